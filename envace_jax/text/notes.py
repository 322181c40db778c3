"""Rehearsal memory as text: which call met which observation.

One format, written by demonstrations and by private rehearsal alike:
`get_order O12 -> {"order_id": "O12", ...}; list_orders U07 -> {...}`.
"""

from collections.abc import Callable, Iterable, Sequence
import json

from envace_jax import types
from envace_jax.text import tool_calls

ARROW = ' -> '
SEPARATOR = '; '

Fact = tuple[types.ToolCall, str]  # a call and what it met


def format_note(call: types.ToolCall, observation_text: str) -> str:
  """One remembered call and what it met."""
  values = [
    value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    for value in call.arguments.values()
  ]
  return ' '.join([call.name, *values]) + ARROW + observation_text


def join_notes(notes: Iterable[str]) -> str:
  """The memory as it is shown in a prompt; empty for no notes."""
  return SEPARATOR.join(notes)


def facts(
  steps: Sequence[types.Step], is_write: Callable[[str], bool]
) -> list[Fact]:
  """Calls and answers up to the first write that was not refused."""
  found = []
  for step in steps:
    if isinstance(step.action, types.ParseError):
      continue
    answer = tool_calls.parse_observation(step.observation_text)
    if not isinstance(answer, dict):
      continue
    if is_write(step.action.name) and not tool_calls.is_error(answer):
      break  # later observations describe a world after this write
    found.append((step.action, step.observation_text))
  return found
