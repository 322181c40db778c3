"""Orbax, and nothing else of it anywhere: atomic saves, exact restores."""

import os
import pathlib

import jax
import orbax.checkpoint as ocp


class CheckpointError(Exception):
  """A checkpoint that cannot be used, in one sentence."""


class Checkpointer:
  """Saves and restores train states of one phase in one directory."""

  def __init__(self, directory: str | os.PathLike[str], max_to_keep: int = 2):
    self._directory = pathlib.Path(directory).absolute()
    self._manager = ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=max_to_keep, cleanup_tmp_directories=True, create=True
      ),
    )

  def latest_step(self) -> int | None:
    self._manager.wait_until_finished()
    return self._manager.latest_step()

  def save(self, step: int, state, meta: dict) -> None:
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
      ),
    )

  def wait(self) -> None:
    self._manager.wait_until_finished()

  def restore(self, abstract_state):
    restored = self._manager.restore(
      self._manager.latest_step(),
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract_state),
        meta=ocp.args.JsonRestore(),
      ),
    )
    return restored.state, restored.meta

  def close(self) -> None:
    self._manager.close()
