"""Rehearsal memory as text: which call met which observation.

One format, written by demonstrations and by private rehearsal alike:
`get_order O12 -> {"order_id": "O12", ...}; list_orders U07 -> {...}`.
"""

from collections.abc import Iterable
import json

from envace_jax import types

ARROW = ' -> '
SEPARATOR = '; '


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
