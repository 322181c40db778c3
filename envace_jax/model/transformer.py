"""The policy network.

  variables = lora.variables(params)
  hidden_BTD, cache = model.apply(variables, tokens_BT, ...)
  logits_BTV = model.apply(variables, hidden_BTD, method='unembed')

`params` are those of a whole network, or a frozen one with adapters.

One function, two ways to run it. Without a cache: causal attention over the
row, layers scanned or unrolled, optionally rematerialised; this is training.
With a cache: tokens are written at their positions and attend to every slot
up to their own; layers are always unrolled, whatever `scan_layers` says,
because a scan over layers copies the whole cache at each step.

Not here: log-probabilities, sampling, losses, sharded initialisation.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from envace_jax.model import config as config_lib
from envace_jax.model import kv_cache, layers, lora, visibility

Params = Mapping[str, Any]


class Transformer(nn.Module):
  """Decoder-only transformer."""

  config: config_lib.TransformerConfig

  def setup(self):
    c = self.config
    self.embedding = self.param(
      'embedding',
      layers.partitioned_normal(c.d_model**-0.5, ('vocab', 'embed')),
      (c.vocab_size, c.d_model),
    )
    if not c.tie_embeddings:
      self.unembedding = self.param(
        'unembedding',
        layers.partitioned_normal(c.d_model**-0.5, ('embed', 'vocab')),
        (c.d_model, c.vocab_size),
      )
    block = layers.Block
    if c.remat:
      block = nn.remat(block, prevent_cse=not c.scan_layers)
    if c.scan_layers:
      self.layers = nn.scan(
        block,
        variable_axes={'params': 0, lora.COLLECTION: 0},
        split_rngs={'params': True},
        # One flag per layer: does it slide. All else is shared.
        in_axes=(nn.broadcast,) * 4 + (0, nn.broadcast),
        length=c.num_layers,
        metadata_params={nn.PARTITION_NAME: 'layers'},
      )(c)
    else:
      self.layers = [block(c) for _ in range(c.num_layers)]
    self.final_norm = layers.RMSNorm(
      c.norm_eps, zero_centered=c.zero_centered_norms
    )

  def __call__(
    self,
    tokens_BT: jax.Array,
    positions_BT: jax.Array | None = None,
    cache: kv_cache.KVCache | None = None,
    valid_BT: jax.Array | None = None,
  ) -> tuple[jax.Array, kv_cache.KVCache | None]:
    """Final hidden states, and the cache with these tokens added to it.

    Args:
      tokens_BT: int ids. An id outside the vocabulary gives NaN, not a guess.
      positions_BT: default 0, 1, ... without a cache, and from `length_b` on
        with one. With a cache the valid tokens of a row must continue it.
        Without one, positions that start again start another transcript: a
        token attends within its own only.
      cache: attend to this cache. A token whose position is past its capacity
        is not stored; `length` still counts it, so overflow is visible.
      valid_BT: False for padding: never attended to and never stored. The
        hidden states of padding are finite and mean nothing.
    """
    c = self.config
    B, T = tokens_BT.shape
    if T > c.max_len:
      raise ValueError(
        f'rows of {T} tokens exceed model.max_len={c.max_len}; '
        'raise max_len or shorten the rows'
      )
    if positions_BT is None:
      start_B = jnp.zeros((B,), jnp.int32) if cache is None else cache.length
      positions_BT = start_B[:, None] + jnp.arange(T)[None, :]
    # Gathering from a table sharded on both axes would replicate it whole.
    table_VD = nn.with_logical_constraint(
      self.embedding, ('vocab', 'act_embed')
    )
    x_BTD = jnp.take(table_VD, tokens_BT, axis=0).astype(c.compute_dtype)
    if c.scale_embeddings:
      x_BTD = x_BTD * jnp.asarray(c.d_model**0.5, x_BTD.dtype)
    x_BTD = layers.constrain(x_BTD)
    if cache is None:
      x_BTD = self._read_row(x_BTD, positions_BT, valid_BT)
    else:
      x_BTD, cache = self._read_cache(x_BTD, positions_BT, cache, valid_BT)
    return self.final_norm(x_BTD), cache

  def unembed(self, hidden_BTD: jax.Array) -> jax.Array:
    """Logits over the vocabulary, in float32."""
    c = self.config
    if c.tie_embeddings:
      table_DV = self.embedding.T
    else:
      table_DV = self.unembedding
    table_DV = nn.with_logical_constraint(table_DV, ('act_embed', 'vocab'))
    logits_BTV = jnp.einsum(
      'BTD,DV->BTV',
      hidden_BTD.astype(c.compute_dtype),
      table_DV.astype(c.compute_dtype),
      preferred_element_type=jnp.float32,
    )
    return nn.with_logical_constraint(logits_BTV, ('batch', 'time', 'vocab'))

  def _read_row(self, x_BTD, positions_BT, valid_BT):
    c = self.config
    full, sliding = visibility.of_row(
      c, positions_BT, valid_BT, rows=x_BTD.shape[0]
    )
    if c.scan_layers:
      is_sliding_L = None
      if sliding is not None:
        is_sliding_L = jnp.isin(
          jnp.arange(c.num_layers), jnp.asarray(c.sliding_layers)
        )
      return self.layers(x_BTD, *full, None, None, is_sliding_L, sliding)[0]
    for i, layer in enumerate(self.layers):
      x_BTD, _ = layer(x_BTD, *(sliding if i in c.sliding_layers else full))
    return x_BTD

  def _read_cache(self, x_BTD, positions_BT, cache, valid_BT):
    c = self.config
    if self.is_initializing():
      raise ValueError('initialise the model without a cache')
    variables = nn.meta.unbox(self.variables)
    slots_BT = kv_cache.write_slots(positions_BT, valid_BT, cache.capacity)
    full, sliding = visibility.of_cache(c, positions_BT, cache.capacity)
    keys, values = [], []
    for i in range(c.num_layers):
      x_BTD, (k_BKHS, v_BKSH) = layers.Block(c, parent=None).apply(
        {name: layer_params(tree, i) for name, tree in variables.items()},
        x_BTD,
        *(sliding if i in c.sliding_layers else full),
        (cache.k[i], cache.v[i]),
        slots_BT,
      )
      keys.append(k_BKHS)
      values.append(v_BKSH)
    T = x_BTD.shape[1]
    added_B = T if valid_BT is None else jnp.sum(valid_BT, axis=1)
    return x_BTD, kv_cache.KVCache(
      k=tuple(keys),
      v=tuple(values),
      length=(cache.length + added_B).astype(jnp.int32),
    )


def init_partitioned(model: Transformer, key: jax.Array) -> Params:
  """Fresh parameters, each boxed with its logical axis names.

  Drawn in the stacked layout whatever `scan_layers` says: a key then gives
  the same network in both, and the program holds one layer's draws instead of
  every layer's, each about a second of compilation on a CPU.
  """
  stacked = Transformer(dataclasses.replace(model.config, scan_layers=True))
  params = stacked.init(key, jnp.zeros((1, 1), jnp.int32))['params']
  return _in_layout(model, params)


def init_trained(model: Transformer, key: jax.Array) -> Params:
  """What training starts from, boxed: a whole network, or its adapters."""
  if model.config.lora is None:
    return init_partitioned(model, key)
  stacked = Transformer(dataclasses.replace(model.config, scan_layers=True))
  base = jax.eval_shape(lambda: init_partitioned(stacked, key))
  adapters = lora.init_partitioned(model.config.lora, base, key)
  return _in_layout(model, adapters)


def init_params(model: Transformer, key: jax.Array) -> Params:
  """Fresh parameters as plain arrays, for use without a mesh."""
  return nn.meta.unbox(init_partitioned(model, key))


def num_params(params: Params) -> int:
  return sum(x.size for x in jax.tree.leaves(params))


def layer_params(params: Params, index: int) -> Params:
  """Parameters of one layer, from either layout."""
  if 'layers' in params:
    return jax.tree.map(lambda x: x[index], params['layers'])
  return params[f'layers_{index}']


def stack_params(params: Params) -> Params:
  """`scan_layers=False` layout -> `scan_layers=True` layout."""
  rest, num_layers = _outside_layers(params)
  stacked = jax.tree.map(
    lambda *xs: jnp.stack(xs),
    *(layer_params(params, i) for i in range(num_layers)),
  )
  return {**rest, 'layers': stacked}


def unstack_params(params: Params) -> Params:
  """`scan_layers=True` layout -> `scan_layers=False` layout."""
  rest, _ = _outside_layers(params)
  num_layers = jax.tree.leaves(params['layers'])[0].shape[0]
  each = {f'layers_{i}': layer_params(params, i) for i in range(num_layers)}
  return {**rest, **each}


def _in_layout(model, stacked):
  """Boxed stacked parameters, or adapters, in the layout of the model."""
  if model.config.scan_layers:
    return stacked
  axis = {nn.PARTITION_NAME: 'layers'}
  each = {
    name: nn.meta.remove_axis(layer, 0, axis)
    for name, layer in unstack_params(stacked).items()
    if name.startswith('layers_')
  }
  return {n: p for n, p in stacked.items() if n != 'layers'} | each


def _outside_layers(params: Params) -> tuple[dict[str, Any], int]:
  """Everything but the layers, and the number of per-layer trees."""
  rest = {n: p for n, p in params.items() if not n.startswith('layers')}
  return rest, len(params) - len(rest)
