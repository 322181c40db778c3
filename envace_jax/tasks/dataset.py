"""Records on disk: a TFDS dataset in ArrayRecord, read by random access.

Written once, under a fingerprint of its contents, and found again; never
overwritten. No tensorflow is imported at any time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import hashlib
import io
import json
import operator
import os
import re

from absl import logging
from array_record.python import array_record_module
from etils import epath
import tensorflow_datasets as tfds

from envace_jax import errors, types
from envace_jax.tasks import records


class TaskDataset(tfds.core.GeneratorBasedBuilder):
  """Stores located records in the order given; `write_dataset` is its face."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'id, kind and strict JSON of each record.'}

  def __init__(
    self,
    *,
    data_dir: epath.PathLike,
    name: str,
    rows: Mapping[str, Sequence[dict]],
    fingerprint: str,
  ):
    self.name = name  # a directory, instead of the class's own name
    self._rows = rows
    self._fingerprint = fingerprint
    super().__init__(data_dir=data_dir, file_format='array_record')

  def _info(self) -> tfds.core.DatasetInfo:
    text = tfds.features.Text()
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {'id': text, 'kind': text, 'json': text}
      ),
      metadata=tfds.core.MetadataDict(fingerprint=self._fingerprint),
      # Else TFDS sorts by a hash of the key, and the order given is lost.
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {s: self._generate_examples(rows) for s, rows in self._rows.items()}

  def _generate_examples(self, rows: Sequence[dict]):
    yield from enumerate(rows)


def find_dataset(data_dir: epath.PathLike, name: str) -> str | None:
  """The directory of a dataset that was completely written, or None."""
  directory = epath.Path(data_dir) / name / str(TaskDataset.VERSION)
  return None if _fingerprint(directory) is None else os.fspath(directory)


def write_dataset(
  data_dir: epath.PathLike,
  name: str,
  splits: Mapping[str, Iterable[records.Record]],
) -> str:
  """Writes, or finds again, a dataset; returns the directory to read from."""
  located = {
    split: [(f'{name}/{split}[{i}]', record) for i, record in enumerate(given)]
    for split, given in splits.items()
  }
  return _write(data_dir, name, located)


def write_dataset_from_jsonl(
  data_dir: epath.PathLike, name: str, paths: Mapping[str, epath.PathLike]
) -> str:
  """`write_dataset` for files in the form of `SCHEMAS`, one per split."""
  return _write(
    data_dir, name, {s: records.read_located(p) for s, p in paths.items()}
  )


def _write(
  data_dir: epath.PathLike,
  name: str,
  splits: Mapping[str, list[records.Located]],
) -> str:
  rows = _rows(name, splits)
  content = [str(TaskDataset.VERSION), name, rows]
  fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
  directory = epath.Path(data_dir) / name / str(TaskDataset.VERSION)
  stored = _fingerprint(directory)
  if stored is None:
    _remove_half_written(directory, name)
    try:
      with _quiet():
        builder = TaskDataset(
          data_dir=data_dir, name=name, rows=rows, fingerprint=fingerprint
        )
        builder.download_and_prepare()
    except OSError:
      # Another process may have renamed its finished copy into place first.
      if _fingerprint(directory) is None:
        raise
    stored = _fingerprint(directory)
  if stored != fingerprint:
    raise errors.UserError(
      f'{directory} holds other records than the ones given (fingerprint '
      f'{stored}, not {fingerprint}): delete that directory, or choose another '
      'dataset name or data_dir'
    )
  return os.fspath(directory)


def _rows(
  name: str, splits: Mapping[str, list[records.Located]]
) -> dict[str, list[dict]]:
  """What is stored, after every check that needs all the records."""
  for word in (name, *splits):
    if not re.fullmatch('[a-z][a-z0-9_]*', word) or word == 'all':
      raise errors.UserError(
        f'dataset or split name {word!r}: use a-z, 0-9 and _, and not "all"'
      )
  if not splits:
    raise errors.UserError(f'dataset {name!r} has no splits')
  rows, first = {}, {}
  for split, located in splits.items():
    if not located:
      raise errors.UserError(
        f'split {split!r} of dataset {name!r} is empty: give it a record, or '
        'leave the split out'
      )
    for where, record in located:
      if isinstance(record, types.Task):
        if record.id in first:
          raise errors.UserError(
            f'{where}: task id {record.id!r} was used by {first[record.id]}'
          )
        first[record.id] = where
    rows[split] = [
      {
        'id': record.id if isinstance(record, types.Task) else record.task_id,
        'kind': records.KINDS[type(record)],
        'json': records.to_json(record, where=where),
      }
      for where, record in located
    ]
  return rows


def _fingerprint(directory: epath.Path) -> str | None:
  """Of a complete dataset; None if there is none, or a part of one."""
  try:
    info = json.loads((directory / 'dataset_info.json').read_text())
    metadata = json.loads((directory / 'metadata.json').read_text())
    if not (directory / 'features.json').exists():
      return None
    for split in info['splits']:
      lengths = [int(length) for length in split['shardLengths']]
      for i, length in enumerate(lengths):
        stem = f'{info["name"]}-{split["name"]}.array_record'
        path = directory / f'{stem}-{i:05d}-of-{len(lengths):05d}'
        # A cut file opens without complaint and counts no records.
        if not path.exists() or _num_records(path) != length:
          return None
    return metadata['fingerprint']
  # RuntimeError: closing the reader of a cut file.
  except (OSError, ValueError, KeyError, TypeError, RuntimeError):
    return None


def _num_records(path: epath.Path) -> int:
  reader = array_record_module.ArrayRecordReader(os.fspath(path))
  try:
    return reader.num_records()
  finally:
    reader.close()


def _remove_half_written(directory: epath.Path, name: str) -> None:
  """Removes what a killed writer or a cut copy left, and nothing else."""
  if not directory.exists():
    return
  ours = re.compile(
    rf'(dataset_info|features|metadata)\.json|{name}-\w+\.array_record-.*'
  )
  strange = [p.name for p in directory.iterdir() if not ours.fullmatch(p.name)]
  if strange:
    raise errors.UserError(
      f'{directory} is no complete dataset and holds {sorted(strange)[:3]}: '
      'delete it, or choose another dataset name or data_dir'
    )
  logging.warning('%s was written in part; writing it again', directory)
  directory.rmtree()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """TFDS draws bars, prints to stdout and logs what is no news to a user."""
  tfds.disable_progress_bar()
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    logging.set_verbosity(verbosity)


class Records(Sequence):
  """One split of a dataset on disk, decoded record by record when asked."""

  def __init__(self, directory: epath.PathLike, split: str):
    try:
      with _quiet():
        builder = tfds.builder_from_directory(directory)
    except (OSError, ValueError) as error:
      raise errors.UserError(f'{directory} is no dataset: {error}') from error
    if split not in builder.info.splits:
      raise errors.UserError(
        f'{directory} has no split {split!r}, only {list(builder.info.splits)}'
      )
    self._source = builder.as_data_source(split)
    self._where = f'{directory} {split}'

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> records.Record:
    i = operator.index(index)
    if not -len(self) <= i < len(self):
      raise IndexError(f'{self._where}: no record {i} among {len(self)}')
    i %= len(self)
    text = self._source[i]['json'].decode('utf-8')  # Text reads as bytes
    return records.from_stored(text)
