"""Memory categories: what a policy noted in sessions, asked for afterwards.

Of each scenario the package has a chain of sessions, in which a user talks, and
questions about what was said. A session and a question are conversations with a
context of their own; all that goes from one to the next is the store, which the
package's backends keep. A session begins with the store that the one before it
left; every question begins with that of the last session, and changes nothing
for the others. Only questions are judged: the package looks for an accepted
answer in the last reply.

The package passes stores on through files named after the model. Here a store
is a value: `record` of a session holds it, and an attempt writes it where the
backend looks, into a directory of its own that goes when the attempt is closed.
So attempts share no path, and what is resumed is what was recorded.

Two facts stand beside a verdict and are none: whether an accepted answer was in
the store (`stored`), and whether the policy was shown it (`seen`), by the
checker's own rule. Short answers are found by chance, too.
"""

from collections.abc import Sequence
import importlib.util
import json
import pathlib
import tempfile
from typing import Any

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import conversation as bfcl_conversation
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.text import tool_calls

KV, REC_SUM, VECTOR = 'memory_kv', 'memory_rec_sum', 'memory_vector'
CATEGORIES = (KV, REC_SUM, VECTOR)
SESSIONS = '_prereq'  # after a category's name: its sessions

_NOTHING = {
  KV: {'core_memory': {}, 'archival_memory': {}},
  REC_SUM: {'memory': ''},
  VECTOR: {
    'core_memory': {'next_id': 0, 'store': {}},
    'archival_memory': {'next_id': 0, 'store': {}},
  },
}
_MODULES = {  # by their distributions
  KV: {'overrides': 'overrides', 'rank_bm25': 'rank-bm25'},
  REC_SUM: {'overrides': 'overrides'},
  VECTOR: {
    'overrides': 'overrides',
    'sentence_transformers': 'sentence-transformers',
    'faiss': 'faiss-cpu',
  },
}
_ENCODER = 'all-MiniLM-L6-v2'


def missing(category: str) -> str:
  """What the package's backend lacks on this machine; '' for nothing."""
  lacks = [
    name
    for module, name in _MODULES[category].items()
    if importlib.util.find_spec(module) is None
  ]
  if lacks:
    return f'it needs {" and ".join(lacks)}: pip install {" ".join(lacks)}'
  if category == VECTOR and not _has_encoder():
    return (
      f'its backend loads the encoder {_ENCODER} from the Hugging Face hub; '
      'put it into the local cache of the hub, or into a directory of that '
      'name in the working directory'
    )
  return ''


class Memory:
  """An attempt at a session, or at a question."""

  def __init__(
    self,
    package: bfcl_package.Package,
    entry: types.Json,
    answers: Sequence[str] | None,
    store: types.Json | None,
  ):
    """Begins.

    Args:
      package: bfcl-eval.
      entry: of the session or the question.
      answers: accepted of a question; None for a session.
      store: what was left by the session before; None for nothing.
    """
    self._package, self._entry, self._answers = package, entry, answers
    self._category = category_of(entry['id'])
    store = store or _NOTHING[self._category]
    self._folder = tempfile.TemporaryDirectory(prefix='bfcl_memory_')
    try:
      placed = self._placed(pathlib.Path(self._folder.name), store)
      self._talk = bfcl_conversation.Conversation(package, placed)
    except BaseException:
      self._folder.cleanup()
      raise
    (self._backend,) = self._talk.backends.instances.values()
    self.system = tool_calls.clean(self._prompt())
    self.instruction, self.tools = self._talk.instruction, self._talk.tools
    # A question's words are no memory, but the memory in its prompt is.
    self._seen = [self._backend._dump_core_memory_to_context()]
    self._stored = json.dumps(store, ensure_ascii=False)

  def record(self) -> Any:
    """As in the result file; of a session beside the store that it leaves.

    Raises:
      AttemptFailed: the store cannot be read back.
    """
    results = [list(turn) for turn in self._talk.results]
    if self._answers is not None:
      return results
    try:
      self._backend._flush_memory_to_local_file()
      store = json.loads(self._backend.latest_snapshot_file.read_text())
    except (OSError, ValueError, TypeError) as error:
      raise benchmark.AttemptFailed(
        f'{self._entry["id"]}: no store was left: {error!r}'
      ) from error
    return {'results': results, 'store': store}

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    heard = self._talk.respond(reply)
    self._seen += [m.text for m in heard if m.role == 'tool']
    return heard

  def score(self) -> benchmark.Outcome:
    if self._answers is None:
      raise ValueError(f'{self._entry["id"]} is a session: nothing judges it')
    # A text ends the only turn, so there is one at most; unreadable calls are
    # recorded as text, and count as the last words also for the package.
    said = [step for step in self._talk.results[0] if isinstance(step, str)]
    if said and said[-1]:
      verdict = self._check(said[-1])
      reason = '' if verdict['valid'] else verdict['error_type']
    else:
      reason = 'agentic:no_last_message'
    return benchmark.Outcome(
      reward=float(not reason),
      success=not reason,
      reason=reason,
      parts={
        **self._talk.counts,
        'scenario': self._entry['scenario'],
        'stored': self._check(self._stored)['valid'],
        'seen': self._check('\n'.join(self._seen))['valid'],
      },
    )

  def close(self) -> None:
    self._talk.close()
    self._folder.cleanup()

  def _check(self, text: str) -> types.Json:
    checker = self._package.agentic_checker.agentic_checker
    return checker(text, list(self._answers))

  def _placed(self, root: pathlib.Path, store: types.Json) -> types.Json:
    """The entry for a backend that finds `store` under `root`."""
    entry, utils = self._entry, self._package.utils
    folder = root / utils.get_directory_structure_by_id(entry['id'])
    folder = folder / 'memory_snapshot'
    folder.mkdir(parents=True)
    path = folder / f'{entry["scenario"]}_final.json'
    path.write_text(json.dumps(store))
    (backend,) = entry['involved_classes']
    config = {
      'model_result_dir': root,
      'scenario': entry['scenario'],
      'test_id': entry['id'],
      'test_category': entry['id'].rpartition('_')[0],
    }
    return {**entry, 'initial_config': {backend: config}}

  def _prompt(self) -> str:
    """The package's instructions, with the memory that is always in sight."""
    prompts = self._package.default_prompts
    if self._category == REC_SUM:
      template = prompts.MEMORY_BACKEND_INSTRUCTION_UNIFIED
    else:
      template = prompts.MEMORY_BACKEND_INSTRUCTION_CORE_ARCHIVAL
    text = template.format(
      scenario_setting=prompts.MEMORY_AGENT_SETTINGS[self._entry['scenario']],
      memory_content=self._backend._dump_core_memory_to_context(),
    )
    first = self._entry['question'][0]
    own = [m['content'] for m in first if m['role'] == 'system']
    return '\n\n'.join([text, *own])


def category_of(task_id: str) -> str:
  """The category whose store a session or a question is about."""
  return task_id.rpartition('_')[0].removesuffix(SESSIONS)


def is_session(task_id: str) -> bool:
  return task_id.rpartition('_')[0].endswith(SESSIONS)


def _has_encoder() -> bool:
  if pathlib.Path(_ENCODER).is_dir():
    return True
  import huggingface_hub

  found = huggingface_hub.try_to_load_from_cache(
    f'sentence-transformers/{_ENCODER}', 'modules.json'
  )
  return isinstance(found, str)
