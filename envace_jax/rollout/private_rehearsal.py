"""Rehearse privately, remember by rule, then commit once.

N rehearsals of a task cost no real call. What they agree on is written down as
notes (call -> observation), and the one committed execution sees the notes in
its prompt: `memories`, then a real rollout with them. Nothing in the notes
comes from the environment, a checklist or the oracle: the only judge is
agreement among the rehearsals.

This is the parallel form of EnvACE's test-time rehearsal (arXiv 2608.06197,
eq. 9) with a memory extracted by rule; the released code has no test-time
part, so the rule is ours.
"""

import collections
from collections.abc import Callable, Sequence
import json

from envace_jax import types
from envace_jax.text import notes as notes_text
from envace_jax.text import tool_calls


def memories(
  episodes: Sequence[types.Episode],
  attempts: int,
  *,
  max_notes: int,
  is_write: Callable[[str], bool],
) -> list[str]:
  """Notes for each task, from its `attempts` consecutive rehearsals."""
  return [
    memory(episodes[i : i + attempts], max_notes, is_write)
    for i in range(0, len(episodes), attempts)
  ]


def memory(
  rehearsals: Sequence[types.Episode],
  max_notes: int,
  is_write: Callable[[str], bool],
) -> str:
  """What the rehearsals of one task agree on, as notes.

  Each distinct well-formed call votes for the observation it was rehearsed to
  get; an episode votes once per call, with its first answer. The majority
  observation is kept (ties: the one seen first), calls are ranked by how many
  episodes made them, and the first `max_notes` are written down in the order
  in which they were first made. A write that was rehearsed to succeed is not a
  fact but a plan, and a committed run that read it as done would be wrong: it
  is left out. A write that was refused is kept.
  """
  calls, answers = {}, collections.defaultdict(collections.Counter)
  for episode in rehearsals:
    voted = set()
    for step in episode.steps:
      if isinstance(step.action, types.ParseError):
        continue
      parsed = tool_calls.parse_response(
        tool_calls.render_response(step.observation_text)
      )
      if not isinstance(parsed, dict):
        continue
      name = step.action.name
      if is_write(name) and 'error' not in parsed:
        break  # later observations describe a world after this write
      key = (name, json.dumps(step.action.arguments, sort_keys=True))
      if key in voted:
        continue
      voted.add(key)
      calls.setdefault(key, step.action)
      answers[key][step.observation_text] += 1
  kept = sorted(calls, key=lambda key: -sum(answers[key].values()))
  kept = set(kept[:max_notes])
  return notes_text.join_notes(
    notes_text.format_note(call, answers[key].most_common(1)[0][0])
    for key, call in calls.items()
    if key in kept
  )


def placebo(notes: Sequence[str]) -> list[str]:
  """Another task's notes for each task: the control for merely having some."""
  return [*notes[1:], *notes[:1]]
