"""`envace bench`: how fast this machine runs a config, and how near its limit.

  generate     one role writes rows to the end, nothing in between
  rehearse     the same number of new tokens per row, but as a rehearsal: two
               roles, forced headers, as many turns as `max_steps` allows
  train_step   one policy step, its recorded-world anchor included

How long an untrained policy writes is chance. So the sampled workloads run a
*scripted* one: the configured network (with an unembedding of its own) whose
residual branches end in zeros, so that its last hidden state is the embedding
of the last token, and whose unembedding maps each embedding to a successor.
Greedy decoding then follows a script, token by token. The zeros are data: XLA
compiles and runs the full network.

`fraction_of_limit` is the time the work must take over the time it took,

  must take = sum over phases of max(FLOPs / matmul peak, bytes / bandwidth)

with both limits measured here, in the same run. Only useful work counts: no
padding, no recomputation. Per token, with W weights in matrices and n keys:

  forward        2 W + 4 n * query heads * head_dim * layers  FLOPs
  train          3 x forward, + 1 x for a KL reference; bytes not counted
  decode step    W + 2 n * kv heads * head_dim * layers * rows  numbers read

Weights that stay in the processor's own cache can beat the bandwidth limit.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import rich.console
import rich.table

from envace_jax import build
from envace_jax import errors
from envace_jax import process
from envace_jax import progress
from envace_jax import types
from envace_jax.learning import batch as batches
from envace_jax.learning import step as learning
from envace_jax.model import config as model_config
from envace_jax.model import sharding
from envace_jax.model import transformer
from envace_jax.rollout import on_device
from envace_jax.sampling import decode
from envace_jax.sampling import generator
from envace_jax.sampling import keys
from envace_jax.sampling import samplers

REPEATS = 5
OVERHEAD_PROMISE = 1.25
# The vocabulary of the script; text follows from FIRST_FREE on.
FILLER, ACT_HEADER, REHEARSE_HEADER, CALL, END, *CYCLE = range(8)
FIRST_FREE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
  """What the scripted policy reads and writes; all rows are alike."""

  prompt: np.ndarray  # ends in the ACT header
  tokens: np.ndarray  # that follow it in a rehearsal
  authors: np.ndarray  # of those
  plain_prompt: np.ndarray  # ends in a cycle without a stop token
  plain_tokens: np.ndarray
  successor: dict[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What the machine can do at best."""

  flops_per_s: float
  bytes_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  name: str
  call: Callable[[], Any]  # returns what to wait for
  tokens: int  # sampled, or trained on, by one call
  flops: np.ndarray  # [phases] that one call must spend
  bytes: np.ndarray  # [phases] that one call must move


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  workload: str
  tokens_per_s: float  # sampled, or read by the train step
  fraction_of_limit: float
  seconds: float  # median of REPEATS calls
  compiles: int  # programs, from the first call to the last
  compile_seconds: float
  peak_bytes: int  # device memory, else the process's, so far
  params: int
  load: float  # machine load, one-minute mean, when done
  tokens: int  # per call
  ratio_to_generate: float | None  # seconds per new token; None: not sampled


def run(config: ml_collections.ConfigDict, json_path: str | None) -> int:
  """Measures, prints a table, writes the records; returns the exit code."""
  build.validate(config)
  target = None if json_path is None else pathlib.Path(json_path)
  if target and not target.absolute().parent.is_dir():
    raise errors.UserError(f'--json {target}: no such directory; create it')
  try:
    records, limits = measure(config)
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  if target:
    rows = [dataclasses.asdict(record) for record in records]
    target.write_text(json.dumps(rows, indent=2) + '\n')
  _print(config, records, limits)
  return 0


def measure(
  config: ml_collections.ConfigDict,
) -> tuple[list[Record], Limits]:
  """Every workload's record, and the limits they are compared with."""
  mesh = sharding.make_mesh(**config.mesh.to_dict())
  network = build.model(config, config.data.vocab_size)
  shapes = jax.eval_shape(
    lambda: transformer.init_params(network, jax.random.key(0))
  )
  compiles = process.CompileCounter()
  calls = 3 * (1 + REPEATS) + 2
  with progress.bar('bench', calls, unit='run') as bar:
    # Two in turn, so that a change of load hits both sides of their ratio;
    # memory measured first, as it only ever grows.
    measured = _time(sampling_workloads(config, mesh), compiles, bar)
    measured += _time([train_workload(config, network, mesh)], compiles, bar)
    limits = measure_limits(network.config.compute_dtype, mesh, bar)
  plain_seconds = measured[0][1]['seconds']
  records = []
  for work, timing in measured:
    least = np.maximum(
      work.flops / limits.flops_per_s, work.bytes / limits.bytes_per_s
    ).sum()
    ratio = None
    if work.name != 'train_step':  # as many new tokens in both
      ratio = timing['seconds'] / plain_seconds
    records.append(
      Record(
        workload=work.name,
        tokens_per_s=work.tokens / timing['seconds'],
        fraction_of_limit=float(least / timing['seconds']),
        params=transformer.num_params(shapes),
        tokens=work.tokens,
        ratio_to_generate=ratio,
        **timing,
      )
    )
  return records, limits


def make_script(config: ml_collections.ConfigDict) -> Script:
  """As many turns as `max_steps` allows, spread over the whole row."""
  c, vocab = config.rollout, config.data.vocab_size
  if min(c.max_steps, c.max_observation_tokens) < 1 or c.max_action_tokens < 2:
    raise ValueError(
      'nothing to rehearse: set rollout.max_steps and '
      'rollout.max_observation_tokens to 1 or more, max_action_tokens to 2'
    )
  if vocab <= FIRST_FREE:
    raise ValueError(f'data.vocab_size={vocab} must exceed {FIRST_FREE}')
  prompt_length = max(1, c.prompt_tokens // 2)
  room = c.max_row_tokens - prompt_length
  turn = room // c.max_steps - 2  # without the two headers
  share = c.max_action_tokens / (c.max_action_tokens + c.max_observation_tokens)
  longest = min(c.max_action_tokens, (vocab - FIRST_FREE) // 2 + 2)
  acts = int(np.clip(round(turn * share), 2, longest))
  longest = min(c.max_observation_tokens, (vocab - FIRST_FREE) // 2 + 1)
  answers = int(np.clip(turn - acts, 1, longest))

  text = [*range(FIRST_FREE, FIRST_FREE + acts + answers - 3)]
  action = [CALL, *text[: acts - 2], END]
  answer = [*text[acts - 2 :], END]
  chain = [
    *zip([ACT_HEADER, *action], action, strict=False),
    *zip([REHEARSE_HEADER, *answer], answer, strict=False),
    *zip(CYCLE, [*CYCLE[1:], CYCLE[0]], strict=True),
  ]
  author = types.Author
  parts = (
    (action, author.ACT),
    ([REHEARSE_HEADER], author.FORCED),
    (answer, author.REHEARSE),
    ([ACT_HEADER], author.FORCED),
  )
  episode = [(t, by) for part, by in parts for t in part] * c.max_steps
  episode += [(t, author.ACT) for t in action]  # one call too many ends it
  tokens, authors = np.asarray(episode[:room]).T
  filler = [FILLER] * (prompt_length - 1)
  return Script(
    prompt=np.asarray([*filler, ACT_HEADER]),
    tokens=tokens,
    authors=authors,
    plain_prompt=np.asarray([*filler, CYCLE[0]]),
    plain_tokens=np.resize([*CYCLE[1:], CYCLE[0]], len(tokens)),
    successor=dict(chain),
  )


def scripted_params(
  model: transformer.Transformer, successor: dict[int, int]
) -> transformer.Params:
  """Parameters under which the likeliest next token is `successor[token]`."""
  c, draws = model.config, np.random.default_rng(0)
  embedding_VD = draws.normal(size=(c.vocab_size, c.d_model))
  # Orthogonal where the width allows it; random directions nearly are.
  scripted = sorted({*successor, *successor.values()})
  if len(scripted) <= c.d_model:
    embedding_VD[scripted] = np.linalg.qr(embedding_VD[scripted].T)[0].T
  embedding_VD /= np.linalg.norm(embedding_VD, axis=1, keepdims=True)
  unembedding_DV = np.zeros((c.d_model, c.vocab_size))
  for token, following in successor.items():
    unembedding_DV[:, following] += embedding_VD[token]
  tables = {'embedding': embedding_VD, 'unembedding': unembedding_DV}

  def fill(path, leaf):
    name = path[-1].key
    if name in tables:
      return tables[name].astype(leaf.dtype)
    if name == 'scale':
      return np.ones(leaf.shape, leaf.dtype)
    if name in ('wo', 'w_down'):  # how the residual branches end
      return np.zeros(leaf.shape, leaf.dtype)
    weights = draws.standard_normal(leaf.shape, np.float32)
    return (weights * c.d_model**-0.5).astype(leaf.dtype)

  shapes = jax.eval_shape(
    lambda: transformer.init_params(model, jax.random.key(0))
  )
  return jax.tree.map_with_path(fill, shapes)


def sampling_workloads(config: ml_collections.ConfigDict, mesh):
  """`generate` and `rehearse`, checked against the script as they run."""
  script = make_script(config)
  base = build.model(config, config.data.vocab_size).config
  network = transformer.Transformer(
    dataclasses.replace(base, tie_embeddings=False)
  )
  decoder = _greedy_decoder(config, network)
  abstract = learning.abstract_state(network, build.optimizer(config.rl), mesh)
  params = jax.device_put(
    scripted_params(network, script.successor),
    jax.tree.map(lambda x: x.sharding, abstract.params),
  )
  groups, size = config.rl.tasks_per_step, config.rl.group_size
  row_keys = keys.rows(
    keys.stream(config.seed, 'bench', 0), range(groups * size)
  )
  settings = decoder.settings()

  def opened(prompt):
    row = (prompt, np.full(len(prompt), types.Author.PROMPT))
    prompts = generator.pad_prompts(decoder, [row] * groups)
    return network, params, *prompts, row_keys

  def generate():
    state = generate_plain(
      opened(script.plain_prompt), decoder, settings, size, len(script.tokens)
    )
    return _follows(state, script.plain_prompt, script.plain_tokens)

  def rehearse():
    state = on_device.run(
      *opened(script.prompt),
      settings,
      np.asarray([ACT_HEADER, REHEARSE_HEADER], np.int32),
      np.int32(CALL),
      np.int32(decoder.limits.max_steps),
      group_size=size,
      ladder=decoder.ladder,
      filtered=decoder.filtered,
    )
    return _follows(state.decode, script.prompt, script.tokens)

  sampled = int(np.sum(script.authors != types.Author.FORCED))
  flops, moved = decode_cost(
    base, groups, groups * size, len(script.prompt), len(script.tokens)
  )
  return [
    Workload(
      name=name, call=call, tokens=tokens * groups * size, flops=flops,
      bytes=moved,
    )
    for name, call, tokens in (
      ('generate', generate, len(script.tokens)),
      ('rehearse', rehearse, sampled),
    )
  ]  # fmt: skip


def generate_plain(
  opened, decoder: generator.Decoder, settings, group_size: int, new: int
) -> decode.DecodeState:
  """One generation of `new` tokens per row, on the same rungs as a rehearsal."""
  model, params, ids_PW, _, count_P, row_keys = opened
  rungs = [rung for rung in decoder.ladder if rung > ids_PW.shape[1]]
  state = decode.prefill(
    *opened,
    group_size=group_size,
    capacity=rungs[-1],
    cache_length=rungs[0],
  )
  length = int(count_P[0])
  end = length + new
  for rung in rungs:
    if length == end:
      break
    if rung != rungs[0]:
      state = decode.grow(state, rung)
    # A full cache still yields one token more, which waits for the next rung.
    reached = min(rung + 1, end)
    budget_R = np.full((2,), reached - length, np.int32)
    state, _ = decode.generate(
      model,
      params,
      state,
      np.ones(len(row_keys), bool),
      np.int32(types.Role.ACT),
      settings.replace(max_new=budget_R),
      filtered=decoder.filtered,
    )
    length = reached
  return state


def train_workload(
  config: ml_collections.ConfigDict, network: transformer.Transformer, mesh
) -> Workload:
  """One policy step on rows of a third of the longest to the longest."""
  script, rl, loss = make_script(config), config.rl, build.policy_loss(config)
  tx = build.optimizer(rl)
  tokens = np.concatenate([script.prompt, script.tokens])
  authors = np.full(len(tokens), types.Author.PROMPT)
  authors[len(script.prompt) :] = script.authors
  recorded = np.where(
    authors == types.Author.REHEARSE, types.Author.WORLD, authors
  )
  first = max(len(tokens) // 3, len(script.prompt) + 1)

  def pack(rows, authors):
    lengths = np.linspace(first, len(tokens), rows).astype(int)
    return batches.pack_rows(
      [(tokens[:n], authors[:n]) for n in lengths],
      length_buckets=(config.rollout.max_row_tokens,),
      batch_size=rows,
      microbatches=rl.microbatches,
    )

  batch = pack(rl.tasks_per_step * rl.group_size, authors)
  batch = batch.replace(advantages=np.ones_like(batch.advantages))
  anchor = pack(rl.anchor_batch_size, recorded) if loss.uses_anchor else None
  flops = (3 + loss.uses_reference) * forward_flops(
    network.config, batch.lengths
  )
  total = int(batch.lengths.sum())
  if anchor is not None:
    flops += 3 * forward_flops(network.config, anchor.lengths)
    total += int(anchor.lengths.sum())

  key = keys.stream(config.seed, 'init', 0)
  state = learning.init_state(network, tx, key, mesh)
  step_fn = learning.make_policy_step(network, tx, loss, mesh)
  ref = jax.tree.map(jnp.copy, state.params) if loss.uses_reference else None
  batch = sharding.place_batch(batch, mesh)
  if anchor is not None:
    anchor = sharding.place_batch(anchor, mesh)

  def call():
    nonlocal state
    state, metrics = step_fn(state, batch, ref, anchor)
    return state, metrics

  return Workload(
    name='train_step',
    call=call,
    tokens=total,
    flops=np.asarray([flops]),
    bytes=np.zeros(1),
  )
