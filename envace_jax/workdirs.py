"""A run's directory: one config, one owner, nothing overwritten.

config.json        what the run was started with
data/              tasks and demonstrations (TFDS), tokenizer; samples.json
                   says what published samples lost
checkpoints/       warm_start/ and rl/, by train step
metrics.jsonl      deterministic values; timings.jsonl holds the clock
evaluations/       finished evaluations, so that a restart skips them
summary.json  report.html  transcripts.jsonl
"""

import json
import pathlib

import ml_collections

from envace_jax import errors

PRIVATE_STUDY_FILE = 'evaluations/private_rehearsal.json'


def claim(workdir: str, config: ml_collections.ConfigDict) -> pathlib.Path:
  """Creates the directory, or takes it up again under the same config.

  Raises:
    UserError: the directory belongs to another config or to something else.
  """
  path = pathlib.Path(workdir)
  mine = to_json(config)
  recorded = path / 'config.json'
  if recorded.exists():
    theirs = _read(recorded)
    changed = sorted(
      key
      for key in {*flat(mine), *flat(theirs)}
      if flat(mine).get(key) != flat(theirs).get(key)
    )
    if changed:
      raise errors.UserError(
        f'{path} belongs to a run with another {", ".join(changed[:5])}; '
        'use another --workdir, or the config recorded in its config.json'
      )
    return path
  if path.is_dir() and any(path.iterdir()):
    raise errors.UserError(
      f'{path} is not empty and holds no run (no config.json); '
      'use another --workdir'
    )
  if path.exists() and not path.is_dir():
    raise errors.UserError(f'{path} is a file; use another --workdir')
  path.mkdir(parents=True, exist_ok=True)
  write_json(recorded, mine)
  return path


def load_config(workdir: str) -> ml_collections.ConfigDict:
  """The config that a run was started with."""
  recorded = pathlib.Path(workdir) / 'config.json'
  if not recorded.exists():
    raise errors.UserError(
      f'{workdir} holds no run (no config.json); give the --workdir of one'
    )
  return ml_collections.ConfigDict(_lists_to_tuples(_read(recorded)))


def to_json(config: ml_collections.ConfigDict) -> dict:
  """Plain JSON values; tuples become lists, as they do on disk."""
  return json.loads(config.to_json_best_effort())


def write_json(path: pathlib.Path, value) -> None:
  """Writes all or nothing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + '.partial')
  partial.write_text(json.dumps(value, indent=1, sort_keys=True) + '\n')
  partial.replace(path)


def _read(path: pathlib.Path) -> dict:
  try:
    return json.loads(path.read_text())
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise errors.UserError(
      f'{path} is damaged ({error}); restore it or use another --workdir'
    ) from error


def flat(tree: dict, prefix: str = '') -> dict:
  """Nested options as one level, `rl.optimizer.b1` and so on."""
  leaves = {}
  for key, value in tree.items():
    if isinstance(value, dict):
      leaves |= flat(value, f'{prefix}{key}.')
    else:
      leaves[prefix + key] = value
  return leaves


def _lists_to_tuples(value):
  if isinstance(value, dict):
    return {key: _lists_to_tuples(item) for key, item in value.items()}
  return tuple(value) if isinstance(value, list) else value
