"""SmolLM2-135M-Instruct from its GGUF file, beside transformers and by itself.

transformers reads the same file by its own code: its weights, its order of the
rows of q and k and its config are the reference.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pretrained as fetched
import pytest

from envace_jax import types
from envace_jax.model import logprobs, transformer
from envace_jax.sampling import generator, keys, samplers
from envace_jax.text import fast_tokenizer
from envace_jax.weights import pretrained

torch = pytest.importorskip('torch', reason='needs torch, the reference')
transformers = pytest.importorskip(
  'transformers', reason='needs transformers, the reference'
)
pytest.importorskip('gguf', reason='reads the file')

END = 2  # <|im_end|>
LAYERS = 30
# Its first layers in every run: decoding compiles each layer three times.
depths = pytest.mark.parametrize(
  'depth', [6, pytest.param(LAYERS, marks=pytest.mark.nightly)]
)
REQUESTS = (
  'What is the capital of France?',
  'Write a haiku about rain.',
  'List three uses of a paper clip, one a line.',
  'Def: prime(n) returns True if n is prime. Write it in Python.',
  'My order 48213 arrived broken on 12/05. What now?',
)


@pytest.fixture(scope='module')
def ours():
  """(model, params): stacked parameters, as a long run would load them."""
  opened = pretrained.open_checkpoint(fetched.smollm2_gguf())
  config = dataclasses.replace(opened.config, scan_layers=True, max_len=512)
  return transformer.Transformer(config), opened.load(config)


@pytest.fixture(scope='module')
def theirs():
  pytest.importorskip('accelerate', reason='transformers reads GGUF with it')
  path = fetched.smollm2_gguf()
  return transformers.AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    dtype=torch.float32,
    attn_implementation='eager',
  ).eval()


@pytest.fixture(scope='module')
def tokenizer():
  return fast_tokenizer.load(fetched.smollm2_tokenizer())


def ids_of(tokenizer, request):
  """A whole prompt. Its markers are single tokens."""
  start = tokenizer.encode('user\n' + request)
  system = tokenizer.encode('system\nYou are a helpful AI assistant.')
  newline = tokenizer.encode('\n')
  assistant = tokenizer.encode('assistant\n')
  return [1, *system, END, *newline, 1, *start, END, *newline, 1, *assistant]


def logits_of(model, params, tokens_BT):
  @jax.jit
  def run(params):
    hidden_BTD, _ = model.apply({'params': params}, tokens_BT)
    return model.apply({'params': params}, hidden_BTD, method='unembed')

  return np.asarray(run(params))


def their_logits(reference, tokens_BT):
  with torch.no_grad():
    return reference(torch.tensor(tokens_BT)).logits.numpy()


def test_the_config_of_the_file(ours, theirs):
  config = ours[0].config
  assert (config.num_layers, config.d_model, config.d_ff) == (30, 576, 1536)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
  assert config.rope_theta == 100_000.0 and config.norm_eps == 1e-5
  assert config.tie_embeddings and config.vocab_size == 49_152
  assert transformer.num_params(ours[1]) == theirs.num_parameters()


def test_logits_equal_those_of_transformers(ours, theirs, tokenizer):
  model, params = ours
  ids = ids_of(tokenizer, REQUESTS[4])
  noise = np.random.default_rng(0).integers(17, 49_152, len(ids))
  tokens_BT = np.asarray([ids, noise, ids[::-1]], np.int32)
  expected = their_logits(theirs, tokens_BT)
  assert np.abs(expected).max() > 10
  got = logits_of(model, params, tokens_BT)
  np.testing.assert_allclose(got, expected, atol=1e-3, rtol=0)
  # The tolerance sees what agreement of the best token does not.
  config = dataclasses.replace(model.config, norm_eps=1e-6)
  wrong = logits_of(transformer.Transformer(config), params, tokens_BT)
  assert np.abs(wrong - expected).max() > 5e-3
  assert (wrong[0].argmax(-1) == expected[0].argmax(-1)).mean() > 0.95


def cut(ours, depth):
  """The first layers of the real model."""
  model, params = ours
  config = dataclasses.replace(model.config, num_layers=depth)
  layers = jax.tree.map(lambda x: x[:depth], params['layers'])
  return transformer.Transformer(config), {**params, 'layers': layers}


def decoder_of(model, *, max_new, temperature):
  settings = samplers.SamplerConfig(temperature=temperature)
  return generator.Decoder(
    model=model,
    limits=types.Limits(
      max_steps=4,
      max_actions=4,
      max_user_turns=4,
      max_parallel_calls=1,
      max_row_tokens=128,
      max_action_tokens=max_new,
      max_observation_tokens=max_new,
    ),
    act=settings,
    rehearse=settings,
    act_stop_ids=(END,),
    rehearse_stop_ids=(END,),
    prompt_tokens=64,
    widths=(16,),
    ladder=(128,),
  )


def open_session(decoder, params, prompts):
  rows = [
    (np.asarray(ids, np.int32), np.zeros(len(ids), np.int8)) for ids in prompts
  ]
  row_keys = keys.rows(jax.random.key(0), range(len(rows)))
  return generator.Session(decoder, params, rows, 1, row_keys)


def greedy_of_theirs(reference, ids, max_new):
  out = reference.generate(
    torch.tensor([ids]),
    max_new_tokens=max_new,
    do_sample=False,
    eos_token_id=END,
    pad_token_id=END,
  )
  return out[0, len(ids) :].tolist()


@depths
def test_greedy_words_are_those_of_transformers(
  ours, theirs, tokenizer, monkeypatch, depth
):
  model, params = cut(ours, depth)
  monkeypatch.setattr(theirs.config, 'num_hidden_layers', depth)
  whole = depth == LAYERS
  prompts = [ids_of(tokenizer, request) for request in REQUESTS]
  max_new = 64 if whole else 16
  decoder = decoder_of(model, max_new=max_new, temperature=0.0)
  session = open_session(decoder, params, prompts)
  said = session.generate(types.Role.ACT, range(len(prompts)))
  for row, ids in enumerate(prompts):
    expected = greedy_of_theirs(theirs, ids, max_new)
    assert len(expected) > 5 and len(set(expected)) > 1
    assert said[row].ids.tolist() == expected, REQUESTS[row]
  if whole:
    assert 'Paris' in tokenizer.decode(said[0].ids.tolist())


@depths
def test_turns_over_a_cache_equal_the_whole_row(ours, tokenizer, depth):
  """Five rows of unequal length: prefill, speak, be told, speak again."""
  model, params = cut(ours, depth)
  decoder = decoder_of(model, max_new=6, temperature=0.7)
  prompts = [ids_of(tokenizer, request) for request in REQUESTS]
  session = open_session(decoder, params, prompts)
  for role, told in (
    (
      types.Role.ACT,
      ('No, shorter.', 'Once more: 17 + 25?', 'Why', '', 'x = 3'),
    ),
    (
      types.Role.REHEARSE,
      ('Thanks.', 'And 3.5%?', 'Go on, please, do', 'ok', ''),
    ),
    (types.Role.ACT, ()),
  ):
    session.generate(role, range(5))
    for row, text in enumerate(told):
      ids = np.asarray([*tokenizer.encode(text), END], np.int32)
      session.extend(row, ids, np.zeros(len(ids), np.int8))
  rows = session.rows()
  assert len({len(row.tokens) for row in rows}) >= 3
  longest = max(len(row.tokens) for row in rows)
  tokens_BT = np.zeros((5, longest), np.int32)
  sampled_BT = np.zeros((5, longest))
  spoken_BT = np.zeros((5, longest), bool)
  valid_BT = np.zeros((5, longest), bool)
  for i, row in enumerate(rows):
    n = len(row.tokens)
    tokens_BT[i, :n], valid_BT[i, :n] = row.tokens, True
    sampled_BT[i, :n], spoken_BT[i, :n] = row.logprobs, row.logprobs != 0
  # Not every row speaks its whole budget; each speaks in every turn.
  assert spoken_BT.sum(axis=1).min() >= 3 and spoken_BT.sum() > 25
  scored = logprobs.token_logprobs(
    model,
    params,
    jnp.asarray(tokens_BT),
    jnp.asarray(valid_BT),
    jnp.full(tokens_BT.shape, 0.7, jnp.float32),
    chunk=16,
  )
  gap = np.abs(np.asarray(scored.logprob) - sampled_BT)[spoken_BT]
  assert gap.max() <= 1e-4
  assert np.abs(sampled_BT[spoken_BT]).max() > 0.5
