"""Result files as the package's own `bfcl evaluate` reads them.

  DIRECTORY/MODEL/multi_turn/BFCL_v4_multi_turn_base_result.json

one line a task: its id, and what a function-calling model said. MODEL must be
one that the package knows, with a handler that reads OpenAI tool calls and
renames dots: it decides how lines are decoded, and nothing else. HANDLER is
one; whoever was measured, results stand under its name. A category is judged
whole, or with `--partial-eval`.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

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
    line = {'id': task_id, 'result': result}
    by_category.setdefault(category, []).append(line)
  paths = []
  for category, lines in by_category.items():
    path = (
      pathlib.Path(directory)
      / model.replace('/', '_')
      / utils.get_directory_structure_by_category(category)
      / utils.get_file_name_by_category(category, is_result_file=True)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    lines.sort(key=utils.sort_key)
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    paths.append(path)
  return paths
