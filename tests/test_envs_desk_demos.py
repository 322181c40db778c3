"""Demonstrations: real, in the asked proportions, and bad in the right way."""

import collections
import dataclasses
import json
import re

import pytest

from envace_jax import types
from envace_jax.envs.desk import data as desk_data
from envace_jax.envs.desk import demos as desk_demos
from envace_jax.envs.desk import environment as desk
from envace_jax.envs.desk import reflections as desk_reflections
from envace_jax.envs.desk import tasks as desk_tasks
from envace_jax.rewards import checklist, verifiers
from envace_jax.text import notes as notes_text
from envace_jax.text import reflection, tool_calls

COUNT = 800


@pytest.fixture(scope='module', params=['small', 'resampled'])
def recorded(request):
  """(config, tasks by id, demonstrations, a desk)."""
  config = {'small': desk.SMALL, 'resampled': desk.RESAMPLED}[request.param]
  tasks = desk_tasks.make_tasks(config, {'train': 240}, seed=0)['train']
  demos = desk_demos.make_demonstrations(
    config, tasks, count=COUNT, notes_fraction=0.25, seed=0
  )
  environment = desk.Desk(config)
  yield config, {task.id: task for task in tasks}, demos, environment
  environment.close()


def judge(environment, task, demo):
  """(training score, evaluation score); checks each observation."""
  environment.reset(task)
  for step in demo.steps:
    assert tool_calls.parse_action(step.action_text) == step.action
    assert environment.call(step.action).text == step.observation_text
  transcript = verifiers.Transcript(
    steps=demo.steps,
    reply=demo.reply,
    tools=task.tools,
    state_hash=environment.state_hash(),
  )
  training = checklist.score(task.checklist, transcript, success_bonus=0.0)
  return training, checklist.score(
    task.evaluation, transcript, success_bonus=0.0
  )


def errors_of(demo):
  answers = [json.loads(step.observation_text) for step in demo.steps]
  return [answer['error'] for answer in answers if 'error' in answer]


def test_observations_are_real_and_habits_end_as_they_should(recorded):
  _, tasks, demos, environment = recorded
  succeeded = collections.defaultdict(list)
  for demo in demos:
    task = tasks[demo.task_id]
    training, evaluation = judge(environment, task, demo)
    assert demo.instruction == task.instruction
    succeeded[demo.habit].append(evaluation.success)
    if demo.habit in ('expert', 'recover', 'dither', 'slip', 'misled'):
      assert training.success, demo
  hasty = succeeded.pop('hasty')
  assert 0.2 < sum(hasty) / len(hasty) < 0.5
  assert set(succeeded) == {
    'expert',
    'recover',
    'dither',
    'slip',
    'noted',
    'misled',
  }
  assert all(all(outcomes) for outcomes in succeeded.values())


def test_habits_and_notes_have_the_asked_shares(recorded):
  _, _, demos, _ = recorded
  habits = collections.Counter(demo.habit for demo in demos)
  assert len(demos) == COUNT
  assert habits['noted'] == round(0.7 * 0.25 * COUNT)
  assert habits['misled'] == round(0.1 * 0.25 * COUNT)
  rest = COUNT - habits['noted'] - habits['misled']
  for habit, share in desk_demos.DEFAULT_HABITS.items():
    assert abs(habits[habit] - share * rest) <= 1
  assert sum(bool(demo.notes) for demo in demos) >= 0.24 * COUNT


def test_haste_never_meets_a_trap_well_and_always_claims_success(recorded):
  _, tasks, demos, _ = recorded
  for demo in demos:
    task = tasks[demo.task_id]
    if demo.habit == 'hasty' and task.family in ('trap', 'infeasible'):
      assert errors_of(demo) and demo.reply == 'Done.'


def test_recoveries_start_with_a_refusal(recorded):
  _, _, demos, _ = recorded
  starts = [
    'error' in json.loads(demo.steps[0].observation_text)
    for demo in demos
    if demo.habit == 'recover'
  ]
  assert sum(starts) > 0.7 * len(starts)


def test_slips_are_refused_and_dithering_is_one_read_too_many(recorded):
  _, tasks, demos, _ = recorded
  for demo in demos:
    extra = len(demo.steps) - len(tasks[demo.task_id].plan)
    if demo.habit == 'slip':
      assert extra == 1 and errors_of(demo)
    if demo.habit == 'dither':
      assert extra == 1


def test_notes_replace_looking(recorded):
  _, tasks, demos, _ = recorded
  noted = [demo for demo in demos if demo.habit == 'noted']
  for demo in noted:
    plan = tasks[demo.task_id].plan
    assert len(demo.steps) < len(plan)
    assert [step.action for step in demo.steps] == list(
      plan[len(plan) - len(demo.steps) :]
    )
  assert any(not demo.steps for demo in noted)


def test_misleading_notes_contradict_the_desk_in_one_place(recorded):
  _, tasks, demos, environment = recorded
  for demo in demos:
    if demo.habit != 'misled':
      continue
    assert errors_of(demo)
    task = tasks[demo.task_id]
    truth = []
    for step in desk_tasks.oracle_episode(environment, task):
      note = notes_text.format_note(step.action, step.observation_text)
      truth.append(note)
    told = demo.notes.split(notes_text.SEPARATOR)
    assert len([note for note in told if note not in truth]) == 1


def test_notes_of_another_task_say_nothing_about_this_one(recorded):
  _, tasks, demos, _ = recorded
  for demo in demos:
    if demo.notes and demo.habit not in ('noted', 'misled'):
      for value in tasks[demo.task_id].environment['slots'].values():
        if isinstance(value, str):
          assert not re.search(rf'\b{value}\b', demo.notes)


def test_every_error_occurs_somewhere():
  moving = dataclasses.replace(desk.SMALL, goals=(*desk_data.GOALS, 'transfer'))
  tasks = desk_tasks.make_tasks(moving, {'train': 240}, seed=0)['train']
  demos = desk_demos.make_demonstrations(
    moving, tasks, count=1500, habits={'hasty': 0.3, 'slip': 0.7}, seed=0
  )
  assert {error for d in demos for error in errors_of(d)} == set(desk.ERRORS)


def test_demonstrations_follow_from_the_seed(recorded):
  config, tasks, demos, _ = recorded
  again = desk_demos.make_demonstrations(
    config, list(tasks.values()), count=COUNT, notes_fraction=0.25, seed=0
  )
  assert again == demos
  other = desk_demos.make_demonstrations(
    config, list(tasks.values()), count=COUNT, notes_fraction=0.25, seed=1
  )
  assert other != demos


def test_held_out_tasks_and_unknown_habits_are_refused():
  splits = desk_tasks.make_tasks(
    desk.SMALL, {'train': 12, 'test_ood': 3}, seed=0
  )
  with pytest.raises(ValueError, match='held out'):
    desk_demos.make_demonstrations(desk.SMALL, splits['test_ood'], count=3)
  with pytest.raises(ValueError, match='habits'):
    desk_demos.make_demonstrations(
      desk.SMALL, splits['train'], count=3, habits={'lazy': 1.0}
    )


def test_a_note_is_a_call_and_what_it_met():
  call = types.ToolCall(
    name='place_order', arguments={'user_id': 'U07', 'quantity': 2}
  )
  note = notes_text.format_note(call, '{"paid": 40}')
  assert note == 'place_order U07 2 -> {"paid": 40}'
  assert notes_text.join_notes([note, note]) == f'{note}; {note}'
  assert notes_text.join_notes([]) == ''


def test_an_attempt_s_assessment_is_the_truth(recorded):
  config, tasks, demos, environment = recorded
  reflected = desk_reflections.reflect(
    config, list(tasks.values()), demos, 0.5, seed=0
  )
  assert [d.steps for d in reflected] == [d.steps for d in demos]
  said = collections.Counter()
  for demo, plain in zip(reflected, demos, strict=True):
    if demo == plain:
      continue
    assert demo.user_turns == (reflection.REQUEST,)
    assert demo.turn_replies == (plain.reply,)
    episode = types.Episode(
      task_id='',
      group=0,
      sample_index=0,
      rows=(),
      steps=demo.steps,
      reply=demo.reply,
      num_turns=2,
      stop_reason=types.StopReason.REPLIED,
    )
    read = reflection.read(episode, tasks[demo.task_id])
    _, evaluation = judge(environment, tasks[demo.task_id], plain)
    assert read.worked == evaluation.success, demo
    said[read.worked] += 1
    met = ' '.join(step.observation_text for step in demo.steps)
    assert all(note.partition(' -> ')[2] in met for note in read.notes)
  assert 0.4 < said.total() / len(demos) < 0.6
  assert min(said[True], said[False]) > 0.1 * said.total()


def test_nobody_reflects_unless_asked(recorded):
  config, tasks, demos, _ = recorded
  some = demos[:5]
  known = list(tasks.values())
  assert desk_reflections.reflect(config, known, some, 0.0, seed=0) == some
  with pytest.raises(ValueError, match='data.reflections=2'):
    desk_reflections.reflect(config, known, some, 2, seed=0)
