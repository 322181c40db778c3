"""What log-probs cost in memory where the vocabulary is large.

Logits should exist for one chunk of time steps at a time, and nothing else of
their size. How near a program comes to that is read off what XLA sets aside for
it: the temporary memory of `logprobs.token_logprobs` over one microbatch, in
units of one [B, chunk, V] array of float32. The network is the configured one,
on one device, whole, and with a vocabulary of today's tokenizers. Compiled,
never run: no such logits are ever made here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_collections

from envace_jax import components
from envace_jax.model import config as model_config
from envace_jax.model import logprobs, transformer

VOCAB_SIZE = 150_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  workload: str = 'logprob_memory'
  vocab_size: int
  chunk_bytes: int
  forward_chunks: float
  gradient_chunks: float  # of all parameters, which counts what holds theirs


def measure(
  config: ml_collections.ConfigDict,
  published: model_config.TransformerConfig | None = None,
) -> Record:
  """Compiles the pass, and the pass with its gradient."""
  rl, length = config.rl, config.rollout.max_row_tokens
  chosen = components.model(config, config.data.vocab_size, published).config
  model = transformer.Transformer(
    dataclasses.replace(chosen, vocab_size=VOCAB_SIZE, lora=None)
  )
  rows = rl.tasks_per_step * rl.group_size // rl.minibatches // rl.microbatches

  def score(params, tokens_BT, temperature_BT):
    return logprobs.token_logprobs(
      model, params, tokens_BT, None, temperature_BT, chunk=rl.logprob_chunk
    )

  def total(*inputs):
    scored = score(*inputs)
    return jnp.sum(scored.logprob) + jnp.sum(scored.entropy)

  inputs = (
    jax.eval_shape(lambda: transformer.init_params(model, jax.random.key(0))),
    jax.ShapeDtypeStruct((rows, length), jnp.int32),
    jax.ShapeDtypeStruct((rows, length), jnp.float32),
  )
  chunk_bytes = rows * rl.logprob_chunk * VOCAB_SIZE * 4
  forward, gradient = (
    jax.jit(f).lower(*inputs).compile().memory_analysis().temp_size_in_bytes
    for f in (score, jax.grad(total))
  )
  return Record(
    vocab_size=VOCAB_SIZE,
    chunk_bytes=chunk_bytes,
    forward_chunks=forward / chunk_bytes,
    gradient_chunks=gradient / chunk_bytes,
  )
