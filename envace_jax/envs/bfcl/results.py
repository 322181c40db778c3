"""Result files as the package's own `bfcl evaluate` reads them.

  DIRECTORY/MODEL/multi_turn/BFCL_v4_multi_turn_base_result.json

one line a task: its id, and what a function-calling model said. A memory
category has a second file, `..._prereq_result.json`, for its sessions, and
beside it the stores that they left, as the package's own runs do:

  agentic/memory/kv/memory_snapshot/SCENARIO_final.json
  agentic/memory/kv/memory_snapshot/prereq_checkpoints/SESSION.json

MODEL must be
one that the package knows, with a handler that reads OpenAI tool calls and
renames dots: it decides how lines are decoded, and nothing else. HANDLER is
one; whoever was measured, results stand under its name. A category is judged
whole, or with `--partial-eval`.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

from envace_jax.envs.bfcl import memory as bfcl_memory
from envace_jax.envs.bfcl import package as bfcl_package

HANDLER = 'gpt-4o-2024-11-20-FC'


def write_results(
  directory: pathlib.Path, model: str, results: Mapping[str, Any]
) -> list[pathlib.Path]:
  """Writes results by task id (`Attempt.record`), a file per category."""
  utils = bfcl_package.load().utils
  by_category: dict[str, list] = {}
  for task_id, result in results.items():
    category = task_id.rpartition('_')[0]
    by_category.setdefault(category, []).append((task_id, result))
  paths = []
  root = pathlib.Path(directory) / model.replace('/', '_')
  for category, found in by_category.items():
    folder = root / utils.get_directory_structure_by_id(found[0][0])
    folder.mkdir(parents=True, exist_ok=True)
    if bfcl_memory.is_session(found[0][0]):
      _write_stores(folder / 'memory_snapshot', dict(found))
      found = [(task_id, result['results']) for task_id, result in found]
    path = folder / utils.get_file_name_by_category(
      category, is_result_file=True
    )
    lines = [{'id': task_id, 'result': result} for task_id, result in found]
    lines.sort(key=utils.sort_key)
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    paths.append(path)
  return paths


def _write_stores(folder: pathlib.Path, sessions: Mapping[str, Any]) -> None:
  """What each session left; the last one of a scenario is its final store."""
  checkpoints = folder / 'prereq_checkpoints'
  checkpoints.mkdir(parents=True, exist_ok=True)
  for task_id in sorted(sessions, key=_place):
    text = json.dumps(sessions[task_id]['store'], indent=4)
    scenario = task_id.split('-')[1]
    (checkpoints / f'{task_id}.json').write_text(text)
    (folder / f'{scenario}_final.json').write_text(text)


def _place(task_id: str) -> int:
  """5 for 'memory_kv_prereq_15-finance-5'."""
  return int(task_id.rpartition('-')[2])
