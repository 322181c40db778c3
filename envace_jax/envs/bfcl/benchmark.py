"""BFCL v4: what of it runs offline, scored by the package's own checkers.

Python single turn, (ir)relevance, multi turn, and memory: a question there is
attempted after the sessions of its scenario (`bfcl.memory`), which are attempts
of the same policy and trial, not scored, and whose stores their records hold.
The vector store is here where its encoder is on the disk. What is not here is
refused by name and reason. So there is no "overall": the leaderboard takes
twenty of a hundred parts of it from web search, and `bfcl.scores` reports
groups.

These tasks are a test set. What is learned from belongs to `bfcl.files`.
"""

from collections.abc import Mapping, Sequence
import functools
import pathlib
from typing import Any

from envace_jax import errors, types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import calls as bfcl_calls
from envace_jax.envs.bfcl import memory as bfcl_memory
from envace_jax.envs.bfcl import memory_script as bfcl_memory_script
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
NOT_HERE = {
  **dict.fromkeys(
    ('simple_java', 'simple_javascript'),
    'its parser is a compiled dependency',
  ),
  **dict.fromkeys(
    ('web_search_base', 'web_search_no_snippet'),
    'its backend asks a paid search service, and reads pages of the web',
  ),
  'format_sensitivity': (
    'its answers are texts in 26 formats, read by parsers with compiled parts'
  ),
}


class Bfcl:
  """The categories above and memory, by the ids of the package."""

  name = NAME
  oracle_note = bfcl_memory_script.NOTE

  def __init__(self):
    self._package = bfcl_package.load()
    self.version = f'bfcl-eval {self._package.version}, its own data'
    memory = [c for c in bfcl_memory.CATEGORIES if not bfcl_memory.missing(c)]
    self._categories = (*CATEGORIES, *memory)

  def categories(self) -> Sequence[str]:
    return self._categories

  def task_ids(self, category: str) -> Sequence[str]:
    return list(self._tasks(category))

  def open(self, task_id: str) -> benchmark.Attempt:
    category, entry, answer = self._task(task_id)
    if category in bfcl_multi.CATEGORIES:
      return bfcl_multi.MultiTurn(self._package, entry, answer)
    if category in bfcl_memory.CATEGORIES:
      return bfcl_memory.Memory(self._package, entry, answer, None)
    return bfcl_single.SingleTurn(self._package, category, entry, answer)

  def prerequisites(self, task_id: str) -> Sequence[str]:
    """The sessions of a question, and those before a session."""
    category, entry, _ = self._task(task_id)
    if category not in bfcl_memory.CATEGORIES:
      return ()
    chain = self._chain(category, entry['scenario'])
    return chain[: chain.index(task_id)] if task_id in chain else chain

  def open_after(
    self, task_id: str, records: Sequence[Any]
  ) -> benchmark.Attempt:
    _, entry, answer = self._task(task_id)
    store = records[-1]['store']
    return bfcl_memory.Memory(self._package, entry, answer, store)

  def oracle(self, task_id: str) -> Sequence[benchmark.Reply] | None:
    """The ground truth, one call a reply where calls are executed.

    Memory has none: see `bfcl.memory_script` for what stands in.
    """
    category, entry, answer = self._task(task_id)
    if category in bfcl_memory.CATEGORIES:
      return self._memory_script(category, entry)
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
    groups = bfcl_scores.group_scores(
      {
        name: bfcl_scores.category_score(some)
        for name, some in outcomes.items()
      }
    )
    return groups | bfcl_scores.scenario_scores(outcomes)

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
    category = bfcl_memory.category_of(task_id)
    known = {}
    if category in self._categories:
      known = self._tasks(category)
      if bfcl_memory.is_session(task_id):
        known = self._sessions(category)
    if task_id not in known:
      raise errors.UserError(
        f'BFCL has no task {task_id!r}; ids are those of task_ids(category)'
      )
    return category, *known[task_id]

  @functools.cache  # noqa: B019 - as long-lived as the data
  def _tasks(self, category: str) -> dict[str, tuple[types.Json, Sequence]]:
    if category not in self._categories:
      raise errors.UserError(
        f'BFCL has no category {category!r} here{_why_not(category)}; use '
        f'{", ".join(self._categories)}'
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

  def _sessions(self, category: str) -> dict[str, tuple[types.Json, None]]:
    if category not in bfcl_memory.CATEGORIES:
      return {}
    return {one['id']: (one, None) for one in self._package.sessions(category)}

  def _chain(self, category: str, scenario: str) -> list[str]:
    """Ids of a scenario's sessions, in their order."""
    sessions = self._package.sessions(category)
    return [one['id'] for one in sessions if one['scenario'] == scenario]

  def _memory_script(
    self, category: str, entry: types.Json
  ) -> list[benchmark.Reply]:
    facts = {
      task_id: (other['question'][0][-1]['content'], answers[0])
      for task_id, (other, answers) in self._tasks(category).items()
      if other['scenario'] == entry['scenario']
    }
    if not bfcl_memory.is_session(entry['id']):
      return bfcl_memory_script.question(entry['id'], facts[entry['id']])
    chain = self._chain(category, entry['scenario'])
    return bfcl_memory_script.session(entry, chain, facts)


def _why_not(category: str) -> str:
  if category in bfcl_memory.CATEGORIES:
    return f': {bfcl_memory.missing(category)}'
  return f': {NOT_HERE[category]}' if category in NOT_HERE else ''
