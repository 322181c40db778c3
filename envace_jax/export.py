"""`envace export-samples`: MiniDesk tasks in the published sample format.

A file per split, to look at, or to be read back:

  envace export-samples --config experiments/envace.py --out samples
  envace train --config experiments/envace.py --workdir runs/published \\
    --config.data.world=published '--config.data.files=samples/{split}.jsonl'

Each sample holds the executed oracle plan as its dialogue, so a run from these
files clones experts only, and as many as there are training tasks.
"""

import pathlib
import sys

import ml_collections

from envace_jax import data as datasets
from envace_jax import desk_worlds, errors, pretrained, refusals
from envace_jax.envs.checklist import files as checklist_files
from envace_jax.envs.desk import samples as desk_samples


def run(config: ml_collections.ConfigDict, directory: str) -> int:
  """Writes the config's tasks; returns the exit code.

  Raises:
    UserError: the config generates none, or a file is there already.
  """
  refusals.validate(config, pretrained.architecture(config))
  if config.data.world not in desk_worlds.GENERATED:
    raise errors.UserError(
      f'data.world={config.data.world!r} makes no tasks to export; use one of '
      f'{", ".join(desk_worlds.GENERATED)}'
    )
  folder = pathlib.Path(directory)
  paths = {split: folder / f'{split}.jsonl' for split in datasets.SPLITS}
  if present := [str(path) for path in paths.values() if path.exists()]:
    raise errors.UserError(
      f'{", ".join(present)} would be overwritten; use another --out'
    )
  tasks, world = desk_worlds.generate_tasks(config)
  folder.mkdir(parents=True, exist_ok=True)
  for split, path in paths.items():
    samples = desk_samples.samples(tasks[split], world)
    checklist_files.write(path, samples)
    sys.stdout.write(f'{path}: {len(samples)} samples\n')
  return 0
