"""Fields of a request, read strictly; an absent one has its default."""

from envace_jax.serving import jobs


def boolean(body, name: str, default: bool | None = False) -> bool | None:
  """True or false.

  Raises:
    Refused: it is neither, as all here.
  """
  value = body.get(name, default)
  if value is not default and not isinstance(value, bool):
    raise wrong(name, f'{name} must be true or false')
  return value


def integer(body, name: str, default, least: int, most: int) -> int | None:
  """A whole number in [least, most]."""
  value = body.get(name, default)
  if name not in body:
    return default
  if type(value) is not int or not least <= value <= most:
    raise wrong(name, f'{name} must be a whole number in [{least}, {most}]')
  return value


def number(body, name: str, default, least, most) -> float | None:
  """A number in [least, most]."""
  if name not in body:
    return default
  value = body[name]
  if type(value) not in (int, float) or not least <= value <= most:
    raise wrong(name, f'{name} must be a number in [{least}, {most}]')
  return float(value)


def wrong(param: str, message: str) -> jobs.Refused:
  """A field whose value cannot be used."""
  return jobs.Refused(400, 'invalid_value', message, param)
