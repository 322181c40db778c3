"""Speed of a published checkpoint here, beside transformers and torch.

  pip install -e '.[parity]' peft && python tests/against_torch.py model.gguf

Both sides run the same float32 weights, the same tokens and the same number of
new tokens on the same cores, in turns, and the ratio of medians is printed:

  rollout      whole batches of two-role episodes: in every turn one span by ACT
               and one by REHEARSE, each behind a forced header. torch: one
               `generate` per span over the episode so far, as rollout loops
               that render a chat anew do; `kept` gives it its own cache again.
  train step   LoRA on all projections over rows of unequal length, AdamW.
               torch: peft, rows padded to the longest, one backward a
               microbatch of neighbours in length.

Not a test: it takes minutes, and what it says depends on the machine.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time

import jax
import numpy as np
import optax
import peft
import torch
import transformers

from envace_jax import types
from envace_jax.learning import batch as batches
from envace_jax.learning import objective
from envace_jax.learning import state as states
from envace_jax.learning import step as learning
from envace_jax.model import config as model_config
from envace_jax.model import sharding, transformer
from envace_jax.sampling import generator, keys, samplers
from envace_jax.weights import export, pretrained

ROWS, GROUP = 16, 4
PROMPT, TURNS, SPAN, HEADER = 64, 4, 24, 5
LENGTH = PROMPT + TURNS * 2 * (SPAN + HEADER)
RANK, ALPHA = 16, 32.0
MICROBATCHES = 4
PROJECTIONS = {
  'wq': 'q_proj', 'wk': 'k_proj', 'wv': 'v_proj', 'wo': 'o_proj',
  'w_gate': 'gate_proj', 'w_up': 'up_proj', 'w_down': 'down_proj',
}  # fmt: skip


def our_rollout(model, params, prompts, header):
  """A function that runs one batch of episodes."""
  limits = types.Limits(
    max_steps=TURNS, max_actions=TURNS + 1, max_user_turns=1,
    max_parallel_calls=1, max_action_tokens=SPAN, max_observation_tokens=SPAN,
    max_row_tokens=LENGTH,
  )  # fmt: skip
  decoder = generator.Decoder(
    model=model, limits=limits, act=samplers.SamplerConfig(),
    rehearse=samplers.SamplerConfig(), act_stop_ids=(), rehearse_stop_ids=(),
    prompt_tokens=PROMPT, widths=(8,), ladder=(128, 192, 256, LENGTH),
  )  # fmt: skip
  authored = np.full(HEADER, types.Author.FORCED, np.int8)
  rows = [(ids, np.zeros(PROMPT, np.int8)) for ids in prompts[::GROUP]]
  row_keys = keys.rows(keys.stream(0, 'rollout', 0), range(ROWS))

  def run():
    session = generator.Session(decoder, params, rows, GROUP, row_keys)
    for _ in range(TURNS):
      for role in types.Role:
        for row in range(ROWS):
          session.extend(row, header, authored)
        session.generate(role, range(ROWS))
    assert (session.lengths == LENGTH).all()

  return run


def their_rollout(model, prompts, header, *, kept: bool):
  """The same with `generate`; `kept` hands it its cache again."""
  header = torch.tensor(header).repeat(ROWS, 1)

  @torch.no_grad()
  def run():
    ids, cache = torch.tensor(prompts), None
    for _ in range(TURNS * 2):
      ids = torch.cat([ids, header], dim=1)
      if kept and cache is None:
        cache = transformers.DynamicCache()
      ids = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
        min_new_tokens=SPAN, max_new_tokens=SPAN, pad_token_id=0,
        past_key_values=cache,
      )  # fmt: skip
    assert ids.shape == (ROWS, LENGTH)

  return run


def our_train_step(config, base, lengths, tokens):
  """A function that makes one update."""
  model, mesh = transformer.Transformer(config), sharding.make_mesh()
  tx = optax.adamw(1e-4)
  loss = objective.LossConfig(
    microbatches=MICROBATCHES, logprob_chunk=128,
    row_buckets=tuple(int(n) for n in lengths[3::4]),
  )  # fmt: skip
  state = states.init_state(model, tx, jax.random.key(0), mesh)
  step = learning.make_supervised_step(model, tx, loss, mesh, base=base)
  authors = np.full(LENGTH, types.Author.ACT, np.int8)
  batch = batches.pack_rows(
    [(tokens[i, :n], authors[:n]) for i, n in enumerate(lengths)],
    length_buckets=(LENGTH,), batch_size=ROWS, microbatches=MICROBATCHES,
  )  # fmt: skip
  batch = sharding.place_batch(batch, mesh)

  def run():
    nonlocal state
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))

  return run


def their_train_step(model, lengths, tokens):
  """The same with peft, rows of similar length together."""
  adapted = peft.get_peft_model(
    model,
    peft.LoraConfig(
      r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS.values()),
      task_type='CAUSAL_LM',
    ),
  )  # fmt: skip
  optimizer = torch.optim.AdamW(
    [p for p in adapted.parameters() if p.requires_grad], lr=1e-4
  )
  each = ROWS // MICROBATCHES

  def run():
    optimizer.zero_grad()
    for first in range(0, ROWS, each):
      part = slice(first, first + each)
      longest = lengths[part].max()
      ids = torch.tensor(tokens[part, :longest], dtype=torch.long)
      valid = torch.arange(longest)[None] < torch.tensor(lengths[part])[:, None]
      labels = torch.where(valid, ids, -100)
      loss = adapted(
        input_ids=ids, attention_mask=valid.long(), labels=labels
      ).loss
      (loss * valid.sum() / int(lengths.sum())).backward()
    optimizer.step()

  return run


def compare(name: str, ours, theirs: dict, repeats: int) -> None:
  """Prints how many times as long theirs take, run in turns."""
  works = {'ours': ours, **theirs}
  spent = {one: [] for one in works}
  for repeat in range(repeats + 1):
    for one, run in works.items():
      start = time.perf_counter()
      run()
      if repeat:  # the first compiles
        spent[one].append(time.perf_counter() - start)
  medians = {one: statistics.median(spent[one]) for one in spent}
  for one in theirs:
    ratios = [b / a for a, b in zip(spent['ours'], spent[one], strict=True)]
    print(
      f'{name}: {one} takes {medians[one] / medians["ours"]:.2f} x as long '
      f'({medians["ours"]:.2f} s against {medians[one]:.2f} s; pairs from '
      f'{min(ratios):.2f} to {max(ratios):.2f})',
      flush=True,
    )


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('checkpoint')
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  opened = pretrained.open_checkpoint(args.checkpoint)
  config = opened.config
  base = opened.load()
  with tempfile.TemporaryDirectory() as folder:
    export.save(base, config, f'{folder}/model', dtype='float32', eos_ids=[0])
    model = transformers.AutoModelForCausalLM.from_pretrained(
      f'{folder}/model', dtype=torch.float32
    )
  rng = np.random.default_rng(0)
  tokens = rng.integers(100, config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
  prompts = np.repeat(tokens[::GROUP, :PROMPT], GROUP, axis=0)
  header = tokens[0, :HEADER]
  compare(
    'rollout',
    our_rollout(transformer.Transformer(config), base, prompts, header),
    {
      'transformers': their_rollout(model, prompts, header, kept=False),
      'transformers, kept': their_rollout(model, prompts, header, kept=True),
    },
    args.repeats,
  )
  lengths = np.linspace(LENGTH // 3, LENGTH, ROWS).astype(int)
  adapting = model_config.LoraConfig(
    rank=RANK, alpha=ALPHA, targets=tuple(PROJECTIONS)
  )
  # Compiled once instead of thirty times; the arithmetic is the same.
  stacked = dataclasses.replace(config, scan_layers=True)
  compare(
    'train step',
    our_train_step(
      dataclasses.replace(stacked, lora=adapting),
      opened.load(stacked),
      lengths,
      tokens,
    ),
    {'peft': their_train_step(model, lengths, tokens)},
    args.repeats,
  )


if __name__ == '__main__':
  main()
