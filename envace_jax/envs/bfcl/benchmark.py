"""BFCL v4: what of it runs offline, scored by the package's own checkers.

Python single turn, (ir)relevance and multi turn. Not here: Java and JavaScript
(their parsers are a compiled dependency), web search (a paid service), the
vector memory (a downloaded encoder), and memory as a whole: a question there
starts from what the same policy noted in earlier sessions, each with a context
of its own, and attempts behind this seam share no state. So there is no
"overall": the leaderboard takes forty of a hundred parts of it from agentic
categories, and `bfcl_scores` reports groups.

These tasks are a test set. What is learned from belongs to `bfcl_files`.
"""

from collections.abc import Mapping, Sequence
import functools
import pathlib

from envace_jax import errors, types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import calls as bfcl_calls
from envace_jax.envs.bfcl import multi as bfcl_multi
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.envs.bfcl import results as bfcl_results
from envace_jax.envs.bfcl import scores as bfcl_scores
from envace_jax.envs.bfcl import single as bfcl_single
from envace_jax.envs.bfcl import tools as bfcl_tools

NAME = 'bfcl_v4'
CATEGORIES = (
  *bfcl_single.CATEGORIES,
  *bfcl_single.NO_CALL,
  *bfcl_single.ANY_CALL,
  *bfcl_multi.CATEGORIES,
)


class Bfcl:
  """The categories above, by the ids of the package."""

  name = NAME

  def __init__(self):
    self._package = bfcl_package.load()
    self.version = f'bfcl-eval {self._package.version}, its own data'

  def categories(self) -> Sequence[str]:
    return CATEGORIES

  def task_ids(self, category: str) -> Sequence[str]:
    return list(self._tasks(category))

  def open(self, task_id: str) -> benchmark.Attempt:
    category, entry, answer = self._task(task_id)
    if category in bfcl_multi.CATEGORIES:
      return bfcl_multi.MultiTurn(self._package, entry, answer)
    return bfcl_single.SingleTurn(self._package, category, entry, answer)

  def oracle(self, task_id: str) -> Sequence[benchmark.Reply] | None:
    """The ground truth, one call a reply where calls are executed."""
    category, _, answer = self._task(task_id)
    if category in bfcl_single.ANY_CALL:
      return None  # any call is right, and none is recorded
    if category in bfcl_single.NO_CALL:
      return [benchmark.Reply(text='No function fits this request.')]
    if category in bfcl_single.CATEGORIES:
      calls = bfcl_single.first_choice(answer)
      return [benchmark.Reply(text='', calls=calls)]
    replies = []
    limit = self._package.default_prompts.MAXIMUM_STEP_LIMIT
    for turn in self.plan(task_id):
      # Two plans have more calls in a turn than a turn may have steps.
      steps = [turn] if len(turn) > limit else [[call] for call in turn]
      replies += [benchmark.Reply(text='', calls=step) for step in steps]
      replies.append(benchmark.Reply(text='Done.'))
    return replies

  def groups(
    self,
    outcomes: Mapping[str, Sequence[benchmark.Outcome | None]],
    recorded: Sequence[benchmark.Recorded],
  ) -> Mapping[str, float]:
    del recorded
    return bfcl_scores.group_scores(
      {
        name: bfcl_scores.category_score(some)
        for name, some in outcomes.items()
      }
    )

  def write(
    self,
    directory: pathlib.Path,
    policy: str,
    recorded: Sequence[benchmark.Recorded],
  ) -> Sequence[pathlib.Path]:
    """A directory a trial, each as `bfcl evaluate --result-dir` wants it."""
    del policy
    paths = []
    for trial in sorted({one.trial for one in recorded}):
      values = {
        one.task_id: one.value for one in recorded if one.trial == trial
      }
      paths += bfcl_results.write_results(
        directory / f'trial_{trial}', bfcl_results.HANDLER, values
      )
    return paths

  def plan(self, task_id: str) -> list[list[types.ToolCall]]:
    """The ground truth of a multi-turn task: calls by turn."""
    _, entry, answer = self._task(task_id)
    held_out = entry.get('missed_function', {}).values()
    docs = [*entry['function'], *(doc for part in held_out for doc in part)]
    names = bfcl_tools.parameter_names(docs)
    return [[bfcl_calls.read(text, names) for text in turn] for turn in answer]

  def _task(self, task_id: str) -> tuple[str, types.Json, Sequence | None]:
    category = task_id.rpartition('_')[0]
    if category not in CATEGORIES or task_id not in self._tasks(category):
      raise errors.UserError(
        f'BFCL has no task {task_id!r}; ids are those of task_ids(category)'
      )
    return category, *self._tasks(category)[task_id]

  @functools.cache  # noqa: B019 - as long-lived as the data
  def _tasks(self, category: str) -> dict[str, tuple[types.Json, Sequence]]:
    if category not in CATEGORIES:
      raise errors.UserError(
        f'BFCL has no category {category!r}; use {", ".join(CATEGORIES)}'
      )
    entries = self._package.entries(category)
    if category in (*bfcl_single.NO_CALL, *bfcl_single.ANY_CALL):
      answers = [None] * len(entries)
    else:
      answers = [a['ground_truth'] for a in self._package.answers(category)]
    return {
      entry['id']: (entry, answer)
      for entry, answer in zip(entries, answers, strict=True)
    }
