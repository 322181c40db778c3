"""A recorded attempt as the rows that its policy would have read.

Some chat templates show earlier turns otherwise once the conversation goes on:
thoughts are dropped at a new user turn, an empty thought at the next call. What
an action was read behind is then no continuation of the row so far. Before
every action the prompt is made anew, and where it differs from the row, the row
ends and the new prompt opens another: nothing is spliced. Repeated turns are
COPIED, so that each is trained once, behind what it was really said behind.
"""

import numpy as np

from envace_jax import types
from envace_jax.text import formats
from envace_jax.text import template as templates


def rows(
  template: templates.Template, demo: types.Demonstration
) -> list[templates.Span]:
  """The rows of an attempt; one more than prompts that broke a row."""
  opening = template.opening(
    demo.instruction, demo.notes, demo.tools, demo.system
  )
  prompt = np.asarray(template.format.prompt(opening, ()), np.int32)
  row = [(prompt, np.full(len(prompt), types.Author.PROMPT, np.int8))]
  turns, made, before = template.turns(demo), [], types.Author.USER
  for i, turn in enumerate(turns):
    if (
      i
      and turn.author == types.Author.ACT
      and not continues(template, opening, turns[:i], templates.join(row)[0])
    ):
      made.append(templates.join(row))
      row = [_reopened(template, opening, turns[:i], prompt)]
    row += template.spans(turn, before)
    before = turn.author
  return [*made, templates.join(row)]


def continues(
  template: templates.Template,
  opening: formats.Opening,
  turns: list[formats.Turn],
  row: np.ndarray,
) -> bool:
  """Whether a prompt made anew equals a row, up to the next action's joint."""
  if isinstance(template.format, formats.Own):
    return True
  return template.format.prompt(opening, turns) == row.tolist()


def _reopened(template, opening, turns, prompt) -> templates.Span:
  ids = np.asarray(template.format.prompt(opening, turns), np.int32)
  authors = np.full(len(ids), types.Author.COPIED, np.int8)
  authors[: len(prompt)] = types.Author.PROMPT
  return ids, authors
