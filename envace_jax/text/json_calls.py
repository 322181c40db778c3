"""Calls that are an action's whole text: {"name": ..., "parameters": {...}}.

The form of Llama 3, read under the rules of `text.tool_calls`: total, nothing
repaired. `arguments` is understood as well. One action holds one call.
"""

from envace_jax import types
from envace_jax.text import tool_calls


def parse_action(text: str) -> types.ToolCall | types.ParseError:
  """Reads an action that is known to be a call."""
  value = tool_calls.parse_json(text)
  if isinstance(value, dict) and 'arguments' not in value:
    renamed = {'parameters': 'arguments'}
    value = {renamed.get(key, key): v for key, v in value.items()}
  if isinstance(value, types.ParseError):
    return value
  return tool_calls.call_of(value)
