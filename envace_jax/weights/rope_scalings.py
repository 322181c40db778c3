"""The `rope_scaling` table of a config.json <-> `RopeScaling`."""

from collections.abc import Mapping
import math
from typing import Any

from envace_jax import errors
from envace_jax.model import rope


def read(
  table: Mapping[str, Any], original: int | None, max_len: int, path: Any
) -> rope.RopeScaling | None:
  """What a table in the file at `path` asks for; None: nothing."""
  kind = table.get('rope_type', table.get('type', 'default'))
  if kind == 'default':
    return None
  if kind not in rope.KINDS:
    raise errors.UserError(
      f'{path}: rope scaling type {kind!r} is not one of '
      f'{["default", *rope.KINDS]}; load a checkpoint with one of these'
    )
  original = table.get('original_max_position_embeddings', original) or max_len
  factor = table.get('factor')
  if factor is None and kind == 'yarn':
    factor = max_len / original
  if factor is None:
    raise errors.UserError(f'{path}: rope scaling {kind!r} needs a factor')
  if kind == 'linear':
    return rope.RopeScaling(kind=kind, factor=float(factor))
  if kind == 'llama3':
    return rope.RopeScaling(
      kind=kind,
      factor=float(factor),
      original_max_len=int(original),
      low_freq_factor=float(table.get('low_freq_factor', 1.0)),
      high_freq_factor=float(table.get('high_freq_factor', 4.0)),
    )
  return rope.RopeScaling(
    kind=kind,
    factor=float(factor),
    original_max_len=int(original),
    beta_fast=float(table.get('beta_fast') or 32.0),
    beta_slow=float(table.get('beta_slow') or 1.0),
    attention_factor=_attention_factor(table, float(factor)),
    truncate=bool(table.get('truncate', True)),
  )


def write(scaling: rope.RopeScaling | None) -> dict[str, Any] | None:
  """The table that `read` reads back."""
  if scaling is None:
    return None
  fields = {'rope_type': scaling.kind, 'factor': scaling.factor}
  if scaling.kind == 'linear':
    return fields
  fields['original_max_position_embeddings'] = scaling.original_max_len
  names = {
    'llama3': ('low_freq_factor', 'high_freq_factor'),
    'yarn': ('beta_fast', 'beta_slow', 'attention_factor', 'truncate'),
  }[scaling.kind]
  return fields | {name: getattr(scaling, name) for name in names}


def _attention_factor(table, factor: float) -> float:
  """Of sine and cosine: as the file says, or 0.1 ln(factor) + 1."""

  def magnitude(weight):
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

  if table.get('attention_factor') is not None:
    return float(table['attention_factor'])
  if table.get('mscale') and table.get('mscale_all_dim'):
    return magnitude(table['mscale']) / magnitude(table['mscale_all_dim'])
  return magnitude(1.0)
