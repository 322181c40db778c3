"""Compiles for sixteen TPU chips on a host that has none; prints what is said.

  python tests/tpu_ahead.py

The real compiler, from the package `libtpu`. One line of JSON: how often the
attention kernel is called in each program, how many arrays of the compiled
train step are squares of scores, and its temporary memory per chip.
"""

import os

# The compiler asks a cloud's metadata server which chips it has, unless told.
os.environ |= {
  'JAX_PLATFORMS': 'cpu',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
}

# ruff: noqa: E402
import dataclasses
import json
import re

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import numpy as np

from envace_jax.learning import batch as batches
from envace_jax.learning import objective, optimizer, step
from envace_jax.learning import state as states
from envace_jax.model import config as config_lib
from envace_jax.model import sharding, transformer

ROWS, LENGTH = 16, 2048
CONFIG = config_lib.TransformerConfig(
  vocab_size=1024,
  d_model=512,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=128,
  d_ff=1024,
  dtype='bfloat16',
  scan_layers=True,
  remat=True,
  max_len=LENGTH,
)


def main():
  chips = topologies.get_topology_desc(
    platform='tpu', topology_name='v5e:4x4'
  ).devices
  mesh = jax.sharding.Mesh(
    np.asarray(chips).reshape(2, 4, 2),
    sharding.AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
  )
  # 'auto' takes splash by itself: the mesh says what the program is for.
  said = {
    'devices': len(chips),
    'splash': train_step('auto', mesh),
    'reference': train_step('reference', mesh),
    'forward_kernels': kernels(
      compiled_forward(transformer.Transformer(CONFIG), mesh)
    ),
  }
  print(json.dumps(said))


def train_step(who, mesh):
  model = transformer.Transformer(dataclasses.replace(CONFIG, attention=who))
  compiled = compiled_train_step(model, mesh)
  squares = re.findall(rf'\[[\d,]*{LENGTH},{LENGTH}\]', compiled.as_text())
  return {
    'kernels': kernels(compiled),
    'squares': len(squares),
    'temp_bytes': compiled.memory_analysis().temp_size_in_bytes,
  }


def kernels(compiled):
  return compiled.as_text().count('custom_call_target="tpu_custom_call"')


def compiled_train_step(model, mesh):
  tx = optimizer.make_optimizer(
    learning_rate=1e-6,
    warmup_steps=0,
    total_steps=10,
    schedule='constant',
    weight_decay=0.0,
    clip_norm=1.0,
    b1=0.9,
    b2=0.95,
  )
  update = step.make_policy_step(
    model, tx, objective.LossConfig(logprob_chunk=128), mesh
  )
  shapes = {
    'tokens': jnp.int32,
    'authors': jnp.int32,
    'logprobs': jnp.float32,
    'advantages': jnp.float32,
    'positions': jnp.int32,
  }
  rows = sharding.batch_sharding(mesh)
  batch = batches.TrainBatch(
    **{
      name: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype, sharding=rows)
      for name, dtype in shapes.items()
    },
    lengths=jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=rows),
  )
  state = states.abstract_state(model, tx, mesh)
  return update.lower(state, batch, None, None).compile()


def placed_params(model, mesh):
  shapes = jax.eval_shape(
    lambda: transformer.init_params(model, jax.random.key(0))
  )
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    states.network_shardings(model, mesh),
  )


def compiled_forward(model, mesh):
  def forward(params, tokens_BT):
    hidden_BTD, _ = model.apply({'params': params}, tokens_BT)
    return model.apply({'params': params}, hidden_BTD, method='unembed')

  tokens_BT = jax.ShapeDtypeStruct(
    (ROWS, LENGTH), jnp.int32, sharding=sharding.batch_sharding(mesh)
  )
  with sharding.use_mesh(mesh):
    lowered = jax.jit(forward).lower(placed_params(model, mesh), tokens_BT)
    return lowered.compile()


if __name__ == '__main__':
  main()
