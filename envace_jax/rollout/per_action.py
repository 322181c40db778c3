"""Rehearsal before each action: try k candidates in the head, commit one.

Every turn, the policy draws k actions and rehearses m answers to each call.
Equal actions are one candidate, drawn as often as the policy likes it:

  value = (draws / k) * (P(not refused) - w * (1 - max_o P(o)))

with P over the rehearsed answers, read as outcomes: refused with which error,
or fine. A reply meets no answer and is worth its share of the draws. The first
of equals is taken. Scoring a simulated candidate by its outcome less the
uncertainty about it follows WebDreamer (2411.06559) and MOPO (2005.13239);
the score itself is ours.

The committed action is put into the row as if said, without log-probs: for
acting, not for training. Joint view only (`worlds.foresight`).
"""

import collections
from collections.abc import Sequence
import dataclasses
import json

import numpy as np

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import formats, tool_calls
from envace_jax.text import template as templates
from envace_jax.worlds import foresight

_FINE = 'fine'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  candidates: int  # k, drawn per action
  answers: int  # m, rehearsed per drawn call
  uncertainty_weight: float  # w

  def __post_init__(self):
    if self.candidates < 1 or self.answers < 1 or self.uncertainty_weight < 0:
      raise ValueError(
        f'private.candidates={self.candidates} and private.answers='
        f'{self.answers} must be at least 1, private.uncertainty_weight='
        f'{self.uncertainty_weight} at least 0'
      )


class Chooser:
  """Decides on actions, see `alternation.Chooser`."""

  def __init__(self, template: templates.Template, settings: Settings):
    self._template, self._settings = template, settings

  def __call__(
    self, session: generator.Session, rows: Sequence[int]
  ) -> dict[int, types.Generation]:
    before = {row: int(session.lengths[row]) for row in rows}
    drawn = {row: [] for row in rows}
    for _ in range(self._settings.candidates):
      said = session.generate(types.Role.ACT, rows)
      expected = self._expect(session, said)
      for row, action in said.items():
        drawn[row].append((action, expected.get(row, [])))
      session.rewind(before)
    chosen = {row: self._best(candidates) for row, candidates in drawn.items()}
    for row, said in chosen.items():
      author = np.full(len(said.ids), types.Author.ACT, np.int8)
      session.extend(row, said.ids, author)
    return chosen

  def _expect(self, session, said) -> dict[int, list[str]]:
    """Answers to what calls a tool; to the first call, where there are more."""
    header, forced = self._template.header(formats.Joint.CALLED)
    calling = []
    for row, action in said.items():
      calls = action.finished and self._template.is_call(action.ids)
      if calls and session.room(row) > len(header):
        session.extend(row, header, forced)
        calling.append(row)
    return foresight.expect(
      session, self._template, calling, self._settings.answers
    )

  def _best(
    self, candidates: Sequence[tuple[types.Generation, list[str]]]
  ) -> types.Generation:
    kinds: dict[str, list] = {}
    for candidate in candidates:
      kinds.setdefault(self._kind(candidate[0]), []).append(candidate)
    best = max(kinds.values(), key=self._value)
    return best[0][0]

  def _kind(self, said: types.Generation) -> str:
    """Equal for actions that are the same but for spelling."""
    if not self._template.is_call(said.ids):
      return self._template.text(said.ids)
    return json.dumps(
      [
        [call.name, call.arguments]
        if isinstance(call, types.ToolCall)
        else self._template.text(said.ids)
        for call in self._template.calls(said.ids)
      ],
      sort_keys=True,
    )

  def _value(self, same: Sequence[tuple[types.Generation, list[str]]]) -> float:
    share = len(same) / self._settings.candidates
    outcomes = [_outcome(text) for _, answers in same for text in answers]
    if not outcomes:
      return share
    counts = collections.Counter(outcomes)
    fine = counts[_FINE] / len(outcomes)
    doubt = 1 - max(counts.values()) / len(outcomes)
    return share * (fine - self._settings.uncertainty_weight * doubt)


def _outcome(text: str) -> str:
  """Fine, or the refusal."""
  return text if tool_calls.reports_error(text) else _FINE
