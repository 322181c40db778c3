"""Whole episodes cost work in proportion to their turns, not to its square.

A scripted policy calls a tool until it may no more, and its other role answers,
in split views. Counted is what is put through the model, at the three functions
that do so, padding included, whatever a session says about itself.
"""

import dataclasses

import numpy as np
import pytest
from talkative import ANYTHING, NO_RULES, TEMPLATE, decoder_for, task

from envace_jax import types
from envace_jax.model import config as config_lib
from envace_jax.model import transformer
from envace_jax.rollout import alternation, episodes
from envace_jax.sampling import decode, generator, keys, samplers, scripted
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.worlds import own_row

TURNS = (2, 4, 8, 16)
SLACK = 1.1
GREEDY = samplers.SamplerConfig(temperature=0.0)


@pytest.fixture(scope='module')
def policy():
  """<|act|> <tool_call> a c e <|end|> <|rehearse|> b d f h <|end|> and on."""
  tokenizer = tokenizers.ByteTokenizer()
  control, successor = tokenizer.control, {}
  for chain in (
    [control['<|act|>'], control['<tool_call>'], *tokenizer.encode('ace')],
    [control['<|rehearse|>'], *tokenizer.encode('bdfh')],
  ):
    successor |= dict(
      zip(
        chain, [*chain[1:], TEMPLATE.stop_ids[types.Role.ACT][0]], strict=True
      )
    )
  model = transformer.Transformer(
    config_lib.TransformerConfig(
      vocab_size=tokenizer.vocab_size,
      d_model=32,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      d_ff=32,
      max_len=256,
      tie_embeddings=False,
    )
  )
  return model, scripted.params(model, successor)


class Counter:
  """Positions put through the model: prompts, and what comes after them."""

  def __init__(self, monkeypatch):
    self.prompts = self.after = 0
    self.sessions = []
    prefill, extend, generate = decode.prefill, decode.extend, decode.generate
    opened = generator.Session.__init__

    def counted_prefill(model, params, ids_PW, *args, **options):
      self.prompts += ids_PW.size
      return prefill(model, params, ids_PW, *args, **options)

    def counted_extend(model, params, state, ids_BW, *args):
      self.after += ids_BW.size
      return extend(model, params, state, ids_BW, *args)

    def counted_generate(model, params, state, live_B, *args, **options):
      before_B = np.asarray(state.length)
      state, finished_B = generate(
        model, params, state, live_B, *args, **options
      )
      # A row that has ended keeps its place until the last one has.
      self.after += live_B.size * int((state.length - before_B).max())
      return state, finished_B

    def counted_open(session, *args):
      opened(session, *args)
      self.sessions.append(session)

    monkeypatch.setattr(decode, 'prefill', counted_prefill)
    monkeypatch.setattr(decode, 'extend', counted_extend)
    monkeypatch.setattr(decode, 'generate', counted_generate)
    monkeypatch.setattr(generator.Session, '__init__', counted_open)


def run(policy, turns):
  """Three episodes of `turns` answered calls, with prompts of three lengths."""
  model, params = policy
  decoder = dataclasses.replace(
    decoder_for(model, max_steps=turns, max_row_tokens=256),
    act=GREEDY,
    rehearse=GREEDY,
  )
  world = own_row.OwnRowWorld(
    dataclasses.replace(decoder, prompt_tokens=40),
    TEMPLATE,
    params,
    lambda one: TEMPLATE.prompt(one.instruction, 'you are the desk'),
    ANYTHING,
    trained=True,
  )
  tasks = [task(text) for text in ('a', 'a longer one', 'mid')]
  finished = alternation.run_episodes(
    decoder,
    TEMPLATE,
    params,
    world,
    episodes.attempts_of(tasks, 1),
    [TEMPLATE.prompt(one.instruction) for one in tasks],
    keys.rows(keys.stream(0, 'rollout', 0), range(len(tasks))),
    NO_RULES,
  )
  for one in finished:
    assert one.stop_reason is types.StopReason.MAX_STEPS
    spoken = [author for author, _, _ in templates.runs(one.rows[1].authors)]
    assert spoken.count(types.Author.REHEARSE) == turns
  return finished


def encoded_anew(finished):
  """Positions, prompts apart, if each call of the model read its whole row."""
  count = 0
  for one in finished:
    for row in one.rows:
      prompt = int((row.authors == types.Author.PROMPT).sum())
      count += sum(
        stop - prompt
        for author, _, stop in templates.runs(row.authors)
        if author in (types.Author.ACT, types.Author.REHEARSE)
      )
  return count


def grows_linearly(counts):
  """Whether twice the turns never cost more than twice the work."""
  pairs = zip(counts, counts[1:], strict=False)
  return all(more <= 2 * SLACK * less for less, more in pairs)


def test_tokens_processed_grow_linearly_with_turns(policy, monkeypatch):
  processed, anew = [], []
  for turns in TURNS:
    with monkeypatch.context() as patch:
      counter = Counter(patch)
      finished = run(policy, turns)
    processed.append(counter.after)
    anew.append(encoded_anew(finished))
    # What a session reports is what was done.
    reported = sum(session.positions for session in counter.sessions)
    assert len(counter.sessions) == 2
    assert reported == counter.prompts + counter.after
  assert grows_linearly(processed), processed
  assert not grows_linearly(anew), 'reading rows anew would pass unseen'
  assert anew[-1] > 2 * processed[-1]
