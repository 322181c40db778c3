"""τ²-Bench as a benchmark: categories, attempts, and oracles from gold actions.

  telecom_solo  a ticket, no user; the agent holds the phone's tools as well
  telecom       dual control: the user holds the phone
  airline, retail, mock    the user only talks
  mock_solo     the small tasks that have a ticket

Only solo categories can be played without a user. What is measured with a
scripted one, or under `prompt='short'`, is not comparable with published
numbers, and `version` says which it was.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any

from envace_jax import errors
from envace_jax.envs import benchmark
from envace_jax.envs.tau2 import attempts as tau2_attempts
from envace_jax.envs.tau2 import data as tau2_data
from envace_jax.envs.tau2 import oracles as tau2_oracles
from envace_jax.envs.tau2 import package as tau2_package
from envace_jax.envs.tau2 import prompts as tau2_prompts
from envace_jax.envs.tau2 import results as tau2_results
from envace_jax.envs.tau2 import users as tau2_users


class Tau2:
  """Implements `benchmark.Benchmark`."""

  name = 'tau2'

  def __init__(
    self,
    make_user: Callable[[str, Any], tau2_users.User] | None = None,
    *,
    user_name: str = '',
    split: str = tau2_data.BASE,
    prompt: tau2_prompts.Prompt = 'policy',
    limits: tau2_attempts.Limits | None = None,
  ):
    """Names what is measured; nothing is read yet.

    Args:
      make_user: (category, task) -> who talks in an attempt; None leaves the
        solo categories. One `EndpointUser` may serve all of them.
      user_name: of that user, as printed.
      split: of the tasks; domains have different ones, and all of them 'base'.
      prompt: what the policy is told.
      limits: what ends an attempt; the benchmark's own by default.

    Raises:
      UserError: the package is not installed.
    """
    tau2_package.load()
    self._make_user, self._split, self._prompt = make_user, split, prompt
    self._limits = limits or tau2_attempts.Limits()
    self._user_name = user_name
    self.version = (
      f'{tau2_data.version()}, split {split}, prompt {prompt}, '
      f'user {user_name or "none"}'
    )

  def categories(self) -> Sequence[str]:
    return tuple(
      name
      for name, category in tau2_data.CATEGORIES.items()
      if category.solo or self._make_user is not None
    )

  def task_ids(self, category: str) -> Sequence[str]:
    if category not in self.categories():
      raise errors.UserError(
        f'τ² has no category {category!r} here; use one of '
        f'{self.categories()}, and give it a user for those with a conversation'
      )
    ids = tau2_data.task_ids(category, self._split)
    return tuple(f'{category}/{task_id}' for task_id in ids)

  def open(self, task_id: str) -> tau2_attempts.Tau2Attempt:
    category, task = find(task_id)
    user = None
    if not tau2_data.CATEGORIES[category].solo:
      if self._make_user is None:
        raise errors.UserError(f'{task_id} needs a user; give one to Tau2')
      user = self._make_user(category, task)
    return tau2_attempts.Tau2Attempt(
      category, task, user, limits=self._limits, prompt=self._prompt
    )

  def oracle(self, task_id: str) -> Sequence[benchmark.Reply] | None:
    return tau2_oracles.replies(*find(task_id))

  def groups(
    self,
    outcomes: Mapping[str, Sequence[benchmark.Outcome | None]],
    recorded: Sequence[benchmark.Recorded],
  ) -> Mapping[str, float]:
    del outcomes, recorded
    return {}

  def write(
    self,
    directory: pathlib.Path,
    policy: str,
    recorded: Sequence[benchmark.Recorded],
  ) -> Sequence[pathlib.Path]:
    """A file a category, as `tau2 view` loads it."""
    by_category: dict[str, list[benchmark.Recorded]] = {}
    for one in recorded:
      by_category.setdefault(one.task_id.partition('/')[0], []).append(one)
    paths = []
    for category, some in by_category.items():
      paths.append(directory / f'{category}.json')
      found = tau2_results.results(
        category, some, agent=policy, user=self._user_name, limits=self._limits
      )
      tau2_results.write(paths[-1], found)
    return paths


def find(task_id: str) -> tuple[str, Any]:
  """The category and a copy of the task that an id names."""
  category, _, own_id = task_id.partition('/')
  try:
    return category, tau2_data.task(
      tau2_data.CATEGORIES[category].domain, own_id
    )
  except KeyError:
    raise errors.UserError(
      f'τ² has no task {task_id!r}; ids are those of `task_ids`'
    ) from None
