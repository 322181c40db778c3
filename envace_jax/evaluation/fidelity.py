"""M1 and M2: does a rehearsed observation say what the real one said?

Both answer the same call after the same history. An observation is flattened
into the set F of (path, value) of its leaves (F^ for the rehearsed one), both
restricted to the *determinable* paths: those whose value follows from what the
rehearser may see. The rest is irreducible and is not scored.

  M1  parses = mean 1[F^ is JSON];  valid = parses and fits the tool's schema
  M2  EM = mean 1[F^ = F];  P = |F & F^| / |F^|;  R = |F & F^| / |F|
      F1 = 2 |F & F^| / (|F| + |F^|), sums over comparisons (micro-average);
      key F1: the same over paths alone

Rehearsed text that is not strict JSON is wrong (F^ is empty, EM is 0) and has
its own counter. Comparisons with nothing determinable, or whose real side is
not JSON, are left out and counted: an empty set equals an empty set and would
pass for exact. List items are matched by index, so an item inserted in front
makes the whole list wrong; numbers compare by value, true is not 1.

Sources: EnvACE (arXiv 2608.06197) trains such observations and scores none of
them. Determinable paths follow the state-prediction view of ByteSized32-SP
(arXiv 2406.06485); stratify by hand for the EnvSimBench cliff (2605.07247).
"""

from collections.abc import Mapping, Sequence
import dataclasses

import jsonschema
import numpy as np

from envace_jax import types
from envace_jax.evaluation import intervals
from envace_jax.tasks import records

Path = tuple[str | int, ...]
Leaves = dict[Path, tuple[str, object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """One call answered twice. A path stands for all that lies below it."""

  rehearsed: str
  real: str
  determinable: Sequence[Path]  # [()] is the whole observation
  task_id: str = ''  # unit of resampling; '' is a unit of its own
  schema: types.Json | None = None  # of a successful observation, for M1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fidelity:
  """M1 over all comparisons, M2 over `num_scored`; None where undefined."""

  num_comparisons: int
  num_scored: int
  num_unparseable: int  # rehearsed text that is not JSON
  num_nothing_determinable: int  # not in M2
  num_real_unparseable: int  # not in M2
  parses: intervals.Interval | None
  valid: intervals.Interval | None
  exact_match: intervals.Interval | None
  precision: intervals.Interval | None
  recall: intervals.Interval | None
  f1: intervals.Interval | None
  key_f1: intervals.Interval | None


def compare(
  comparisons: Sequence[Comparison], *, seed: int, draws: int = 10_000
) -> Fidelity:
  """M1 and M2 with intervals over tasks."""
  validity, scores, scored_tasks = [], [], []
  nothing = real_unparseable = 0
  for comparison in comparisons:
    rehearsed = parse(comparison.rehearsed)
    validity.append([rehearsed is not None, _is_valid(comparison), 1])
    real = parse(comparison.real)
    if real is None:
      real_unparseable += 1
    elif not comparison.determinable:
      nothing += 1
    else:
      scores.append(_score(rehearsed, real, comparison.determinable))
      scored_tasks.append(comparison.task_id)

  def over_tasks(task_ids, counts, width, statistic):
    counts = np.asarray(counts, np.float64).reshape(-1, width)
    return intervals.bootstrap_counts(
      intervals.cluster(task_ids, counts), statistic, seed=seed, draws=draws
    )

  def m1(statistic):
    ids = [comparison.task_id for comparison in comparisons]
    return over_tasks(ids, validity, 3, statistic)

  def m2(statistic):
    return over_tasks(scored_tasks, scores, len(_COLUMNS), statistic)

  return Fidelity(
    num_comparisons=len(comparisons),
    num_scored=len(scores),
    num_unparseable=sum(not parses for parses, _, _ in validity),
    num_nothing_determinable=nothing,
    num_real_unparseable=real_unparseable,
    parses=m1(intervals.ratio(0, 2)),
    valid=m1(intervals.ratio(1, 2)),
    exact_match=m2(intervals.ratio(_EXACT, _ONE)),
    precision=m2(intervals.ratio(_BOTH, _REHEARSED)),
    recall=m2(intervals.ratio(_BOTH, _REAL)),
    f1=m2(lambda s: 2 * s[..., _BOTH] / (s[..., _REHEARSED] + s[..., _REAL])),
    key_f1=m2(
      lambda s: 2 * s[..., _KEYS] / (s[..., _REHEARSED] + s[..., _REAL])
    ),
  )


_COLUMNS = _BOTH, _KEYS, _REHEARSED, _REAL, _EXACT, _ONE = range(6)


def _score(
  rehearsed: Leaves | None, real: Leaves, determinable: Sequence[Path]
) -> tuple[int, ...]:
  """One row of counts, in the order of `_COLUMNS`."""
  truth = restrict(real, determinable)
  guess = restrict(rehearsed or {}, determinable)
  both = len(truth.items() & guess.items())
  keys = len(truth.keys() & guess.keys())
  exact = rehearsed is not None and guess == truth
  return both, keys, len(guess), len(truth), int(exact), 1


def parse(text: str) -> Leaves | None:
  """Flattened observation; None if the text is not strict JSON."""
  try:
    return flatten(records.parse_json(text))
  except (ValueError, RecursionError):
    return None


def flatten(value: object, path: Path = ()) -> Leaves:
  """Path -> (type, value) of each leaf; an empty container is a leaf."""
  if isinstance(value, Mapping) and value:
    items = value.items()
  elif isinstance(value, list) and value:
    items = enumerate(value)
  else:
    return {path: _leaf(value)}
  return {
    below: leaf
    for key, item in items
    for below, leaf in flatten(item, (*path, key)).items()
  }


def _leaf(value: object) -> tuple[str, object]:
  """With its JSON type: Python holds True == 1 and would call that exact."""
  if isinstance(value, bool):
    return 'boolean', value
  if isinstance(value, int | float):
    return 'number', value
  if isinstance(value, dict | list):
    return type(value).__name__, None
  return 'null' if value is None else 'string', value


def restrict(leaves: Leaves, determinable: Sequence[Path]) -> Leaves:
  """Leaves at or below one of the paths."""
  for path in determinable:
    if isinstance(path, str):
      raise ValueError(f'path {path!r}: give a tuple such as {(path,)}')
  wanted = {tuple(path) for path in determinable}
  return {
    path: leaf
    for path, leaf in leaves.items()
    if any(path[:i] in wanted for i in range(len(path) + 1))
  }


def _is_valid(comparison: Comparison) -> bool:
  try:
    value = records.parse_json(comparison.rehearsed)
    if comparison.schema is not None and not _is_error(value):
      jsonschema.validate(value, comparison.schema)
  except (ValueError, RecursionError, jsonschema.ValidationError):
    return False
  return True


def _is_error(value: object) -> bool:
  """A tool may always answer {'error': ...}, whatever its schema says."""
  return isinstance(value, dict) and isinstance(value.get('error'), str)
