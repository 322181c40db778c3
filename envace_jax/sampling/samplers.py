"""From logits and one uniform number to one token, by inverse CDF.

  p = filter(softmax(logits / temperature));  token = min {v : CDF(v) > u}

Sampling and rescoring read the same log-distribution, so the log-prob that is
recorded is the one a token was really drawn under. Settings are per row and
traced: rows in different roles share one compiled program. Temperature 0 is
the one-hot at the argmax, not a separate code path. The uniform of a token is
a function of its row's key and its position, so no result depends on batch
layout.

A row whose logits hold NaN or +inf, or nothing finite, has no distribution:
its log-prob is NaN, so the failure is seen, and its token is 0.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
  """How one role samples."""

  temperature: float = 1.0  # 0 is greedy
  top_k: int = 0  # keep the k most likely tokens; 0 is off
  top_p: float = 1.0  # then the fewest tokens holding this mass; 1 is off

  def __post_init__(self):
    if not 0 <= self.temperature < float('inf'):
      raise ValueError(
        f'sampler.temperature={self.temperature} must be finite and >= 0; '
        '0 is greedy'
      )
    if self.top_k < 0:
      raise ValueError(f'sampler.top_k={self.top_k} must be >= 0; 0 is off')
    if not 0 < self.top_p <= 1:
      raise ValueError(
        f'sampler.top_p={self.top_p} must be in (0, 1]; 1.0 is off'
      )

  @property
  def filtered(self) -> bool:
    """Whether sampling needs a sort; static for `sample` and `logprob_of`."""
    return self.top_k > 0 or self.top_p < 1


def uniform_for(row_key_B: jax.Array, position_B: jax.Array) -> jax.Array:
  """The uniform in [0, 1) that decides the token at `position` of a row."""

  def draw(key, position):
    return jax.random.uniform(jax.random.fold_in(key, position))

  return jax.vmap(draw)(row_key_B, position_B)


def sample(
  logits_BV: jax.Array,
  uniform_B: jax.Array,
  temperature_B: jax.Array,
  top_k_B: jax.Array,
  top_p_B: jax.Array,
  *,
  filtered: bool,
) -> tuple[jax.Array, jax.Array]:
  """One token per row, and its log-prob under what it was drawn from.

  `filtered=False` ignores `top_k_B` and `top_p_B` and never sorts.
  """
  logp_BV = log_distribution(
    logits_BV, temperature_B, top_k_B, top_p_B, filtered=filtered
  )
  token_B = _invert_cdf(jnp.exp(logp_BV), uniform_B)
  return token_B, _pick(logp_BV, token_B)


def logprob_of(
  logits_BV: jax.Array,
  token_B: jax.Array,
  temperature_B: jax.Array,
  top_k_B: jax.Array,
  top_p_B: jax.Array,
  *,
  filtered: bool,
) -> jax.Array:
  """Log-prob of given tokens; -inf where sampling could not produce them."""
  logp_BV = log_distribution(
    logits_BV, temperature_B, top_k_B, top_p_B, filtered=filtered
  )
  return _pick(logp_BV, token_B)


def log_distribution(
  logits_BV: jax.Array,
  temperature_B: jax.Array,
  top_k_B: jax.Array,
  top_p_B: jax.Array,
  *,
  filtered: bool,
) -> jax.Array:
  """Float32 log-probabilities after temperature and filters."""
  logits_BV = logits_BV.astype(jnp.float32)
  max_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  greedy_B1 = (temperature_B == 0)[:, None]
  # The maximum goes first: a tiny temperature must not overflow.
  scaled_BV = (logits_BV - max_B1) / jnp.where(
    greedy_B1, 1.0, temperature_B[:, None]
  )
  keep_BV = jnp.arange(logits_BV.shape[1])[None, :] == jnp.argmax(
    logits_BV, axis=-1, keepdims=True
  )
  keep_BV = keep_BV | ~greedy_B1
  if filtered:
    keep_BV = keep_BV & _keep_likely(scaled_BV, top_k_B, top_p_B)
  # Without a finite maximum the subtraction above made NaN, which spreads.
  return jax.nn.log_softmax(jnp.where(keep_BV, scaled_BV, -jnp.inf))


def _keep_likely(
  scaled_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array
) -> jax.Array:
  """The top-k tokens, then the fewest of those that hold mass top_p.

  Ties are broken by token id, so exactly k survive. One sort; the set that
  survives is a prefix of the order, described by its last member:

    sorted    5.0  3.0  3.0  1.0      kept = 2: last is (3.0, id 4)
    id          7    4    9    2      token 9 ties in value, loses on id
  """
  V = scaled_BV.shape[1]
  id_BV = jax.lax.broadcasted_iota(jnp.int32, scaled_BV.shape, 1)
  negated_BV, sorted_id_BV = jax.lax.sort((-scaled_BV, id_BV), num_keys=2)

  top_k_B1 = jnp.where(top_k_B == 0, V, jnp.minimum(top_k_B, V))[:, None]
  in_top_k_BV = id_BV < top_k_B1
  mass_BV = jax.nn.softmax(jnp.where(in_top_k_BV, -negated_BV, -jnp.inf))
  mass_before_BV = jnp.pad(jnp.cumsum(mass_BV, axis=1), ((0, 0), (1, 0)))
  # Rounding may take the sum to 1 early; top_p = 1 must still drop nothing.
  top_p_B1 = jnp.where(top_p_B >= 1, jnp.inf, top_p_B)[:, None]
  in_top_p_BV = mass_before_BV[:, :-1] < top_p_B1
  kept_B1 = jnp.sum(in_top_k_BV & in_top_p_BV, axis=1, keepdims=True)

  last_value_B1 = -jnp.take_along_axis(negated_BV, kept_B1 - 1, axis=1)
  last_id_B1 = jnp.take_along_axis(sorted_id_BV, kept_B1 - 1, axis=1)
  tie_BV = (scaled_BV == last_value_B1) & (id_BV <= last_id_B1)
  return (scaled_BV > last_value_B1) | tie_BV


def _invert_cdf(prob_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """First token whose CDF exceeds u; never one of probability zero."""
  V = prob_BV.shape[1]
  possible_BV = prob_BV > 0
  cdf_BV = jnp.cumsum(prob_BV, axis=1)
  # The float32 total is not exactly 1: scale u, do not trust the table's end.
  threshold_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
  hit_BV = (cdf_BV > threshold_B1) & possible_BV
  # For u next to 1 rounding may leave no hit: the last possible token it is.
  last_B = V - 1 - jnp.argmax(possible_BV[:, ::-1], axis=1)
  token_B = jnp.where(
    jnp.any(hit_BV, axis=1), jnp.argmax(hit_BV, axis=1), last_B
  )
  broken_B = jnp.isnan(cdf_BV[:, -1])
  return jnp.where(broken_B, 0, token_B).astype(jnp.int32)


def _pick(logp_BV: jax.Array, token_B: jax.Array) -> jax.Array:
  return jnp.take_along_axis(logp_BV, token_B[:, None], axis=1)[:, 0]
