"""`envace bench`: how fast this machine runs a config, and how near its limit.

  generate     one role writes rows to the end, nothing in between
  rehearse     as many new tokens per row, but as a rehearsal: two roles,
               forced headers, as many turns as `max_steps` allows
  train_step   one policy step, its recorded-world anchor included

How much an untrained policy writes is chance, so the sampled workloads run a
*scripted* one: the configured network (with an unembedding of its own) whose
residual branches end in zeros, so that its last hidden state is the embedding
of the last token, and whose unembedding maps that to the token's successor.
The zeros are data: XLA compiles and runs the full network.

`fraction_of_limit` is the time the work must take over the time it took,

  must take = sum over phases of max(FLOPs / matmul peak, bytes / bandwidth)

with both limits measured in the same run. Only useful work counts: neither
padding nor recomputation. With W weights in matrices and n keys per token:

  forward        2 W + 4 n * query heads * head_dim * layers  FLOPs a token
  train          3 x forward, + 1 x for a KL reference; bytes not counted
  decode step    W + 2 n * kv heads * head_dim * layers * rows  numbers read

Weights that stay in the processor's own cache can beat the bandwidth limit.
"""

from collections.abc import Callable
import dataclasses
import json
import os
import pathlib
import resource
import sys
import time
from typing import Any, NamedTuple

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
from envace_jax.model import sharding
from envace_jax.model import transformer
from envace_jax.rollout import on_device
from envace_jax.sampling import decode
from envace_jax.sampling import generator
from envace_jax.sampling import keys
from envace_jax.sampling import samplers

REPEATS = 5
# The script's vocabulary; texts are written in the ids that follow.
FILLER, ACT_HEADER, REHEARSE_HEADER, CALL, END, PING, PONG = range(7)
HEADER_R = np.asarray([ACT_HEADER, REHEARSE_HEADER], np.int32)
TEXT = 7


class Limits(NamedTuple):
  """What the machine can do at best."""

  flops_per_s: float
  bytes_per_s: float


class Workload(NamedTuple):
  call: Callable[[], Any]  # returns arrays to wait for
  tokens: int  # sampled, or read by the train step, per call
  flops: np.ndarray  # [phases] that a call must spend
  bytes: np.ndarray  # [phases] that a call must move


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  workload: str
  tokens_per_s: float  # sampled, or read by the train step
  fraction_of_limit: float
  seconds: float  # median of REPEATS calls
  compiles: int  # programs, over all calls
  peak_bytes: int  # of the device, else of this process, up to here
  params: int
  load: float  # one-minute mean of the machine
  tokens: int  # per call
  ratio_to_generate: float | None  # seconds per new token; None: samples none


def run(config: ml_collections.ConfigDict, json_path: str | None) -> int:
  """Measures, prints a table, writes the records; returns the exit code."""
  build.validate(config)
  target = None if json_path is None else pathlib.Path(json_path).absolute()
  if target and not target.parent.is_dir():
    raise errors.UserError(f'--json: {target.parent} is no directory; make it')
  try:
    records, limits = measure(config)
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  if target:
    rows = [dataclasses.asdict(record) for record in records]
    target.write_text(json.dumps(rows, indent=2) + '\n')
  _print(records, limits)
  return 0


def measure(
  config: ml_collections.ConfigDict,
) -> tuple[list[Record], Limits]:
  """A record per workload, and the limits they are compared with."""
  mesh = sharding.make_mesh(**config.mesh.to_dict())
  model = build.model(config, config.data.vocab_size)
  compiles = process.CompileCounter()
  with progress.bar('bench', 3 * (1 + REPEATS) + 2, unit='run') as bar:
    work = sampled_workloads(config, model, mesh)
    timed = _time(work, compiles, bar)
    work['train_step'] = train_workload(config, model, mesh)
    timed |= _time({'train_step': work['train_step']}, compiles, bar)
    limits = measure_limits(mesh, model.config.compute_dtype, bar)
  params = transformer.num_params(_shapes(model))
  plain = timed['generate']['seconds']
  return [
    Record(
      workload=name,
      tokens=w.tokens,
      tokens_per_s=w.tokens / seconds['seconds'],
      fraction_of_limit=must_take(w, limits) / seconds['seconds'],
      params=params,
      ratio_to_generate=(
        None if name == 'train_step' else seconds['seconds'] / plain
      ),
      **seconds,
    )
    for (name, w), seconds in zip(work.items(), timed.values(), strict=True)
  ], limits


def make_script(c: ml_collections.ConfigDict, vocab_size: int):
  """As many turns as `max_steps` allows, spread over the whole row.

  Args:
    c: `config.rollout`.
    vocab_size: ids available.

  Returns:
    tokens and authors that follow a prompt, and the successor of each token.
  """
  if min(c.max_steps, c.max_observation_tokens, c.max_action_tokens - 1) < 1:
    raise ValueError(
      'no room for a turn: rollout.max_steps and max_observation_tokens must '
      'be at least 1, max_action_tokens at least 2'
    )
  room = c.max_row_tokens - _prompt_length(c)
  turn = room // c.max_steps - 2  # without its two headers
  longest = np.asarray([c.max_action_tokens, c.max_observation_tokens])
  longest = np.minimum(longest, (vocab_size - TEXT) // 2 + 1)
  share = np.round(turn * longest / longest.sum()).astype(int)
  acts, answers = np.maximum(np.minimum(share, longest), (2, 1))
  text = list(range(TEXT, TEXT + acts + answers - 3))
  action = [CALL, *text[: acts - 2], END]
  answer = [*text[acts - 2 :], END]
  one_turn = [
    *((t, types.Author.ACT) for t in action),
    (REHEARSE_HEADER, types.Author.FORCED),
    *((t, types.Author.REHEARSE) for t in answer),
    (ACT_HEADER, types.Author.FORCED),
  ]
  # One call more than is answered ends the episode, if the row does not.
  episode = (one_turn * c.max_steps + one_turn[:acts])[:room]
  successor = dict(zip([ACT_HEADER, *action], action, strict=False))
  successor |= dict(zip([REHEARSE_HEADER, *answer], answer, strict=False))
  return *np.asarray(episode).T, successor | {PING: PONG, PONG: PING}


def scripted_params(
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
  tables = {'embedding': embedding_VD, 'unembedding': unembedding_DV}

  def fill(path, leaf):
    name = path[-1].key
    if name in tables:
      return tables[name].astype(leaf.dtype)
    if name == 'scale':
      return np.ones(leaf.shape, leaf.dtype)
    if name in ('wo', 'w_down'):  # the ends of the residual branches
      return np.zeros(leaf.shape, leaf.dtype)
    return draws.standard_normal(leaf.shape, leaf.dtype) * c.d_model**-0.5

  return jax.tree.map_with_path(fill, _shapes(model))


def sampled_workloads(config, model, mesh) -> dict[str, Workload]:
  """`generate` and `rehearse`, which check that the script is followed."""
  c, rl, vocab_size = config.rollout, config.rl, model.config.vocab_size
  tokens, authors, successor = make_script(c, vocab_size)
  model = model.clone(
    config=dataclasses.replace(model.config, tie_embeddings=False)
  )
  state = learning.abstract_state(model, build.optimizer(rl), mesh)
  params = jax.device_put(
    scripted_params(model, successor),
    jax.tree.map(lambda x: x.sharding, state.params),
  )
  decoder = _greedy_decoder(config, model)
  rows, before = rl.tasks_per_step * rl.group_size, _prompt_length(c)
  row_keys = keys.rows(keys.stream(config.seed, 'bench', 0), range(rows))
  settings = decoder.settings()

  def opening(last):
    ids = np.asarray([FILLER] * (before - 1) + [last], np.int32)
    prompts = [(ids, np.zeros_like(ids))] * rl.tasks_per_step
    return params, *generator.pad_prompts(decoder, prompts), row_keys

  def generate():
    state = generate_plain(
      decoder, *opening(PING), settings, rl.group_size, len(tokens)
    )
    return _follows(state, before, np.resize([PONG, PING], len(tokens)))

  def rehearse():
    steps, call_id = np.int32(c.max_steps), np.int32(CALL)
    state = on_device.run(
      model, *opening(ACT_HEADER), settings, HEADER_R, call_id, steps,
      group_size=rl.group_size, ladder=decoder.ladder,
      filtered=decoder.filtered,
    )  # fmt: skip
    return _follows(state.decode, before, tokens)

  sampled = int(np.sum(authors != types.Author.FORCED))
  cost = decode_cost(model.config, rl.tasks_per_step, rows, before, len(tokens))
  return {
    'generate': Workload(generate, rows * len(tokens), *cost),
    'rehearse': Workload(rehearse, rows * sampled, *cost),
  }


def generate_plain(
  decoder, params, ids_PW, authors_PW, count_P, row_keys, settings, group, new
) -> decode.DecodeState:
  """`new` tokens per row by one role, on the cache lengths of a rehearsal."""
  rungs = [rung for rung in decoder.ladder if rung > ids_PW.shape[1]]
  state = decode.prefill(
    decoder.model, params, ids_PW, authors_PW, count_P, row_keys,
    group_size=group, capacity=rungs[-1], cache_length=rungs[0],
  )  # fmt: skip
  live_B, length = np.ones(len(row_keys), bool), int(count_P[0])
  end = length + new
  for rung in rungs:
    if length == end:
      break
    if rung > rungs[0]:
      state = decode.grow(state, rung)
    # A full cache yields one token more, which is stored on the next rung.
    until = min(rung + 1, end)
    budget = settings.replace(max_new=np.full(2, until - length, np.int32))
    state, _ = decode.generate(
      decoder.model, params, state, live_B, np.int32(types.Role.ACT), budget,
      filtered=decoder.filtered,
    )  # fmt: skip
    length = until
  return state


def train_workload(config, model, mesh) -> Workload:
  """A policy step on rows from a third of the greatest length to the whole."""
  rl, loss = config.rl, build.policy_loss(config)
  tokens, authors, _ = make_script(config.rollout, model.config.vocab_size)

  def pack(rows, answered_by):
    by = np.where(authors == types.Author.REHEARSE, answered_by, authors)
    before = np.zeros(_prompt_length(config.rollout), int)
    ids, by = np.append(before + FILLER, tokens), np.append(before, by)
    shortest = max(len(ids) // 3, len(before) + 1)
    lengths = np.linspace(shortest, len(ids), rows).astype(int)
    batch = batches.pack_rows(
      [(ids[:n], by[:n]) for n in lengths],
      length_buckets=(config.rollout.max_row_tokens,),
      batch_size=rows,
      microbatches=rl.microbatches,
    )
    return batch.replace(advantages=np.ones_like(batch.advantages)), lengths

  rows = rl.tasks_per_step * rl.group_size
  batch, lengths_B = pack(rows, types.Author.REHEARSE)
  passes_B = np.full(rows, 3 + loss.uses_reference)
  batch, anchor = sharding.place_batch(batch, mesh), None
  if loss.uses_anchor:
    anchor, more_B = pack(rl.anchor_batch_size, types.Author.WORLD)
    anchor = sharding.place_batch(anchor, mesh)
    lengths_B = np.append(lengths_B, more_B)
    passes_B = np.append(passes_B, np.full(len(more_B), 3))
  tx, key = build.optimizer(rl), keys.stream(config.seed, 'init', 0)
  state = learning.init_state(model, tx, key, mesh)
  step = learning.make_policy_step(model, tx, loss, mesh)
  ref = jax.tree.map(jnp.copy, state.params) if loss.uses_reference else None

  def call():
    nonlocal state
    state, metrics = step(state, batch, ref, anchor)
    return state, metrics

  flops_B = row_flops(model.config, lengths_B) * passes_B
  return Workload(call, int(lengths_B.sum()), flops_B, np.zeros(len(flops_B)))


def row_flops(c, length, *, scored: bool = True):
  """Of one forward pass over rows of these lengths, logits included."""
  pairs = length * (length + 1) / 2
  weights = _weights(c) + scored * c.d_model * c.vocab_size
  return 2 * weights * length + 4 * _heads(c, c.num_heads) * pairs


def decode_cost(c, prompts, rows, before, new) -> tuple[np.ndarray, np.ndarray]:
  """FLOPs and bytes of the prefill, then of each of `new` decode steps."""
  keys_T = before + np.arange(new)  # the pending token sees itself
  weights = _weights(c) + c.d_model * c.vocab_size
  flops_T = rows * (2 * weights + 4 * _heads(c, c.num_heads) * keys_T)
  read_T = weights + 2 * rows * _heads(c, c.num_kv_heads) * keys_T
  prefill = prompts * row_flops(c, before, scored=False)
  width = jnp.dtype(c.compute_dtype).itemsize
  numbers = np.append(_weights(c), read_T)
  return np.append(prefill, flops_T), numbers * width


def must_take(work: Workload, limits: Limits) -> float:
  """Seconds that a call needs at the machine's limits."""
  spent = work.flops / limits.flops_per_s, work.bytes / limits.bytes_per_s
  return float(np.maximum(*spent).sum())


def measure_limits(mesh, dtype, bar: progress.Bar) -> Limits:
  """Best matrix product of growing sizes, best update in place of 256 MiB."""
  product, flops, size = jax.jit(jnp.matmul), 0.0, 512
  while size <= 16384:
    x = jnp.ones((size, size), dtype)
    seconds = _best_seconds(lambda x=x: product(x, x))
    flops = max(flops, 2 * size**3 / seconds)
    if seconds > 0.1:
      break
    size *= 2
  bar.advance()
  increment, x = jax.jit(lambda x: x + 1, donate_argnums=0), jnp.ones(2**26)

  def update():
    nonlocal x
    x = increment(x)
    return x

  moved = 2 * x.nbytes / _best_seconds(update)
  bar.advance()
  # Several CPU devices are one processor under several names.
  devices = 1 if mesh.devices.flat[0].platform == 'cpu' else mesh.size
  return Limits(devices * flops, devices * moved)


def _time(works, compiles: process.CompileCounter, bar) -> dict[str, dict]:
  """Runs workloads in turn, so that a change of load meets all of them."""
  found, seconds = {}, {name: [] for name in works}
  for name, work in works.items():
    before = compiles.count
    jax.block_until_ready(work.call())
    found[name] = {
      'compiles': compiles.count - before,
      'peak_bytes': _peak_bytes(),
    }
    bar.advance()
  for _ in range(REPEATS):
    for name, work in works.items():
      before, start = compiles.count, time.perf_counter()
      jax.block_until_ready(work.call())
      seconds[name].append(time.perf_counter() - start)
      found[name]['compiles'] += compiles.count - before
      bar.advance()
  for name, spent in seconds.items():
    found[name] |= {
      'seconds': float(np.median(spent)),
      'load': os.getloadavg()[0],
    }
  return found


def _best_seconds(call: Callable[[], jax.Array]) -> float:
  jax.block_until_ready(call())
  best, stop = float('inf'), time.perf_counter() + 0.4
  while time.perf_counter() < stop:
    start = time.perf_counter()
    jax.block_until_ready(call())
    best = min(best, time.perf_counter() - start)
  return best


def _greedy_decoder(config, model) -> generator.Decoder:
  c = config.rollout
  role = lambda s: samplers.SamplerConfig(**s.to_dict() | {'temperature': 0.0})
  return generator.Decoder(
    model=model,
    limits=types.Limits(
      max_steps=c.max_steps,
      max_action_tokens=c.max_action_tokens,
      max_observation_tokens=c.max_observation_tokens,
      max_row_tokens=c.max_row_tokens,
    ),
    act=role(c.act),
    rehearse=role(c.rehearse),
    act_stop_ids=(END,),
    rehearse_stop_ids=(END,),
    prompt_tokens=c.prompt_tokens,
    widths=tuple(c.widths),
    ladder=tuple(c.ladder),
  )


def _follows(state: decode.DecodeState, before: int, tokens: np.ndarray):
  """The state, once every row is seen to end in `tokens`."""
  rows, length = jax.device_get((state.tokens, state.length))
  end = before + len(tokens)
  if (length != end).any() or (rows[:, before:end] != tokens).any():
    raise RuntimeError('the scripted policy left its script; nothing measured')
  return state


def _print(records: list[Record], limits: Limits) -> None:
  console = rich.console.Console()
  console.print(
    f'{records[0].params:,} parameters on {jax.devices()[0].device_kind}; '
    f'limits {limits.flops_per_s / 1e9:,.1f} GFLOP/s and '
    f'{limits.bytes_per_s / 1e9:,.1f} GB/s'
  )
  table = rich.table.Table()
  for name in ('workload', 'tokens/s', 'of limit', 'seconds', 'compiles',
               'peak MiB', 'load'):  # fmt: skip
    table.add_column(name, justify='left' if name == 'workload' else 'right')
  for r in records:
    table.add_row(
      r.workload, f'{r.tokens_per_s:,.0f}', f'{r.fraction_of_limit:.0%}',
      f'{r.seconds:.3f}', str(r.compiles), f'{r.peak_bytes / 2**20:,.0f}',
      f'{r.load:.1f}',
    )  # fmt: skip
  console.print(table)
  overhead = next(r for r in records if r.workload == 'rehearse')
  console.print(
    f'multi-turn overhead {overhead.ratio_to_generate:.2f} x generate, per new '
    'token (promised: at most 1.25)'
  )


def _peak_bytes() -> int:
  stats = jax.local_devices()[0].memory_stats()
  if stats and 'peak_bytes_in_use' in stats:
    return stats['peak_bytes_in_use']
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == 'darwin' else peak * 1024


def _prompt_length(c: ml_collections.ConfigDict) -> int:
  return max(1, c.prompt_tokens // 2)


def _weights(c) -> int:
  """In the matrices of all layers, without embeddings."""
  heads = 2 * _heads(c, c.num_heads) + 2 * _heads(c, c.num_kv_heads)
  return c.d_model * (heads + 3 * c.d_ff * c.num_layers)


def _heads(c, heads: int) -> int:
  return heads * c.head_dim * c.num_layers


def _shapes(model: transformer.Transformer):
  return jax.eval_shape(
    lambda: transformer.init_params(model, jax.random.key(0))
  )
