"""Log-probabilities of tokens that never hold [B, T, V].

Logits exist for a chunk of time steps at a time, forwards and backwards.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from envace_jax.model import lora, transformer

Params = transformer.Params | lora.Adapted


# Parts of a chunk whose probabilities exist at a time.
_BLOCKS = 8


class TokenLogprobs(NamedTuple):
  logprob: jax.Array  # [B, T] float32, log p(token_t | tokens_<t)
  entropy: jax.Array  # [B, T] float32, of that same distribution, in nats


def token_logprobs(
  model: transformer.Transformer,
  params: Params,
  tokens_BT: jax.Array,
  valid_BT: jax.Array | None = None,
  temperature_BT: jax.Array | None = None,
  positions_BT: jax.Array | None = None,
  *,
  chunk: int,
) -> TokenLogprobs:
  """Log p(token_t | tokens_<t) and the entropy of that choice.

  Both are 0 at t = 0 and at padding. Logits exist for `chunk` time steps at
  a time, forwards and backwards. With `temperature_BT` token t is scored under
  softmax(logits / temperature_t), the distribution it was sampled from. With
  `positions_BT` a row holds a transcript from each position 0 on, scored as it
  would be in a row of its own; without, one.
  """
  inputs = (tokens_BT, valid_BT, temperature_BT, positions_BT)
  scored = _score(model, params, None, *inputs, chunk=chunk)
  return TokenLogprobs(*scored)


def token_logprobs_and_kl(
  model: transformer.Transformer,
  params: Params,
  ref_params: Params,
  tokens_BT: jax.Array,
  valid_BT: jax.Array | None = None,
  temperature_BT: jax.Array | None = None,
  positions_BT: jax.Array | None = None,
  *,
  chunk: int,
) -> tuple[TokenLogprobs, jax.Array]:
  """`token_logprobs`, and the exact kl_BT of the same choices to a reference.

  kl_t = KL(p(. | tokens_<t) || p_ref(. | tokens_<t)) over the whole vocabulary,
  both under temperature_t, in nats; 0 at t = 0 and at padding. Two chunks of
  logits exist at a time, the policy's and the reference's.
  """
  inputs = (tokens_BT, valid_BT, temperature_BT, positions_BT)
  logprob_BT, entropy_BT, kl_BT = _score(
    model, params, ref_params, *inputs, chunk=chunk
  )
  return TokenLogprobs(logprob_BT, entropy_BT), kl_BT


def kl_divergence(logp_BCV: jax.Array, ref_logp_BCV: jax.Array) -> jax.Array:
  """kl_BC of distributions given as log-probs, in nats."""
  return jnp.sum(jnp.exp(logp_BCV) * (logp_BCV - ref_logp_BCV), axis=-1)


@jax.custom_vjp
def score_choices(
  logits_BCV: jax.Array,
  target_BC: jax.Array,
  inverse_temperature_BC: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """logprob_BC of the targets and entropy_BC of softmax(logits / temperature).

  With z = logits / temperature, L = log sum_v exp(z_v), p = exp(z - L): these
  are z_target - L and H = -sum_v p_v (z_v - L), and their gradients are

    d logprob / d z_v = [v = target] - p_v
    d H / d z_v       = -p_v (z_v - L + H)

  Written out, and a few time steps at a time, so that what is computed from
  the logits is never as large as they are; the gradient takes their place. A
  token of probability 0 adds nothing, even at a logit of -inf.
  """
  return _score_choices(logits_BCV, target_BC, inverse_temperature_BC)[0]


def _score_choices(logits_BCV, target_BC, inverse_BC):
  def score(carry, start):
    z_BcV, target_Bc = _block(logits_BCV, start), _block(target_BC, start)
    if inverse_BC is not None:
      z_BcV = z_BcV * _block(inverse_BC, start)[..., None]
    log_sum_Bc = jax.nn.logsumexp(z_BcV, axis=-1)
    logp_BcV = z_BcV - log_sum_Bc[..., None]
    p_logp_BcV = jnp.where(
      logp_BcV > -jnp.inf, jnp.exp(logp_BcV) * logp_BcV, 0.0
    )
    logp_Bc1 = jnp.take_along_axis(logp_BcV, target_Bc[..., None], axis=-1)
    return carry, (logp_Bc1[..., 0], -p_logp_BcV.sum(-1), log_sum_Bc)

  _, parts = jax.lax.scan(score, None, _starts(logits_BCV))
  logprob_BC, entropy_BC, log_sum_BC = (
    part.swapaxes(0, 1).reshape(target_BC.shape) for part in parts
  )
  saved = (logits_BCV, inverse_BC, target_BC, log_sum_BC, entropy_BC)
  return (logprob_BC, entropy_BC), saved


def _pull_back(saved, cotangents):
  logits_BCV, inverse_BC, *rest_BC = (*saved, *cotangents)

  def pull(carry_BCV, start):
    z_BcV, inverse_Bc1 = _block(carry_BCV, start), 1.0
    if inverse_BC is not None:
      inverse_Bc1 = _block(inverse_BC, start)[..., None]
    target_Bc1, log_sum_Bc1, entropy_Bc1, logprob_Bc1, scale_Bc1 = (
      _block(x_BC, start)[..., None] for x_BC in rest_BC
    )
    logp_BcV = z_BcV * inverse_Bc1 - log_sum_Bc1
    pulled_BcV = jnp.exp(logp_BcV) * (
      logprob_Bc1 + scale_Bc1 * (logp_BcV + entropy_Bc1)
    )
    is_target_BcV = jnp.arange(z_BcV.shape[-1])[None, None] == target_Bc1
    gradient_BcV = jnp.where(is_target_BcV, logprob_Bc1, 0.0) - jnp.where(
      logp_BcV > -jnp.inf, pulled_BcV, 0.0
    )
    return jax.lax.dynamic_update_slice_in_dim(
      carry_BCV, gradient_BcV * inverse_Bc1, start, axis=1
    ), None

  return jax.lax.scan(pull, logits_BCV, _starts(logits_BCV))[0], None, None


def _starts(logits_BCV):
  """Where the blocks of a chunk start: eighths, if it has eighths."""
  steps = logits_BCV.shape[1]
  return jnp.arange(0, steps, steps // math.gcd(steps, _BLOCKS))


def _block(x_BC, start):
  steps = x_BC.shape[1]
  return jax.lax.dynamic_slice_in_dim(
    x_BC, start, steps // math.gcd(steps, _BLOCKS), axis=1
  )


score_choices.defvjp(_score_choices, _pull_back)


def _score(
  model,
  params,
  ref_params,
  tokens_BT,
  valid_BT,
  temperature_BT,
  positions_BT,
  *,
  chunk,
):
  """[logprob_BT, entropy_BT], and kl_BT where there is a reference."""
  if chunk < 1:
    raise ValueError(f'chunk={chunk} must be at least 1')
  read = lambda params: model.apply(
    lora.variables(params), tokens_BT, positions_BT, valid_BT=valid_BT
  )[0]
  hidden_BTD = read(params)
  ref_hidden_BTD = None if ref_params is None else read(ref_params)
  B, T, _ = hidden_BTD.shape

  # T = 6, chunk = 2: hidden 0..4 predict tokens 1..5, padded to 3 chunks.
  num_chunks = -(-(T - 1) // chunk)
  pad = num_chunks * chunk - (T - 1)

  def split(x, axes):
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * axes)
    return x.reshape(B, num_chunks, chunk, *x.shape[2:]).swapaxes(0, 1)

  def logits(params, hidden_BCD):
    return model.apply(lora.variables(params), hidden_BCD, method='unembed')

  @jax.checkpoint
  def score_chunk(carry, xs):
    hidden_BCD, target_BC, inverse_temperature_BC, ref_hidden_BCD = xs
    logits_BCV = logits(params, hidden_BCD)
    scored = score_choices(logits_BCV, target_BC, inverse_temperature_BC)
    if ref_hidden_BCD is not None:
      pair = (logits_BCV, logits(ref_params, ref_hidden_BCD))
      if inverse_temperature_BC is not None:
        pair = [x_BCV * inverse_temperature_BC[..., None] for x_BCV in pair]
      scored += (kl_divergence(*map(jax.nn.log_softmax, pair)),)
    return carry, scored

  chunks = (
    split(hidden_BTD[:, :-1], 1),
    split(tokens_BT[:, 1:], 0),
    # The inverse, so that padding chunks with 0 cannot divide by it.
    None if temperature_BT is None else split(1.0 / temperature_BT[:, 1:], 0),
    None if ref_params is None else split(ref_hidden_BTD[:, :-1], 1),
  )
  _, scored = jax.lax.scan(score_chunk, None, chunks)

  def join(x_CBc):
    x_BT = x_CBc.swapaxes(0, 1).reshape(B, num_chunks * chunk)[:, : T - 1]
    x_BT = jnp.pad(x_BT, ((0, 0), (1, 0)))
    if positions_BT is not None:
      x_BT = jnp.where(positions_BT > 0, x_BT, 0.0)
    return x_BT if valid_BT is None else jnp.where(valid_BT, x_BT, 0.0)

  return [join(x_CBc) for x_CBc in scored]
