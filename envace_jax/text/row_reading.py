"""A row of ACT, read back: who wrote each token decides, and no text does."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.text import template as templates

# Authors of observations in a row of ACT, and whose words they are.
OBSERVING = {
  types.Author.REHEARSE: types.Author.REHEARSE,
  types.Author.COPIED: types.Author.REHEARSE,
  types.Author.WORLD: types.Author.WORLD,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
  """What a row says."""

  steps: Sequence[types.Step]  # answered calls
  turn_replies: Sequence[str]  # replies that a user turn followed
  reply: str | None  # a finished reply that ends the row
  num_turns: int  # user turns that began


def read(
  template: templates.Template, tokens: np.ndarray, authors: np.ndarray
) -> Reading:
  """Reads a row of ACT back, by authors alone."""
  steps, replies, num_turns = [], [], 1
  text, calls, message = '', [], -1
  for author, start, stop in templates.runs(authors):
    ids = tokens[start:stop]
    if author == types.Author.ACT:
      text, message = template.text(ids), message + 1
      calls = template.calls(ids) if template.is_call(ids) else []
      if not calls and ids[-1] in template.stop_ids[types.Role.ACT]:
        replies.append(text)
    elif author == types.Author.USER:
      num_turns += 1
    elif author in OBSERVING:
      steps.append(
        types.Step(
          action=calls.pop(0),
          action_text=text,
          observation_text=template.observation_text(ids),
          author=OBSERVING[author],
          turn=len(replies),
          message=message,
        )
      )
  replied = (
    len(authors) > 0
    and authors[-1] == types.Author.ACT
    and tokens[-1] in template.stop_ids[types.Role.ACT]
    and not calls
  )
  return Reading(
    steps=tuple(steps),
    turn_replies=tuple(replies[:-1] if replied else replies),
    reply=replies[-1] if replied else None,
    num_turns=num_turns,
  )
