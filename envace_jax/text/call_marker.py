"""By which tokens a call can be told from a reply, under a chat template.

A control piece that only calls have; or the tag before a call, as it is encoded
in any surroundings; or how an action begins that is a call.
"""

from collections.abc import Sequence

from envace_jax.text import chat_markup, formats, tool_calls


def find(
  markup: chat_markup.Markup, in_call: str, in_reply: str
) -> formats.Marker:
  """What every call has and no reply.

  Args:
    markup: of the template.
    in_call: how an action begins, up to the name of what it calls.
    in_reply: how one begins, up to the text of a reply.

  Raises:
    ValueError: there is no such sign.
  """
  common = {match[0] for match in markup.controls(in_reply)}
  for match in markup.controls(in_call):
    if match[0] not in common:
      return formats.Marker(ids=tuple(markup.encode(match[0])))
  encode = markup.encode
  if tool_calls.CALL_OPEN in in_call:
    tag = tool_calls.CALL_OPEN
    ways = [
      encode(before + tag + after)
      for before in ('', 'x', '.', ' ', '\n')
      for after in ('\n', '{"', ' ', '')
    ]
    return formats.Marker(ids=_longest_common(ways))
  spelt = in_call[len(in_reply) :] if in_call.startswith(in_reply) else in_call
  ways = [encode(spelt + name) for name in ('a', 'get_order', 'X1', '"')]
  ways += [encode(spelt.replace(' ', '') + 'a')]
  ids = common_start(ways)
  if not ids:
    raise ValueError(
      'the chat template shows no sign by which a call can be known; use '
      'another template'
    )
  return formats.Marker(ids=ids, at_start=True)


def common_start(ways: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """The ids that all begin with."""
  size = 0
  while all(len(w) > size for w in ways) and len({w[size] for w in ways}) == 1:
    size += 1
  return tuple(ways[0][:size])


def _longest_common(ways: Sequence[Sequence[int]]) -> tuple[int, ...]:
  """The longest run of ids that all have; of the first, the first."""
  first = ways[0]
  for size in range(len(first), 0, -1):
    for start in range(len(first) - size + 1):
      marker = formats.Marker(ids=first[start : start + size])
      if all(marker.is_in(way) for way in ways):
        return tuple(marker.ids)
  raise ValueError(
    f'{tool_calls.CALL_OPEN} has no encoding of its own here; use a tokenizer '
    'that keeps words apart'
  )
