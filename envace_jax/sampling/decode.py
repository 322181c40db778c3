"""Jitted decoding over a frozen state whose caches outlive the turn.

A row is a growing list of tokens with authors and log-probs. Its cache holds
the keys and values of every token but the last: the last token is *pending*,
and feeding it is what yields the next distribution.

  tokens   t0 t1 t2 t3 .  .  .         length = 4
  cache    x  x  x  .  .  .  .         cache.length = 3, t3 is pending

Everything is built from two moves. `append` writes tokens somebody else chose;
`feed` brings the cache up to date with them (`prefill` does both on an empty
cache, once per prompt; `extend` on a live one). `generate`
feeds the pending token, samples, appends, until every row has stopped. Slot
equals position, rows are right-padded, budgets are traced values: the programs
depend only on batch size, cache length and window width.
"""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np

from envace_jax import types
from envace_jax.model import kv_cache, lora, transformer
from envace_jax.sampling import samplers

ACT_REHEARSE = np.asarray([types.Author.ACT, types.Author.REHEARSE], np.int8)


@flax.struct.dataclass
class DecodeState:
  cache: kv_cache.KVCache
  tokens: jax.Array  # [B, C] int32
  authors: jax.Array  # [B, C] int8
  logprobs: jax.Array  # [B, C] float32, 0 where not sampled
  length: jax.Array  # [B] int32, tokens in the row
  row_keys: jax.Array  # [B] typed keys


@flax.struct.dataclass
class RoleSettings:
  """How each role samples; traced, so tuning them compiles nothing."""

  temperature: jax.Array  # [R] float32, 0 = greedy
  top_k: jax.Array  # [R] int32, 0 = off
  top_p: jax.Array  # [R] float32, 1 = off
  max_new: jax.Array  # [R] int32, tokens per generation, stop included
  stop: jax.Array  # [R, V] bool, tokens that end a generation


def empty_state(
  model: transformer.Transformer,
  row_keys: jax.Array,
  *,
  capacity: int,
  cache_length: int,
) -> DecodeState:
  """Rows without tokens. `capacity` bounds a row for life."""
  batch = row_keys.shape[0]
  return DecodeState(
    cache=kv_cache.empty(model.config, batch, cache_length),
    tokens=jnp.zeros((batch, capacity), jnp.int32),
    authors=jnp.zeros((batch, capacity), jnp.int8),
    logprobs=jnp.zeros((batch, capacity), jnp.float32),
    length=jnp.zeros((batch,), jnp.int32),
    row_keys=row_keys,
  )


@functools.partial(
  jax.jit,
  static_argnums=0,
  static_argnames=('group_size', 'capacity', 'cache_length'),
)
def prefill(
  model: transformer.Transformer,
  params,
  ids_PW: jax.Array,
  authors_PW: jax.Array,
  count_P: jax.Array,
  row_keys: jax.Array,
  *,
  group_size: int,
  capacity: int,
  cache_length: int,
) -> DecodeState:
  """Opens P * group_size rows, running each prompt through the model once."""
  width = ids_PW.shape[1]
  state = empty_state(
    model, row_keys[::group_size], capacity=capacity, cache_length=width
  )
  state = append(state, ids_PW, authors_PW, count_P)
  state = feed(model, params, state, width)
  spread = lambda x: jnp.repeat(x, group_size, axis=0)
  cache = kv_cache.repeat(state.cache, group_size)
  return DecodeState(
    cache=kv_cache.grow(cache, cache_length),
    tokens=spread(state.tokens),
    authors=spread(state.authors),
    logprobs=spread(state.logprobs),
    length=spread(state.length),
    row_keys=row_keys,
  )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def extend(
  model: transformer.Transformer,
  params,
  state: DecodeState,
  ids_BW: jax.Array,
  authors_BW: jax.Array,
  count_B: jax.Array,
) -> DecodeState:
  """Appends `count_B` of the given tokens to each live row and feeds them.

  The caller guarantees that they fit; tokens past capacity would be dropped.
  """
  state = append(state, ids_BW, authors_BW, count_B)
  # Of the pending token and W new ones, all but the last are fed: W tokens.
  return feed(model, params, state, ids_BW.shape[1])


@functools.partial(jax.jit, static_argnums=1)
def grow(state: DecodeState, cache_length: int) -> DecodeState:
  """Moves the caches to the next rung of the length ladder."""
  return state.replace(cache=kv_cache.grow(state.cache, cache_length))


@functools.partial(jax.jit, donate_argnums=0)
def rewind(state: DecodeState, length_B: jax.Array) -> DecodeState:
  """Forgets what lies beyond `length_B`; rows not longer than that stay.

  A row that forgets is given another key: positions draw from keys, and it
  must not say the same again. Slots beyond a cache's length are never read.
  """
  forgets_B = state.length > length_B
  other_keys = jax.vmap(jax.random.fold_in)(state.row_keys, length_B)
  length_B = jnp.where(forgets_B, length_B, state.length)
  return state.replace(
    length=length_B,
    cache=state.cache.replace(
      length=jnp.minimum(state.cache.length, length_B - 1)
    ),
    row_keys=jnp.where(forgets_B, other_keys, state.row_keys),
  )


@functools.partial(
  jax.jit, static_argnums=0, static_argnames='filtered', donate_argnums=2
)
def generate(
  model: transformer.Transformer,
  params,
  state: DecodeState,
  live_B: jax.Array,
  role: jax.Array,
  settings: RoleSettings,
  *,
  filtered: bool,
) -> tuple[DecodeState, jax.Array]:
  """One generation by `role` on every live row.

  Args:
    model: static.
    params: the policy.
    state: donated; its cache must have room for `max_new[role]` more tokens
      on every live row, or for the rest of the row where that is less.
    live_B: [B] bool; other rows are untouched.
    role: [] int32.
    settings: per-role sampling settings.
    filtered: whether top-k or top-p is on (static: the sort is not free).

  Returns:
    The state, and finished [B] bool: a stop token was sampled. A live row that
    is not finished hit `max_new` or its capacity.
  """
  author = jnp.asarray(ACT_REHEARSE)[role]
  capacity = state.tokens.shape[1]

  def body(carry):
    state, live_B, new_B, finished_B = carry
    logits_BV, cache = feed_pending(model, params, state, live_B)
    roles_B = jnp.full_like(state.length, role)
    token_B, logprob_B = sample(
      logits_BV, state, roles_B, settings, filtered=filtered
    )
    state = append(
      state.replace(cache=cache),
      token_B[:, None],
      jnp.broadcast_to(author, token_B[:, None].shape),
      live_B.astype(jnp.int32),
      logprob_B[:, None],
    )
    stopped_B = settings.stop[role, token_B]
    new_B = new_B + live_B
    finished_B = finished_B | (live_B & stopped_B)
    room_B = (new_B < settings.max_new[role]) & (state.length < capacity)
    return state, live_B & ~stopped_B & room_B, new_B, finished_B

  nothing_B = jnp.zeros_like(live_B)
  live_B = live_B & (state.length < capacity)
  state, _, _, finished_B = jax.lax.while_loop(
    lambda carry: jnp.any(carry[1]),
    body,
    (state, live_B, jnp.zeros_like(state.length), nothing_B),
  )
  return state, finished_B


def append(
  state: DecodeState,
  ids_BW: jax.Array,
  authors_BW: jax.Array,
  count_B: jax.Array,
  logprobs_BW: jax.Array | None = None,
) -> DecodeState:
  """Writes the first `count_B` of W tokens at each row's end; no feeding."""
  batch, width = ids_BW.shape
  capacity = state.tokens.shape[1]
  offset_W = jnp.arange(width)
  slot_BW = jnp.where(
    offset_W[None] < count_B[:, None],
    state.length[:, None] + offset_W[None],
    capacity,  # out of range, hence dropped
  )
  row_B1 = jnp.arange(batch)[:, None]
  write = lambda old, new: old.at[row_B1, slot_BW].set(
    new.astype(old.dtype), mode='drop'
  )
  if logprobs_BW is None:
    logprobs_BW = jnp.zeros(ids_BW.shape, jnp.float32)
  return state.replace(
    tokens=write(state.tokens, ids_BW),
    authors=write(state.authors, authors_BW),
    logprobs=write(state.logprobs, logprobs_BW),
    length=jnp.minimum(state.length + count_B, capacity),
  )


def feed(
  model: transformer.Transformer, params, state: DecodeState, width: int
) -> DecodeState:
  """Caches up to `width` not yet cached tokens per row, all but the last."""
  capacity = state.tokens.shape[1]
  slot_BW = state.cache.length[:, None] + jnp.arange(width)[None]
  valid_BW = slot_BW < state.length[:, None] - 1
  slot_BW = jnp.minimum(slot_BW, capacity - 1)
  _, cache = model.apply(
    lora.variables(params),
    jnp.take_along_axis(state.tokens, slot_BW, axis=1),
    slot_BW,
    cache=state.cache,
    valid_BT=valid_BW,
  )
  return state.replace(cache=cache)


def feed_pending(
  model: transformer.Transformer, params, state: DecodeState, live_B
) -> tuple[jax.Array, kv_cache.KVCache]:
  """Feeds each live row's last token: next-token logits [B, V] and cache."""
  last_B1 = state.length[:, None] - 1
  hidden_BTD, cache = model.apply(
    lora.variables(params),
    jnp.take_along_axis(state.tokens, last_B1, axis=1),
    last_B1,
    cache=state.cache,
    valid_BT=live_B[:, None],
  )
  logits_BTV = model.apply(lora.variables(params), hidden_BTD, method='unembed')
  return logits_BTV[:, 0], cache


def sample(
  logits_BV: jax.Array,
  state: DecodeState,
  roles_B: jax.Array,
  settings: RoleSettings,
  *,
  filtered: bool,
) -> tuple[jax.Array, jax.Array]:
  """(token [B] int32, log-prob [B] float32) for the next position of a row."""
  return samplers.sample(
    logits_BV,
    samplers.uniform_for(state.row_keys, state.length),
    settings.temperature[roles_B],
    settings.top_k[roles_B],
    settings.top_p[roles_B],
    filtered=filtered,
  )
