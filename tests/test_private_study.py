"""The study of private rehearsal: which lines there are, what is in them."""

import dataclasses

import numpy as np
import pytest

from envace_jax import types
from envace_jax.evaluation import private, private_study
from envace_jax.evaluation import runner as runners
from envace_jax.rollout import alternation, per_action, private_rehearsal
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.worlds import gated

TASKS = {
  split: [
    types.Task(id=f'{split}{i}', instruction='', tools=(), checklist=())
    for i in range(3)
  ]
  for split in private_study.SPLITS
}
RULE = private_rehearsal.Rule(
  attempts=4,
  mode=private_rehearsal.Mode.PARALLEL,
  memory=private_rehearsal.Memory.AGREED,
  max_notes=2,
)
SETTINGS = private.Settings(
  rule=RULE,
  max_reflection_tokens=9,
  temperatures=(0.0, 0.5),
  max_calls=(0, 1, 2),
  headline_calls=1,
  action=per_action.Settings(candidates=2, answers=2, uncertainty_weight=1.0),
  action_temperatures=(0.7, 1.0),
  max_refused=0.5,
)


class Runner:
  """Notes everything down; every execution makes one call and 10 tokens."""

  def __init__(self):
    self.template = templates.Template(tokenizers.ByteTokenizer())
    self.environment = runners.Environment(
      make=None, is_write=lambda name: False, determinable=None
    )
    self.real_runs, self.rehearsed_runs, self.blank_runs = [], [], []

  def fits(self, task, notes):
    return True

  def real(self, params, tasks, *, stream, samples=1,
           manner=runners.AS_TRAINED, gate=lambda world: world):  # fmt: skip
    gates = isinstance(gate(None), gated.GatedWorld)
    self.real_runs.append((params, tasks, stream, samples, manner, gates))
    return self._episodes(tasks, samples, f'real {params}', calls=1)

  def rehearsed(self, params, tasks, *, stream, samples, manner):
    self.rehearsed_runs.append((params, stream, samples, manner))
    return self._episodes(tasks, samples, f'own {params}', calls=0)

  def in_world(self, params, world, tasks, *, stream, samples, manner):
    self.blank_runs.append(params)
    return self._episodes(tasks, samples, 'ok', calls=0)

  def _episodes(self, tasks, samples, answer, calls):
    empty = np.zeros(0, np.int32)
    step = lambda task: types.Step(
      action=types.ToolCall(name='get', arguments={'id': task.id}),
      action_text='',
      observation_text=f'{{"by": "{answer}", "of": "{task.id}"}}',
    )
    return [
      types.Episode(
        task_id=task.id,
        group=0,
        sample_index=0,
        rows=(types.Row(tokens=empty, authors=empty, logprobs=empty),),
        steps=(step(task),),
        reply='It worked. get x -> 1' if task.user_turns else 'done',
        num_turns=1 + len(task.user_turns),
        stop_reason=types.StopReason.REPLIED,
        real_calls=calls,
        sampled_tokens=10,
      )
      for task in tasks
      for _ in range(samples)
    ]


class Evaluator:
  """Greedy succeeds at the first task only, warmer at the first two."""

  def __init__(self, runner):
    self.runner, self.real_calls = runner, 0

  def judge(self, tasks, episodes):
    manner = self.runner.real_runs[-1][4]
    good = 1 if manner.temperature == 0 else 2
    return [(task.id, i < good) for i, task in enumerate(tasks)]


def study(settings=SETTINGS):
  runner = Runner()
  made = private_study.Study(
    Evaluator(runner), runner, TASKS, {'before': 'B', 'after': 'A'}, settings,
    log=lambda line: None,
  )  # fmt: skip
  return runner, made


def find(lines, executor, arm, **described):
  (line,) = [
    line
    for line in lines
    if line['executor'] == executor
    and line['arm'] == arm
    and all(line[key] == value for key, value in described.items())
  ]
  return line


def notes_of(runner, executor, arm_index):
  """What the executor's test runs were shown, in the order of the lines."""
  shown = [
    manner.notes
    for params, tasks, stream, _, manner, _ in runner.real_runs
    if params == executor and tasks is TASKS['test_iid']
    and stream == private.COMMITTED
  ]  # fmt: skip
  return shown[2 * arm_index]


def test_every_rehearser_rehearses_for_every_executor():
  runner, made = study()
  lines = made.lines()
  rehearsed = [
    (line['executor'], line['rehearser'], line['mode'])
    for line in lines
    if line['arm'] == 'rehearsed'
  ]
  names = ('before', 'after')
  assert sorted(rehearsed) == sorted(
    (e, r, m) for e in names for r in names for m in ('parallel', 'sequential')
  )
  assert 'own B' in notes_of(runner, 'A', 1)[0]  # rehearsed by the other
  assert 'own A' in notes_of(runner, 'A', 3)[0]
  # Rehearsals are made once for both executors: dev and test, of 2 policies,
  # 1 parallel and 4 sequential runs each.
  assert len(runner.rehearsed_runs) == 2 * 2 * (1 + 4)


def test_controls_show_what_they_say():
  runner, made = study()
  lines = [line for line in made.lines() if line['executor'] == 'after']
  arms = [line['arm'] for line in lines]
  assert arms == [
    'plain', *['rehearsed'] * 4, 'fewer', 'fewer', 'placebo', 'scrambled',
    'blank', 'oracle', 'choose', 'gate', 'choose+gate',
  ]  # fmt: skip
  shown = lambda arm: notes_of(runner, 'A', arms.index(arm))
  assert shown('plain') == ['', '', '']
  own = shown('fewer')
  assert shown('placebo') == [*own[1:], *own[:1]]
  scrambled = shown('scrambled')
  for mine, theirs in zip(own, scrambled, strict=True):
    assert mine.split(' -> ')[0] == theirs.split(' -> ')[0]
    assert mine != theirs
  assert '"by": "ok"' in shown('blank')[0]
  assert '"by": "real A"' in shown('oracle')[0]
  assert runner.blank_runs == ['B', 'B', 'A', 'A']
  assert find(lines, 'after', 'oracle')['attempts'] == 4


def test_temperature_is_tuned_on_dev_and_calls_are_capped():
  _, made = study()
  line = find(made.lines(), 'before', 'plain')
  rates = [at['success']['mean'] for at in line['by_cap']]
  assert rates == pytest.approx([0.0, 2 / 3, 2 / 3])
  assert [at['temperature'] for at in line['by_cap']] == [0.0, 0.5, 0.5]
  assert line['real_calls'] == 1 and line['committed_tokens'] == 10
  assert line['rehearsed_tokens'] == 0


def test_what_rehearsals_cost_is_on_the_line():
  _, made = study()
  lines = made.lines()
  full = find(lines, 'after', 'rehearsed', rehearser='after', mode='parallel')
  assert full['rehearsed_tokens'] == 4 * 10
  assert find(lines, 'after', 'fewer', attempts=1)['rehearsed_tokens'] == 10
  assert find(lines, 'after', 'fewer', attempts=2)['rehearsed_tokens'] == 20
  # The oracle's rehearsals are real calls, and are counted: 2 policies x
  # 2 splits x 3 tasks x 4 attempts.
  assert made._evaluator.real_calls == 2 * 2 * 3 * 4


def test_per_action_lines_choose_and_gate():
  runner, made = study()
  made.lines()
  seen = {
    (isinstance(m.rules.choose, per_action.Chooser), gates, m.temperature)
    for *_, m, gates in runner.real_runs
    if isinstance(m.rules.choose, per_action.Chooser) or gates
  }
  assert seen == {
    (True, False, 0.7), (True, False, 1.0), (True, True, 0.7),
    (True, True, 1.0), (False, True, 0.0), (False, True, 0.5),
  }  # fmt: skip
  plain = [m for *_, m, gates in runner.real_runs if not gates][0]
  assert plain.rules.choose is alternation.sample


def test_self_written_memories_are_studied_beside_the_rule():
  written = dataclasses.replace(RULE, memory=private_rehearsal.Memory.WRITTEN)
  runner, made = study(dataclasses.replace(SETTINGS, rule=written))
  lines = made.lines()
  line = find(
    lines, 'after', 'rehearsed', rehearser='after', mode='parallel',
    memory='written',
  )  # fmt: skip
  assert line['attempts'] == 4
  lengths = {m.max_action_tokens for *_, m in runner.rehearsed_runs}
  assert lengths == {None, 9}
  said = made.self_evaluations()
  assert {(s['rehearser'], s['mode']) for s in said} == {
    (who, mode)
    for who in ('before', 'after')
    for mode in ('parallel', 'sequential')
  }
  assert all(s['worked'] == 1 and s['unclear'] == 0 for s in said)
  assert all(s['attempts'] == 12 for s in said)


@pytest.mark.parametrize(
  ('change', 'named'),
  [
    ({'headline_calls': 5}, 'headline_calls=5'),
    ({'max_refused': 1.5}, 'max_refused=1.5'),
    ({'action_temperatures': (0.0, 1.0)}, 'action_temperatures'),
  ],
)
def test_impossible_settings_are_refused(change, named):
  with pytest.raises(ValueError, match=named):
    dataclasses.replace(SETTINGS, **change)
