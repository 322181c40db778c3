"""The memory rule: agreement among rehearsals, and nothing else."""

import numpy as np

from envace_jax import types
from envace_jax.rollout import private_rehearsal


def step(name, observation, **arguments):
  return types.Step(
    action=types.ToolCall(name=name, arguments=arguments),
    action_text='',
    observation_text=observation,
  )


def episode(*steps):
  empty = np.zeros(0, np.int32)
  return types.Episode(
    task_id='t',
    group=0,
    sample_index=0,
    rows=(
      types.Row(
        tokens=empty,
        authors=empty,
        logprobs=empty,
      ),
    ),
    steps=steps,
    reply=None,
    stop_reason=types.StopReason.REPLIED,
  )


PENDING, SHIPPED = '{"status": "pending"}', '{"status": "shipped"}'
is_write = lambda name: name == 'cancel'


def remember(*episodes, max_notes=4):
  return private_rehearsal.memory(episodes, max_notes, is_write)


def test_the_majority_answer_is_remembered():
  read = lambda observation: episode(step('get', observation, id='O1'))
  notes = remember(read(SHIPPED), read(PENDING), read(PENDING))
  assert notes == f'get O1 -> {PENDING}'
  tied = remember(read(SHIPPED), read(PENDING))
  assert tied == f'get O1 -> {SHIPPED}'  # the one seen first


def test_an_episode_votes_once_per_call():
  stutter = episode(*[step('get', SHIPPED, id='O1')] * 3)
  once = [episode(step('get', PENDING, id='O1'))] * 2
  assert remember(stutter, *once) == f'get O1 -> {PENDING}'


def test_a_rehearsed_write_is_a_plan_and_a_refused_one_a_fact():
  done = step('cancel', '{"status": "cancelled"}', id='O1')
  refused = step('cancel', '{"error": "not_pending"}', id='O2')
  after = step('get', '{"status": "cancelled"}', id='O1')
  notes = remember(episode(refused, done, after))
  assert notes == 'cancel O2 -> {"error": "not_pending"}'


def test_the_calls_most_made_are_kept_in_the_order_made():
  a, b, c = (step('get', PENDING, id=i) for i in 'abc')
  notes = remember(episode(a, b), episode(b, c), episode(c), max_notes=2)
  assert notes == f'get b -> {PENDING}; get c -> {PENDING}'


def test_garbage_is_not_remembered():
  broken = types.Step(
    action=types.ParseError(kind='bad_json', detail=''),
    action_text='',
    observation_text=PENDING,
  )
  words = step('get', 'not json', id='O1')
  numbers = step('get', '[1, 2]', id='O2')
  assert remember(episode(broken, words, numbers)) == ''
  assert remember() == ''


def test_memories_are_grouped_by_task_and_placebos_are_another_s():
  one, two = (episode(step('get', PENDING, id=i)) for i in 'xy')
  notes = private_rehearsal.memories(
    [one, one, two, two], 2, max_notes=4, is_write=is_write
  )
  assert notes == [f'get x -> {PENDING}', f'get y -> {PENDING}']
  assert private_rehearsal.placebo(notes) == notes[::-1]
