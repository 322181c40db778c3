"""One rehearsal, step by step: what is asked next, and what it leaves."""

import dataclasses
import types as types_of

import numpy as np
import pretrained
import pytest
import serving

from envace_jax import policy_service, types
from envace_jax.model import per_role
from envace_jax.serving import conversations, jobs, private, rehearsal
from envace_jax.text import chat_format, fast_tokenizer, reflection, tool_calls
from envace_jax.text import template as templates
from experiments import base

ACT, REHEARSE = types.Role.ACT, types.Role.REHEARSE
GO = tool_calls.render_call(types.ToolCall(name='go', arguments={'to': 1}))
CONVERSATION = conversations.read(
  [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'ab'}],
  [serving.TOOL],
)


def begin(template=serving.TEMPLATE, conversation=CONVERSATION, **changes):
  rules = rehearsal.Rules(
    **{
      'template': template, 'own_row': None, 'forced': (), 'parallel': True,
      'reflects': False, 'temperature': 1.0, 'seed': 5, 'max_actions': 4,
      'context': 400, 'deadline': 1.0,
    }
    | changes
  )  # fmt: skip
  prompt = conversations.anew(template, conversation)
  return rehearsal.Rehearsal(
    rules, conversation, prompt, number=3, max_tokens=300
  )


def generated(ids, ended=jobs.Ended.STOPPED):
  tokens = dataclasses.replace(jobs.NOTHING, ids=np.asarray(ids, np.int32))
  return jobs.Generated(tokens=tokens, ended=ended, reused=0)


def play(one, *texts, template=serving.TEMPLATE):
  """Says things in turn; the prompts that they were said to."""
  prompts = []
  for text in texts:
    job = one.job()
    prompts.append(template.literal(job.prompt))
    said = template.action(text)
    if job.author == types.Author.REHEARSE:
      said = template.observation(text)
    one.hear(generated(said))
  return prompts


def test_roles_take_turns_until_act_replies():
  one = begin()
  prompts = play(one, GO + GO, '{"n": 1}', '{"n": 2}', 'hi')
  assert one.job() is None and one.stop is types.StopReason.REPLIED
  assert [prompt.rpartition('<|')[2] for prompt in prompts] == [
    'act|>', 'rehearse|>', 'rehearse|>', 'act|>'
  ]  # fmt: skip
  for before, after in zip(prompts, prompts[1:], strict=False):
    assert after.startswith(before)
  episode = one.episode()
  assert [step.observation_text for step in episode.steps] == [
    '{"n": 1}', '{"n": 2}'
  ]  # fmt: skip
  assert episode.reply == 'hi' and episode.sample_index == 3
  assert episode.sampled_tokens == one.sampled_tokens > 0


@pytest.mark.parametrize(
  'changes, texts, stop',
  [
    ({'parallel': False}, [GO + GO], types.StopReason.PARALLEL_CALLS),
    ({'max_actions': 2}, [GO, '{}', GO], types.StopReason.MAX_ACTIONS),
    ({'context': 40}, [GO], types.StopReason.CONTEXT_FULL),
  ],
)
def test_limits_have_names(changes, texts, stop):
  one = begin(**changes)
  play(one, *texts)
  assert one.job() is None and one.stop is stop
  assert all(step.observation_text == '{}' for step in one.episode().steps)


def test_an_action_is_begun_as_the_reply_will_be():
  forced = tuple(serving.TEMPLATE.format.call_opening('go'))
  one = begin(forced=forced)
  rest = list(serving.TEMPLATE.action(GO))[len(forced) :]
  job = one.job()
  assert serving.same(job.prompt[-len(forced) :], np.asarray(forced))
  one.hear(generated(rest))
  assert one.sampled_tokens == len(rest)
  play(one, '{"n": 1}')
  (step,) = one.episode().steps
  assert (step.action.name, step.action.arguments) == ('go', {'to': 1})


def test_act_says_what_is_to_be_remembered():
  said = reflection.Reflection(worked=True, notes=('go 1 -> {"n": 1}',))
  one = begin(reflects=True)
  prompts = play(one, GO, '{"n": 1}', 'hi', reflection.render(said))
  assert reflection.REQUEST in prompts[-1] and one.job() is None
  task = types.Task(id='', instruction='', tools=(), checklist=())
  assert reflection.read(one.episode(), task) == said


def test_rehearse_reads_a_row_of_its_own_under_split_views():
  """Other words of the tools, no client's system prompt, and no thoughts."""
  own = templates.Template(serving.TOKENIZER, 'schemas', parallel=True)
  one = begin(
    own_row=rehearsal.OwnRow(template=own, instructions='answer'),
    conversation=dataclasses.replace(CONVERSATION, notes='go 2 -> {}'),
  )
  prompts = play(one, '<think>hm</think>' + GO, '{"n": 1}', 'hi')
  mine, theirs, mine_again = prompts
  assert theirs.startswith('<|system|>answer<|end|><|tools|>[{"name": "go"')
  assert theirs.endswith(
    '<|user|>ab<|end|><|act|>' + GO + '<|end|><|rehearse|>'
  )
  assert mine.startswith('<|system|>s<|end|><|tools|>go<|end|>')
  assert 'go 2 -> {}' in mine and 'go 2' not in theirs
  assert '<think>hm</think>' in mine_again and mine_again.startswith(mine)
  (step,) = one.episode().steps
  assert step.observation_text == '{"n": 1}'


def test_a_published_format_is_rehearsed_in_rows_as_it_shows_them():
  """Qwen3 drops the thoughts of a turn once the user speaks again."""
  folder = pretrained.qwen3_tokenizer()
  tokenizer = fast_tokenizer.load(folder)
  template = templates.Template(
    tokenizer,
    'schemas',
    parallel=True,
    row_format=chat_format.from_directory(folder, tokenizer, thinking=True),
  )
  one = begin(template=template, reflects=True, context=4000)
  prompts = play(
    one, '<think>\nhm\n</think>\n\n' + GO, '{"n": 1}', 'hi', 'It worked.',
    template=template,
  )  # fmt: skip
  assert 'hm' in prompts[2] and prompts[2].startswith(prompts[0])
  assert 'hm' not in prompts[3] and reflection.REQUEST in prompts[3]
  episode = one.episode()
  assert [step.observation_text for step in episode.steps] == ['{"n": 1}']
  assert episode.num_turns == 2 and episode.reply.endswith('It worked.')


def test_notes_are_kept_within_bounds(monkeypatch):
  monkeypatch.setattr(private, '_KEPT_LETTERS', 1000)
  kept, asked = private.Kept(), private.Settings(attempts=1)
  made = [
    conversations.read([{'role': 'user', 'content': str(i)}], [])
    for i in range(9)
  ]
  for one in made:
    kept.keep(asked, one, 'x' * 100)
    kept.keep(asked, one, 'x' * 100)
  assert len(kept._notes) == 5 and kept._letters == 1000
  longer = [
    dataclasses.replace(one, turns=(*one.turns, *one.turns)) for one in made
  ]
  found = [kept.recall(asked, one) is not None for one in longer]
  assert found == [False] * 4 + [True] * 5
  assert kept.recall(asked, made[-1]) is None  # it is yet to be answered


@pytest.mark.parametrize(
  'wrong',
  [
    {'attempts': -1},
    {'attempts': 17},
    {'attempts': 3, 'max_tokens': 2},
    {'max_tokens': 0},
    {'max_actions': 0},
    {'max_notes': 0},
    {'temperature': -1.0},
  ],
)
def test_settings_out_of_range(wrong):
  with pytest.raises(ValueError, match='rehearsal'):
    private.Settings(**wrong)


def test_a_run_rehearses_as_it_was_trained():
  """Joint views in one row, split views in two; two networks not at all."""
  setup = types_of.SimpleNamespace(
    config=base.get_config(),
    data=types_of.SimpleNamespace(
      words=types_of.SimpleNamespace(
        tokenizer=serving.TOKENIZER, row_format=serving.TEMPLATE.format
      ),
      is_write=lambda name: name == 'go',
    ),
  )
  joint = policy_service._ability(setup, {})
  assert not joint.refusal and joint.own_row is None
  assert joint.is_write('go') and not joint.is_write('stay')
  setup.config.rollout.view = 'split'
  setup.config.prompt.rehearse.tools = 'names'
  setup.config.prompt.rehearse.instructions = 'answer'
  split = policy_service._ability(setup, {})
  prompt = split.own_row.template.prompt('ab', '', [serving.TOOL], 's')[0]
  assert '<|tools|>go<|end|>' in serving.TEMPLATE.literal(prompt)
  assert split.own_row.instructions == 'answer' and not split.refusal
  apart = policy_service._ability(setup, per_role.PerRole(act={}, rehearse={}))
  assert 'network of its own' in apart.refusal
