"""Episodes of several rows: a row that the next prompt breaks is opened anew.

  row 0   prompt  call  answer                         kept as it was said
  row 1   prompt' (call' answer', COPIED)  reply       goes on from a new prompt

Where a chat template shows earlier turns otherwise than they were said
(`text.row_breaks`), nothing is spliced: the row is kept for training, and the
session's row is cut back to what it shares with the new prompt and extended by
the rest. What an earlier row has as sampled is COPIED in later ones, so every
generation is trained once, behind what it was really sampled behind.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from envace_jax import types
from envace_jax.rollout import episodes
from envace_jax.sampling import generator
from envace_jax.text import row_breaks
from envace_jax.text import template as templates


class Reopener:
  """The earlier rows of the episodes of a session."""

  def __init__(
    self,
    limits: types.Limits,
    template: templates.Template,
    session: generator.Session,
    attempts: Sequence[episodes.Attempt],
  ):
    self._limits, self._template = limits, template
    self._session, self._attempts = session, attempts
    self._rows = [[] for _ in attempts]  # kept ones
    self._opened_at = [[0] for _ in attempts]

  def reopen(self, rows: Sequence[int]) -> dict[int, types.StopReason]:
    """Opens anew what the next action's prompt breaks.

    Args:
      rows: those about to open an action; they end before its joint.

    Returns:
      Why, for rows that would have to be opened anew and cannot be.
    """
    if (
      not rows
      or self._limits.max_rows == 1
      or self._template.format.append_only
    ):
      return {}
    found, stops, cuts, prompts = self._session.rows(), {}, {}, {}
    for row in rows:
      prompt = self._remade(row, found[row])
      if prompt is not None and row_breaks.continues(
        self._template, found[row].tokens, prompt
      ):
        continue
      if prompt is None or len(self._rows[row]) + 1 >= self._limits.max_rows:
        stops[row] = types.StopReason.MAX_ROWS
      elif len(prompt) >= self._limits.max_row_tokens:
        stops[row] = types.StopReason.CONTEXT_FULL
      else:
        self._rows[row].append(self._once(row, found[row]))
        self._opened_at[row].append(len(prompt))
        cuts[row] = _shared(found[row].tokens, prompt)
        prompts[row] = prompt
    if cuts:
      self._session.rewind(cuts)
    for row, cut in cuts.items():
      rest = prompts[row][cut:]
      copied = np.full(len(rest), types.Author.COPIED, np.int8)
      self._session.extend(row, rest, copied)
    return stops

  def rows(self, row: int, last: types.Row) -> tuple[types.Row, ...]:
    """All rows of an episode, of which the session holds the `last`."""
    return (*self._rows[row], self._once(row, last))

  def opened_at(self, row: int) -> tuple[int, ...]:
    """Where each of them begins to say something new."""
    return tuple(self._opened_at[row])

  def said(self, row: int, last: types.Row) -> types.Row:
    """All that was said in an episode, each turn once."""
    return episodes.stream(self.rows(row, last), self._opened_at[row])

  def _remade(self, row: int, last: types.Row) -> np.ndarray | None:
    said, attempt = self.said(row, last), self._attempts[row]
    try:
      return row_breaks.remade_prompt(
        self._template,
        episodes.opening(attempt, self._template),
        (said.tokens, said.authors),
        attempt.task.user_turns,
      )
    except ValueError:  # the template refuses what was sampled
      return None

  def _once(self, row: int, found: types.Row) -> types.Row:
    """A row without what an earlier one has as sampled."""
    start = self._opened_at[row][-1]
    if not start:
      return found
    sampled = np.isin(found.authors, list(types.AUTHOR_OF_ROLE.values()))
    again = sampled & (np.arange(len(found.tokens)) < start)
    return dataclasses.replace(
      found,
      authors=np.where(again, types.Author.COPIED, found.authors).astype(
        np.int8
      ),
      logprobs=np.where(again, 0.0, found.logprobs).astype(np.float32),
    )


def _shared(left: np.ndarray, right: np.ndarray) -> int:
  """Tokens that both begin with."""
  size = min(len(left), len(right))
  differ = np.flatnonzero(left[:size] != right[:size])
  return int(differ[0]) if len(differ) else size
