"""Who does not think, on a benchmark: what a score is to be held against."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from envace_jax.envs import benchmark


def lines(
  name: str, measured: benchmark.Benchmark, tasks: Mapping[str, Sequence[str]]
) -> Iterator[str]:
  """A line for each who does not think: the share of the tasks it solves.

  Args:
    name: that the benchmark is known by, as in `measure.Options`.
    measured: the benchmark.
    tasks: task ids by category.
  """
  shares: dict[str, list[str]] = {}
  for category, ids in tasks.items():
    for known_as, script in _scripts(name, category).items():
      played = [_play(measured, task_id, script) for task_id in ids]
      solved = [one for one in played if one is not None]
      share = f'{sum(solved) / len(solved):.3f}' if solved else '-'
      if errored := len(played) - len(solved):
        share += f' ({errored} errored)'
      shares.setdefault(known_as, []).append(f'{category} {share}')
  for script, said in shares.items():
    yield f'baseline {script}: {", ".join(said)}'


def _scripts(
  name: str, category: str
) -> Mapping[str, Callable[[benchmark.Attempt], None]]:
  if name == 'tau2':
    from envace_jax.envs.tau2 import baselines as tau2_baselines

    return tau2_baselines.scripts(category)
  return {'nothing': _say_nothing}


def _say_nothing(attempt: benchmark.Attempt) -> None:
  nothing = benchmark.Reply(text='')
  while attempt.respond(nothing):
    pass


def _play(
  measured: benchmark.Benchmark,
  task_id: str,
  script: Callable[[benchmark.Attempt], None],
) -> bool | None:
  """Whether a script solves a task; None: the benchmark broke down."""
  try:
    attempt = measured.open(task_id)
    try:
      script(attempt)
      return attempt.score().success
    finally:
      attempt.close()
  except benchmark.AttemptFailed:
    return None
