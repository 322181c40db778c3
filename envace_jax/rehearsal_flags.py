"""Flags of private rehearsal, for a server and for a benchmark.

Reading them imports no JAX.
"""

from absl import flags

from envace_jax import errors

_FOR = 'serve, evaluate --benchmark: '
_ATTEMPTS = flags.DEFINE_integer(
  'rehearsals', 0,
  f'{_FOR}private rehearsals before a conversation is first answered; requests '
  'may ask for others.',
)  # fmt: skip
_MODE = flags.DEFINE_enum(
  'rehearsal_mode', 'parallel', ('parallel', 'sequential'),
  f'{_FOR}side by side, or each shown what those before left behind.',
)  # fmt: skip
_MEMORY = flags.DEFINE_enum(
  'rehearsal_memory', 'agreed', ('agreed', 'written'),
  f'{_FOR}what they leave behind: what they agree on, or what is said of them.',
)  # fmt: skip
_TOKENS = flags.DEFINE_integer(
  'rehearsal_tokens', 2048, f'{_FOR}sampled in all rehearsals of a request.'
)
_ACTIONS = flags.DEFINE_integer(
  'rehearsal_actions', 8, f'{_FOR}calls and replies in one rehearsal.'
)
_NOTES = flags.DEFINE_integer(
  'rehearsal_notes', 4, f'{_FOR}calls that are remembered.'
)
_TEMPERATURE = flags.DEFINE_float(
  'rehearsal_temperature', 1.0, f'{_FOR}of both roles in rehearsals.'
)
_WRITES = flags.DEFINE_list(
  'rehearsal_writes', None,
  f'{_FOR}tools that change something; default: as far as the benchmark, or '
  "the policy's own world, says.",
)  # fmt: skip


def settings():
  """What the flags say.

  Raises:
    UserError: a value is out of range.
  """
  from envace_jax.rollout import private_rehearsal
  from envace_jax.serving import private

  writes = _WRITES.value
  try:
    return private.Settings(
      attempts=_ATTEMPTS.value,
      mode=private_rehearsal.Mode(_MODE.value),
      memory=private_rehearsal.Memory(_MEMORY.value),
      max_tokens=_TOKENS.value,
      max_actions=_ACTIONS.value,
      max_notes=_NOTES.value,
      temperature=_TEMPERATURE.value,
      writes=None if writes is None else tuple(writes),
    )
  except ValueError as error:
    raise errors.UserError(f'--rehearsals, --rehearsal_...: {error}') from error
