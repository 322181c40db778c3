"""Log-probabilities of tokens that never hold [B, T, V].

Logits exist for a chunk of time steps at a time, forwards and backwards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envace_jax.model import lora, transformer

Params = transformer.Params | lora.Adapted


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
  logits_BCV: jax.Array, target_BC: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """logprob_BC of the targets and entropy_BC of softmax(logits).

  With L = log sum_v exp(z_v) and p = exp(z - L), these are z_target - L and
  H = -sum_v p_v (z_v - L), and their gradients are

    d logprob / d z_v = [v = target] - p_v
    d H / d z_v       = -p_v (z_v - L + H)

  Written out, each pass reads one array of logits and writes at most one more;
  a differentiated log_softmax keeps several. A token of probability 0 adds
  nothing, even at a logit of -inf.
  """
  return _score_choices(logits_BCV, target_BC)[0]


def _score_choices(logits_BCV, target_BC):
  # Every sum has an exponential of its own: one that two sums share would be
  # stored, an array as large as the logits.
  log_sum_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
  logp_BCV = logits_BCV - log_sum_BC[..., None]
  entropy_BC = -jnp.sum(
    jnp.where(logp_BCV > -jnp.inf, jnp.exp(logp_BCV) * logp_BCV, 0.0), axis=-1
  )
  is_target_BCV = _is_target(logits_BCV, target_BC)
  logit_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
  in_vocab_BC = (target_BC >= 0) & (target_BC < logits_BCV.shape[-1])
  logprob_BC = jnp.where(in_vocab_BC, logit_BC - log_sum_BC, jnp.nan)
  return (logprob_BC, entropy_BC), (
    logits_BCV,
    target_BC,
    log_sum_BC,
    entropy_BC,
  )


def _pull_back(saved, cotangents):
  logits_BCV, target_BC, log_sum_BC, entropy_BC = saved
  logprob_BC, scale_BC = cotangents
  is_target_BCV = _is_target(logits_BCV, target_BC)
  logp_BCV = logits_BCV - log_sum_BC[..., None]
  # p (g + h (log p + H)), each term 0 where p is.
  weight_BC = logprob_BC + scale_BC * entropy_BC
  pulled_BCV = jnp.where(
    logp_BCV > -jnp.inf,
    jnp.exp(logp_BCV) * (weight_BC[..., None] + scale_BC[..., None] * logp_BCV),
    0.0,
  )
  picked_BCV = jnp.where(is_target_BCV, logprob_BC[..., None], 0.0)
  return picked_BCV - pulled_BCV, None


def _is_target(logits_BCV, target_BC):
  vocab_11V = jnp.arange(logits_BCV.shape[-1])[None, None]
  return vocab_11V == target_BC[..., None]


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

  def logits(params, hidden_BCD, inverse_temperature_BC):
    logits_BCV = model.apply(
      lora.variables(params), hidden_BCD, method='unembed'
    )
    if inverse_temperature_BC is not None:
      logits_BCV = logits_BCV * inverse_temperature_BC[..., None]
    return logits_BCV

  @jax.checkpoint
  def score_chunk(carry, xs):
    hidden_BCD, target_BC, inverse_temperature_BC, ref_hidden_BCD = xs
    logits_BCV = logits(params, hidden_BCD, inverse_temperature_BC)
    scored = score_choices(logits_BCV, target_BC)
    if ref_hidden_BCD is not None:
      ref_BCV = logits(ref_params, ref_hidden_BCD, inverse_temperature_BC)
      log_softmax = jax.nn.log_softmax
      scored += (kl_divergence(log_softmax(logits_BCV), log_softmax(ref_BCV)),)
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
