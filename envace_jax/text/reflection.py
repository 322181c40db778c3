"""A rehearsed attempt judged by whoever made it.

After the attempt the user asks (`REQUEST`), and the policy answers with a
verdict and with what to remember of it, in the words of `text.notes`:

  It worked. get_order O12 -> {"status": "pending"}
  It failed. cancel_order O12 -> {"error": "not_pending"}

A later user turn like any other: nothing but the words is new.
"""

from collections.abc import Sequence
import dataclasses

from envace_jax import types
from envace_jax.text import notes

REQUEST = 'Did it work?'
_VERDICTS = {True: 'It worked.', False: 'It failed.'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reflection:
  worked: bool
  notes: Sequence[str] = ()  # as text.notes writes them


def ask(task: types.Task) -> types.Task:
  """The task, followed by the question."""
  return dataclasses.replace(task, user_turns=(*task.user_turns, REQUEST))


def render(reflection: Reflection) -> str:
  """What the policy is taught to say."""
  verdict = _VERDICTS[reflection.worked]
  return ' '.join([verdict, notes.join_notes(reflection.notes)]).strip()


def read(episode: types.Episode, task: types.Task) -> Reflection | None:
  """What was said of an attempt at `ask(task)`; None for no clear verdict."""
  asked = episode.num_turns == len(task.user_turns) + 2
  if not asked or episode.reply is None:
    return None
  for worked, verdict in _VERDICTS.items():
    if episode.reply.startswith(verdict):
      said = episode.reply[len(verdict) :].split(notes.SEPARATOR.strip())
      return Reflection(
        worked=worked,
        notes=tuple(note.strip() for note in said if note.strip()),
      )
  return None
