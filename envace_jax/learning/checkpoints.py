"""Checkpoints: written in the background, believed only when complete.

  <directory>/<step>/state    every array of the train state
  <directory>/<step>/meta     JSON: data cursor and whatever else must resume

A step is first written to a temporary name and renamed when all of it is on
disk, so a process may be killed at any moment. Still, files get lost and
disks fill: restoring walks from the newest step to the oldest, says what it
passes over, and takes the first that can be read whole. A step that was
passed over is set aside by name when training reaches it again, never
overwritten and never a reason to skip that save.

A background save that failed is raised by the next `save`, `wait` or
`close`: a run whose last checkpoint did not land does not end normally.

Every Orbax call of the project is here.
"""

from collections.abc import Mapping
import contextlib
import os
import pathlib
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import orbax.checkpoint as ocp

from envace_jax import errors

Json = Mapping[str, Any]

_ITEMS = ('state', 'meta')
_SET_ASIDE = '.unreadable'


class CheckpointError(errors.UserError):
  """A checkpoint could not be written, found or read."""


class Checkpointer:
  """Saves and restores one run's state.

  One writer per directory; `read_only=True` for everybody else, who may then
  read while the writer writes. Use as a context manager, or `close`.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    *,
    max_to_keep: int | None = 3,
    read_only: bool = False,
    timeout_secs: int = 1800,
  ):
    self._directory = pathlib.Path(directory).absolute()
    self._unreadable: set[int] = set()
    self._saved: int | None = None
    options = ocp.CheckpointManagerOptions(
      max_to_keep=max_to_keep,
      # Leftovers of a killed writer. A reader must not touch the writer's.
      cleanup_tmp_directories=not read_only,
      read_only=read_only,
      async_options=ocp.AsyncOptions(timeout_secs=timeout_secs),
    )
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=options,
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'meta': ocp.JsonCheckpointHandler(),
      },
    )

  def save(self, step: int, state: Any, meta: Json) -> None:
    """Copies the state, then writes it in the background.

    The state may be donated as soon as this returns. Saving a step that was
    just saved or restored does nothing; saving an earlier one is an error.
    """
    step = int(step)
    if step == self._saved:
      return
    self.wait()
    self._set_aside_unreadable()
    present = self._manager.all_steps()
    if present and step <= max(present):
      raise CheckpointError(
        f'{self._directory} already holds step {max(present)}, so step {step} '
        'would not be its newest; resume from it or use another directory'
      )
    with _reported(f'saving step {step} to {self._directory}'):
      saved = self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          meta=ocp.args.JsonSave(dict(meta)),
        ),
        force=True,
      )
    if not saved:
      raise CheckpointError(f'{self._directory}: step {step} was not saved')
    self._saved = step

  def wait(self) -> None:
    """Returns when no save is running; raises if one has failed."""
    with _reported(f'a background save to {self._directory}'):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    if self._saved is not None and not self._is_complete(self._saved):
      raise CheckpointError(
        f'{self._directory}: step {self._saved} was saved and is not there'
      )

  def latest_step(self) -> int | None:
    """The newest complete step, None if there is none."""
    return max(self._complete_steps(), default=None)

  def restore(self, abstract_state: Any) -> tuple[Any, Json]:
    """(state, meta) of the newest readable step.

    `abstract_state` gives structure, shapes, dtypes and shardings
    (`state.abstract_state`); the mesh need not be the one that saved.
    """

    def read(step):
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(abstract_state),
          meta=ocp.args.JsonRestore(),
        ),
      )
      return restored['state'], restored['meta']

    self._saved, restored = self._newest_readable(read)
    return restored

  def restore_params(self, abstract_params: Any) -> tuple[int, Any]:
    """(step, params) of the newest readable step, without the optimizer."""
    item = {'params': abstract_params}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)

    def read(step):
      # The manager's own handler is bound to whole states.
      with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(
          self._directory / str(step) / 'state',
          args=ocp.args.PyTreeRestore(
            item, restore_args=restore_args, partial_restore=True
          ),
        )
      return restored['params']

    return self._newest_readable(read)

  def close(self) -> None:
    """Waits for a running save and raises if it failed."""
    try:
      self.wait()
    finally:
      self._manager.close()

  def __enter__(self) -> 'Checkpointer':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def _newest_readable(self, read):
    self.wait()
    self._manager.reload()
    failures = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      if not self._is_complete(step):
        failures.append(f'step {step}: incomplete')
      else:
        try:
          restored = read(step)
        # Whatever a damaged file makes Orbax raise, an older step may do.
        except Exception as error:
          failures.append(f'step {step}: {type(error).__name__}: {error}')
        else:
          if failures:
            logging.warning(
              '%s: restored step %d, newer ones are unreadable: %s',
              self._directory,
              step,
              '; '.join(failures),
            )
          return step, restored
      self._unreadable.add(step)
    if failures:
      self._unreadable.clear()  # most likely it is us who are wrong
      raise CheckpointError(
        f'{self._directory} has no readable checkpoint (damaged, or saved '
        f'with another model or optimizer): {"; ".join(failures)}'
      )
    raise CheckpointError(f'{self._directory} holds no checkpoint')

  def _complete_steps(self):
    self.wait()
    self._manager.reload()
    return [s for s in self._manager.all_steps() if self._is_complete(s)]

  def _is_complete(self, step):
    directory = self._directory / str(step)
    return all(
      (directory / item).is_dir() and any((directory / item).iterdir())
      for item in _ITEMS
    )

  def _set_aside_unreadable(self):
    if not self._unreadable:
      return
    if jax.process_index() == 0:
      for step in self._unreadable:
        directory = self._directory / str(step)
        aside = directory.with_name(f'{step}{_SET_ASIDE}')
        while aside.exists():
          aside = aside.with_name(aside.name + _SET_ASIDE)
        directory.rename(aside)
        logging.warning('set aside %s as %s', directory, aside.name)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices('unreadable checkpoints set aside')
    self._unreadable.clear()
    self._manager.reload()


@contextlib.contextmanager
def _reported(what):
  """Turns whatever Orbax raises into a CheckpointError that says where."""
  try:
    yield
  except CheckpointError:
    raise
  except Exception as error:
    raise CheckpointError(
      f'{what} failed: {type(error).__name__}: {error}'
    ) from error
