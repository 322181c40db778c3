"""Private rehearsal in full: who rehearses, how, for whom, and against what.

Every line commits one real execution per test task with one executor:

  plain       no notes
  rehearsed   notes of a rehearser, itself or the other policy (2 x 2), in
              parallel or one after another, agreed by rule or self-written
  fewer       notes of its first 1, 2, 4, ... parallel rehearsals
  placebo     its notes of another task
  scrambled   its own calls, with answers that other calls met
  blank       notes from rehearsals in which every answer says nothing
  oracle      notes from rehearsals in a copy of the real world: a ceiling
  choose      it rehearses k candidates before each action, and takes the best
  gate        it rehearses each write, and makes none it expects to be refused
  choose+gate both

Temperatures are tuned on dev for each cap on real calls, with as many tries for
every line. Rehearsing costs tokens and time, which stand in the line; a plain
run that spends nothing is cheaper than any. Executions are paired: the same
tasks, and the same random numbers as far as the texts agree.
"""

from collections.abc import Callable, Mapping
import dataclasses
import time

from envace_jax.evaluation import evaluator as evaluators
from envace_jax.evaluation import private
from envace_jax.evaluation import runner as runners
from envace_jax.rollout import alternation, memory, per_action
from envace_jax.rollout import private_rehearsal as rehearsing
from envace_jax.worlds import gated, real

SPLITS = ('dev', 'test_iid')  # to tune on, to report
PARALLEL, AGREED = rehearsing.Mode.PARALLEL, rehearsing.Memory.AGREED


# What is shown in place of one's own notes, from the same rehearsals.
_CONTROLS: Mapping[str, Callable[[rehearsing.Rehearsed], list[str]]] = {
  'placebo': lambda rehearsed: memory.placebo(rehearsed.notes()),
  'scrambled': lambda rehearsed: rehearsed.show(
    memory.scrambled(rehearsed.facts())
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Notes:
  """Memories for the tasks of one split, and what making them took."""

  shown: list[str]
  sampled_tokens: int
  seconds: float


class Study:
  """All lines for some policies; `policies` maps names to parameters."""

  def __init__(
    self,
    evaluator: evaluators.Evaluator,
    runner: runners.Runner,
    tasks: Mapping[str, private.Tasks],
    policies: Mapping,
    settings: private.Settings,
    log: Callable[[str], None],
  ):
    self._evaluator, self._runner = evaluator, runner
    self._tasks, self._policies = tasks, policies
    self._settings, self._log = settings, log
    self._rehearsals: dict = {}

  def lines(self) -> list[dict]:
    """One JSON object a line, see the module's docstring."""
    lines = []
    for executor in self._policies:
      lines += self._with_notes(executor)
      lines += self._per_action(executor)
    return lines

  def self_evaluations(self) -> list[dict]:
    """How often a rehearser said that an attempt worked, and said nothing."""
    found = []
    for (rehearser, rule, split, _), (rehearsed, _) in self._rehearsals.items():
      if split != 'test_iid' or rule.memory is AGREED:
        continue
      said = [one for own in rehearsed.reflections() for one in own]
      clear = [one.worked for one in said if one is not None]
      found.append(
        {
          'rehearser': rehearser,
          'mode': rule.mode.value,
          'attempts': len(said),
          'unclear': len(said) - len(clear),
          'worked': sum(clear) / len(clear) if clear else None,
        }
      )
    return found

  def _with_notes(self, executor: str) -> list[dict]:
    own = dataclasses.replace(self._settings.rule, mode=PARALLEL, memory=AGREED)
    lines = [self._line(executor, 'plain', self._no_notes())]
    for rehearser in self._policies:
      for rule in self._rules():
        lines.append(self._noted(executor, 'rehearsed', rehearser, rule))
    attempts = 1
    while attempts < own.attempts:
      lines.append(
        self._noted(executor, 'fewer', executor, own, attempts=attempts)
      )
      attempts *= 2
    for name, make in _CONTROLS.items():
      lines.append(self._noted(executor, name, executor, own, make=make))
    for world in ('blank', 'oracle'):
      lines.append(self._noted(executor, world, executor, own, world=world))
    return lines

  def _rules(self) -> list[rehearsing.Rule]:
    """Both modes; memory by rule, and by the policy where it has learned to."""
    kinds = dict.fromkeys([AGREED, self._settings.rule.memory])
    return [
      dataclasses.replace(self._settings.rule, mode=mode, memory=kind)
      for kind in kinds
      for mode in rehearsing.Mode
    ]

  def _per_action(self, executor: str) -> list[dict]:
    return [
      self._line(
        executor,
        name,
        self._no_notes(),
        chooses='choose' in name,
        gates='gate' in name,
      )
      for name in ('choose', 'gate', 'choose+gate')
    ]

  def _no_notes(self) -> dict[str, _Notes]:
    return {
      split: _Notes(
        shown=[''] * len(self._tasks[split]), sampled_tokens=0, seconds=0.0
      )
      for split in SPLITS
    }

  def _noted(
    self,
    executor: str,
    arm: str,
    rehearser: str,
    rule: rehearsing.Rule,
    *,
    make: Callable[[rehearsing.Rehearsed], list[str]] = (
      rehearsing.Rehearsed.notes
    ),
    world: str = 'own',
    attempts: int | None = None,
  ) -> dict:
    """A line with what a rehearser's first `attempts` rehearsals leave behind.

    `make` turns rehearsals into what is shown, `world` is where they are made.
    """
    attempts = rule.attempts if attempts is None else attempts
    return self._line(
      executor,
      arm,
      {
        split: self._memories(rehearser, rule, split, world, attempts, make)
        for split in SPLITS
      },
      rehearser=rehearser,
      mode=rule.mode.value,
      memory=rule.memory.value,
      attempts=attempts,
    )

  def _memories(self, rehearser, rule, split, world, attempts, make) -> _Notes:
    """What some rehearsals leave behind; each is made once."""
    key = rehearser, rule, split, world
    if key not in self._rehearsals:
      started = time.perf_counter()
      rehearsed = private.rehearse(
        self._runner,
        self._tasks[split],
        rule,
        self._settings,
        self._where(self._policies[rehearser], world),
      )
      self._rehearsals[key] = rehearsed, time.perf_counter() - started
    rehearsed, seconds = self._rehearsals[key]
    rehearsed = rehearsed.first(attempts)
    return _Notes(
      shown=make(rehearsed),
      sampled_tokens=rehearsed.sampled_tokens,
      seconds=seconds * attempts / rule.attempts,
    )

  def _where(self, params, world: str) -> private.Where:
    if world == 'own':
      return private.own_world(self._runner, params)

    def blank(tasks, stream, samples, manner):
      return self._runner.in_world(
        params,
        real.NullWorld(),
        tasks,
        stream=stream,
        samples=samples,
        manner=manner,
      )

    def oracle(tasks, stream, samples, manner):
      episodes = self._runner.real(
        params, tasks, stream=stream, samples=samples, manner=manner
      )
      self._evaluator.real_calls += sum(e.real_calls for e in episodes)
      return episodes

    return {'blank': blank, 'oracle': oracle}[world]

  def _line(
    self, executor, arm, notes, *, chooses=False, gates=False, **described
  ) -> dict:
    """Tunes on dev, reports on test."""
    tried, seconds = {}, {}
    temperatures = self._settings.temperatures
    if chooses:
      temperatures = self._settings.action_temperatures
    for split in SPLITS:
      started = time.perf_counter()
      tried[split] = {
        temperature: self._commit(
          executor, split, notes[split].shown, temperature, chooses, gates
        )
        for temperature in temperatures
      }
      seconds[split] = time.perf_counter() - started
    test, made = tried['test_iid'], notes['test_iid']
    caps = []
    for cap in self._settings.max_calls:
      best = private.tuned_temperature(tried['dev'], cap)
      rate = private.success_rate(test[best], cap)
      caps.append({'cap': cap, 'temperature': best, 'success': rate})
    best = private.tuned_temperature(
      tried['dev'], self._settings.headline_calls
    )
    count = len(made.shown)
    line = {'executor': executor, 'arm': arm} | described
    self._log(', '.join(str(value) for value in line.values()))
    return line | {
      'by_cap': caps,
      'real_calls': sum(test[best].real_calls) / count,
      'rehearsed_tokens': made.sampled_tokens / count,
      'committed_tokens': test[best].sampled_tokens / count,
      'seconds': (made.seconds + seconds['test_iid'] / len(test)) / count,
    }

  def _commit(self, executor, split, notes, temperature, chooses, gates):
    """One real execution per task."""
    runner, settings = self._runner, self._settings
    choose = alternation.sample
    if chooses:
      choose = per_action.Chooser(runner.template, settings.action)

    def gate(world):
      return gated.GatedWorld(
        world,
        runner.template,
        is_write=runner.environment.is_write,
        answers=settings.action.answers,
        max_refused=settings.max_refused,
      )

    return private.commit(
      self._evaluator,
      runner,
      self._tasks[split],
      self._policies[executor],
      runners.Manner(
        temperature=temperature,
        notes=notes,
        rules=alternation.Rules(choose=choose),
      ),
      gate=gate if gates else lambda world: world,
    )
