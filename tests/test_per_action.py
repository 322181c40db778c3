"""Rehearsal before an action, and before a write: imagined, then undone."""

import dataclasses
import json

import numpy as np
import pytest
import talkative
from talkative import HEADERS

from envace_jax import types
from envace_jax.rollout import alternation, per_action
from envace_jax.sampling import generator, keys, samplers
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.worlds import base as worlds
from envace_jax.worlds import foresight, gated

A = types.Author
TEMPLATE = templates.Template(tokenizers.ByteTokenizer())
FINE, REFUSED = '{"status": "ok"}', '{"error": "not_pending"}'


def call(name, i=0):
  body = json.dumps({'name': name, 'arguments': {'i': i}})
  return f'<tool_call>{body}</tool_call>'


class Imagination:
  """A session whose row draws actions and answers from scripts."""

  def __init__(self, actions, answers, capacity=500):
    prompt, authors = TEMPLATE.prompt('go')
    self.tokens, self.authors = [*prompt], [*authors]
    self.actions, self.answers = list(actions), dict(answers)
    self.capacity, self.drawn = capacity, []

  @property
  def lengths(self):
    return np.array([len(self.tokens)])

  def room(self, row):
    return self.capacity - len(self.tokens)

  def extend(self, row, ids, authors):
    assert len(ids) <= self.room(row)
    self.tokens += map(int, ids)
    self.authors += map(int, authors)

  def rewind(self, lengths):
    self.tokens = self.tokens[: lengths[0]]
    self.authors = self.authors[: lengths[0]]

  def generate(self, role, rows):
    assert rows == [0] or list(rows) == [0]
    if role is types.Role.ACT:
      text = self.actions.pop(0)
      self.drawn.append(text)
      ids = TEMPLATE.action(text)
    else:
      assert self.tokens[-1] == HEADERS[types.Role.REHEARSE]
      answers = self.answers[self.drawn[-1]] if self.drawn else self.answers
      answers.append(answers.pop(0))
      ids = TEMPLATE.observation(answers[-1])
    author = types.AUTHOR_OF_ROLE[role]
    self.extend(0, ids, [author] * len(ids))
    said = types.Generation(
      role=role, ids=ids, logprobs=np.zeros(len(ids)), finished=True
    )
    return {0: said}


def choose(actions, answers, weight=1.0, m=2):
  session = Imagination(actions, answers)
  before = len(session.tokens)
  settings = per_action.Settings(
    candidates=len(actions), answers=m, uncertainty_weight=weight
  )
  chosen = per_action.Chooser(TEMPLATE, settings)(session, [0])[0]
  # The row holds the chosen action and nothing else.
  np.testing.assert_array_equal(session.tokens[before:], chosen.ids)
  assert set(session.authors[before:]) == {A.ACT}
  return TEMPLATE.text(chosen.ids)


def test_a_call_that_is_expected_to_be_refused_loses():
  bad, good = call('cancel'), call('get')
  answers = {bad: [REFUSED], good: [FINE]}
  assert choose([bad, good], answers) == good
  assert choose([good, bad], answers) == good


def test_the_policy_s_own_liking_counts():
  often, rare = call('get'), call('list')
  answers = {often: [FINE], rare: [FINE]}
  assert choose([rare, often, often], answers) == often
  # However it was spelt: arguments in another order are the same call.
  body = '<tool_call>{"arguments": {"i": 0}, "name": "get"}</tool_call>'
  answers[body] = [FINE]
  assert choose([rare, often, body], answers) == often


def test_doubt_costs_what_its_weight_says():
  unsure, sure = call('cancel'), 'I am done.'
  answers = {unsure: [FINE, FINE, FINE, REFUSED]}
  # (2/3) * (3/4) = 1/2 against 1/3; with doubt (2/3) * (3/4 - 1/4) = 1/3.
  assert choose([sure, unsure, unsure], answers, weight=0.0, m=4) == unsure
  answers = {unsure: [FINE, FINE, FINE, REFUSED]}
  assert choose([sure, unsure, unsure], answers, weight=1.1, m=4) == sure


def test_of_equals_the_first_is_taken():
  assert choose(['one', 'two'], {}) == 'one'


def test_a_full_row_rehearses_nothing():
  text = call('get')
  session = Imagination([text], {})
  session.capacity = len(session.tokens) + len(TEMPLATE.action(text)) + 1
  settings = per_action.Settings(
    candidates=1, answers=1, uncertainty_weight=0.0
  )
  chosen = per_action.Chooser(TEMPLATE, settings)(session, [0])[0]
  assert TEMPLATE.text(chosen.ids) == text


@pytest.mark.parametrize(
  'options', [{'candidates': 0}, {'answers': 0}, {'uncertainty_weight': -1}]
)
def test_impossible_settings_are_refused(options):
  fine = {'candidates': 1, 'answers': 1, 'uncertainty_weight': 0.0}
  with pytest.raises(ValueError, match=next(iter(options))):
    per_action.Settings(**fine | options)


class Executed:
  """Executes everything, and says so."""

  def __init__(self):
    self.calls = []

  def respond(self, session, requests):
    self.calls += [request.action.name for request in requests]
    return [worlds.Response(text='{"real": 1}')] * len(requests)


def respond(name, answers, max_refused=0.5):
  session = Imagination([], [])
  session.answers = list(answers)
  session.extend(0, [HEADERS[types.Role.REHEARSE]], [A.FORCED])
  before = list(session.tokens)
  inner = Executed()
  world = gated.GatedWorld(
    inner,
    TEMPLATE,
    is_write=lambda tool: tool == 'cancel',
    answers=len(answers),
    max_refused=max_refused,
  )
  action = types.ToolCall(name=name, arguments={})
  request = worlds.Request(row=0, action=action, heard=())
  (response,) = world.respond(session, [request])
  assert session.tokens == before  # no trace
  return response, inner.calls, world.stopped


def test_a_write_expected_to_be_refused_is_not_made():
  other = '{"error": "other"}'
  answers = [REFUSED, FINE, REFUSED, other]
  response, calls, stopped = respond('cancel', answers)
  assert response == worlds.Response(text=REFUSED)  # unexecuted, the likeliest
  assert calls == [] and stopped == 1


def test_what_is_expected_to_pass_is_executed():
  response, calls, stopped = respond('cancel', [REFUSED, FINE])
  assert 'real' in response.text and calls == ['cancel'] and stopped == 0
  response, calls, _ = respond('cancel', [REFUSED] * 2, max_refused=1.0)
  assert 'real' in response.text and calls == ['cancel']


def test_reads_need_no_rehearsal():
  response, calls, stopped = respond('get', [REFUSED])
  assert 'real' in response.text and calls == ['get'] and stopped == 0


def test_a_real_policy_leaves_no_trace_and_pays_for_every_draw(policy):
  """Through a live cache: the row goes on as if nothing had been imagined."""
  model, params = policy
  decoder = dataclasses.replace(
    talkative.decoder_for(model), rehearse=samplers.SamplerConfig(temperature=0)
  )

  def opened():
    row_keys = keys.rows(keys.stream(0, 'a', 0), range(4))
    prompts = [TEMPLATE.prompt('ab'), TEMPLATE.prompt('cd')]
    return generator.Session(decoder, params, prompts, 2, row_keys)

  settings = per_action.Settings(
    candidates=3, answers=2, uncertainty_weight=1.0
  )
  session = opened()
  before = session.lengths.copy()
  rows = list(range(4))
  chosen = per_action.Chooser(TEMPLATE, settings)(session, rows)
  spent = session.sampled_B.copy()
  for n, row, said in zip(before, session.rows(), chosen.values(), strict=True):
    np.testing.assert_array_equal(row.tokens[n:], said.ids)
  assert (spent > [len(said.ids) for said in chosen.values()]).all()

  # What follows is what a row extended by the same words would say.
  header = [HEADERS[types.Role.REHEARSE]]
  plain = opened()
  for row in rows:
    plain.extend(row, chosen[row].ids, [A.ACT] * len(chosen[row].ids))
  answers = []
  for one in (session, plain):
    for row in rows:
      one.extend(row, np.array(header), np.array([A.FORCED], np.int8))
    answers.append(one.generate(types.Role.REHEARSE, rows))
  for mine, theirs in zip(*(one.values() for one in answers), strict=True):
    np.testing.assert_array_equal(mine.ids, theirs.ids)
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


def test_expectations_are_as_many_as_asked_and_differ(policy):
  model, params = policy
  row_keys = keys.rows(keys.stream(0, 'a', 0), range(1))
  session = generator.Session(
    talkative.decoder_for(model),
    params,
    [TEMPLATE.prompt('ab')],
    1,
    row_keys,
  )
  header = np.array([HEADERS[types.Role.REHEARSE]])
  session.extend(0, header, np.array([A.FORCED], np.int8))
  length = int(session.lengths[0])
  expected = foresight.expect(session, TEMPLATE, [0], 8)[0]
  assert len(expected) == 8 and len(set(expected)) > 1
  assert session.lengths[0] == length
  assert foresight.expect(session, TEMPLATE, [], 8) == {}


def test_episodes_run_under_a_chooser(policy):
  """End to end in the loop, with limits and stop reasons as ever."""
  from envace_jax.rollout import episodes
  from envace_jax.worlds import real

  model, params = policy
  attempts = episodes.attempts_of([talkative.task('ab')], 4)
  settings = per_action.Settings(
    candidates=2, answers=2, uncertainty_weight=1.0
  )
  finished = alternation.run_episodes(
    talkative.decoder_for(model),
    TEMPLATE,
    params,
    real.NullWorld(),
    attempts,
    [TEMPLATE.prompt('ab')],
    keys.rows(keys.stream(0, 'a', 0), range(4)),
    alternation.Rules(choose=per_action.Chooser(TEMPLATE, settings)),
  )
  seen = [
    episodes.episode_of(a, f, TEMPLATE)
    for a, f in zip(attempts, finished, strict=True)
  ]
  assert any(episode.steps for episode in seen)
  for episode in seen:
    kept = int((episode.rows[0].authors == A.ACT).sum())
    assert episode.sampled_tokens > kept
    assert A.REHEARSE not in episode.rows[0].authors
