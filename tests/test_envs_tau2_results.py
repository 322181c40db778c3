"""τ²-Bench's results files and pass^k, against the package's own code."""

import json

import pytest

pytest.importorskip(
  'tau2', reason='needs the package of τ²-Bench: see tau2_package.INSTALL'
)

from envace_jax import types  # noqa: E402
from envace_jax.envs import benchmark  # noqa: E402
from envace_jax.envs.tau2 import benchmark as tau2  # noqa: E402
from envace_jax.envs.tau2 import data as tau2_data  # noqa: E402
from envace_jax.envs.tau2 import metrics as tau2_metrics  # noqa: E402
from envace_jax.envs.tau2 import oracles as tau2_oracles  # noqa: E402
from envace_jax.envs.tau2 import package as tau2_package  # noqa: E402


@pytest.fixture(scope='module')
def bench():
  return tau2.Tau2(tau2_oracles.user, user_name='scripted')


def play(bench, task_id, replies):
  attempt = bench.open(task_id)
  for reply in replies:
    attempt.respond(reply)
  return attempt


def call(name, arguments):
  action = types.ToolCall(name=name, arguments=arguments)
  return benchmark.Reply(text='', calls=(action,))


def written(bench, directory, trials):
  """A file of trials of one category, as the package reads it."""
  (path,) = bench.write(
    directory,
    'oracle',
    [
      benchmark.Recorded(
        task_id=task_id,
        trial=trial,
        started='2026-01-01T00:00:00+00:00',
        seconds=1.0,
        # As it comes back from a file.
        value=json.loads(json.dumps(attempt.record())),
      )
      for task_id, trial, attempt in trials
    ],
  )
  return tau2_package.load().simulation.Results.load(path)


def rescored(results, category):
  """The rewards that the package's one evaluator for all gives."""
  from tau2.evaluator import evaluator

  chosen = tau2_data.CATEGORIES[category]
  return [
    evaluator.evaluate_simulation(
      simulation,
      next(t for t in results.tasks if t.id == simulation.task_id),
      evaluator.EvaluationType.ALL,
      solo_mode=chosen.solo,
      domain=chosen.domain,
    ).reward
    for simulation in results.simulations
  ]


def test_results_are_read_and_scored_alike_by_the_package(bench, tmp_path):
  played = [
    (task_id, trial, play(bench, task_id, replies))
    for task_id in bench.task_ids('telecom_solo')[:3]
    for trial, replies in enumerate(
      (bench.oracle(task_id), [call('no_such', {}), tau2_oracles.DONE], [])
    )
  ]
  read = written(bench, tmp_path / 'out', played)
  assert len(read.tasks) == 3 and len(read.simulations) == 9
  assert rescored(read, 'telecom_solo') == [1, 0, 0] * 3
  ends = [s.termination_reason.value for s in read.simulations]
  assert ends == ['agent_stop', 'agent_stop', 'agent_error'] * 3
  assert [s.reward_info.reward for s in read.simulations] == [1, 0, 0] * 3
  from tau2.metrics import agent_metrics

  theirs = agent_metrics.compute_metrics(read)
  ours = tau2_metrics.pass_hat_ks({t.id: [1, 0, 0] for t in read.tasks})
  assert theirs.pass_hat_ks == pytest.approx(ours)
  assert ours[1] == pytest.approx(1 / 3) and ours[2] == 0


def test_conversations_are_scored_alike_too(bench, tmp_path):
  """Every basis of the small domain: oracles, and the end at once."""
  played = []
  for task_id in bench.task_ids('mock'):
    # The package itself raises on this one, where nothing was done.
    if task_id.endswith('create_task_1_with_env_assertions'):
      continue
    replies = bench.oracle(task_id)
    if replies is not None:
      played.append((task_id, 0, play(bench, task_id, replies)))
    nothing = tau2_oracles.nothing('mock')
    played.append((task_id, 1, play(bench, task_id, [nothing])))
  read = written(bench, tmp_path, played)
  kept = [s.reward_info.reward for s in read.simulations]
  assert rescored(read, 'mock') == kept
  assert set(kept) == {0, 1}


def test_pass_hat_k_is_the_packages():
  from tau2.metrics import agent_metrics

  for n in range(1, 6):
    for c in range(n + 1):
      for k in range(1, n + 1):
        assert tau2_metrics.pass_hat_k(c, n, k) == agent_metrics.pass_hat_k(
          n, c, k
        )
  with pytest.raises(ValueError, match='k=3'):
    tau2_metrics.pass_hat_k(1, 2, 3)
  assert tau2_metrics.pass_hat_ks({}) == {}
  uneven = tau2_metrics.pass_hat_ks({'a': [1, 1, 0], 'b': [1, 1]})
  assert uneven == {1: pytest.approx(5 / 6), 2: pytest.approx(2 / 3)}
