"""What a server runs on the device: few programs, on a few rows at a time.

The server's rows are one `decode.DecodeState`. A program takes the rows that it
is about and as much of their caches as they fill, runs `decode`'s own moves on
them, and puts them back:

  rows [B, ..., C]  --take P rows, R slots-->  part [P, ..., R]  --put-->  rows

So a step costs what the rows concerned cost, however many others wait and
however long they are. P, R and the width of a window come from small sets, and
how a row is sampled is data: the set of programs is closed. `rows_P` are P
different rows, or None: all of them, in order, of which none need be gathered.
A row among them that nothing is done to is put back as it was.
"""

import functools

import flax
import jax
import jax.numpy as jnp

from envace_jax.model import lora, transformer
from envace_jax.sampling import decode, samplers

TOP = 20  # alternatives that are ever reported
# Logits of so many time steps exist at a time where a prompt is scored.
_SCORED = 64


@flax.struct.dataclass
class RowSettings:
  """How each row is sampled, and where it ends."""

  temperature: jax.Array  # [P] float32, 0 = greedy
  top_k: jax.Array  # [P] int32, 0 = off
  top_p: jax.Array  # [P] float32, 1 = off
  limit: jax.Array  # [P] int32, length at which a row must end
  stop: jax.Array  # [P, K] int32 tokens that end it; -1 is none
  author: jax.Array  # [P] int8, who samples


@flax.struct.dataclass
class Said:
  """What was sampled in one call; only the first `count` mean anything."""

  count: jax.Array  # [P] int32
  stopped: jax.Array  # [P] bool, by a stop token
  tokens: jax.Array  # [P, C] int32
  logprobs: jax.Array  # [P, C] float32, of the policy itself, at temperature 1
  top_ids: jax.Array  # [P, C, TOP] int32; without detail, zeros
  top_logprobs: jax.Array  # [P, C, TOP] float32


@functools.partial(jax.jit, donate_argnums=0)
def open_row(
  state: decode.DecodeState,
  target: jax.Array,
  source: jax.Array,
  keep: jax.Array,
  seed_3: jax.Array,
) -> decode.DecodeState:
  """Row `target` begins anew as the first `keep` tokens of row `source`.

  `seed_3` are 32-bit words: two of the request's seed, and which answer to it.
  """

  def copy(x):
    row = jax.lax.dynamic_slice_in_dim(x, source, 1)
    return jax.lax.dynamic_update_slice_in_dim(x, row, target, 0)

  key = jax.random.key(0)
  for i in range(3):
    key = jax.random.fold_in(key, seed_3[i])
  return decode.DecodeState(
    cache=jax.tree.map(copy, state.cache).replace(
      length=state.cache.length.at[target].set(jnp.maximum(keep - 1, 0))
    ),
    tokens=copy(state.tokens),
    authors=copy(state.authors),
    logprobs=copy(state.logprobs),
    length=state.length.at[target].set(keep),
    row_keys=state.row_keys.at[target].set(key),
  )


@functools.partial(
  jax.jit, static_argnums=0, static_argnames='rung', donate_argnums=2
)
def extend_rows(
  model: transformer.Transformer,
  params,
  state: decode.DecodeState,
  rows_P: jax.Array | None,
  ids_PW: jax.Array,
  authors_PW: jax.Array,
  count_P: jax.Array,
  *,
  rung: int,
) -> decode.DecodeState:
  """Appends `count` of the given tokens to each row, and feeds them."""
  part = _take(state, rows_P, rung)
  part = decode.append(part, ids_PW, authors_PW, count_P)
  part = decode.feed(model, params, part, ids_PW.shape[1])
  return _put(state, part, rows_P)


@functools.partial(
  jax.jit,
  static_argnums=0,
  static_argnames=('rung', 'chunk', 'detailed'),
  donate_argnums=2,
)
def decode_rows(
  model: transformer.Transformer,
  params,
  state: decode.DecodeState,
  rows_P: jax.Array | None,
  live_P: jax.Array,
  settings: RowSettings,
  steps: jax.Array,
  *,
  rung: int,
  chunk: int,
  detailed: bool,
) -> tuple[decode.DecodeState, Said]:
  """Up to `steps` tokens more on each live row; `steps` is at most `chunk`.

  `detailed` (static: a sort of the vocabulary is not free) is for batches in
  which some row filters by top-k or top-p, or wants to be told alternatives.
  """
  part = _take(state, rows_P, rung)
  before_P = part.length
  (P,) = before_P.shape
  said = Said(
    count=jnp.zeros((P,), jnp.int32),
    stopped=jnp.zeros((P,), bool),
    tokens=jnp.zeros((P, chunk), jnp.int32),
    logprobs=jnp.zeros((P, chunk), jnp.float32),
    top_ids=jnp.zeros((P, chunk, TOP), jnp.int32),
    top_logprobs=jnp.zeros((P, chunk, TOP), jnp.float32),
  )

  def body(carry):
    step, part, live_P, said = carry
    logits_PV, cache = decode.feed_pending(model, params, part, live_P)
    token_P, logprob_P, top_PK, top_logprob_PK = _sample(
      logits_PV, part, settings, detailed=detailed
    )
    part = decode.append(
      part.replace(cache=cache),
      token_P[:, None],
      settings.author[:, None],
      live_P.astype(jnp.int32),
      logprob_P[:, None],
    )
    write = lambda old, new: jax.lax.dynamic_update_index_in_dim(
      old, new, step, 1
    )
    stops_P = jnp.any(token_P[:, None] == settings.stop, axis=1) & live_P
    said = Said(
      count=part.length - before_P,
      stopped=said.stopped | stops_P,
      tokens=write(said.tokens, token_P),
      logprobs=write(said.logprobs, logprob_P),
      top_ids=write(said.top_ids, top_PK) if detailed else said.top_ids,
      top_logprobs=write(said.top_logprobs, top_logprob_PK)
      if detailed
      else said.top_logprobs,
    )
    live_P = live_P & ~stops_P & (part.length < settings.limit)
    return step + 1, part, live_P, said

  _, part, _, said = jax.lax.while_loop(
    lambda carry: (carry[0] < steps) & jnp.any(carry[2]),
    body,
    (jnp.int32(0), part, live_P & (part.length < settings.limit), said),
  )
  return _put(state, part, rows_P), said


@functools.partial(jax.jit, static_argnums=0)
def score(
  model: transformer.Transformer, params, tokens_T: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Log-probs [T] of given tokens, and the likeliest ones in their places.

  The first token has no distribution: its entries mean nothing.
  """
  hidden_BTD, _ = model.apply(lora.variables(params), tokens_T[None])
  (T,) = tokens_T.shape
  chunks = -(-T // _SCORED)
  pad = chunks * _SCORED - T
  # Position t is predicted from t - 1.
  hidden_TD = jnp.roll(hidden_BTD[0], 1, axis=0)
  hidden_CcD = jnp.pad(hidden_TD, ((0, pad), (0, 0))).reshape(
    chunks, 1, _SCORED, -1
  )
  target_Cc = jnp.pad(tokens_T, (0, pad)).reshape(chunks, _SCORED)

  def one(xs):
    hidden_BcD, target_c = xs
    logits_BcV = model.apply(
      lora.variables(params), hidden_BcD, method='unembed'
    )
    return _report(jax.nn.log_softmax(logits_BcV[0]), target_c, detailed=True)

  scored = jax.lax.map(one, (hidden_CcD, target_Cc))
  return tuple(x.reshape(chunks * _SCORED, *x.shape[2:])[:T] for x in scored)


def _sample(logits_PV, part, settings, *, detailed):
  """A token per row, its log-prob, and alternatives where they are wanted."""
  token_P, _ = samplers.sample(
    logits_PV,
    samplers.uniform_for(part.row_keys, part.length),
    settings.temperature,
    settings.top_k,
    settings.top_p,
    filtered=detailed,
  )
  logp_PV = jax.nn.log_softmax(logits_PV.astype(jnp.float32))
  return token_P, *_report(logp_PV, token_P, detailed=detailed)


def _report(logp_PV, token_P, *, detailed):
  logprob_P = jnp.take_along_axis(logp_PV, token_P[:, None], axis=1)[:, 0]
  if not detailed:
    nothing = jnp.zeros((len(token_P), 0))
    return logprob_P, nothing, nothing
  most = min(TOP, logp_PV.shape[1])
  top_logprob_PK, top_PK = jax.lax.top_k(logp_PV, most)
  short = ((0, 0), (0, TOP - most))
  return (
    logprob_P,
    jnp.pad(top_PK.astype(jnp.int32), short),
    jnp.pad(top_logprob_PK, short, constant_values=-jnp.inf),
  )


def _take(state: decode.DecodeState, rows_P, rung: int) -> decode.DecodeState:
  """P rows with the first `rung` slots of their caches."""
  if rows_P is None:
    take = lambda x: x
  else:
    # One slice a row: XLA's gather on a CPU copies number by number.
    take = lambda x: jnp.concatenate(
      [jax.lax.dynamic_slice_in_dim(x, row, 1) for row in rows_P]
    )
  return decode.DecodeState(
    cache=state.cache.replace(
      k=tuple(take(k[..., :rung]) for k in state.cache.k),
      v=tuple(take(v[:, :, :rung]) for v in state.cache.v),
      length=take(state.cache.length),
    ),
    tokens=take(state.tokens),
    authors=take(state.authors),
    logprobs=take(state.logprobs),
    length=take(state.length),
    row_keys=take(state.row_keys),
  )


def _put(state: decode.DecodeState, part: decode.DecodeState, rows_P):
  """The inverse of `_take`: what lies beyond the part stays."""

  def put(old, new):
    zeros = (0,) * (old.ndim - 1)
    if rows_P is None:
      return jax.lax.dynamic_update_slice(old, new, (0, *zeros))
    for i, row in enumerate(rows_P):
      old = jax.lax.dynamic_update_slice(old, new[i : i + 1], (row, *zeros))
    return old

  return jax.tree.map(put, state, part).replace(row_keys=state.row_keys)
