"""Files of checklist samples: a JSON list, JSONL, or Parquet.

What a row holds is the business of `checklist_samples`; a row that is no JSON
is handed on as such, since one bad line is no reason to refuse the others. A
row is named by its file and its number: lines of JSONL count from 1 as in an
editor, rows of the other two from 0 as in a data frame.
"""

from collections.abc import Iterable, Iterator, Sequence
import io
import json
from typing import NamedTuple

from etils import epath

from envace_jax import errors, types
from envace_jax.tasks import records

SUFFIXES = ('.json', '.jsonl', '.parquet')
# Of a Parquet file nothing else is read.
COLUMNS = ('data_source', 'messages', 'extra_info')


class Row(NamedTuple):
  """A row of a file: where it stands, and what it is or why it is nothing."""

  where: str
  value: object
  fault: str = ''


def read(path: epath.PathLike) -> Iterator[Row]:
  """The rows of one file; blank lines of JSONL are skipped.

  Raises:
    UserError: the file cannot be read, has another suffix, is no JSON list or
      no Parquet, or is Parquet without pyarrow to read it.
  """
  readers = {'.json': _json, '.jsonl': _jsonl, '.parquet': _parquet}
  suffix = _suffix(path)
  try:
    content = epath.Path(path).read_bytes()
  except OSError as error:
    raise errors.UserError(f'cannot read {path}: {error}') from error
  return readers[suffix](path, content)


def located(samples: Iterable[types.Json], name: str) -> Iterator[Row]:
  """Rows of samples that stand in no file."""
  for number, value in enumerate(samples):
    yield Row(f'{name} row {number}', value)


def write(path: epath.PathLike, samples: Sequence[types.Json]) -> None:
  """Writes samples in the form that the suffix names; raises as `read`."""
  suffix = _suffix(path)
  if suffix == '.parquet':
    arrow, parquet = _pyarrow(path)
    buffer = io.BytesIO()
    try:
      parquet.write_table(arrow.Table.from_pylist(list(samples)), buffer)
    except arrow.ArrowException as error:
      raise errors.UserError(
        f'{path}: Parquet has one type a field; write check as JSON: {error}'
      ) from error
    epath.Path(path).write_bytes(buffer.getvalue())
    return
  lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
  if suffix == '.json':
    text = '[' + ',\n'.join(lines) + ']\n'
  else:
    text = ''.join(f'{line}\n' for line in lines)
  # Bytes: text mode would spell newlines as the platform does.
  epath.Path(path).write_bytes(text.encode('utf-8'))


def _suffix(path: epath.PathLike) -> str:
  suffix = epath.Path(path).suffix
  if suffix not in SUFFIXES:
    raise errors.UserError(f'{path}: samples are one of {", ".join(SUFFIXES)}')
  return suffix


def _json(path: epath.PathLike, content: bytes) -> Iterator[Row]:
  try:
    rows = records.parse_json(_decoded(content))
  except ValueError as error:
    raise errors.UserError(f'{path} is not JSON: {error}') from error
  if not isinstance(rows, list):
    raise errors.UserError(
      f'{path} is no list of samples; name it .jsonl if it has one a line'
    )
  for number, value in enumerate(rows):
    yield Row(f'{path} row {number}', value)


def _jsonl(path: epath.PathLike, content: bytes) -> Iterator[Row]:
  # Not splitlines: U+2028 may stand inside a JSON string.
  for number, line in enumerate(content.split(b'\n'), 1):
    if not line.strip():
      continue
    where = f'{path} line {number}'
    try:
      yield Row(where, records.parse_json(_decoded(line)))
    except ValueError as error:  # also what is not UTF-8
      yield Row(where, None, str(error))


def _parquet(path: epath.PathLike, content: bytes) -> Iterator[Row]:
  arrow, parquet = _pyarrow(path)
  number = 0
  try:
    file = parquet.ParquetFile(io.BytesIO(content))
    columns = [n for n in file.schema_arrow.names if n in COLUMNS]
    for batch in file.iter_batches(256, columns=columns):
      for value in batch.to_pylist():
        yield _plain(f'{path} row {number}', _without_nulls(value))
        number += 1
  except arrow.ArrowException as error:
    raise errors.UserError(f'{path} is not Parquet: {error}') from error


def _plain(where: str, value: object) -> Row:
  """A row as JSON would give it: Arrow also has bytes, dates and NaN."""
  try:
    return Row(where, records.parse_json(json.dumps(value, default=repr)))
  except ValueError as error:
    return Row(where, None, str(error))


def _pyarrow(path: epath.PathLike):
  """(pyarrow, pyarrow.parquet), which nothing else here needs."""
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as error:
    raise errors.UserError(
      f"{path}: Parquet needs pyarrow: pip install 'envace_jax[parquet]'"
    ) from error
  return pyarrow, pyarrow.parquet


def _decoded(content: bytes) -> str:
  return content.removeprefix(b'\xef\xbb\xbf').decode('utf-8')


def _without_nulls(value: object) -> object:
  """Undoes that every object has the keys of all objects of its column."""
  if isinstance(value, dict):
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}
  if isinstance(value, list):
    return [_without_nulls(item) for item in value]
  return value
