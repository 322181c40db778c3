"""A tiny policy whose episodes have turns, and how it is sampled."""

import jax
import numpy as np

from envace_jax import types
from envace_jax.model import config as config_lib
from envace_jax.model import transformer
from envace_jax.rollout import alternation, episodes
from envace_jax.sampling import generator, keys, samplers
from envace_jax.text import formats
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.worlds import answers

NO_RULES = alternation.Rules()
TEMPLATE = templates.Template(tokenizers.ByteTokenizer())
HEADERS = {
  types.Role.ACT: TEMPLATE.header(formats.Joint.ANSWERED)[0][0],
  types.Role.REHEARSE: TEMPLATE.header(formats.Joint.CALLED)[0][0],
}
END = TEMPLATE.stop_ids[types.Role.ACT]
ANYTHING = answers.Answers(template=TEMPLATE, max_resamples=None)


def task(text):
  return types.Task(id=text, instruction=text, tools=(), checklist=())


# What tends to follow what, in a policy whose episodes have turns.
CONTROL = tokenizers.ByteTokenizer().control
LETTER_A, LETTER_B = tokenizers.ByteTokenizer().encode('ab')
CHAIN = {
  CONTROL['<|act|>']: {CONTROL['<tool_call>']: 0.7, LETTER_A: 0.3},
  CONTROL['<|rehearse|>']: {LETTER_A: 0.8, LETTER_B: 0.2},
  CONTROL['<tool_call>']: {LETTER_A: 0.9, LETTER_B: 0.1},
  LETTER_A: {LETTER_A: 0.3, LETTER_B: 0.3, CONTROL['<|end|>']: 0.4},
  LETTER_B: {LETTER_A: 0.5, CONTROL['<|end|>']: 0.5},
}


def policy(chain=CHAIN, *, max_len=128, unlikely=-8):
  """A chain in the embeddings, disturbed by small residual branches.

  The disturbance is what makes the tests see a wrong cache.
  """
  config = config_lib.TransformerConfig(
    vocab_size=tokenizers.ByteTokenizer().vocab_size,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    max_len=max_len,
    tie_embeddings=False,
  )
  model = transformer.Transformer(config)
  params = transformer.init_params(model, jax.random.key(1))
  embedding = 0.1 * np.array(params['embedding'])
  unembedding = np.full(params['unembedding'].shape, -1.0, np.float32)
  for i, (token, following) in enumerate(chain.items()):
    embedding[token, i] = 12.0  # normalised to about sqrt(32) = 5.7
    unembedding[i] = unlikely / 5.7
    for after, probability in following.items():
      unembedding[i, after] = np.log(probability) / 5.7
  unembedding[len(chain) :] = (
    0.1 * np.array(params['unembedding'])[len(chain) :]
  )
  asarray = jax.numpy.asarray
  return model, {
    **params,
    'embedding': asarray(embedding),
    'unembedding': asarray(unembedding),
  }


def decoder_for(model, top_k=0, **limits):
  limits = {
    'max_steps': 3,
    'max_actions': 30,
    'max_user_turns': 30,
    'max_parallel_calls': 1,
    'max_action_tokens': 30,
    'max_observation_tokens': 25,
    'max_row_tokens': 120,
  } | limits
  ladder = [n for n in (40, 64) if n < limits['max_row_tokens']]
  return generator.Decoder(
    model=model,
    limits=types.Limits(**limits),
    act=samplers.SamplerConfig(temperature=0.9, top_k=top_k),
    rehearse=samplers.SamplerConfig(temperature=1.3, top_k=top_k),
    act_stop_ids=END,
    rehearse_stop_ids=END,
    prompt_tokens=20,
    widths=(4, 16),
    ladder=(*ladder, limits['max_row_tokens']),
  )


def play(decoder, params, world, tasks, group_size, seed=0):
  """Episodes of some tasks in a host-driven world."""
  attempts = episodes.attempts_of(tasks, group_size)
  finished = alternation.run_episodes(
    decoder,
    TEMPLATE,
    params,
    world,
    attempts,
    [TEMPLATE.prompt(one.instruction) for one in tasks],
    keys.rows(keys.stream(seed, 'rollout', 0), range(len(attempts))),
    NO_RULES,
  )
  return [
    episodes.episode_of(attempt, one, TEMPLATE)
    for attempt, one in zip(attempts, finished, strict=True)
  ]


def assert_only_answers_part(plain, other):
  """ACT's rows are equal up to a token that REHEARSE said, if they differ."""
  parted = 0
  for left, right in zip(plain, other, strict=True):
    a, b = left.rows[0], right.rows[0]
    n = min(len(a.tokens), len(b.tokens))
    differ = np.flatnonzero(a.tokens[:n] != b.tokens[:n])
    first = int(differ[0]) if len(differ) else n
    np.testing.assert_array_equal(a.logprobs[:first], b.logprobs[:first])
    if len(differ):
      # Only an answer can be where the two part.
      assert a.authors[first] == b.authors[first] == types.Author.COPIED
      parted += 1
  assert parted, 'no answer changed: this test sees nothing'
