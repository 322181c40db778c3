"""Where tasks and demonstrations come from, and in which order.

A record is a `types.Task` or a `types.Demonstration`. It has one JSON form
(`SCHEMAS`; `to_json` and `from_json` are inverse), one file form for people
(JSONL, a record a line) and one for machines (a TFDS dataset in ArrayRecord,
read by random access and without tensorflow). `Order` says which record stands
at which position of an endless stream of epochs. It is a function, so the only
state of the data is one integer, the cursor, and resume is exact.

JSON is read strictly: NaN, infinities, duplicate keys, lone surrogates and
trailing text are errors that name the record and the field. Declared sequences
come back as tuples, arrays inside free JSON (arguments, environment) as lists.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import enum
import functools
import hashlib
import io
import json
import math
import operator
import os
import re

from absl import logging
from array_record.python import array_record_module
from etils import epath
import jsonschema
import numpy as np
import tensorflow_datasets as tfds

from envace_jax import errors, types

Record = types.Task | types.Demonstration
Located = tuple[str, Record]  # where it was found, for messages

_TEXT = {'type': 'string'}
_NAME = {'type': 'string', 'minLength': 1}
_FREE = {'type': 'object'}  # any JSON object


def _array(items: types.Json) -> types.Json:
  return {'type': 'array', 'items': items}


def _object(required: types.Json, optional: types.Json) -> types.Json:
  """A closed object: an unknown key is a spelling mistake."""
  return {
    'type': 'object',
    'properties': {**required, **optional},
    'required': list(required),
    'additionalProperties': False,
  }


_CALL = _object({'name': _NAME, 'arguments': _FREE}, {})
_CRITERION = _object(
  {'id': _NAME, 'question': _TEXT, 'check': _FREE},
  {
    'weight': {'type': 'number', 'minimum': 0, 'maximum': 1e6},
    'focus_on': {'enum': ['tool_calls', 'tool.content', 'reply', 'state']},
    'required': {'type': 'boolean'},
    'required_for_next_turn': {'type': 'boolean'},
    'pass_condition': _TEXT,
    'failure_examples': _array(_TEXT),
    'evidence': _TEXT,
  },
)
_STEP = _object(
  {
    'action': {
      'type': 'object',
      # A call, or why the text was none.
      'if': {'required': ['name']},
      'then': _CALL,
      'else': _object({'kind': _NAME, 'detail': _TEXT}, {}),
    },
    'action_text': _TEXT,
    'observation_text': _TEXT,
  },
  {'author': {'enum': [author.name for author in types.Author]}},
)
_TOOL = {
  'type': 'object',
  'properties': {
    'type': {'const': 'function'},
    'function': {
      'type': 'object',
      'properties': {'name': _NAME, 'parameters': _FREE},
      'required': ['name'],
    },
  },
  'required': ['type', 'function'],
}

# kind -> JSON Schema of a record. Absent optional keys have types' defaults.
SCHEMAS = {
  'task': _object(
    {
      'kind': {'const': 'task'},
      'id': {**_NAME, 'description': 'unique in a dataset, over all splits'},
      'instruction': {**_NAME, 'description': "the user's first message"},
      'tools': {**_array(_TOOL), 'description': 'OpenAI function schemas'},
      'checklist': {**_array(_CRITERION), 'description': 'trained on'},
    },
    {
      'evaluation': {**_array(_CRITERION), 'description': 'never trained on'},
      'environment': {**_FREE, 'description': 'for the real environment'},
      'family': _TEXT,
      'plan': {**_array(_CALL), 'description': 'an oracle solution'},
      'plan_reply': _TEXT,
      'user_turns': _array(_TEXT),
    },
  ),
  'demonstration': _object(
    {
      'kind': {'const': 'demonstration'},
      'task_id': _NAME,
      'instruction': _NAME,
      'steps': _array(_STEP),
      'reply': _TEXT,
    },
    {'notes': _TEXT, 'habit': _TEXT, 'tools': _array(_TOOL)},
  ),
}
_VALIDATORS = {
  kind: jsonschema.Draft202012Validator(schema)
  for kind, schema in SCHEMAS.items()
}
_KINDS = {types.Task: 'task', types.Demonstration: 'demonstration'}


def to_json(record: Record, *, where: str = 'record') -> str:
  """One line of JSON; `where` opens the message of an error."""
  kind = _KINDS[type(record)]
  try:
    value = {'kind': kind, **_plain(record)}
    _validate(value)
    return json.dumps(value, ensure_ascii=False)
  except (ValueError, RecursionError) as error:
    raise errors.UserError(f'{where}, {_label(record)}: {error}') from error


def from_json(text: str, *, where: str = 'record') -> Record:
  """Inverse of `to_json`; raises UserError for anything else."""
  value = None
  try:
    value = parse_json(text)
    _validate(value)
    return _record(_plain(value))
  except (ValueError, RecursionError) as error:
    who = f'{where}, {_label(value)}' if _label(value) else where
    raise errors.UserError(f'{who}: {error}') from error


def _record(value: types.Json) -> Record:
  """A record from its plain form, which somebody has validated."""
  return _task(value) if value['kind'] == 'task' else _demonstration(value)


def parse_json(text: str) -> object:
  """Strict JSON: what `json.loads` forgives is a ValueError here."""

  def unique(pairs):
    value = dict(pairs)
    if len(value) != len(pairs):
      raise ValueError(f'an object repeats a key: {[k for k, _ in pairs]}')
    return value

  def finite(literal):
    if not math.isfinite(float(literal)):
      raise ValueError(f'{literal} is not a finite number')
    return float(literal)

  try:
    return json.loads(
      text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite
    )
  except RecursionError as error:
    raise ValueError('JSON is nested too deeply') from error


def read_jsonl(path: epath.PathLike) -> list[Record]:
  """The records of a UTF-8 file, one a line; blank lines are skipped."""
  return [record for _, record in _read_jsonl(path)]


def _read_jsonl(path: epath.PathLike) -> list[Located]:
  try:
    content = epath.Path(path).read_bytes()
  except OSError as error:
    raise errors.UserError(f'cannot read {path}: {error}') from error
  located = []
  # Not splitlines: U+2028 may stand inside a JSON string.
  lines = content.removeprefix(b'\xef\xbb\xbf').split(b'\n')
  for number, line in enumerate(lines, 1):
    where = f'{path} line {number}'
    if line.strip():
      try:
        text = line.decode('utf-8')
      except UnicodeDecodeError as error:
        raise errors.UserError(f'{where}: not UTF-8: {error}') from error
      located.append((where, from_json(text, where=where)))
  return located


def _label(record: Record | object) -> str:
  """The record's own name, as far as there is one."""
  if isinstance(record, Record):
    record = {'kind': _KINDS[type(record)], **vars(record)}
  if not isinstance(record, dict):
    return ''
  name = record.get('id') or record.get('task_id')
  return f'{record.get("kind", "record")} {name!r}' if name else ''


def _validate(value: object) -> None:
  """Raises ValueError '<field>: <what is wrong>'."""
  kind = value.get('kind') if isinstance(value, dict) else None
  if not isinstance(kind, str) or kind not in SCHEMAS:
    raise ValueError(f'an object with kind in {list(SCHEMAS)} is needed')
  tools = value.get('tools')
  if isinstance(tools, list) and _are_tools(json.dumps(tools)):
    value = {**value, 'tools': []}  # the same few tools in every record
  error = jsonschema.exceptions.best_match(_VALIDATORS[kind].iter_errors(value))
  if error is not None:
    path = error.json_path.removeprefix('$').removeprefix('.')
    text = error.message
    short = text if len(text) <= 200 else f'{text[:100]} ... {text[-90:]}'
    raise ValueError(f'{path or "record"}: {short}')
  for field in ('checklist', 'evaluation'):
    ids = [criterion['id'] for criterion in value.get(field, ())]
    if repeated := {i for i in ids if ids.count(i) > 1}:
      raise ValueError(f'{field}: criterion ids {sorted(repeated)} repeat')


@functools.lru_cache(64)
def _are_tools(text: str) -> bool:
  """Whether a JSON array is a legal `tools` field."""
  schema = SCHEMAS['task']['properties']['tools']
  return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def _plain(
  value: object, path: str = '', key: str | int | None = None
) -> types.Json | list | str | float | None:
  """Plain JSON values, or a ValueError that names the field path + key.

  The bulk of a task is ASCII: it goes first, and paths are spelled late.
  """
  if type(value) is str and value.isascii():
    return value
  if value is None or type(value) in (bool, int):
    return value
  if key is not None:
    path += f'[{key}]' if isinstance(key, int) else f'.{key}'
  where = path.lstrip('.')
  if dataclasses.is_dataclass(value):
    value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
  if isinstance(value, Mapping):
    for k in value:
      if not isinstance(k, str):
        raise ValueError(f'{where}: key {k!r} is not a string')
      _plain(k, path, 'key')
    return {k: _plain(item, path, k) for k, item in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(item, path, i) for i, item in enumerate(value)]
  if isinstance(value, types.Author):
    return value.name
  if isinstance(value, str):
    try:
      value.encode('utf-8')
    except UnicodeEncodeError as error:
      raise ValueError(f'{where}: lone surrogate: {error}') from error
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f'{where}: {value} is not a finite number')
  if isinstance(value, enum.Enum) or not isinstance(value, str | int | float):
    raise ValueError(f'{where}: {type(value).__name__} has no JSON form')
  return value


def _criterion(value: types.Json) -> types.Criterion:
  examples = tuple(value.get('failure_examples', ()))
  weight = float(value.get('weight', 1.0))
  return types.Criterion(
    **{**value, 'failure_examples': examples, 'weight': weight}
  )


def _step(value: types.Json) -> types.Step:
  action = value['action']
  make = types.ToolCall if 'name' in action else types.ParseError
  author = types.Author[value.get('author', 'WORLD')]
  return types.Step(**{**value, 'action': make(**action), 'author': author})


def _fields(value: types.Json, **make) -> dict:
  """Keyword arguments, each array mapped over by its `make`."""
  made = {k: tuple(map(f, value[k])) for k, f in make.items() if k in value}
  return {k: v for k, v in value.items() if k != 'kind'} | made


def _task(value: types.Json) -> types.Task:
  return types.Task(
    **_fields(
      value,
      tools=dict,
      checklist=_criterion,
      evaluation=_criterion,
      plan=lambda call: types.ToolCall(**call),
      user_turns=str,
    )
  )


def _demonstration(value: types.Json) -> types.Demonstration:
  return types.Demonstration(**_fields(value, steps=_step, tools=dict))


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
  data_dir: epath.PathLike, name: str, splits: Mapping[str, Iterable[Record]]
) -> str:
  """Writes, or finds again, a dataset; returns the directory to read from."""
  located = {
    split: [
      (f'{name}/{split}[{i}]', record) for i, record in enumerate(records)
    ]
    for split, records in splits.items()
  }
  return _write(data_dir, name, located)


def write_dataset_from_jsonl(
  data_dir: epath.PathLike, name: str, paths: Mapping[str, epath.PathLike]
) -> str:
  """`write_dataset` for files in the form of `SCHEMAS`, one per split."""
  return _write(data_dir, name, {s: _read_jsonl(p) for s, p in paths.items()})


def _write(
  data_dir: epath.PathLike, name: str, splits: Mapping[str, list[Located]]
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
  name: str, splits: Mapping[str, list[Located]]
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
        'kind': _KINDS[type(record)],
        'json': to_json(record, where=where),
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

  def __getitem__(self, index: int) -> Record:
    i = operator.index(index)
    if not -len(self) <= i < len(self):
      raise IndexError(f'{self._where}: no record {i} among {len(self)}')
    i %= len(self)
    text = self._source[i]['json'].decode('utf-8')  # Text reads as bytes
    return _record(json.loads(text))  # validated when it was written


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupBatch:
  """Rows of one train step on one process; `groups` and samples are global."""

  records: np.ndarray  # [B] int64, index of the row's record
  groups: np.ndarray  # [B] int64, which prompt of the whole batch
  sample_indices: np.ndarray  # [B] int64, unique over all processes
  next_cursor: int  # where the following step starts


class Order:
  """Position -> record index: each epoch a fresh permutation.

  The cursor counts records handed out to all processes together. It moves by
  the global batch size whatever becomes of the episodes, so it is the only
  state. A batch may span two epochs and then hold a record twice.
  """

  def __init__(self, num_records: int, seed: int):
    if num_records < 1:
      raise ValueError(f'num_records={num_records}: an order needs a record')
    if not 0 <= seed < 2**32:
      raise ValueError(f'seed={seed} must lie in [0, 2**32)')
    self.num_records = num_records
    self.seed = seed

  @functools.cached_property
  def _positions(self):
    # Here, because grain loads jax and this module must not.
    import grain

    source = grain.MapDataset.source(range(self.num_records))
    return source.seed(self.seed).shuffle().repeat()

  def batch_indices(
    self, cursor: int, batch_size: int, *, process: int = 0, num_processes=1
  ) -> np.ndarray:
    """This process's contiguous part of the global batch at `cursor`."""
    if cursor < 0 or batch_size < 1 or not 0 <= process < num_processes:
      raise ValueError(f'{cursor=} {batch_size=} {process=} {num_processes=}')
    if batch_size % num_processes:
      raise ValueError(f'{batch_size=} must be a multiple of {num_processes=}')
    local = batch_size // num_processes
    start = cursor + process * local
    return np.array(
      [self._positions[start + i] for i in range(local)], np.int64
    )

  def group_batches(
    self,
    cursor: int,
    *,
    groups: int,
    group_size: int,
    process: int = 0,
    num_processes: int = 1,
  ) -> Iterator[GroupBatch]:
    """Endless batches of `groups` records (global), each `group_size` times."""
    if group_size < 1:
      raise ValueError(f'group_size={group_size} must be positive')
    while True:
      indices = self.batch_indices(
        cursor, groups, process=process, num_processes=num_processes
      )
      first = process * len(indices) * group_size
      samples = first + np.arange(len(indices) * group_size)
      cursor += groups
      yield GroupBatch(
        records=np.repeat(indices, group_size),
        groups=samples // group_size,
        sample_indices=samples,
        next_cursor=cursor,
      )
