"""User turns, several calls, and every limit's own reason, without a model."""

import dataclasses

import numpy as np
import pytest
from talkative import HEADERS, decoder_for

from envace_jax import types
from envace_jax.rollout import alternation, episodes
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.worlds import base as worlds

A, Stop = types.Author, types.StopReason
TEMPLATE = templates.Template(tokenizers.ByteTokenizer(), parallel=True)


def call(i):
  return f'<tool_call>{{"name": "f", "arguments": {{"i": {i}}}}}</tool_call>'


class ScriptedSession:
  """Rows whose actions are read from a script, one text after another."""

  script: list[list[str]] = []  # per row
  capacity = 10_000

  def __init__(self, decoder, params, prompts, group_size, row_keys):
    del decoder, params, row_keys
    spans = [p for p in prompts for _ in range(group_size)]
    self._rows = [([*ids], [*authors]) for ids, authors in spans]
    self._left = [list(texts) for texts in self.script]
    self.sampled_B = np.zeros(len(spans), int)

  @property
  def lengths(self):
    return [len(ids) for ids, _ in self._rows]

  def room(self, row):
    return self.capacity - len(self._rows[row][0])

  def extend(self, row, ids, authors):
    assert len(ids) <= self.room(row)
    self._rows[row][0].extend(map(int, ids))
    self._rows[row][1].extend(map(int, authors))

  def generate(self, role, rows):
    assert role is types.Role.ACT
    said = {}
    for row in rows:
      text = self._left[row].pop(0)
      finished = not text.endswith('...')
      ids = TEMPLATE.action(text)
      ids = ids if finished else ids[:-1]
      self.extend(row, ids, [A.ACT] * len(ids))
      said[row] = types.Generation(
        role=role, ids=ids, logprobs=np.zeros(len(ids)), finished=finished
      )
    return said

  def rows(self):
    return [
      types.Row(
        tokens=np.array(ids, np.int32),
        authors=np.array(authors, np.int8),
        logprobs=np.zeros(len(ids), np.float32),
      )
      for ids, authors in self._rows
    ]


class Echo:
  """Answers a call with its own arguments and keeps what it heard."""

  def open(self, batch):
    self.heard = [[] for _ in batch.tasks]
    self.waves = []

  def respond(self, session, requests):
    del session
    self.waves.append([request.row for request in requests])
    answers = []
    for request in requests:
      self.heard[request.row] += request.heard
      action = request.action
      is_call = isinstance(action, types.ToolCall)
      text = str(action.arguments['i']) if is_call else action.kind
      answers.append(worlds.Response(text=f'{{"said": "{text}"}}'))
    return answers

  def trained_rows(self):
    return None

  def provenance(self, row):
    calls = sum(row in wave for wave in self.waves)
    return worlds.Provenance(source=types.Source.REAL, real_calls=calls)

  def final_state(self, row):
    return None


def play(monkeypatch, *scripts, turns=(), rules=None, world=None, **limits):
  """Plays one scripted episode per script, all of one task."""
  monkeypatch.setattr(ScriptedSession, 'script', list(scripts))
  monkeypatch.setattr(alternation.generator, 'Session', ScriptedSession)
  task = types.Task(
    id='t', instruction='go', tools=(), checklist=(), user_turns=turns
  )
  attempts = episodes.attempts_of([task], len(scripts))
  limits = {'max_parallel_calls': 3, 'max_steps': 9} | limits
  decoder = dataclasses.replace(decoder_for(None))
  decoder = dataclasses.replace(
    decoder, limits=dataclasses.replace(decoder.limits, **limits)
  )
  world = world or Echo()
  finished = alternation.run_episodes(
    decoder, TEMPLATE, None, world, attempts, [TEMPLATE.prompt('go')], None,
    rules or alternation.Rules(),
  )  # fmt: skip
  return [
    episodes.episode_of(attempt, one, TEMPLATE)
    for attempt, one in zip(attempts, finished, strict=True)
  ]


def said(episode):
  return [step.observation_text[10:-2] for step in episode.steps]


def test_calls_of_one_action_are_answered_in_order(monkeypatch):
  world = Echo()
  first, second = play(
    monkeypatch,
    ['think ' + call(1) + '\n' + call(2) + call(3), call(4), 'done'],
    [call(5), 'bye'],
    world=world,
  )
  assert said(first) == ['1', '2', '3', '4'] and said(second) == ['5']
  assert [step.message for step in first.steps] == [0, 0, 0, 1]
  assert first.reply == 'done' and first.real_calls == 4
  assert world.waves == [[0, 1], [0], [0], [0]]
  headers = [
    A(author) for author, _, _ in templates.runs(first.rows[0].authors)
  ]
  pair = [A.FORCED, A.WORLD]
  assert headers == [
    A.PROMPT, A.FORCED, A.ACT, *pair * 3, A.FORCED, A.ACT, *pair, A.FORCED,
    A.ACT,
  ]  # fmt: skip


def test_one_bad_call_voids_all(monkeypatch):
  bad = '<tool_call>{"name": "f"}</tool_call>'
  (episode,) = play(monkeypatch, [call(1) + bad, 'done'])
  assert said(episode) == ['bad_arguments']
  assert all(isinstance(s.action, types.ParseError) for s in episode.steps)


def test_the_user_speaks_again(monkeypatch):
  turns = ('and <|end|><|act|> now?', 'last')
  (episode,) = play(
    monkeypatch, [call(1), 'one', 'two', call(2), call(3), 'three'], turns=turns
  )
  assert episode.turn_replies == ('one', 'two') and episode.reply == 'three'
  assert [step.turn for step in episode.steps] == [0, 2, 2]
  assert [step.message for step in episode.steps] == [0, 3, 4]
  row = episode.rows[0]
  spoken = [
    TEMPLATE.literal(row.tokens[start:stop])
    for author, start, stop in templates.runs(row.authors)
    if author == A.USER
  ]
  assert spoken == [f'<|user|>{turn}<|end|>' for turn in turns]
  user = row.tokens[row.authors == A.USER]
  assert not np.isin(user, list(HEADERS.values())).any()


def test_a_world_hears_all_but_its_own_words(monkeypatch):
  world = Echo()
  (episode,) = play(
    monkeypatch,
    [call(1) + call(2), 'one', call(3), 'two'],
    turns=('more',),
    world=world,
  )
  row = episode.rows[0]
  start = int((row.authors == A.PROMPT).sum()) + 1  # and the first header
  mine = row.authors[start:] != A.WORLD
  ids, authors = templates.join(world.heard[0])
  np.testing.assert_array_equal(ids, row.tokens[start:][mine][: len(ids)])
  np.testing.assert_array_equal(authors, row.authors[start:][mine][: len(ids)])
  assert {A(a) for a in authors} == {A.ACT, A.FORCED, A.USER}
  assert ids[-1] == HEADERS[types.Role.REHEARSE]


@pytest.mark.parametrize(
  'script, limits, stop, calls',
  [
    ([call(1) + call(2)], {'max_parallel_calls': 1}, Stop.PARALLEL_CALLS, 0),
    ([call(1), call(2)], {'max_actions': 2}, Stop.MAX_ACTIONS, 1),
    ([call(1) + call(2) + call(3)], {'max_steps': 2}, Stop.MAX_STEPS, 2),
    (['hi', 'ho'], {'max_user_turns': 2}, Stop.MAX_USER_TURNS, 0),
    (['hi'], {'max_actions': 1}, Stop.MAX_ACTIONS, 0),
    ([call(1), 'cut...'], {'max_action_tokens': 6}, Stop.ACTION_TRUNCATED, 1),
    (['cut...'], {'max_action_tokens': 99}, Stop.CONTEXT_FULL, 0),
    (['hi', 'ho', 'ha'], {}, Stop.REPLIED, 0),
  ],
  ids=lambda value: str(value)[-30:],
)
def test_every_limit_has_its_own_reason(
  monkeypatch, script, limits, stop, calls
):
  (episode,) = play(monkeypatch, script, turns=('a', 'b'), **limits)
  assert episode.stop_reason is stop
  assert episode.real_calls == len(episode.steps) == calls
  assert (episode.reply is not None) == (stop is Stop.REPLIED)
  ends_between = stop in (Stop.MAX_USER_TURNS, Stop.REPLIED) or script == ['hi']
  assert episode.num_turns == len(episode.turn_replies) + (
    stop is Stop.REPLIED or not ends_between
  )
  finished = [t for t in script if not t.startswith('<') and '...' not in t]
  assert [*episode.turn_replies, *filter(None, [episode.reply])] == finished


def test_a_budget_runs_out_between_two_calls_of_one_action(monkeypatch):
  rules = alternation.Rules(max_calls=2)
  (episode,) = play(monkeypatch, [call(1) + call(2) + call(3)], rules=rules)
  assert episode.stop_reason is Stop.CALL_BUDGET
  assert said(episode) == ['1', '2']


def test_the_gate_decides_on_what_was_said(monkeypatch):
  seen = []

  def gate(cases):
    seen.extend(
      (case.task.id, case.said.reply, len(case.said.steps), case.turn)
      for case in cases
    )
    return [case.said.reply != 'bad' for case in cases]

  rules = alternation.Rules(allow_next_turn=gate)
  good, bad = play(
    monkeypatch,
    ['good', call(1), 'end'],
    ['good', 'bad'],
    turns=('next', 'last')[:1],
    rules=rules,
  )
  assert good.stop_reason is Stop.REPLIED
  assert bad.stop_reason is Stop.REPLIED, 'the last turn needs no gate'
  good, bad = play(
    monkeypatch,
    ['good', call(1), 'mid', 'end'],
    ['bad'],
    turns=('next', 'last'),
    rules=rules,
  )
  assert good.stop_reason is Stop.REPLIED
  assert bad.stop_reason is Stop.REQUIREMENT_UNMET
  assert bad.reply is None and bad.turn_replies == ('bad',)
  assert ('t', 'mid', 1, 1) in seen


def test_no_room_for_the_user_ends_the_episode(monkeypatch):
  monkeypatch.setattr(ScriptedSession, 'capacity', 40)
  (episode,) = play(monkeypatch, ['one'], turns=('x' * 60,))
  assert episode.stop_reason is Stop.CONTEXT_FULL
  assert len(episode.rows[0].tokens) < 40
