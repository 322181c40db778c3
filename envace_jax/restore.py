"""Parameters that another run trained, or this one earlier."""

import pathlib

import ml_collections
import optax

from envace_jax import build, errors, types, workdirs
from envace_jax import data as datasets
from envace_jax.learning import checkpoints
from envace_jax.learning import state as states
from envace_jax.model import per_role, transformer

# Of networks or, where a run has adapters, of those.
Trained = transformer.Params | per_role.PerRole

PHASES = ('rl', 'warm_start')  # the later one first


def newest(workdir: str, setup: build.Setup) -> tuple[str, int, Trained]:
  """(phase, step, what was trained) of a run's newest checkpoint.

  `setup` is of this run or of one with the same network.

  Raises:
    UserError: it has none, or none of this architecture.
  """
  config = workdirs.load_config(workdir)
  for phase in PHASES:
    saves = pathlib.Path(workdir) / 'checkpoints' / phase
    if saves.is_dir():
      with checkpoints.Checkpointer(saves, read_only=True) as saved:
        if saved.latest_step() is not None:
          shared = phase == 'warm_start' or _shares_roles(config)
          return phase, *saved.restore_params(_shapes(setup, shared))
  raise errors.UserError(f'{workdir} has no checkpoint yet; train it first')


def simulator_of(workdir: str, setup: build.Setup) -> transformer.Params:
  """Who answers in another run that speaks this run's tokens, at its newest.

  Raises:
    UserError: no such run, or it has another tokenizer or architecture.
  """
  theirs = workdirs.load_config(workdir)
  for name in ('model', 'pretrained', 'lora'):
    if theirs[name].to_dict() != setup.config[name].to_dict():
      raise errors.UserError(
        f'{workdir} has another config.{name}; use one alike'
      )
  mine, other = (
    pathlib.Path(run) / 'data' / datasets.TOKENIZER_FILE
    for run in (setup.path, workdir)
  )
  if not other.exists() or mine.read_bytes() != other.read_bytes():
    raise errors.UserError(f'{workdir} has another tokenizer; use one alike')
  network = setup.network(newest(workdir, setup)[2])
  return per_role.of(network, types.Role.REHEARSE)


def warm_start_of(
  workdir: str, setup: build.Setup, steps: int
) -> transformer.Params:
  """What another run had trained at the end of its warm start.

  Raises:
    UserError: it is missing, or has not `steps` steps.
  """
  source = pathlib.Path(workdir) / 'checkpoints' / 'warm_start'
  if not source.is_dir():
    raise errors.UserError(
      f'warm_start.workdir={workdir} has no warm start; train it first'
    )
  with checkpoints.Checkpointer(source, read_only=True) as saves:
    step, params = saves.restore_params(_shapes(setup, share_roles=True))
  if step != steps:
    raise errors.UserError(
      f'the warm start of {workdir} has {step} steps, not '
      f'warm_start.steps={steps}; let it finish, or say its number'
    )
  return params


def _shares_roles(config: ml_collections.ConfigDict) -> bool:
  """A run that is older than the option did."""
  return 'share_roles' not in config.rl or config.rl.share_roles


def _shapes(setup: build.Setup, share_roles: bool):
  # Parameters have the same shapes whatever updates them.
  return states.abstract_state(
    setup.model, optax.identity(), setup.mesh, share_roles=share_roles
  ).params
