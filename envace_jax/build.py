"""From a config to the objects it describes. Every `config.x` of a component
is read here, once, so that an option has one reader and one meaning."""

import dataclasses
import pathlib

import ml_collections

from envace_jax import data as datasets
from envace_jax import types
from envace_jax.learning import step as learning
from envace_jax.model import config as model_config
from envace_jax.model import transformer
from envace_jax.rollout import collect
from envace_jax.sampling import generator
from envace_jax.sampling import samplers


def model(
  config: ml_collections.ConfigDict, vocab_size: int
) -> transformer.Transformer:
  return transformer.Transformer(
    model_config.TransformerConfig(
      vocab_size=vocab_size,
      max_len=config.rollout.max_row_tokens,
      **config.model.to_dict(),
    )
  )


def decoder(
  config: ml_collections.ConfigDict,
  network: transformer.Transformer,
  data: datasets.Data,
) -> generator.Decoder:
  """How episodes are sampled while training."""
  rollout, template = config.rollout, data.template
  return generator.Decoder(
    model=network,
    limits=limits(config),
    act=samplers.SamplerConfig(**rollout.act.to_dict()),
    rehearse=samplers.SamplerConfig(**rollout.rehearse.to_dict()),
    act_stop_ids=(template.stop_id,),
    rehearse_stop_ids=(template.stop_id,),
    prompt_tokens=rollout.prompt_tokens,
    widths=tuple(rollout.widths),
    ladder=tuple(rollout.ladder),
  )


def limits(config: ml_collections.ConfigDict) -> types.Limits:
  rollout = config.rollout
  return types.Limits(
    max_steps=rollout.max_steps,
    max_action_tokens=rollout.max_action_tokens,
    max_observation_tokens=rollout.max_observation_tokens,
    max_row_tokens=rollout.max_row_tokens,
  )


def at_temperature(
  decoder: generator.Decoder, temperature: float
) -> generator.Decoder:
  """The same decoder with both roles at one temperature (0 = greedy)."""
  sampler = samplers.SamplerConfig(temperature=temperature)
  return dataclasses.replace(decoder, act=sampler, rehearse=sampler)


def collector(
  decoder: generator.Decoder,
  data: datasets.Data,
  batch_tasks: int,
  group_size: int,
) -> collect.Collector:
  return collect.Collector(
    decoder=decoder,
    template=data.template,
    batch_tasks=batch_tasks,
    group_size=group_size,
  )


def optimizer(phase: ml_collections.ConfigDict):
  """The optimizer of `config.warm_start` or `config.rl`."""
  c = phase.optimizer
  return learning.make_optimizer(
    learning_rate=c.learning_rate,
    warmup_steps=c.warmup_steps,
    total_steps=phase.steps,
    schedule=c.schedule,
    weight_decay=c.weight_decay,
    clip_norm=c.clip_norm,
    b1=c.b1,
    b2=c.b2,
  )


def checkpoint_dir(workdir: pathlib.Path, phase: str) -> pathlib.Path:
  return workdir / 'checkpoints' / phase
