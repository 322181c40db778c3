"""Real and rehearsed answers in one batch: each as if it were alone."""

import zlib

import numpy as np
import pytest
import talkative
from talkative import ANYTHING, TEMPLATE, decoder_for, task

from envace_jax import types
from envace_jax.envs import base as envs
from envace_jax.learning import batch as batches
from envace_jax.sampling import keys
from envace_jax.text import template as templates
from envace_jax.worlds import base, mixed, own_row, real, rehearsal

A, Source = types.Author, types.Source
GROUP = 4


class Ledger:
  """An environment whose every answer depends on all calls before it."""

  executed = 0  # by all of them

  def __init__(self, breaks_on=None):
    self._breaks_on = breaks_on

  def reset(self, task):
    self._task, self._calls = task.id, []

  def call(self, action):
    if (self._task, len(self._calls)) == self._breaks_on:
      raise RuntimeError('out of order')
    Ledger.executed += 1
    self._calls.append(repr(action))
    return envs.Observation(text=f'{{"n": {self._digest()}}}')

  def state_hash(self):
    if self._breaks_on == (self._task, 0):
      raise RuntimeError('out of order')
    return str(self._digest())

  def close(self):
    pass

  def _digest(self):
    return zlib.crc32(repr((self._task, self._calls)).encode()) % 1000


# Without a policy ------------------------------------------------------------


class Inner:
  """Answers by numbers, and keeps what it was asked."""

  def open(self, batch):
    self.requests = []

  def respond(self, session, requests):
    del session
    self.requests += requests
    return [
      base.Response(text=f'{{"inner": {len(r.heard)}}}') for r in requests
    ]

  def provenance(self, row):
    return base.Provenance(source=Source.SIMULATED)

  def trained_rows(self):
    return None

  def final_state(self, row):
    return None

  def close(self):
    self.closed = True


def open_world(steps, episodes_, breaks_on=None, step=0):
  tasks = [task(name) for name in 'abc' for _ in range(GROUP)]
  row_keys = keys.rows(keys.stream(1, 'rollout', step), range(len(tasks)))
  inner = Inner()
  world = mixed.MixedWorld(
    inner,
    real.RealWorld(lambda: Ledger(breaks_on)),
    TEMPLATE,
    real_episodes=episodes_,
    real_steps=steps,
  )
  world.open(base.Batch(tasks=tasks, prompts=[()] * 3, row_keys=row_keys))
  return world, inner, tasks


def span(*ids):
  return np.array(ids, np.int32), np.full(len(ids), A.ACT, np.int8)


def action(row, i):
  return types.ToolCall(name='f', arguments={'row': row, 'i': i})


def play(world, num_calls, rows=range(12)):
  """Answers by row; a stopped row is asked no more."""
  said = {row: [] for row in rows}
  for i in range(num_calls):
    live = [row for row in rows if not said[row] or not said[row][-1].stop]
    asked = [
      base.Request(row=row, action=action(row, i), heard=(span(row, i),))
      for row in live
    ]
    for row, answer in zip(live, world.respond(None, asked), strict=True):
      said[row].append(answer)
  return said


def truth(name, row, num_calls):
  """What a fresh environment answers to the whole sequence of calls."""
  ledger = Ledger()
  ledger.reset(task(name))
  return [ledger.call(action(row, i)).text for i in range(num_calls)]


def test_steps_shown_for_real_are_those_of_the_whole_history():
  world, inner, tasks = open_world(0.4, 0)
  before = Ledger.executed
  said = play(world, 25)
  shown = 0
  for row, answers in said.items():
    expected = truth(tasks[row].id, row, 25)
    for answer, right in zip(answers, expected, strict=True):
      assert answer.text == right or 'inner' in answer.text
      shown += answer.text == right
    assert world.provenance(row) == base.Provenance(
      source=Source.MIXED, real_calls=25
    )
    assert world.final_state(row) == expected[-1][6:-1]
  assert Ledger.executed - before - 25 * 12 == 25 * 12  # and those of `truth`
  assert 0.3 < shown / (25 * 12) < 0.5
  assert len(inner.requests) == 25 * 12 - shown
  # Rows draw alone, a rerun draws alike, another step does not.
  patterns = [
    {
      row: tuple('inner' in a.text for a in answers)
      for row, answers in play(open_world(0.4, 0, step=step)[0], 25).items()
    }
    for step in (0, 0, 1)
  ]
  assert patterns[0] == patterns[1] != patterns[2]
  assert len(set(patterns[0].values())) == 12


def test_the_inner_world_hears_what_the_real_one_said():
  world, inner, tasks = open_world(0.5, 0)
  said = play(world, 8)
  for row, answers in said.items():
    pending, mine = [], [r for r in inner.requests if r.row == row]
    for i, answer in enumerate(answers):
      pending.append(span(row, i))
      if 'inner' in answer.text:
        ids, authors = templates.join(mine.pop(0).heard)
        expected, whose = templates.join(pending)
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(authors, whose)
        pending = []
      else:
        ids = TEMPLATE.observation(answer.text)
        pending.append((ids, np.full(len(ids), A.WORLD, np.int8)))
    assert not mine


def test_episodes_are_shared_out_within_groups():
  world, inner, tasks = open_world(0.0, 2)
  before = Ledger.executed
  said = play(world, 3)
  for row, answers in said.items():
    if row % GROUP < 2:
      texts = [a.text for a in answers]
      assert texts == truth(tasks[row].id, row, 3)
      assert world.provenance(row) == base.Provenance(
        source=Source.REAL, real_calls=3
      )
      assert world.final_state(row) == texts[-1][6:-1]
    else:
      assert all('inner' in a.text for a in answers)
      assert world.provenance(row) == base.Provenance(source=Source.SIMULATED)
      assert world.final_state(row) is None
  assert Ledger.executed - before == 2 * 3 * 6  # `truth` ran them again
  assert {r.row % GROUP for r in inner.requests} == {2, 3}
  world.close()
  assert inner.closed


@pytest.mark.parametrize('steps', [0.0, 0.3])
def test_a_failing_environment_ends_only_its_own_episodes(steps):
  world, _, _ = open_world(steps, 2, breaks_on=('b', 1))
  healthy, _, _ = open_world(steps, 2)
  said, expected = play(world, 3), play(healthy, 3)
  for row in range(12):
    executed = row % GROUP < 2 or steps > 0
    if row // GROUP == 1 and executed:
      assert said[row][0] == expected[row][0] and len(said[row]) == 2
      assert said[row][1].stop is types.StopReason.WORLD_FAILED
      assert world.final_state(row) is None
    else:
      assert said[row] == expected[row]
  # A state that cannot be put in place, or read, is no reason to stop either.
  broken, _, _ = open_world(0.0, 4, breaks_on=('a', 0))
  assert broken.final_state(0) is None and broken.final_state(5)


# With a policy ---------------------------------------------------------------


def run(policy, world):
  model, params = policy
  decoder = decoder_for(model)
  return talkative.play(
    decoder, params, world(decoder), [task('a'), task('mid')], GROUP, seed=4
  )


def inner_world(policy, decoder, view):
  if view == 'joint':
    return rehearsal.RehearsedWorld(ANYTHING)
  return own_row.OwnRowWorld(
    decoder,
    TEMPLATE,
    policy[1],
    lambda one: TEMPLATE.prompt(one.instruction),
    ANYTHING,
    trained=True,
  )


@pytest.mark.parametrize('view', ['joint', 'split'])
def test_every_episode_is_as_if_its_world_were_alone(policy, view):
  def mix(real_episodes, real_steps):
    return lambda decoder: mixed.MixedWorld(
      inner_world(policy, decoder, view),
      real.RealWorld(Ledger),
      TEMPLATE,
      real_episodes=real_episodes,
      real_steps=real_steps,
    )

  both = run(policy, mix(2, 0.0))
  real_alone = run(policy, lambda _: real.RealWorld(Ledger))
  inner_alone = run(policy, lambda decoder: inner_world(policy, decoder, view))
  for i, episode in enumerate(both):
    is_real = i % GROUP < 2
    alone = (real_alone if is_real else inner_alone)[i]
    assert episode.source is alone.source
    assert episode.steps == alone.steps
    assert episode.real_calls == (len(episode.steps) if is_real else 0)
    for mine, theirs in zip(episode.rows, alone.rows, strict=not is_real):
      np.testing.assert_array_equal(mine.tokens, theirs.tokens)
      np.testing.assert_array_equal(mine.authors, theirs.authors)
      np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
    if is_real and view == 'split':  # the other role's row is its prompt
      assert set(episode.rows[1].authors) <= {A.PROMPT, A.FORCED}
  assert {e.source for e in both} == {Source.REAL, Source.REHEARSED}
  assert any(e.real_calls for e in both)

  stepped = run(policy, mix(0, 0.5))
  seen = {step.author for e in stepped for step in e.steps}
  assert seen == {A.WORLD, A.REHEARSE}
  for episode in stepped:
    ledger = Ledger()
    ledger.reset(task(episode.task_id))
    for step in episode.steps:
      right = ledger.call(step.action).text
      assert step.author is A.REHEARSE or step.observation_text == right
    if view == 'split':
      act, own = (
        row.tokens[int((row.authors == A.PROMPT).sum()) :]
        for row in episode.rows
      )
      np.testing.assert_array_equal(own, act[: len(own)])
  packed = batches.pack_episodes(
    stepped,
    np.ones((len(stepped), 2), np.float32),
    length_buckets=(120,),
    batch_size=sum(len(e.rows) for e in stepped),
  )
  assert (packed.authors == A.WORLD).any()
  for role in types.Role:
    trained = np.asarray(batches.role_mask(packed, role))
    assert set(packed.authors[trained]) == {types.AUTHOR_OF_ROLE[role]}
  assert not packed.advantages[packed.authors == A.WORLD].any()
