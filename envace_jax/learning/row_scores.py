"""Log-probs and KL of rows, as the losses read them.

Rows are scored under the temperatures that they were sampled at: behaviour
log-probs belong to that distribution. `config` is an `objective.LossConfig`.
"""

import jax.numpy as jnp

from envace_jax import types
from envace_jax.learning import batch as batches
from envace_jax.learning import kl, losses, packing
from envace_jax.model import logprobs


def with_kl(model, params, ref_params, rows, config):
  """Scores of the rows, and mask_BT -> the KL sum (None without a reference).

  The gradient is taken with respect to `params` alone.
  """
  temperature_BT = sampling_temperatures(rows, config)
  score = lambda params: logprobs_of(
    model, params, rows, config, temperature_BT
  )
  if not config.uses_reference:
    return score(params), None
  if config.kl_estimator is kl.KLEstimator.EXACT:
    inputs = _inputs(rows, temperature_BT)
    scored, kl_BT = _unless_empty(
      rows,
      config,
      lambda: logprobs.token_logprobs_and_kl(
        model, params, ref_params, *inputs, chunk=config.logprob_chunk
      ),
    )
    return scored, lambda mask_BT: losses.masked_sum(kl_BT, mask_BT)
  scored, ref = score(params), score(ref_params).logprob
  estimate = kl.SAMPLED[config.kl_estimator]
  return scored, lambda mask_BT: estimate(scored.logprob, ref, mask_BT)


def logprobs_of(model, params, rows, config, temperature_BT):
  """`logprobs.TokenLogprobs` of the rows; zeros where none is left."""
  return _unless_empty(
    rows,
    config,
    lambda: logprobs.token_logprobs(
      model,
      params,
      *_inputs(rows, temperature_BT),
      chunk=config.logprob_chunk,
    ),
  )


def sampling_temperatures(rows, config):
  """temperature_BT of the role that wrote the token; None when all are 1."""
  if set(config.temperature_per_role) == {1.0}:
    return None
  temperature_BT = jnp.ones(rows.tokens.shape, jnp.float32)
  for role in types.Role:
    temperature_BT = jnp.where(
      batches.role_mask(rows, role),
      config.temperature_per_role[role],
      temperature_BT,
    )
  return temperature_BT


def _unless_empty(rows, config, score):
  """`score()`; zeros for a microbatch of rows that packing left empty."""
  return packing.unless_empty(rows.lengths, score) if config.packed else score()


def _inputs(rows, temperature_BT):
  """What `logprobs.token_logprobs` reads of rows."""
  return rows.tokens, batches.valid(rows), temperature_BT, rows.positions
