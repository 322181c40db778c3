"""Rows that Qwen3's template breaks: kept, opened anew, trained once."""

import dataclasses

import jax
import numpy as np
import pretrained
import pytest
import talkative

from envace_jax import errors, types
from envace_jax.learning import batch as batches
from envace_jax.model import config as model_config
from envace_jax.model import transformer
from envace_jax.rollout import alternation, episodes, on_device
from envace_jax.sampling import keys, samplers, scripted
from envace_jax.text import chat_format, fast_tokenizer
from envace_jax.text import template as templates
from envace_jax.worlds import answers, own_row, real, rehearsal

A, Stop = types.Author, types.StopReason
CALL = '<tool_call>{"name": "f", "arguments": {"i": 1}}</tool_call>'
EMPTY = '<think>\n\n</think>\n\n'
THOUGHT = '<think>\nhm\n</think>\n\n'
# What Qwen3's template makes of them, written by hand.
ASKED = '<|im_start|>user\ngo<|im_end|>'
ACTS = '<|im_start|>assistant\n'
CALLED = (
  '<tool_call>\n{"name": "f", "arguments": {"i": 1}}\n</tool_call><|im_end|>'
)
SEEN_BY = '\n<|im_start|>user\n<tool_response>'
SEEN = f'\n{real.NULL_OBSERVATION}\n</tool_response>'
NEXT = '<|im_end|>\n' + ACTS


@pytest.fixture(scope='module')
def tokenizer():
  return fast_tokenizer.load(pretrained.qwen3_tokenizer())


@pytest.fixture(scope='module')
def silent(tokenizer):
  return template_of(tokenizer, thinking=False)


@pytest.fixture(scope='module')
def loud(tokenizer):
  return template_of(tokenizer, thinking=True)


def template_of(tokenizer, thinking):
  chat = chat_format.from_directory(
    pretrained.qwen3_tokenizer(), tokenizer, thinking=thinking
  )
  return templates.Template(tokenizer, parallel=True, row_format=chat)


@pytest.fixture(scope='module')
def policy(tokenizer):
  """Calls, and answers; its residual branches make a wrong cache visible."""
  control = tokenizer.control
  call, answer = control['<tool_call>'], control['<tool_response>']
  line, turn, x, y = (
    tokenizer.encode(text)[0] for text in ('\n\n', '\n', 'x', 'y')
  )
  successor = {
    line: call, turn: call, call: x, x: control['<|im_end|>'],
    answer: y, y: control['</tool_response>'],
  }  # fmt: skip
  model = transformer.Transformer(
    model_config.TransformerConfig(
      vocab_size=tokenizer.vocab_size, d_model=32, num_layers=2, num_heads=4,
      num_kv_heads=2, head_dim=8, d_ff=64, max_len=256, tie_embeddings=False,
    )
  )  # fmt: skip
  params = scripted.params(model, successor)
  draws = np.random.default_rng(3)

  def disturb(path, leaf):
    name = path[-1].key
    if name == 'unembedding':
      return 3 * leaf  # as sure as a vocabulary of 150k wants it
    branch = name in ('wo', 'w_down')
    return leaf + 0.01 * draws.normal(size=leaf.shape) if branch else leaf

  params = jax.tree.map_with_path(disturb, params)
  params = jax.tree.map(lambda x: x.astype(np.float32), params)
  return model, params


def decoder_of(model, template, **limits):
  limits = {
    'max_row_tokens': 240, 'max_rows': 4, 'max_parallel_calls': 3,
    'max_action_tokens': 12, 'max_observation_tokens': 10,
  } | limits  # fmt: skip
  decoder = talkative.decoder_for(model)
  return dataclasses.replace(
    decoder,
    limits=dataclasses.replace(decoder.limits, **limits),
    act=samplers.SamplerConfig(temperature=1.0),
    rehearse=samplers.SamplerConfig(temperature=1.0),
    act_stop_ids=template.stop_ids[types.Role.ACT],
    rehearse_stop_ids=template.stop_ids[types.Role.REHEARSE],
    prompt_tokens=20,
    ladder=(48, limits['max_row_tokens']),
    widths=(16, 64),
  )


def says(template, scripts):
  """A chooser that says what is next in each row's script, texts or ids."""
  left = [list(texts) for texts in scripts]

  def choose(session, rows):
    said = {}
    for row in rows:
      ids = left[row].pop(0)
      ids = template.action(ids) if isinstance(ids, str) else ids
      session.extend(row, ids, np.full(len(ids), A.ACT, np.int8))
      said[row] = types.Generation(
        role=types.Role.ACT, ids=ids, logprobs=np.zeros(len(ids)), finished=True
      )
    return said

  return choose


def play(policy, template, scripts, turns=(), world=None, **limits):
  model, params = policy
  task = dataclasses.replace(talkative.task('go'), user_turns=turns)
  attempts = episodes.attempts_of([task], len(scripts))
  finished = alternation.run_episodes(
    decoder_of(model, template, **limits),
    template,
    params,
    world or real.NullWorld(),
    attempts,
    [template.prompt('go')],
    keys.rows(keys.stream(0, 'rollout', 0), range(len(scripts))),
    alternation.Rules(
      choose=says(template, scripts) if any(scripts) else alternation.sample
    ),
  )
  return [
    episodes.episode_of(attempt, one, template)
    for attempt, one in zip(attempts, finished, strict=True)
  ]


def spans(template, row):
  return [
    (A(author), template.literal(row.tokens[start:stop]))
    for author, start, stop in templates.runs(row.authors)
  ]


def test_an_empty_thought_is_dropped_at_each_call(policy, silent):
  one, two, none = play(
    policy, silent, [[CALL, 'Done.'], [CALL, CALL, 'Done.'], ['Hello.']]
  )
  begin = [(A.PROMPT, ASKED), (A.FORCED, '\n' + ACTS + EMPTY)]
  answered = [(A.FORCED, SEEN_BY), (A.WORLD, SEEN)]
  again = CALLED + SEEN_BY + SEEN
  fresh = [
    [*begin, (A.ACT, CALLED), *answered],
    [
      (A.PROMPT, ASKED),
      (A.FORCED, '\n' + ACTS),
      (A.COPIED, again),
      (A.FORCED, NEXT + EMPTY),
      (A.ACT, CALLED),
      *answered,
    ],
    [
      (A.PROMPT, ASKED),
      (A.FORCED, '\n' + ACTS),
      (A.COPIED, again),
      (A.FORCED, NEXT),  # shared with the row before
      (A.COPIED, again),
      (A.FORCED, NEXT + EMPTY),
      (A.ACT, 'Done.<|im_end|>'),
    ],
  ]
  assert [spans(silent, row) for row in two.rows] == fresh
  assert [spans(silent, row) for row in none.rows] == [
    [*begin, (A.ACT, 'Hello.<|im_end|>')]
  ]
  assert [episode.breaks for episode in (one, two, none)] == [1, 2, 0]
  assert spans(silent, one.rows[0]) == fresh[0]
  for episode in (one, two):
    assert episode.reply == 'Done.' and episode.stop_reason is Stop.REPLIED
    assert {s.observation_text for s in episode.steps} == {
      real.NULL_OBSERVATION
    }
  assert [len(e.steps) for e in (one, two, none)] == [1, 2, 0]
  assert [s.message for s in two.steps] == [0, 1]


def test_thoughts_are_dropped_at_a_user_turn(policy, loud):
  texts = [THOUGHT + CALL, THOUGHT + 'Hi.', THOUGHT + 'Bye.']
  (episode,) = play(policy, loud, [texts], turns=('And?',))
  first, second = episode.rows
  assert (A.ACT, THOUGHT + 'Hi.<|im_end|>') in spans(loud, first)
  assert spans(loud, first)[-1] == (
    A.USER, '\n<|im_start|>user\nAnd?<|im_end|>'
  )  # fmt: skip
  assert spans(loud, second) == [
    (A.PROMPT, ASKED),
    (A.FORCED, '\n' + ACTS),
    (A.COPIED, CALLED + SEEN_BY + SEEN + NEXT + 'Hi.<|im_end|>'
     '\n<|im_start|>user\nAnd?<|im_end|>'),
    (A.FORCED, '\n' + ACTS),
    (A.ACT, THOUGHT + 'Bye.<|im_end|>'),
  ]  # fmt: skip
  assert (episode.breaks, episode.num_turns) == (1, 2)
  assert episode.turn_replies == (THOUGHT + 'Hi.',)
  assert episode.reply == THOUGHT + 'Bye.'


def test_a_sampled_empty_thought_breaks_its_row(policy, loud):
  scripts = [[EMPTY + CALL, THOUGHT + 'Ok.'], [THOUGHT + CALL, THOUGHT + 'Ok.']]
  thoughtless = loud.action(CALL)[4:]  # <think> \n\n </think> \n\n
  assert loud.literal(thoughtless) == CALLED
  scripts += [[thoughtless, THOUGHT + 'Ok.']]
  kept = play(policy, loud, scripts, max_rows=1)
  assert [len(episode.rows) for episode in kept] == [1, 1, 1]
  opened = play(policy, loud, scripts)
  assert [len(episode.rows) for episode in opened] == [2, 1, 1]
  for left, right in zip(kept, opened, strict=True):
    assert left.breaks == right.breaks == len(right.rows) - 1
    assert left.steps == right.steps and left.reply == right.reply
  # The first call stands in both rows, and is trained in one.
  late = [THOUGHT + CALL, EMPTY + CALL, THOUGHT + 'Ok.']
  (episode,) = play(policy, loud, [late])
  first, second = episode.rows
  called = (A.ACT, THOUGHT + CALLED)
  assert called in spans(loud, first) and called not in spans(loud, second)
  assert (A.COPIED, THOUGHT + CALLED) in spans(loud, second)
  assert episodes.generation_counts(episode)[0] == len(late)


def test_what_needs_more_rows_or_tokens_ends(policy, silent, tokenizer):
  script = [CALL, CALL, CALL, 'Done.']
  (whole,) = play(policy, silent, [script])
  assert whole.stop_reason is Stop.REPLIED and len(whole.rows) == 4
  (short,) = play(policy, silent, [script], max_rows=2)
  assert short.stop_reason is Stop.MAX_ROWS and len(short.rows) == 2
  assert len(short.steps) == 2
  # Room for the first answer, none for the prompt that comes after the second.
  length = len(whole.rows[1].tokens)
  (full,) = play(policy, silent, [script], max_row_tokens=length)
  assert full.stop_reason is Stop.CONTEXT_FULL and len(full.steps) == 2
  # Room for what was said, none for the template's longer spelling of it.
  control, encode = tokenizer.control, tokenizer.encode
  compact = np.array([
    control['<tool_call>'],
    *encode('{"name":"f","arguments":{"i":[1,2,3,4,5,6,7,8,9]}}'),
    control['</tool_call>'], control['<|im_end|>'],
  ], np.int32)  # fmt: skip
  (whole,) = play(policy, silent, [[compact, 'Done.']])
  length = len(whole.rows[0].tokens) + 1
  (full,) = play(policy, silent, [[compact, 'Done.']], max_row_tokens=length)
  assert full.stop_reason is Stop.CONTEXT_FULL and len(full.rows) == 1
  with pytest.raises(errors.UserError, match='rollout.max_rows above 1'):
    play(policy, silent, [script], max_rows=1)
  with pytest.raises(errors.UserError, match='rollout.mode=host'):
    on_device.rehearse_episodes(None, silent, None, [], 1, None)


def world_of(policy, template, view):
  """The policy, in ACT's row or in one of its own."""
  model, params = policy
  anything = answers.Answers(template=template, max_resamples=None)
  if view == 'joint':
    return rehearsal.RehearsedWorld(anything)
  return own_row.OwnRowWorld(
    decoder_of(model, template),
    template,
    params,
    lambda task: template.prompt(task.instruction),
    anything,
    trained=True,
  )


@pytest.mark.parametrize('view', ['joint', 'split'])
def test_each_generation_is_trained_once_where_it_was_sampled(
  policy, silent, view
):
  model, params = policy
  played = play(policy, silent, [[]] * 6, world=world_of(policy, silent, view))
  assert sum(len(episode.opened_at) > 2 for episode in played) > 1
  sampled = [int(a) for a in types.AUTHOR_OF_ROLE.values()]

  @jax.jit
  def score(tokens_T):
    hidden, _ = model.apply({'params': params}, tokens_T[None])
    logits = model.apply({'params': params}, hidden, method='unembed')[0]
    return jax.nn.log_softmax(logits)

  for episode in played:
    for row in episode.rows:
      scored = score(np.pad(row.tokens, (0, 240 - len(row.tokens))))
      mine = np.isin(row.authors, sampled)
      assert (row.logprobs[~mine] == 0).all()
      where = np.flatnonzero(mine)
      np.testing.assert_allclose(
        row.logprobs[where], scored[where - 1, row.tokens[where]], atol=3e-4
      )
    total = sum(int(np.isin(r.authors, sampled).sum()) for r in episode.rows)
    assert total == episode.sampled_tokens
    acts, answered = episodes.generation_counts(episode)
    assert acts == answered + 1 or episode.stop_reason is not Stop.REPLIED
    assert answered >= len(episode.opened_at) - 1 == episode.breaks
    if view == 'joint':
      assert len(episode.rows) == len(episode.opened_at)
    else:
      *acting, own = episode.rows
      assert len(acting) == len(episode.opened_at)
      assert not any((row.authors == A.REHEARSE).any() for row in acting)
      assert A.ACT not in own.authors
      stream = episodes.stream(acting, episode.opened_at)
      heard = len(own.tokens)  # not what was said last
      np.testing.assert_array_equal(stream.tokens[:heard], own.tokens)
  count = 6 * (4 + (view == 'split'))
  batch = batches.pack_episodes(
    played, np.ones((6, 2)), length_buckets=(240,), batch_size=count,
    microbatches=2,
  )  # fmt: skip
  assert (batch.lengths > 0).sum() == sum(len(e.rows) for e in played)
  trained = batches.loss_mask(batch, batches.SAMPLED_AUTHORS)
  assert int(trained.sum()) == sum(e.sampled_tokens for e in played)


def test_host_and_device_agree_with_thinking_on(policy, loud):
  model, params = policy
  world = world_of(policy, loud, 'joint')
  host = play(policy, loud, [[]] * 6, world=world, max_rows=1)
  device = on_device.rehearse_episodes(
    decoder_of(model, loud), loud, params, [loud.prompt('go')], 6,
    keys.rows(keys.stream(0, 'rollout', 0), range(6)),
  )  # fmt: skip
  assert sum(len(episode.steps) for episode in host) > 6
  for left, right in zip(host, device, strict=True):
    assert left.stop_reason is right.stop_reason
    np.testing.assert_array_equal(left.rows[0].tokens, right.rows[0].tokens)
    np.testing.assert_array_equal(left.rows[0].authors, right.rows[0].authors)
