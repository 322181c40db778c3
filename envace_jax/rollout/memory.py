"""What private rehearsals leave behind, and the memories to compare it with.

A memory is a list of notes, the most useful first, of which a prompt shows as
many as fit, whole. Nothing in it comes from the environment, a checklist or the
oracle. Two ways of making one:

  agreed    by rule: what the rehearsals of a task agree on
  written   by the policy: what it said of each attempt (`text.reflection`)

and three memories that look alike and should help less:

  placebo    another task's
  scrambled  the own calls, with answers that other tasks' calls met
  blank      agreed in a world that says nothing (made by rehearsing there)
"""

import collections
from collections.abc import Callable, Sequence
import json

from envace_jax import types
from envace_jax.text import notes as notes_text
from envace_jax.text import reflection


def agreed(
  rehearsals: Sequence[types.Episode],
  max_notes: int,
  is_write: Callable[[str], bool],
) -> list[notes_text.Fact]:
  """What the rehearsals of one task agree on.

  Each distinct well-formed call votes for the observation it was rehearsed to
  get; an episode votes once per call, with its first answer. The majority
  observation is kept (ties: the one seen first), calls are ranked by how many
  episodes made them, and the first `max_notes` are returned in the order in
  which they were first made. A write that was rehearsed to succeed is not a
  fact but a plan, and a committed run that read it as done would be wrong: it
  is left out, with all that follows. A write that was refused is kept.
  """
  calls, answers = {}, collections.defaultdict(collections.Counter)
  for episode in rehearsals:
    voted = set()
    for call, observation in notes_text.facts(episode.steps, is_write):
      key = (call.name, json.dumps(call.arguments, sort_keys=True))
      if key in voted:
        continue
      voted.add(key)
      calls.setdefault(key, call)
      answers[key][observation] += 1
  kept = sorted(calls, key=lambda key: -sum(answers[key].values()))
  kept = set(kept[:max_notes])
  return [
    (call, answers[key].most_common(1)[0][0])
    for key, call in calls.items()
    if key in kept
  ]


def written(
  reflections: Sequence[reflection.Reflection | None], max_notes: int
) -> list[str]:
  """What the policy said of its attempts; of those that worked, first.

  Of two notes about one call the first stands.
  """
  said = [one for one in reflections if one is not None]
  notes = {}
  for one in sorted(said, key=lambda one: not one.worked):
    for note in one.notes:
      notes.setdefault(note.partition(notes_text.ARROW)[0], note)
  return list(notes.values())[:max_notes]


def render(memory: Sequence[notes_text.Fact]) -> list[str]:
  """Facts as notes."""
  return [notes_text.format_note(call, answer) for call, answer in memory]


def show(notes: Sequence[str], fits: Callable[[str], bool]) -> str:
  """As many notes as `fits` allows, none of them cut."""
  shown: list[str] = []
  for note in notes:
    if fits(notes_text.join_notes([*shown, note])):
      shown.append(note)
  return notes_text.join_notes(shown)


def placebo(memories: Sequence[str]) -> list[str]:
  """Another task's memory for each task: the control for merely having one."""
  return [*memories[1:], *memories[:1]]


def scrambled(
  memories: Sequence[Sequence[notes_text.Fact]],
) -> list[list[notes_text.Fact]]:
  """The same calls; each with the next other answer that its tool gave.

  The answers come from all memories in turn, so that outcomes keep their
  frequencies and lose their meaning. A tool with one answer keeps it.
  """
  answers = collections.defaultdict(list)
  for memory in memories:
    for call, answer in memory:
      answers[call.name].append(answer)
  seen = collections.Counter()
  mixed = []
  for memory in memories:
    mixed.append([])
    for call, answer in memory:
      seen[call.name] += 1
      pool, at = answers[call.name], seen[call.name]
      others = [other for other in pool[at:] + pool[:at] if other != answer]
      mixed[-1].append((call, others[0] if others else answer))
  return mixed
