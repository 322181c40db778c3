"""config.json of a Hugging Face checkpoint <-> `TransformerConfig`.

Which fields make which architecture:

  llama        the defaults (SmolLM2 too)
  qwen2        attention_bias
  qwen3        qk_norm
  gemma3_text  qk_norm, zero-centred and post norms, GELU, scaled embeddings,
               sliding layers of their own frequency

What the transformer does not compute is refused here, by its key in the file.
`dtype`, `scan_layers`, `remat` and `max_len` are the caller's and not the
architecture's: they keep their defaults, or what fits the file.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any

from envace_jax import errors
from envace_jax.model import config as config_lib
from envace_jax.weights import rope_scalings

CLASSES = {
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
  'gemma3_text': 'Gemma3ForCausalLM',
}

# What a checkpoint decides; every other field is the caller's.
DECIDED = (
  'vocab_size', 'd_model', 'num_layers', 'num_heads', 'num_kv_heads',
  'head_dim', 'd_ff', 'rope_theta', 'rope_scaling', 'norm_eps', 'qk_norm',
  'attention_bias', 'output_bias', 'attention_scale', 'sliding_window',
  'sliding_layers', 'sliding_rope_theta', 'zero_centered_norms', 'post_norms',
  'activation', 'scale_embeddings', 'tie_embeddings',
)  # fmt: skip

_GEMMA = {
  'qk_norm': True,
  'zero_centered_norms': True,
  'post_norms': True,
  'activation': 'gelu_tanh',
  'scale_embeddings': True,
}


def read(source: Mapping[str, Any], path: Any) -> config_lib.TransformerConfig:
  """The config that a config.json (parsed, from `path`) describes."""
  if not isinstance(source, Mapping):
    raise errors.UserError(f'{path} must hold a JSON object')
  kind = source.get('model_type')
  if not isinstance(kind, str) or kind not in CLASSES:
    raise errors.UserError(
      f'{path}: model_type={kind!r} is not one of {sorted(CLASSES)}; '
      'load a checkpoint of one of these architectures'
    )
  _refuse_unsupported(source, kind, path)
  try:
    need = lambda key: _whole(source, key, path)
    heads = need('num_attention_heads')
    layers = need('num_hidden_layers')
    d_model = need('hidden_size')
    gemma = kind == 'gemma3_text'
    bias = bool(source.get('attention_bias', False))
    max_len = int(source.get('max_position_embeddings') or 4096)
    return config_lib.TransformerConfig(
      vocab_size=need('vocab_size'),
      d_model=d_model,
      num_layers=layers,
      num_heads=heads,
      num_kv_heads=int(source.get('num_key_value_heads') or heads),
      head_dim=int(source.get('head_dim') or _default_head_dim(kind, source)),
      d_ff=need('intermediate_size'),
      norm_eps=float(source.get('rms_norm_eps') or 1e-6),
      attention_bias=bias or kind == 'qwen2',
      output_bias=bias,
      tie_embeddings=bool(source.get('tie_word_embeddings', gemma)),
      max_len=max_len,
      **_rotations(source, kind, max_len, path),
      **_sliding(source, kind, layers, path),
      **(_GEMMA if gemma else {'qk_norm': kind == 'qwen3'}),
      **(
        {'attention_scale': float(source['query_pre_attn_scalar']) ** -0.5}
        if gemma and source.get('query_pre_attn_scalar')
        else {'attention_scale': 256**-0.5 if gemma else None}
      ),
    )
  except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
    raise errors.UserError(
      f'{path} describes no model that can be built: {error}'
    ) from error


def model_type(config: config_lib.TransformerConfig) -> str:
  """The architecture that computes what `config` says, and nothing else."""
  c = config
  gemma = {name: getattr(c, name) for name in _GEMMA}
  plain = not any(
    gemma[n] for n in _GEMMA if n not in ('activation', 'qk_norm')
  )
  plain = plain and c.activation == 'silu' and c.attention_scale is None
  plain = plain and c.sliding_rope_theta is None
  both = c.attention_bias == c.output_bias
  whole = c.d_model % c.num_heads == 0  # their classes insist on it
  # A file of theirs has the scale as 1 / sqrt(a whole number).
  scale = c.attention_scale or c.head_dim**-0.5
  whole = whole and math.isclose(round(scale**-2) * scale**2, 1.0)
  if gemma == _GEMMA and c.sliding_layers and both and whole:
    return 'gemma3_text'
  if plain and c.qk_norm and both:
    return 'qwen3'
  if plain and not c.qk_norm and c.attention_bias and not c.output_bias:
    return 'qwen2'
  if plain and not c.qk_norm and both and whole and not c.sliding_layers:
    return 'llama'
  raise errors.UserError(
    'no Hugging Face architecture of '
    f'{sorted(CLASSES)} computes this model ({_unusual(c)}); export needs a '
    'model with the fields of one of them'
  )


def write(config: config_lib.TransformerConfig, dtype: str) -> dict[str, Any]:
  """The config.json of `config`, in the keys that old readers know as well."""
  c, kind = config, model_type(config)
  gemma = kind == 'gemma3_text'
  written = {
    'architectures': [CLASSES[kind]],
    'model_type': kind,
    'vocab_size': c.vocab_size,
    'hidden_size': c.d_model,
    'num_hidden_layers': c.num_layers,
    'num_attention_heads': c.num_heads,
    'num_key_value_heads': c.num_kv_heads,
    'head_dim': c.head_dim,
    'intermediate_size': c.d_ff,
    'rms_norm_eps': c.norm_eps,
    'rope_theta': c.rope_theta,
    'rope_scaling': rope_scalings.write(c.rope_scaling),
    'tie_word_embeddings': c.tie_embeddings,
    'max_position_embeddings': c.max_len,
    'torch_dtype': dtype,
    'hidden_activation' if gemma else 'hidden_act': (
      'gelu_pytorch_tanh' if gemma else 'silu'
    ),
  }
  if kind != 'qwen2':
    written['attention_bias'] = c.attention_bias
  if kind != 'llama':
    written['sliding_window'] = c.sliding_window or None
    written['layer_types'] = [
      'sliding_attention' if i in c.sliding_layers else 'full_attention'
      for i in range(c.num_layers)
    ]
  if gemma:
    scale = c.attention_scale or c.head_dim**-0.5
    written['query_pre_attn_scalar'] = round(scale**-2)
    local = c.sliding_rope_theta or c.rope_theta
    written['rope_local_base_freq'] = local
  elif kind != 'llama':
    written['use_sliding_window'] = bool(c.sliding_layers)
  return written


def check_same(
  wanted: config_lib.TransformerConfig,
  found: config_lib.TransformerConfig,
  path: Any,
) -> None:
  """Refuses a model whose architecture is not the file's."""
  for name in DECIDED:
    want, have = getattr(wanted, name), getattr(found, name)
    if want != have:
      raise errors.UserError(
        f'model.{name}={want!r} but {path} has {have!r}; '
        "take the architecture from the checkpoint's config"
      )


def _default_head_dim(kind, source) -> int:
  if kind == 'qwen3':
    return 128
  if kind == 'gemma3_text':
    return 256
  return int(source['hidden_size']) // int(source['num_attention_heads'])


def _whole(source, key, path) -> int:
  value = source.get(key)
  if isinstance(value, bool) or not isinstance(value, int):
    raise errors.UserError(
      f'{path}: {key}={value!r} must be a whole number; the file is not a '
      'complete config.json of a causal language model'
    )
  return value


def _refuse_unsupported(source, kind, path) -> None:
  act = source.get('hidden_activation') or source.get('hidden_act')
  known = 'gelu_pytorch_tanh' if kind == 'gemma3_text' else 'silu'
  wrong = {
    'hidden_act': act if act not in (None, known) else None,
    **{
      key: source.get(key)
      for key in (
        'mlp_bias',
        'final_logit_softcapping',
        'attn_logit_softcapping',
        'use_bidirectional_attention',
        'quantization_config',
      )
    },
  }
  factor = source.get('partial_rotary_factor')
  wrong['partial_rotary_factor'] = None if factor == 1 else factor
  for key, value in wrong.items():
    if value:
      raise errors.UserError(
        f'{path}: {key}={json.dumps(value)} is not supported for {kind}; '
        'load a checkpoint without it'
      )


def _rotations(source, kind, max_len, path) -> dict[str, Any]:
  """rope_theta, rope_scaling and sliding_rope_theta, from old or new keys."""
  new = source.get('rope_parameters') or {}
  old = source.get('rope_scaling') or {}
  if not isinstance(new, Mapping) or not isinstance(old, Mapping):
    raise errors.UserError(f'{path}: rope_scaling must be an object or null')
  original = source.get('original_max_position_embeddings')
  scaling = lambda table: rope_scalings.read(table, original, max_len, path)
  if kind != 'gemma3_text':
    table = {**old, **new}
    theta = table.get('rope_theta', source.get('rope_theta', 10_000.0))
    return {'rope_theta': float(theta), 'rope_scaling': scaling(table)}
  full = {**old, **(new.get('full_attention') or {})}
  local = new.get('sliding_attention') or {}
  if scaling(local) is not None:
    raise errors.UserError(
      f'{path}: rope scaling of sliding layers is not supported; '
      'load a checkpoint that scales its full layers only'
    )
  theta = full.get('rope_theta', source.get('rope_theta', 1_000_000.0))
  local_theta = local.get(
    'rope_theta', source.get('rope_local_base_freq', 10_000.0)
  )
  return {
    'rope_theta': float(theta),
    'rope_scaling': scaling(full),
    'sliding_rope_theta': float(local_theta),
  }


def _sliding(source, kind, layers, path) -> dict[str, Any]:
  """sliding_window and sliding_layers."""
  types, window = source.get('layer_types'), source.get('sliding_window')
  if kind == 'llama':
    if window:
      raise errors.UserError(
        f'{path}: sliding_window={window} is not supported for llama; '
        'load a checkpoint without it'
      )
    return {}
  if kind != 'gemma3_text' and not source.get('use_sliding_window'):
    return {}
  if types is None and kind == 'gemma3_text':
    period = int(source.get('sliding_window_pattern') or 6)
    slides = [bool((i + 1) % period) for i in range(layers)]
  elif types is None:
    first = int(source.get('max_window_layers', 28))
    slides = [i >= first for i in range(layers)]
  else:
    slides = [kind_of_layer == 'sliding_attention' for kind_of_layer in types]
    unknown = set(types) - {'sliding_attention', 'full_attention'}
    if unknown or len(types) != layers:
      raise errors.UserError(
        f'{path}: layer_types must name {layers} layers, each '
        f'full_attention or sliding_attention; it has {len(types)} of '
        f'{sorted(set(types))}'
      )
  if not any(slides):
    return {'sliding_rope_theta': None} if kind == 'gemma3_text' else {}
  return {
    'sliding_window': int(window or 4096),
    'sliding_layers': tuple(i for i in range(layers) if slides[i]),
  }


def _unusual(config) -> str:
  """The architecture's fields that are not at their defaults."""
  defaults = {f.name: f.default for f in dataclasses.fields(config)}
  return ', '.join(
    f'{name}={getattr(config, name)!r}'
    for name in DECIDED
    if defaults[name] is not dataclasses.MISSING
    and getattr(config, name) != defaults[name]
  )
