"""Which tools of a benchmark change something.

A rehearsal in which such a tool succeeded is a plan and no knowledge
(`text.notes`), so whoever rehearses must know them by name.
"""

from collections.abc import Sequence


def of(name: str, categories: Sequence[str]) -> tuple[str, ...] | None:
  """Names of such tools; None where the benchmark does not say.

  Args:
    name: that the benchmark is known by, as in `measure.Options`.
    categories: that are measured.
  """
  if name != 'tau2':
    return None
  from envace_jax.envs.tau2 import data as tau2_data

  found = set()
  for category in categories:
    known = tau2_data.CATEGORIES[category]
    made = tau2_data.environment(known.domain, solo=known.solo)
    for kit in (made.tools, made.user_tools):
      if kit is not None:
        kinds = {tool: kit.tool_type(tool).value for tool in kit.tools}
        found |= {tool for tool, kind in kinds.items() if kind == 'write'}
  return tuple(sorted(found))
