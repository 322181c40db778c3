"""The field of a request that asks for private rehearsals."""

import dataclasses
from typing import Any

from envace_jax.rollout import private_rehearsal as rehearsing
from envace_jax.serving import fields, jobs, private

_MOST = 1 << 30


def read(value: Any, default: private.Settings) -> private.Settings | None:
  """What is asked for; the server's own in all else. None: nothing is.

  Raises:
    Refused: a part of it is unknown or wrong.
  """
  if value is None:
    return None
  if not isinstance(value, dict):
    raise fields.wrong('rehearsal', 'rehearsal must be an object')
  names = [_key(field.name) for field in dataclasses.fields(default)]
  asked = {_key(k): v for k, v in value.items() if v is not None}
  for key in asked:
    if key not in names:
      raise jobs.Refused(
        400,
        'unsupported_parameter',
        f'{key[:100]} is none of {", ".join(names)}',
        key[:100],
      )

  def whole(name: str, least: int, most: int = _MOST) -> int:
    own = getattr(default, name)
    return fields.integer(asked, _key(name), own, least, most)

  key = _key('conversation')
  conversation = asked.get(key, default.conversation)
  if not isinstance(conversation, str):
    raise fields.wrong(key, f'{key} must be a string')
  try:
    return private.Settings(
      attempts=whole('attempts', 0, private.MAX_ATTEMPTS),
      mode=_one_of(asked, 'mode', default.mode),
      memory=_one_of(asked, 'memory', default.memory),
      max_tokens=whole('max_tokens', 1),
      max_actions=whole('max_actions', 1),
      max_notes=whole('max_notes', 1),
      temperature=fields.number(
        asked, _key('temperature'), default.temperature, 0, 2
      ),
      writes=_writes(asked, default.writes),
      conversation=conversation,
    )
  except ValueError as error:
    raise fields.wrong('rehearsal', str(error)) from error


def _one_of(
  asked: dict, name: str, default: rehearsing.Mode | rehearsing.Memory
):
  kind, key = type(default), _key(name)
  names = [one.value for one in kind]
  said = asked.get(key, default.value)
  if said not in names:
    raise fields.wrong(key, f'{key} must be one of {", ".join(names)}')
  return kind(said)


def _writes(asked: dict, default: tuple[str, ...] | None):
  key = _key('writes')
  if key not in asked:
    return default
  names = asked[key]
  if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
    raise fields.wrong(key, f'{key} must be a list of names of tools')
  return tuple(names)


def _key(name: str) -> str:
  return f'rehearsal.{name}'
