"""Rehearsing privately: modes, memories and their controls."""

import json

import numpy as np
import pytest

from envace_jax import types
from envace_jax.rollout import memory, private_rehearsal
from envace_jax.text import reflection


def step(name, observation, **arguments):
  return types.Step(
    action=types.ToolCall(name=name, arguments=arguments),
    action_text='',
    observation_text=observation,
  )


def episode(*steps, **said):
  empty = np.zeros(0, np.int32)
  return types.Episode(
    **{
      'task_id': 't',
      'group': 0,
      'sample_index': 0,
      'rows': (types.Row(tokens=empty, authors=empty, logprobs=empty),),
      'steps': steps,
      'reply': None,
      'stop_reason': types.StopReason.REPLIED,
    }
    | said
  )


def task(name='t', user_turns=()):
  return types.Task(
    id=name,
    instruction=name,
    tools=(),
    checklist=(),
    user_turns=user_turns,
  )


PENDING, SHIPPED = '{"status": "pending"}', '{"status": "shipped"}'
is_write = lambda name: name == 'cancel'


def remember(*episodes, max_notes=4):
  facts = memory.agreed(episodes, max_notes, is_write)
  return memory.show(memory.render(facts), lambda notes: True)


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


def test_notes_that_do_not_fit_are_left_out_whole():
  short = lambda text: len(text) <= len('a -> 1; cc -> 3')
  assert memory.show(['a -> 1', 'b -> 22222222', 'cc -> 3'], short) == (
    'a -> 1; cc -> 3'
  )
  assert memory.show(['b -> 2222222222222'], short) == ''


def test_placebos_are_another_task_s():
  assert memory.placebo(['x', 'y', 'z']) == ['y', 'z', 'x']


def test_scrambled_keeps_calls_and_changes_every_answer_it_can():
  call = lambda name, i: types.ToolCall(name=name, arguments={'id': i})
  memories = [
    [(call('get', 'a'), '1'), (call('list', 'a'), 'alone')],
    [(call('get', 'b'), '1'), (call('get', 'c'), '2')],
    [],
  ]
  mixed = memory.scrambled(memories)
  calls = lambda facts: [[c for c, _ in m] for m in facts]
  assert calls(mixed) == calls(memories)
  assert [[answer for _, answer in m] for m in mixed] == [
    ['2', 'alone'],
    ['2', '1'],
    [],
  ]


def reflect(worked, *notes):
  return reflection.Reflection(worked=worked, notes=notes)


def test_what_worked_is_remembered_first_and_each_call_once():
  said = [
    reflect(False, 'get a -> 1', 'get b -> 2'),
    None,
    reflect(True, 'get b -> 3', 'get c -> 4'),
  ]
  assert memory.written(said, 3) == ['get b -> 3', 'get c -> 4', 'get a -> 1']
  assert memory.written(said, 2) == ['get b -> 3', 'get c -> 4']
  assert memory.written([None], 2) == []


def test_a_reflection_is_read_as_it_is_rendered():
  asked = task(user_turns=('and then?',))
  for one in (reflect(True, 'get a -> 1', 'get b -> 2'), reflect(False)):
    said = episode(reply=reflection.render(one), num_turns=3)
    assert reflection.read(said, asked) == one


@pytest.mark.parametrize(
  'said',
  [
    {'reply': 'Perhaps.', 'num_turns': 2},
    {'reply': None, 'num_turns': 2, 'stop_reason': types.StopReason.MAX_STEPS},
    # Nobody asked: the task's own reply may say anything.
    {'reply': 'It worked. get a -> 1', 'num_turns': 1},
  ],
)
def test_no_clear_verdict_is_none(said):
  assert reflection.read(episode(**said), task()) is None


class Policy:
  """Rehearses by script; remembers what it was asked."""

  def __init__(self, reply=None):
    self.asked, self.reply = [], reply

  def __call__(self, tasks, notes, samples, number):
    self.asked.append((tasks, notes, samples, number))
    say = {'reply': self.reply, 'sampled_tokens': 7}
    return [
      episode(
        step('get', f'{{"n": {number + i}}}', id=task.id),
        num_turns=1 + len(task.user_turns),
        **say,
      )
      for task in tasks
      for i in range(samples)
    ]


def rehearse(policy, mode, kind='agreed', attempts=3):
  rule = private_rehearsal.Rule(
    attempts=attempts,
    mode=private_rehearsal.Mode(mode),
    memory=private_rehearsal.Memory(kind),
    max_notes=2,
  )
  context = private_rehearsal.Context(
    is_write=is_write, fits=lambda task, notes: len(notes) < 40
  )
  return private_rehearsal.rehearse(
    [task('a'), task('b')], rule, context, policy
  )


def test_parallel_rehearsals_see_no_notes():
  policy = Policy()
  rehearsed = rehearse(policy, 'parallel')
  assert [(n, s, i) for _, n, s, i in policy.asked] == [(None, 3, 0)]
  assert [len(own) for own in rehearsed.attempts] == [3, 3]
  assert rehearsed.notes() == ['get a -> {"n": 0}', 'get b -> {"n": 0}']
  assert rehearsed.sampled_tokens == 6 * 7
  fewer = rehearsed.first(1)
  assert [len(own) for own in fewer.attempts] == [1, 1]
  assert fewer.sampled_tokens == 2 * 7


def test_sequential_rehearsals_see_what_came_before():
  policy = Policy()
  rehearsed = rehearse(policy, 'sequential')
  assert [(n, s, i) for _, n, s, i in policy.asked] == [
    (['', ''], 1, 0),
    (['get a -> {"n": 0}', 'get b -> {"n": 0}'], 1, 1),
    (['get a -> {"n": 0}', 'get b -> {"n": 0}'], 1, 2),  # the first of equals
  ]
  answers = [
    [json.loads(e.steps[0].observation_text)['n'] for e in own]
    for own in rehearsed.attempts
  ]
  assert answers == [[0, 1, 2]] * 2


def test_a_written_memory_is_what_the_policy_said_when_asked():
  policy = Policy(reply='It failed. get a -> 5; get b -> 6')
  rehearsed = rehearse(policy, 'parallel', 'written')
  asked = policy.asked[0][0]
  assert [t.user_turns for t in asked] == [(reflection.REQUEST,)] * 2
  assert rehearsed.notes() == ['get a -> 5; get b -> 6'] * 2
  assert [r.worked for r in rehearsed.reflections()[0]] == [False] * 3
  assert rehearse(Policy('No idea.'), 'parallel', 'written').notes() == ['', '']


def test_a_rule_that_rehearses_nothing_makes_no_notes():
  assert rehearse(Policy(), 'parallel', attempts=0).notes() == ['', '']
  with pytest.raises(ValueError, match='max_notes=0'):
    private_rehearsal.Rule(
      attempts=1,
      mode=private_rehearsal.Mode.PARALLEL,
      memory=private_rehearsal.Memory.AGREED,
      max_notes=0,
    )
