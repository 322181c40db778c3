"""Parameters that another run trained, or this one earlier."""

import pathlib

from envace_jax import build, components, errors, workdirs
from envace_jax import data as datasets
from envace_jax.learning import checkpoints
from envace_jax.learning import step as learning

PHASES = ('rl', 'warm_start')  # the later one first


def newest(workdir: str, setup: build.Setup) -> tuple[str, int, dict]:
  """(phase, step, parameters) of a run's newest checkpoint.

  Raises:
    UserError: it has none, or none of this architecture.
  """
  for phase in PHASES:
    saves = pathlib.Path(workdir) / 'checkpoints' / phase
    if saves.is_dir():
      with checkpoints.Checkpointer(saves, read_only=True) as saved:
        if saved.latest_step() is not None:
          return phase, *saved.restore_params(_shapes(setup, phase))
  raise errors.UserError(f'{workdir} has no checkpoint yet; train it first')


def policy_of(workdir: str, setup: build.Setup) -> dict:
  """The newest parameters of another run that speaks this run's tokens.

  Raises:
    UserError: no such run, or it has another tokenizer or architecture.
  """
  theirs = workdirs.load_config(workdir)
  if theirs.model.to_dict() != setup.config.model.to_dict():
    raise errors.UserError(f'{workdir} has another config.model; use one alike')
  mine, other = (
    pathlib.Path(run) / 'data' / datasets.TOKENIZER_FILE
    for run in (setup.path, workdir)
  )
  if not other.exists() or mine.read_bytes() != other.read_bytes():
    raise errors.UserError(f'{workdir} has another tokenizer; use one alike')
  return newest(workdir, setup)[2]


def warm_start_of(workdir: str, setup: build.Setup, steps: int) -> dict:
  """The end of another run's warm start.

  Raises:
    UserError: it is missing, or has not `steps` steps.
  """
  source = pathlib.Path(workdir) / 'checkpoints' / 'warm_start'
  if not source.is_dir():
    raise errors.UserError(
      f'warm_start.workdir={workdir} has no warm start; train it first'
    )
  with checkpoints.Checkpointer(source, read_only=True) as saves:
    step, params = saves.restore_params(_shapes(setup, 'warm_start'))
  if step != steps:
    raise errors.UserError(
      f'the warm start of {workdir} has {step} steps, not '
      f'warm_start.steps={steps}; let it finish, or say its number'
    )
  return params


def _shapes(setup: build.Setup, phase: str):
  tx = components.optimizer(setup.config[phase])
  return learning.abstract_state(setup.model, tx, setup.mesh).params
