"""`envace bench`: how fast this machine runs a config, and how near its limit.

  generate     one role writes rows to the end, nothing in between
  rehearse     as many new tokens per row, but as a rehearsal: two roles,
               forced headers, as many turns as `max_steps` allows
  train_step   one policy step, its recorded-world anchor included

How much an untrained policy writes is chance, so sampling runs a policy that
follows a script (`sampling.scripted`): the configured network, but untied.

`fraction_of_limit` is the least time the useful work takes, summed over phases
as max(FLOPs / matmul peak, bytes / bandwidth), over the time it took;
`roofline` counts the work and measures the limits, in the same run. Beside
them stands what log-probs cost in memory where the vocabulary is large
(`logprob_memory`): too much of it is a failure, exit code 1.
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

from envace_jax import (
  components,
  errors,
  logprob_memory,
  pretrained,
  process,
  progress,
  refusals,
  roofline,
  types,
)
from envace_jax.learning import batch as batches
from envace_jax.learning import state as states
from envace_jax.learning import step as learning
from envace_jax.model import config as model_config
from envace_jax.model import sharding, transformer
from envace_jax.rollout import on_device
from envace_jax.sampling import decode, generator, keys, samplers, scripted

REPEATS = 5
OVERHEAD_PROMISE = 1.25
MEMORY_PROMISE = 1.5  # chunks of logits, for log-probs without a gradient


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
  compile_seconds: float
  peak_bytes: int  # of the device, else of this process, up to here
  params: int
  load: float  # one-minute mean of the machine
  tokens: int  # per call
  ratio_to_generate: float | None  # seconds per new token; None: samples none


def run(config: ml_collections.ConfigDict, json_path: str | None) -> int:
  """Measures, prints a table, writes the records; returns the exit code."""
  published = pretrained.architecture(config)
  refusals.validate(config, published)
  if json_path and not pathlib.Path(json_path).absolute().parent.is_dir():
    raise errors.UserError(f'--json={json_path} has no directory; create it')
  try:
    records, limits = measure(config, published)
    memory = logprob_memory.measure(config, published)
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  if json_path:
    rows = [dataclasses.asdict(record) for record in (*records, memory)]
    pathlib.Path(json_path).write_text(json.dumps(rows, indent=2) + '\n')
  _print(records, limits, memory)
  return 0 if memory.forward_chunks <= MEMORY_PROMISE else 1


def measure(
  config: ml_collections.ConfigDict,
  published: model_config.TransformerConfig | None = None,
):
  """A record per workload; and what limits them, (FLOP/s, bytes/s)."""
  mesh = sharding.make_mesh(**config.mesh.to_dict())
  model = components.model(config, config.data.vocab_size, published)
  compiles = process.CompileCounter()
  with progress.bar('bench', 3 * (1 + REPEATS) + 2, unit='run') as bar:
    works = sampled_workloads(config, model, mesh)
    timed = _time(works, compiles, bar)
    train = {'train_step': train_workload(config, model, mesh)}
    timed |= _time(train, compiles, bar)
    # Last: its own memory must not count as a workload's.
    limits = roofline.measure_limits(mesh, model.config.compute_dtype, bar)
  key, plain = jax.random.key(0), timed['generate']['seconds']
  shapes = jax.eval_shape(lambda: transformer.init_params(model, key))
  records = []
  for name, work in (works | train).items():
    seconds = timed[name]['seconds']
    least = np.maximum(work.flops / limits[0], work.bytes / limits[1]).sum()
    ratio = None if name in train else seconds / plain
    records.append(Record(
      workload=name, tokens=work.tokens, tokens_per_s=work.tokens / seconds,
      fraction_of_limit=float(least) / seconds, ratio_to_generate=ratio,
      params=transformer.num_params(shapes), **timed[name],
    ))  # fmt: skip
  return records, limits


def sampled_workloads(config, model, mesh) -> dict[str, Workload]:
  """`generate` and `rehearse`, which check that the script is followed."""
  c, rl = config.rollout, config.rl
  tokens, authors, successor = _script(config, model)
  new, before = len(tokens), max(1, c.prompt_tokens // 2)
  groups, rows = rl.tasks_per_step, rl.tasks_per_step * rl.group_size
  untied = dataclasses.replace(model.config, tie_embeddings=False, lora=None)
  model = transformer.Transformer(untied)
  shardings = states.network_shardings(model, mesh)
  params = jax.device_put(scripted.params(model, successor), shardings)
  role = lambda s: samplers.SamplerConfig(**s.to_dict() | {'temperature': 0.0})
  decoder = generator.Decoder(
    model=model, limits=_limits(c), act=role(c.act), rehearse=role(c.rehearse),
    act_stop_ids=(scripted.END,), rehearse_stop_ids=(scripted.END,),
    prompt_tokens=c.prompt_tokens, widths=tuple(c.widths),
    ladder=tuple(c.ladder),
  )  # fmt: skip
  settings = decoder.settings()
  row_keys = keys.rows(keys.stream(config.seed, 'bench', 0), range(rows))

  def opening(last):
    ids = np.asarray([scripted.FILLER] * (before - 1) + [last], np.int32)
    prompts = [(ids, np.zeros_like(ids))] * groups
    return model, params, *generator.pad_prompts(decoder, prompts), row_keys

  def generate():
    state = write_plain(
      opening(scripted.PING), settings, new, rl.group_size, decoder
    )
    return _follows(
      state, before, np.resize([scripted.PONG, scripted.PING], new)
    )

  def rehearse():
    state = on_device.run(
      *opening(scripted.ACT_HEADER), settings, scripted.HEADER_RW,
      np.ones(2, np.int32), np.asarray([scripted.CALL], np.int32),
      np.int32(c.max_steps),
      group_size=rl.group_size, ladder=decoder.ladder,
      filtered=decoder.filtered,
    )  # fmt: skip
    return _follows(state.decode, before, tokens)

  sampled = int(np.sum(authors != types.Author.FORCED))
  cost = roofline.decode_cost(untied, groups, rows, before, new)
  return {
    'generate': Workload(generate, rows * new, *cost),
    'rehearse': Workload(rehearse, rows * sampled, *cost),
  }


def write_plain(opening, settings, new, group_size, decoder):
  """`new` tokens per row by one role, on the cache lengths of a rehearsal."""
  model, params, ids_PW, _, count_P, row_keys = opening
  rungs = [rung for rung in decoder.ladder if rung > ids_PW.shape[1]]
  state = decode.prefill(
    *opening, group_size=group_size, capacity=rungs[-1], cache_length=rungs[0]
  )
  live_B, length = np.ones(len(row_keys), bool), int(count_P[0])
  # A full cache yields one token more; the next rung stores it.
  ends = [min(rung + 1, length + new) for rung in rungs]
  for rung, before, end in zip(rungs, [length, *ends], ends, strict=False):
    if before == end:
      break
    state = state if rung == rungs[0] else decode.grow(state, rung)
    state, _ = decode.generate(
      model, params, state, live_B, np.int32(types.Role.ACT),
      settings.replace(max_new=np.full(2, end - before, np.int32)),
      filtered=decoder.filtered,
    )  # fmt: skip
  return state


def train_workload(config, model, mesh) -> Workload:
  """A policy step on rows of a third of the greatest length to all of it."""
  c, rl, loss = config.rollout, config.rl, components.policy_loss(config)
  tokens, authors, _ = _script(config, model)
  before = max(1, c.prompt_tokens // 2)
  tokens = np.append(np.full(before, scripted.FILLER), tokens)
  authors = np.append(np.full(before, types.Author.PROMPT), authors)

  def pack(rows, authors):
    shortest = max(len(tokens) // 3, before + 2)
    lengths = np.linspace(shortest, len(tokens), rows).astype(int)
    batch = batches.pack_rows(
      [(tokens[:n], authors[:n]) for n in lengths], batch_size=rows,
      length_buckets=(c.max_row_tokens,), microbatches=rl.microbatches,
      packed=components.packs(config),
    )  # fmt: skip
    batch = batch.replace(advantages=np.ones_like(batch.advantages))
    if loss.importance_cap:  # the pass that makes them is not measured
      batch = batch.replace(proximal_logprobs=batch.logprobs)
    return sharding.place_batch(batch, mesh), lengths

  rows = rl.tasks_per_step * rl.group_size // rl.minibatches
  batch, lengths_B = pack(rows, authors)
  flops_B = roofline.row_flops(model.config, lengths_B) * (
    3 + loss.uses_reference
  )
  answers, anchor = authors == types.Author.REHEARSE, None
  if loss.uses_anchor:
    recorded = np.where(answers, types.Author.WORLD, authors)
    anchor, more_B = pack(rl.anchor_batch_size, recorded)
    flops_B = np.append(flops_B, 3 * roofline.row_flops(model.config, more_B))
    lengths_B = np.append(lengths_B, more_B)
  tx, key = components.optimizer(rl), keys.stream(config.seed, 'init', 0)
  state = states.init_state(model, tx, key, mesh)
  base, ref = None, None
  if model.config.lora is not None:
    base = sharding.initialize(
      lambda key: transformer.init_partitioned(model, key), mesh, key
    )
  step = learning.make_policy_step(model, tx, loss, mesh, base=base)
  if loss.uses_reference:
    ref = jax.tree.map(jnp.copy, state.params) if base is None else base

  def call():
    nonlocal state
    state, metrics = step(state, batch, ref, anchor)
    return state, metrics

  return Workload(call, int(lengths_B.sum()), flops_B, np.zeros_like(flops_B))


def _time(works, compiles: process.CompileCounter, bar) -> dict[str, dict]:
  """Runs workloads in turn, so that a change of load meets all of them."""
  spent = {name: [] for name in works}
  found = {name: {'compiles': 0, 'compile_seconds': 0.0} for name in works}
  for repeat in range(1 + REPEATS):
    for name, work in works.items():
      first, compiling = compiles.count, compiles.seconds
      start = time.perf_counter()
      jax.block_until_ready(work.call())
      spent[name].append(time.perf_counter() - start)
      found[name]['compiles'] += compiles.count - first
      found[name]['compile_seconds'] += compiles.seconds - compiling
      if not repeat:  # before another workload has raised it
        found[name]['peak_bytes'] = _peak_bytes()
      bar.advance()
  for name, seconds in spent.items():
    found[name]['seconds'] = float(np.median(seconds[1:]))  # 0 compiled
    found[name]['load'] = os.getloadavg()[0]
  return found


def _follows(state: decode.DecodeState, before: int, tokens: np.ndarray):
  """The state, once every row is seen to end in `tokens`."""
  rows, length = jax.device_get((state.tokens, state.length))
  end = before + len(tokens)
  if (length != end).any() or (rows[:, before:end] != tokens[None]).any():
    raise RuntimeError('the scripted policy left its script; nothing measured')
  return state


def _print(records: list[Record], limits, memory) -> None:
  table = rich.table.Table(
    title=f'{records[0].params:,} parameters on {jax.devices()[0].device_kind}',
    caption=f'limits: {limits[0] / 1e9:,.1f} GFLOP/s, {limits[1] / 1e9:,.1f} '
    f'GB/s\nmulti-turn overhead: {records[1].ratio_to_generate:.2f} x generate '
    f'per new token (at most {OVERHEAD_PROMISE} promised)\nlog-probs of '
    f'{memory.vocab_size:,} pieces: {memory.forward_chunks:.2f} chunks of '
    f'{memory.chunk_bytes / 2**20:,.0f} MiB (at most {MEMORY_PROMISE} '
    f'promised), {memory.gradient_chunks:.2f} with their gradient',
  )
  names = 'workload,tokens/s,of limit,seconds,compiles,in s,peak MiB,load'
  for name in names.split(','):
    table.add_column(name, justify='left' if name == 'workload' else 'right')
  for r in records:
    table.add_row(
      r.workload, f'{r.tokens_per_s:,.0f}', f'{r.fraction_of_limit:.0%}',
      f'{r.seconds:.3f}', str(r.compiles), f'{r.compile_seconds:.1f}',
      f'{r.peak_bytes / 2**20:,.0f}',
      f'{r.load:.1f}',
    )  # fmt: skip
  rich.console.Console().print(table)


def _peak_bytes() -> int:
  stats = jax.local_devices()[0].memory_stats() or {}
  unit = 1 if sys.platform == 'darwin' else 1024
  resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  return stats.get('peak_bytes_in_use', resident)


def _limits(c: ml_collections.ConfigDict) -> types.Limits:
  names = [field.name for field in dataclasses.fields(types.Limits)]
  return types.Limits(**{name: c[name] for name in names})


def _script(config: ml_collections.ConfigDict, model: transformer.Transformer):
  c = config.rollout
  prompt_length = max(1, c.prompt_tokens // 2)
  return scripted.write(_limits(c), prompt_length, model.config.vocab_size)
