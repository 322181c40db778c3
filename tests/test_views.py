"""Split views: two rows, one stream, and nothing of REHEARSE's in ACT's."""

import dataclasses

import jax
import numpy as np
import pytest
import talkative
from talkative import ANYTHING, NO_RULES, TEMPLATE, decoder_for, task

from envace_jax import types
from envace_jax.rollout import collect
from envace_jax.sampling import keys, samplers
from envace_jax.text import rehearse_prompt, row_reading
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.worlds import own_row, rehearsal

A = types.Author
RECORD = types.Record(
  call=types.ToolCall(name='get', arguments={'id': 'O1'}),
  observation_text='{"status": "sent"}',
)
GROUP = 2


def tasks_of(*names, turns=()):
  return [
    dataclasses.replace(task(n), records=(RECORD,), user_turns=turns)
    for n in names
  ]


def opening(secret=''):
  """REHEARSE's prompt; `secret` is something that only it may know."""
  return lambda one: TEMPLATE.prompt(one.instruction, secret)


def run(policy, tasks, world, seed=0, **changes):
  model, params = policy
  limits = {'max_row_tokens': 128} | changes.pop('limits', {})
  decoder = dataclasses.replace(decoder_for(model, **limits), **changes)
  return talkative.play(
    decoder, params, world(decoder), tasks, GROUP, seed=seed
  )


def split_world(policy, secret='', trained=True):
  return lambda decoder: own_row.OwnRowWorld(
    dataclasses.replace(decoder, prompt_tokens=40),
    TEMPLATE,
    policy[1],
    opening(secret),
    ANYTHING,
    trained=trained,
  )


def after_prompt(row):
  """(ids, authors) of the stream: what follows the last PROMPT token."""
  start = int(np.flatnonzero(row.authors == A.PROMPT)[-1]) + 1
  return row.tokens[start:], row.authors[start:]


def test_both_rows_hold_one_stream(policy):
  tasks = tasks_of('a', 'a longer one', 'mid')
  seen = [
    episode
    for seed in range(3)
    for episode in run(policy, tasks, split_world(policy), seed)
  ]
  assert sum(len(e.steps) for e in seen) > 5
  for episode in seen:
    act, own = map(after_prompt, episode.rows)
    # What ACT said last may not have been heard.
    n = len(own[0])
    assert n <= len(act[0])
    np.testing.assert_array_equal(act[0][:n], own[0])
    swapped = {A.ACT: A.COPIED, A.COPIED: A.REHEARSE, A.FORCED: A.FORCED}
    assert [swapped[A(a)] for a in act[1][:n]] == [A(a) for a in own[1]]
    for row in episode.rows:
      sampled = np.isin(row.authors, [A.ACT, A.REHEARSE])
      assert (row.logprobs[~sampled] == 0).all()
      assert (row.logprobs[sampled] < 0).all()
    assert A.REHEARSE not in episode.rows[0].authors
    assert A.ACT not in episode.rows[1].authors
    assert {s.author for s in episode.steps} <= {A.REHEARSE}


def test_equal_prompts_make_split_and_joint_coincide(policy):
  greedy = samplers.SamplerConfig(temperature=0.0)
  tasks = tasks_of('a', 'a longer one', 'mid')
  options = {'act': greedy, 'rehearse': greedy}
  split = run(policy, tasks, split_world(policy), **options)
  joint = run(
    policy, tasks, lambda _: rehearsal.RehearsedWorld(ANYTHING), **options
  )
  for left, right in zip(split, joint, strict=True):
    assert left.stop_reason is right.stop_reason
    np.testing.assert_array_equal(left.rows[0].tokens, right.rows[0].tokens)
    heard = len(left.rows[1].tokens)
    np.testing.assert_array_equal(
      left.rows[1].tokens, right.rows[0].tokens[:heard]
    )
    both = left.rows[0].logprobs.copy()
    both[:heard] += left.rows[1].logprobs
    np.testing.assert_allclose(both, right.rows[0].logprobs, atol=1e-4)


def test_no_word_of_rehearse_s_prompt_reaches_an_action(policy):
  """Perturb what only REHEARSE knows: first actions stay equal, bit for bit,
  and so does every later one whose observations stayed equal."""
  tasks = tasks_of('a', 'a longer one', 'mid')
  plain = run(policy, tasks, split_world(policy))
  told = run(policy, tasks, split_world(policy, 'bbbbabab'))
  talkative.assert_only_answers_part(plain, told)


def test_sampled_logprobs_are_those_of_the_own_row(policy):
  model, params = policy
  temperature = {A.ACT: 0.9, A.REHEARSE: 1.3}
  for episode in run(policy, tasks_of('a', 'mid'), split_world(policy, 'ab')):
    for row in episode.rows:
      tokens = jax.numpy.asarray(row.tokens)[None]
      hidden, _ = model.apply({'params': params}, tokens)
      logits = model.apply({'params': params}, hidden, method='unembed')[0]
      for t in np.flatnonzero(row.logprobs):
        scaled = logits[t - 1] / temperature[A(row.authors[t])]
        np.testing.assert_allclose(
          row.logprobs[t],
          jax.nn.log_softmax(scaled)[row.tokens[t]],
          atol=2e-4,
        )


def test_the_rows_draw_from_different_keys(policy):
  """Equal prompts, equal temperatures: one key would give one episode."""
  joint = run(
    policy, tasks_of('a', 'mid'), lambda _: rehearsal.RehearsedWorld(ANYTHING)
  )
  split = run(policy, tasks_of('a', 'mid'), split_world(policy))
  answers = lambda seen: [s.observation_text for e in seen for s in e.steps]
  assert answers(joint) != answers(split)


def test_a_frozen_answer_is_an_observation_like_any_other(policy):
  for episode in run(policy, tasks_of('a'), split_world(policy, trained=False)):
    assert len(episode.rows) == 1
    assert not {A.COPIED, A.REHEARSE} & {A(a) for a in episode.rows[0].authors}
    assert {s.author for s in episode.steps} <= {A.WORLD}


def test_thoughts_stay_with_their_thinker():
  control = tokenizers.ByteTokenizer().control
  text = 'x<think>b "quoted" <tool_call></think>'
  call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
  ids = TEMPLATE.action(text.replace('<tool_call>', '') + call)
  assert control['<think>'] in ids
  authors = np.full(len(ids), A.COPIED, np.int8)
  shown, kept = TEMPLATE.without_thoughts(ids, authors)
  assert TEMPLATE.text(shown) == 'x' + call
  assert len(kept) == len(shown) and set(kept) == {A.COPIED}
  # ACT's own words are not touched, nor is anybody else's text.
  untouched, _ = TEMPLATE.without_thoughts(
    ids, np.full(len(ids), A.USER, np.int8)
  )
  np.testing.assert_array_equal(untouched, ids)
  # A thought that never ends hides everything but the stop.
  open_end = ids[: list(ids).index(control['</think>'])]
  open_end = np.append(open_end, TEMPLATE.stop_ids[types.Role.ACT][0])
  shown, _ = TEMPLATE.without_thoughts(
    open_end, np.full(len(open_end), A.COPIED, np.int8)
  )
  assert (
    TEMPLATE.text(shown) == 'x'
    and shown[-1] == TEMPLATE.stop_ids[types.Role.ACT][0]
  )
  # A call that is only thought of is none.
  thought = np.asarray(
    [control['<think>'], control['<tool_call>'], control['</think>'], *ids],
    np.int32,
  )
  (parsed,) = TEMPLATE.calls(thought)
  assert parsed == types.ToolCall(name='f', arguments={})


@pytest.mark.parametrize('parallel', [False, True])
def test_a_demonstration_reads_back_as_it_was(parallel):
  template = templates.Template(tokenizers.ByteTokenizer(), parallel=parallel)
  one, two = (
    f'<tool_call>{{"name": "f", "arguments": {{"i": {i}}}}}</tool_call>'
    for i in (1, 2)
  )
  call = lambda i: types.ToolCall(name='f', arguments={'i': i})
  both = one + two if parallel else one
  messages = [(one, call(1), 0, 0), (both, call(1), 1, 2)]
  if parallel:
    messages.append((both, call(2), 1, 2))
  messages.append((two, call(2), 1, 3))
  steps = tuple(
    types.Step(
      action=action,
      action_text=text,
      observation_text=f'{{"<|act|>": {i}}}',
      turn=turn,
      message=message,
    )
    for i, (text, action, turn, message) in enumerate(messages)
  )
  demo = types.Demonstration(
    task_id='t',
    instruction='first <|end|>',
    steps=steps,
    user_turns=('then <|rehearse|>', 'and last'),
    turn_replies=('once', 'twice'),
    reply='done',
  )
  reading = row_reading.read(template, *template.demonstration(demo))
  assert reading.steps == steps
  assert reading.turn_replies == demo.turn_replies
  assert reading.reply == demo.reply
  act, own = template.demonstration_views(
    demo, (template.prompt('p'), template.prompt('q', 'records'))
  )
  ids, authors = after_prompt(types.Row(
    tokens=act[0], authors=act[1], logprobs=np.zeros(len(act[0]))
  ))  # fmt: skip
  n = len(ids)
  np.testing.assert_array_equal(ids, own[0][-n:])
  assert A.WORLD not in authors and A.ACT not in own[1]
  np.testing.assert_array_equal((authors == A.COPIED), (own[1][-n:] == A.WORLD))


def test_records_ground_rehearse_and_are_dropped():
  records = tuple(
    types.Record(
      call=types.ToolCall(name='get', arguments={'id': f'O{i}'}),
      observation_text=f'{{"n": {i}}}',
    )
    for i in range(6)
  )
  one = dataclasses.replace(task('t'), records=records[:3])
  base = rehearse_prompt.RehearsePrompt(
    template=TEMPLATE,
    instructions='be the desk',
    records='own',
    max_records=2,
    keep=1.0,
    max_tokens=500,
    salt=0,
    others=records,
  )
  text = lambda prompt, t=one: TEMPLATE.literal(prompt(t)[0])
  shown = text(base)
  assert 'be the desk' in shown and shown.count(' -> ') == 2
  assert 'O0' in shown and 'O1' in shown
  assert text(dataclasses.replace(base, records='none')).count(' -> ') == 0
  assert text(dataclasses.replace(base, keep=0.0)).count(' -> ') == 0
  for salt in range(5):
    foreign = text(dataclasses.replace(base, records='others', salt=salt))
    assert foreign.count(' -> ') == 2
    assert not any(f'O{i} ->' in foreign for i in range(3)), 'its own leaked'
  half = dataclasses.replace(base, keep=0.5, max_records=3)
  counts = [
    text(dataclasses.replace(half, salt=s)).count(' -> ') for s in range(60)
  ]
  assert set(counts) >= {0, 1, 2} and 1.0 < np.mean(counts) < 2.0
  assert text(half) == text(half)
  # What does not fit is left out whole.
  full = len(base(one)[0])
  tight = dataclasses.replace(base, max_tokens=full - 1)
  assert text(tight).count(' -> ') == 1


def test_a_collector_keeps_views_apart_whatever_the_batch(policy):
  model, params = policy
  decoder = decoder_for(model, max_row_tokens=128)
  key = keys.stream(0, 'rollout', 0)

  def collected(batch_tasks):
    return collect.Collector(
      decoder=decoder,
      template=TEMPLATE,
      batch_tasks=batch_tasks,
      group_size=GROUP,
    ).collect(
      params,
      split_world(policy)(decoder),
      tasks_of('a', 'a longer one', 'mid'),
      key,
      rules=NO_RULES,
    )

  for left, right in zip(collected(3), collected(2), strict=True):
    for mine, theirs in zip(left.rows, right.rows, strict=True):
      np.testing.assert_array_equal(mine.tokens, theirs.tokens)
