"""Names and layouts of tensors in files, beside our parameters.

  file   model.layers.3.self_attn.q_proj.weight  [N * H, D]    (out, in)
  ours   layers_3 / attention / wq               [D, N, H]     (in..., out...)

A matrix in a file is out x in and ours is in x out, so one is the other's
transpose with an axis split. Where layers are stacked, all tensors of one kind
go to one parameter with a leading layer axis.
"""

import dataclasses
import math

import numpy as np

from envace_jax.model import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
  """A parameter of one layer, or of the whole network."""

  path: tuple[str, ...]  # within its layer, where `layered`
  shape: tuple[int, ...]  # ours, without a layer axis
  num_inputs: int  # leading axes that are inputs; 0: stored as it is
  layered: bool
  hf: str  # names in files, with {i} for the layer
  gguf: str

  @property
  def stored_shape(self) -> tuple[int, ...]:
    n = self.num_inputs
    if n:
      return (math.prod(self.shape[n:]), math.prod(self.shape[:n]))
    return (
      self.shape if self.path == ('embedding',) else (math.prod(self.shape),)
    )

  def from_file(self, stored: np.ndarray) -> np.ndarray:
    """A view of a stored tensor in our layout."""
    return (stored.T if self.num_inputs else stored).reshape(self.shape)

  def to_file(self, ours: np.ndarray) -> np.ndarray:
    """A tensor of ours as files store it."""
    shape = self.stored_shape
    if self.num_inputs:
      ours = ours.reshape(shape[::-1]).T
    return np.ascontiguousarray(ours.reshape(shape))


def parameters(config: config_lib.TransformerConfig) -> tuple[Parameter, ...]:
  """Every parameter of the model, once whatever the number of layers."""
  c = config
  V, D, F, H = c.vocab_size, c.d_model, c.d_ff, c.head_dim
  N, K = c.num_heads, c.num_kv_heads

  def whole(path, shape, num_inputs, hf, gguf):
    return Parameter(
      path=path,
      shape=shape,
      num_inputs=num_inputs,
      layered=False,
      hf=f'{hf}.weight',
      gguf=f'{gguf}.weight',
    )

  def layer(path, shape, num_inputs, hf, gguf, kind='weight'):
    return Parameter(
      path=tuple(path.split('/')),
      shape=shape,
      num_inputs=num_inputs,
      layered=True,
      hf=f'model.layers.{{i}}.{hf}.{kind}',
      gguf=f'blk.{{i}}.{gguf}.{kind}',
    )

  found = [
    whole(('embedding',), (V, D), 0, 'model.embed_tokens', 'token_embd'),
    whole(('final_norm', 'scale'), (D,), 0, 'model.norm', 'output_norm'),
  ]
  if not c.tie_embeddings:
    found.append(whole(('unembedding',), (D, V), 1, 'lm_head', 'output'))
  for letter, heads in (('q', N), ('k', K), ('v', K)):
    hf, gguf = f'self_attn.{letter}_proj', f'attn_{letter}'
    path = f'attention/w{letter}'
    found.append(layer(path, (D, heads, H), 1, hf, gguf))
    if c.attention_bias:
      found.append(layer(f'{path}_bias', (heads, H), 0, hf, gguf, 'bias'))
  hf, gguf = 'self_attn.o_proj', 'attn_output'
  found.append(layer('attention/wo', (N, H, D), 2, hf, gguf))
  if c.output_bias:
    found.append(layer('attention/wo_bias', (D,), 0, hf, gguf, 'bias'))
  if c.qk_norm:
    for letter in 'qk':
      path = f'attention/{letter}_norm/scale'
      hf, gguf = f'self_attn.{letter}_norm', f'attn_{letter}_norm'
      found.append(layer(path, (H,), 0, hf, gguf))
  for name, inputs, outputs in (('gate', D, F), ('up', D, F), ('down', F, D)):
    hf, gguf = f'mlp.{name}_proj', f'ffn_{name}'
    found.append(layer(f'mlp/w_{name}', (inputs, outputs), 1, hf, gguf))
  for path, hf, gguf in _norms(c.post_norms):
    found.append(layer(f'{path}/scale', (D,), 0, hf, gguf))
  return tuple(found)


def tree_paths(
  parameter: Parameter, config: config_lib.TransformerConfig
) -> list[tuple[str, ...]]:
  """Where it stands in the parameter tree: once, or once per layer."""
  if not parameter.layered:
    return [parameter.path]
  if config.scan_layers:
    return [('layers', *parameter.path)]
  return [(f'layers_{i}', *parameter.path) for i in range(config.num_layers)]


def _norms(post_norms: bool):
  """(our path, Hugging Face name, GGUF name) of the norms around branches."""
  if not post_norms:
    # Before the mlp, in spite of its name in files.
    return (
      ('attention_norm', 'input_layernorm', 'attn_norm'),
      ('mlp_norm', 'post_attention_layernorm', 'ffn_norm'),
    )
  return (
    ('attention_norm', 'input_layernorm', 'attn_norm'),
    ('attention_post_norm', 'post_attention_layernorm', 'post_attention_norm'),
    ('mlp_norm', 'pre_feedforward_layernorm', 'ffn_norm'),
    ('mlp_post_norm', 'post_feedforward_layernorm', 'post_ffw_norm'),
  )
