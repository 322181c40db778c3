"""Where the prompt of the next action does not continue the row so far.

Some chat templates show earlier turns otherwise once a conversation goes on:
thoughts are dropped at a new user turn, empty ones at the next call. Before an
action is sampled, the prompt that the template makes of the conversation is
compared with the row, control piece by control piece: how a sampled action is
spelt in between stays as it was sampled, but no turn, thought, call or answer
may be there in one and not in the other.

What an action says can break its row as well: <think></think> does. Templates
that drop nothing (`formats.Format.append_only`) are never asked.
"""

from collections.abc import Sequence

import numpy as np

from envace_jax import errors, types
from envace_jax.text import formats, row_reading
from envace_jax.text import template as templates


def remade_prompt(
  template: templates.Template,
  opening: formats.Opening,
  said: templates.Span,
  user_turns: Sequence[str],
) -> np.ndarray:
  """The prompt that the template makes of a conversation, [T] int32.

  Args:
    template: the row format.
    opening: what the conversation's first prompt says.
    said: prompt, joints and turns as they were said, up to the joint before the
      next action.
    user_turns: the later user turns, of which as many were asked as `said` has.

  Raises:
    ValueError: the template refuses the conversation.
  """
  turns, asked = [], iter(user_turns)
  ids, authors = said
  for author, start, stop in templates.runs(authors):
    if author == types.Author.ACT:
      text = template.text(ids[start:stop])
    elif author == types.Author.USER:
      text = next(asked)
    elif author in row_reading.OBSERVING:
      author, text = (
        types.Author.WORLD,
        template.observation_text(ids[start:stop]),
      )
    else:
      continue
    turns.append(formats.Turn(author=types.Author(author), text=text))
  return np.asarray(template.format.prompt(opening, turns), np.int32)


def continues(
  template: templates.Template, row: np.ndarray, prompt: np.ndarray
) -> bool:
  """Whether a row has the control pieces of a prompt made anew."""
  left, right = (
    ids[np.isin(ids, template.control_ids)] for ids in (row, prompt)
  )
  return np.array_equal(left, right)


def count(
  template: templates.Template,
  opening: formats.Opening,
  row: templates.Span,
  user_turns: Sequence[str],
) -> int:
  """Actions of a row of ACT that a prompt made anew would not have led to."""
  if template.format.append_only:
    return 0
  ids, authors = row
  spans, found = templates.runs(authors), 0
  for before, here in zip(spans, spans[1:], strict=False):
    joint = before[1]  # the forced tokens in front of an action
    if here[0] != types.Author.ACT or authors[joint - 1] == types.Author.PROMPT:
      continue
    so_far = ids[:joint], authors[:joint]
    try:
      prompt = remade_prompt(template, opening, so_far, user_turns)
    except ValueError:
      found += 1
    else:
      found += not continues(template, ids[:joint], prompt)
  return found


def refuse(
  template: templates.Template, *, user_turns: bool, max_rows: int
) -> None:
  """Refuses sampled episodes that need more rows than they may have.

  Raises:
    UserError: a joint at which rows break can come up.
  """
  if max_rows > 1:
    return
  remedy = (
    'so that an episode is no single row; set rollout.mode=host and '
    'rollout.max_rows above 1'
  )
  if formats.Joint.ANSWERED in template.format.breaks:
    raise errors.UserError(
      f'this chat template shows a call otherwise once it is answered, {remedy}'
    )
  if user_turns and formats.Joint.ASKED in template.format.breaks:
    raise errors.UserError(
      'this chat template shows a reply otherwise once the user speaks again, '
      f'{remedy}'
    )
