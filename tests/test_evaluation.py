"""Hand-computed tables, and the properties that no table shows."""

import dataclasses
import itertools
import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from envace_jax import types
from envace_jax.evaluation import fidelity, intervals, optimism, success

VALUES = {'a': [1.0, 0.0], 'b': [1.0], 'c': [0.0, 0.0, 0.0, 1.0], 'd': [1.0]}
FAST = dict(seed=0, draws=400)


def test_mean_weighs_tasks_alike():
  found = intervals.bootstrap_mean(VALUES, **FAST)
  assert found.mean == (0.5 + 1.0 + 0.25 + 1.0) / 4
  assert found.n == 4
  assert 0.25 <= found.lo < found.mean < found.hi <= 1.0


def test_bootstrap_resamples_tasks_and_not_samples():
  """Copies of a task's sample add nothing; copies of tasks do."""
  few = {f't{i}': [i % 2] for i in range(10)}
  copied = {task: value * 20 for task, value in few.items()}
  assert intervals.bootstrap_mean(few, seed=3) == intervals.bootstrap_mean(
    copied, seed=3
  )
  many = {f't{i}': [i % 2] for i in range(200)}
  a, b = (intervals.bootstrap_mean(v, seed=3) for v in (few, many))
  assert (a.hi - a.lo) > 3 * (b.hi - b.lo)


def test_bootstrap_is_the_exact_bootstrap_in_the_limit():
  """Three tasks have 27 equally likely draws: enumerate them."""
  values = [0.0, 1.0, 5.0]
  exact = [np.mean(draw) for draw in itertools.product(values, repeat=3)]
  found = intervals.bootstrap_mean(
    {str(i): [v] for i, v in enumerate(values)}, seed=1, draws=40_000
  )
  lo, hi = np.percentile(exact, [2.5, 97.5], method='inverted_cdf')
  assert (found.lo, found.hi) == pytest.approx((lo, hi), abs=1e-9)


def test_bootstrap_covers_about_95_percent():
  rng = np.random.default_rng(0)
  hits = 0
  for i in range(300):
    x = rng.normal(size=60)
    found = intervals.bootstrap_mean(
      {str(j): [v] for j, v in enumerate(x)}, seed=i, draws=500
    )
    hits += found.lo <= 0 <= found.hi
  assert 0.90 < hits / 300 < 0.985


def test_bootstrap_repeats_whatever_the_block(monkeypatch):
  whole = intervals.bootstrap_mean(VALUES, **FAST)
  assert whole == intervals.bootstrap_mean(VALUES, **FAST)
  assert whole != intervals.bootstrap_mean(VALUES, seed=1, draws=400)
  monkeypatch.setattr(intervals, '_BLOCK', 4 * 70)  # 5 blocks and a rest
  assert whole == intervals.bootstrap_mean(VALUES, **FAST)


def test_what_has_no_value_is_none():
  assert intervals.bootstrap_mean({}, **FAST) is None
  one = intervals.bootstrap_mean({'a': [1.0, 0.0]}, **FAST)
  assert (one.mean, one.lo, one.hi, one.n) == (0.5, None, None, 1)
  with pytest.raises(ValueError, match="task 'b' has no value"):
    intervals.bootstrap_mean({'a': [1], 'b': []}, **FAST)
  with pytest.raises(ValueError, match="task 'a': not finite"):
    intervals.bootstrap_mean({'a': [float('nan')]}, **FAST)


def test_paired_difference_uses_the_pairs():
  a = {str(i): [i + 1.0] for i in range(8)}
  b = {str(i): [float(i)] for i in range(8)}
  found = intervals.paired_difference(a, dict(reversed(b.items())), **FAST)
  assert (found.mean, found.lo, found.hi) == (1, 1, 1)
  with pytest.raises(ValueError, match="one side only: \\['7'\\]"):
    intervals.paired_difference(a, {k: b[k] for k in list(b)[:7]}, **FAST)


def test_two_levels_resample_seeds_too():
  """Tasks agree within a seed: only the seed level has any spread."""
  matrix = np.repeat([[0.0], [1.0], [2.0]], 50, axis=1)
  found = intervals.seeds_then_tasks(matrix, seed=0)
  exact = [np.mean(d) for d in itertools.product(range(3), repeat=3)]
  assert (found.mean, found.n) == (1.0, 3)
  assert [found.lo, found.hi] == pytest.approx(
    np.percentile(exact, [2.5, 97.5], method='inverted_cdf')
  )
  tasks_only = intervals.seeds_then_tasks(
    np.tile([[0.0, 1.0, 2.0]], (40, 1)), seed=0
  )
  assert 0 < tasks_only.hi - tasks_only.lo < found.hi - found.lo
  assert intervals.seeds_then_tasks(matrix[:1], seed=0).lo is None
  with pytest.raises(ValueError, match='not \\[seeds, tasks\\]'):
    intervals.seeds_then_tasks(np.zeros(3), seed=0)


def test_paired_t_agrees_with_scipy():
  d = [0.1, 0.3, -0.05, 0.2, 0.12]
  found, p = intervals.paired_t(d)
  theirs = stats.ttest_1samp(d, 0)
  assert p == pytest.approx(theirs.pvalue)
  assert (found.lo, found.hi) == pytest.approx(theirs.confidence_interval(0.95))
  assert intervals.paired_t([0.5])[1] is None
  assert intervals.paired_t([0.0, 0.0])[1] is None
  assert intervals.paired_t([2.0, 2.0])[1] == 0.0


@pytest.mark.parametrize(
  'successes, n, lo, hi',
  [
    (0, 10, 0.0, 0.27753),
    (5, 10, 0.23659, 0.76341),
    (81, 263, 0.25530, 0.36617),
  ],
)
def test_wilson_of_known_shares(successes, n, lo, hi):
  found = intervals.wilson(successes, n)
  assert (found.mean, found.n) == (successes / n, n)
  np.testing.assert_allclose((found.lo, found.hi), (lo, hi), atol=1e-4)
  mirrored = intervals.wilson(n - successes, n)
  np.testing.assert_allclose(mirrored.lo, 1 - found.hi, atol=1e-12)
  z, p = 1.959964, np.array([found.lo, found.hi])
  np.testing.assert_allclose(
    (p - successes / n) ** 2, z**2 * p * (1 - p) / n, atol=1e-6
  )


def test_wilson_of_nothing_and_of_nonsense():
  assert intervals.wilson(0, 0) is None
  with pytest.raises(ValueError, match='successes=3'):
    intervals.wilson(3, 2)


@pytest.mark.parametrize('n, floor', [(5, 0.0625), (6, 0.03125), (8, 2 / 256)])
def test_sign_flip_floor(n, floor):
  assert intervals.sign_flip_p(np.linspace(0.1, 0.3, n)) == floor
  assert intervals.sign_flip_p(-np.linspace(0.1, 0.3, n)) == floor


def test_sign_flip_by_hand():
  # |sums| of (1, 2, -3) under 8 sign patterns: 0 0 2 2 4 4 6 6; observed 0.
  assert intervals.sign_flip_p([1, 2, -3]) == 1.0
  # (0.1, 0.2, 0.3): only +++ and --- reach 0.6.
  assert intervals.sign_flip_p([0.1, 0.2, 0.3]) == 0.25
  # (3, 1, -1): |sums| 3 3 3 3 1 1 5 5; observed 3.
  assert intervals.sign_flip_p([3, 1, -1]) == 0.75
  with pytest.raises(ValueError, match='exact for 1 to'):
    intervals.sign_flip_p([0.1] * 21)


OUTCOMES = [
  *[('a', True), ('a', False), ('a', None)],
  *[('b', None), ('b', None), ('b', None)],
  *[('c', True), ('c', True), ('c', False)],
]


def test_unjudged_attempts_are_not_failures():
  found = success.success_rate(OUTCOMES, **FAST)
  assert found.rate.mean == pytest.approx((1 / 2 + 2 / 3) / 2)
  assert (found.num_judged, found.num_unjudged) == (5, 4)
  assert found.unjudged_tasks == ('b',)
  dead = success.success_rate([('a', None)] * 3, **FAST)
  assert dead.rate is None and dead.num_unjudged == 3


def test_a_reward_is_not_a_success():
  with pytest.raises(ValueError, match='0.7 is no bool'):
    success.success_rate([('a', 0.7)], **FAST)


@pytest.mark.parametrize('n', range(1, 7))
def test_pass_counts_are_the_share_of_subsets(n):
  for c, k in itertools.product(range(n + 1), range(1, n + 1)):
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert success.pass_at_k(n, c, k) == pytest.approx(
      np.mean([any(s) for s in subsets])
    )
    assert success.pass_hat_k(n, c, k) == pytest.approx(
      np.mean([all(s) for s in subsets])
    )


@pytest.mark.parametrize(
  'n, c, k', [(3, 1, 4), (3, 4, 1), (3, 1, 0), (0, 0, 1)]
)
@pytest.mark.parametrize('estimator', [success.pass_at_k, success.pass_hat_k])
def test_pass_preconditions(estimator, n, c, k):
  with pytest.raises(ValueError, match='1 <= k <= n'):
    estimator(n, c, k)


def test_passes_separates_errors_from_too_few_attempts():
  found = success.passes(OUTCOMES, 2, **FAST)
  # a: n=2, c=1 -> any 1, all 0. c: n=3, c=2 -> any 1, all 1/3. b has no two.
  assert found.any_of_k.mean == 1.0
  assert found.all_of_k.mean == pytest.approx((0 + 1 / 3) / 2)
  assert found.short_tasks == ('b',)
  with pytest.raises(ValueError, match="task 'a' was attempted 3 times"):
    success.passes(OUTCOMES, 4, **FAST)
  with pytest.raises(ValueError, match='k=0'):
    success.passes(OUTCOMES, 0, **FAST)
  at_one = success.passes(OUTCOMES, 1, **FAST)
  rate = success.success_rate(OUTCOMES, **FAST).rate
  assert at_one.any_of_k.mean == pytest.approx(rate.mean)
  assert at_one.all_of_k.mean == pytest.approx(rate.mean)


def _episode(task_id, authors, real_calls):
  tokens = np.zeros(len(authors), np.int32)
  return types.Episode(
    task_id=task_id,
    group=0,
    sample_index=0,
    rows=(
      types.Row(
        tokens=tokens,
        authors=np.array(authors, np.int8),
        logprobs=tokens.astype(np.float32),
      ),
    ),
    steps=(),
    reply=None,
    stop_reason=types.StopReason.MAX_STEPS,
    real_calls=real_calls,
  )


def test_spending_adds_up():
  a = types.Author
  episodes = [
    _episode('x', [a.PROMPT, a.FORCED, a.ACT, a.ACT, a.WORLD], 1),
    _episode('x', [a.PROMPT, a.ACT, a.REHEARSE, a.REHEARSE], 0),
    _episode('y', [a.PROMPT, a.ACT], 3),
  ]
  found = success.spending(episodes, **FAST)
  assert (found.num_episodes, found.real_calls) == (3, 4)
  assert (found.act_tokens, found.rehearse_tokens) == (4, 2)
  assert found.all_tokens == 11
  assert found.real_calls_per_task.mean == 2.0
  assert found.sampled_tokens_per_task.mean == 3.0  # x: 5, y: 1
  none = success.spending([], **FAST)
  assert none.all_tokens == 0 and none.real_calls_per_task is None


EVERYTHING = [()]


def _compare(rows, **fields):
  comparisons = [
    fidelity.Comparison(
      rehearsed=mine if isinstance(mine, str) else json.dumps(mine),
      real=theirs if isinstance(theirs, str) else json.dumps(theirs),
      determinable=paths,
      **fields,
    )
    for mine, theirs, paths in rows
  ]
  return fidelity.compare(comparisons, **FAST)


def test_fidelity_by_hand():
  found = _compare(
    [
      # F = {a: 1, b: 2}, F^ = {a: 1, b: 9, c: 0}: 1 of 3, 2 keys
      ({'a': 1, 'b': 9, 'c': 0}, {'a': 1, 'b': 2}, EVERYTHING),
      # all of F right; what is not determinable is wrong and not scored
      ({'a': {'x': 'y'}, 'n': 5}, {'a': {'x': 'y'}, 'n': 6}, [('a',)]),
      ('{"a": 1', {'a': 1, 'b': 2}, EVERYTHING),  # F^ empty, F has 2
      ({'a': 1}, {'a': 1}, []),  # nothing determinable
      ({'a': 1}, 'plain text', EVERYTHING),
    ]
  )
  assert found.num_comparisons == 5 and found.num_scored == 3
  assert found.num_unparseable == 1
  assert (found.num_nothing_determinable, found.num_real_unparseable) == (1, 1)
  assert found.parses.mean == found.valid.mean == 4 / 5
  assert found.exact_match.mean == 1 / 3
  assert found.precision.mean == 2 / 4  # F^: 3 + 1 + 0
  assert found.recall.mean == 2 / 5  # F: 2 + 1 + 2
  assert found.f1.mean == 2 * 2 / (4 + 5)
  assert found.key_f1.mean == 2 * 3 / (4 + 5)


def test_undefined_fidelity_is_none():
  empty = _compare([])
  assert empty.parses is None and empty.f1 is None
  garbage = _compare([('x', {'a': 1}, EVERYTHING)] * 3)
  assert garbage.precision is None
  assert garbage.recall.mean == garbage.f1.mean == 0.0
  assert garbage.exact_match.mean == 0.0
  # Real has no such path, rehearsed neither: exact, though no field counts.
  absent = _compare([({'b': 1}, {'b': 2}, [('a',)])] * 3)
  assert absent.exact_match.mean == 1.0 and absent.f1 is None


@pytest.mark.parametrize(
  'mine, theirs, equal',
  [
    ('{"a": 1}', '{"a": 1.0}', True),
    ('{"a": true}', '{"a": 1}', False),
    ('{"a": 1}', '{"a": "1"}', False),
    ('{"a": null}', '{}', False),
    ('{"a": []}', '{"a": {}}', False),
    ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
    ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', True),
    ('{"a": NaN}', '{"a": 1}', False),
    ('{"a": 1, "a": 1}', '{"a": 1}', False),
    (f'{{"a": {2**53}}}', f'{{"a": {2**53 + 1}}}', False),
    ('{"0": "x"}', '["x"]', False),
    ('"a"', '"a"', True),
  ],
)
def test_exact_match_knows_json_types(mine, theirs, equal):
  found = _compare([(mine, theirs, EVERYTHING)])
  assert found.exact_match.mean == float(equal)


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=8,
)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(JSON, JSON)
def test_fidelity_bounds_and_symmetry(x, y):
  x, y = json.dumps(x), json.dumps(y)  # also where x is a string
  same = _compare([(x, x, EVERYTHING)])
  assert same.exact_match.mean == same.f1.mean == same.key_f1.mean == 1.0
  there, back = _compare([(x, y, EVERYTHING)]), _compare([(y, x, EVERYTHING)])
  assert there.precision.mean == back.recall.mean
  assert there.f1.mean == back.f1.mean <= there.key_f1.mean
  assert (there.exact_match.mean == 1.0) == (there.f1.mean == 1.0)


def test_validity_uses_the_schema_but_any_tool_may_fail():
  schema = {'type': 'object', 'required': ['order_id']}
  rows = [
    ({'order_id': 'O1'}, {}, EVERYTHING),
    ({'id': 'O1'}, {}, EVERYTHING),
    ({'error': 'not_found', 'detail': ''}, {}, EVERYTHING),
  ]
  found = _compare(rows, schema=schema)
  assert (found.parses.mean, found.valid.mean) == (1.0, 2 / 3)


def test_string_paths_are_refused():
  with pytest.raises(ValueError, match="give a tuple such as \\('ab',\\)"):
    _compare([({}, {}, ['ab'])])


def test_fidelity_resamples_by_task():
  rows = [({'a': i % 2}, {'a': 0}, EVERYTHING) for i in range(12)]
  apart, together = _compare(rows), _compare(rows, task_id='t')
  assert apart.f1.mean == together.f1.mean == 0.5
  assert (apart.f1.n, together.f1.n) == (12, 1)
  assert together.f1.lo is None


OK, GARBAGE = optimism.OK, optimism.UNPARSEABLE
X, Y = 'error:x', 'error:y'


@pytest.mark.parametrize(
  'text, expected',
  [
    ('{"error": "not_pending", "detail": "d"}', 'error:not_pending'),
    ('{"error": "ok"}', 'error:ok'),
    ('{"error": {"code": 3}}', 'error:untyped'),
    ('{"error": null, "a": 1}', OK),
    ('{"a": {"error": "x"}}', OK),
    ('"error"', OK),
    ('error', GARBAGE),
    ('{"error": "x"', GARBAGE),
    ('', GARBAGE),
  ],
)
def test_outcome_class(text, expected):
  assert optimism.outcome_class(text) == expected


def _agree(*pairs):
  """Pairs (rehearsed, real), each its own task."""
  return optimism.error_agreement(
    [optimism.ErrorPair(rehearsed=h, real=r) for h, r in pairs], **FAST
  )


def test_optimism_by_hand():
  # a=2 (one of another type), b=3 (one garbage), f=2 (one garbage), d=4
  found = _agree(
    *[(X, X), (Y, X), (OK, X), (OK, Y), (GARBAGE, X)],
    *[(X, OK), (GARBAGE, OK), (OK, OK), (OK, OK), (OK, OK), (OK, OK)],
    (X, GARBAGE),
  )
  assert (found.num_real_errors, found.num_real_ok) == (5, 6)
  assert (found.num_unparseable, found.num_real_unparseable) == (2, 1)
  assert found.error_recall.mean == 2 / 5
  assert found.typed_error_recall.mean == 1 / 5
  assert found.false_alarm.mean == 2 / 6
  assert found.optimism_index.mean == pytest.approx((1 - 2 / 5) - 2 / 6)
  assert found.error_rate_deficit.mean == pytest.approx((3 - 2) / 11)
  mcc = (2 * 4 - 3 * 2) / np.sqrt(5 * 6 * 4 * 7)
  assert found.mcc.mean == pytest.approx(mcc)


@pytest.mark.parametrize(
  'rehearse, index',
  [(lambda real: OK, 1.0), (lambda real: X, -1.0), (lambda real: real, 0.0)],
)
def test_optimism_of_constant_and_perfect_worlds(rehearse, index):
  reals = [X, OK, Y, OK, OK]
  found = _agree(*[(rehearse(real), real) for real in reals])
  assert found.optimism_index.mean == index


def test_garbage_is_neither_optimism_nor_pessimism():
  found = _agree(*[(GARBAGE, real) for real in (X, OK, Y, OK)])
  assert found.error_recall.mean == 0.0 and found.false_alarm.mean == 1.0
  assert found.optimism_index.mean == 0.0


def test_without_real_errors_there_is_no_recall():
  found = _agree((OK, OK), (X, OK), (OK, OK))
  assert found.error_recall is None and found.typed_error_recall is None
  assert found.optimism_index is None and found.mcc is None
  assert found.false_alarm.mean == 1 / 3
  only = _agree((X, X), (OK, X), (OK, Y))
  assert only.false_alarm is None and only.optimism_index is None
  assert only.error_recall.mean == 1 / 3
  nothing = _agree()
  assert nothing.num_real_ok == 0 and nothing.error_rate_deficit is None


def test_mcc_agrees_with_correlation():
  rng = np.random.default_rng(0)
  mine, theirs = rng.integers(0, 2, (2, 60)) | (rng.random((2, 60)) < 0.2)
  pairs = zip(np.where(mine, X, OK), np.where(theirs, X, OK), strict=True)
  found = _agree(*pairs)
  assert found.mcc.mean == pytest.approx(np.corrcoef(mine, theirs)[0, 1])


scores = st.none() | st.floats(0, 1) | st.booleans()


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(
  st.lists(st.tuples(st.sampled_from('abcd'), *[scores] * 4), max_size=12)
)
def test_gap_is_the_sum_of_its_parts(rows):
  ids, *columns = list(zip(*rows, strict=True)) or [()] * 5
  by_name = dict(zip(optimism.SCORES, columns, strict=True))
  found = optimism.gap(ids, **by_name, seed=0, draws=50)
  judged = [row for row in rows if None not in row[1:]]
  assert found.num_matched == len(judged)
  assert found.num_unjudged == len(rows) - len(judged)
  if not judged:
    assert found.total is None and found.means['real'] is None
    return
  parts = found.dyn.mean + found.judge.mean + found.adapt.mean
  assert found.total.mean == parts  # to the last bit
  ends = found.means['rehearsed'].mean - found.means['real'].mean
  assert found.total.mean == pytest.approx(ends, abs=1e-12)


def test_gap_by_hand():
  found = optimism.gap(
    ['a', 'a', 'b', 'c', 'c'],
    rehearsed=[1, 1, 1, 1, None],
    replay_transcript=[1, 0, 1, 0, 1],
    replay_real=[0, 0, 1, 0, 1],
    real=[1, 0, 1, 1, 1],
    **FAST,
  )
  # task means: rehearsed 1 1 1, transcript .5 1 0, replay 0 1 0, real .5 1 1
  means = {name: found.means[name].mean for name in optimism.SCORES}
  assert list(means.values()) == pytest.approx([1, 0.5, 1 / 3, 2.5 / 3])
  assert found.dyn.mean == pytest.approx(0.5)
  assert found.judge.mean == pytest.approx(0.5 - 1 / 3)
  assert found.adapt.mean == pytest.approx(1 / 3 - 2.5 / 3)
  assert (found.num_matched, found.num_unjudged, found.dyn.n) == (4, 1, 3)


def test_lists_of_unequal_length_are_refused():
  with pytest.raises(ValueError):
    optimism.gap(
      ['a'],
      rehearsed=[1],
      replay_transcript=[1],
      replay_real=[1, 0],
      real=[1],
      **FAST,
    )


def test_over_and_under_optimism_by_hand():
  found = optimism.success_errors(
    list('abcdefg'),
    rehearsed=[True, True, False, True, False, None, True],
    replay=[True, False, False, False, True, True, True],
    **FAST,
  )
  assert found.over_optimism.mean == 2 / 3  # b, d of b, c, d
  assert found.under_rate.mean == 1 / 3  # e of a, e, g
  assert (found.num_judged, found.num_unjudged) == (6, 1)
  all_good = optimism.success_errors(
    ['a', 'b', 'c'], rehearsed=[True] * 3, replay=[True] * 3, **FAST
  )
  assert all_good.over_optimism is None and all_good.under_rate.mean == 0


def test_results_are_frozen():
  with pytest.raises(dataclasses.FrozenInstanceError):
    _agree((X, X)).mcc = 0
