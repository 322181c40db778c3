"""A policy that says what it is told to, at the cost of a real one.

Its residual branches end in zeros, so that its last hidden state is the
embedding of the last token, and its unembedding maps that to the token's
successor: greedy decoding follows a script. The zeros are data, and XLA
compiles and runs the full network. For measuring speed, where the length of
what an untrained policy writes would be chance.
"""

import jax
import numpy as np

from envace_jax import types
from envace_jax.model import transformer

# The script's vocabulary; texts are written in the ids that follow.
FILLER, ACT_HEADER, REHEARSE_HEADER, CALL, END, PING, PONG = range(7)
HEADER_RW = np.asarray([[ACT_HEADER], [REHEARSE_HEADER]], np.int32)
TEXT = 7


def write(limits: types.Limits, prompt_length: int, vocab_size: int):
  """As many turns as `limits` allow, spread over the whole row.

  Returns:
    The tokens after a prompt, their authors, and every token's successor.
  """
  c = limits
  most = np.asarray([c.max_action_tokens, c.max_observation_tokens])
  if (most < (2, 1)).any():
    raise ValueError(
      f'no turn fits into max_action_tokens={c.max_action_tokens}, '
      f'max_observation_tokens={c.max_observation_tokens}; use at least 2 and 1'
    )
  room = c.max_row_tokens - prompt_length
  turn = room // c.max_steps - 2  # without its two headers
  share = np.round(turn * most / most.sum()).astype(int)
  most = np.minimum(most, (vocab_size - TEXT) // 2 + 1)
  acts, answers = np.clip(share, (2, 1), most)
  text = range(TEXT, TEXT + acts + answers - 3)
  action = [CALL, *text[: acts - 2], END]
  answer = [*text[acts - 2 :], END]
  one_turn = [(t, types.Author.ACT) for t in action]
  one_turn += [(REHEARSE_HEADER, types.Author.FORCED)]
  one_turn += [(t, types.Author.REHEARSE) for t in answer]
  one_turn += [(ACT_HEADER, types.Author.FORCED)]
  # One call more than is answered ends the episode, if the row does not.
  episode = (one_turn * c.max_steps + one_turn[:acts])[:room]
  successor = dict(zip([ACT_HEADER, *action], action, strict=False))
  successor |= dict(zip([REHEARSE_HEADER, *answer], answer, strict=False))
  return *np.asarray(episode).T, successor | {PING: PONG, PONG: PING}


def params(
  model: transformer.Transformer, successor: dict[int, int]
) -> transformer.Params:
  """Parameters under which the likeliest next token is `successor[token]`."""
  c, draws = model.config, np.random.default_rng(0)
  embedding_VD = draws.normal(size=(c.vocab_size, c.d_model))
  # Orthogonal where the width allows it; random directions nearly are.
  known = sorted({*successor, *successor.values()})
  if len(known) <= c.d_model:
    embedding_VD[known] = np.linalg.qr(embedding_VD[known].T)[0].T
  embedding_VD /= np.linalg.norm(embedding_VD, axis=1, keepdims=True)
  unembedding_DV = np.zeros((c.d_model, c.vocab_size))
  for token, following in successor.items():
    unembedding_DV[:, following] += embedding_VD[token]
  fixed = {'embedding': embedding_VD, 'unembedding': unembedding_DV, 'scale': 1}
  fixed |= {'wo': 0, 'w_down': 0}  # the ends of the residual branches

  def fill(path, leaf):
    noise = draws.standard_normal(leaf.shape, np.float32) * c.d_model**-0.5
    value = fixed.get(path[-1].key, noise)
    return np.broadcast_to(value, leaf.shape).astype(leaf.dtype)

  shapes = jax.eval_shape(
    lambda: transformer.init_params(model, jax.random.key(0))
  )
  return jax.tree.map_with_path(fill, shapes)
