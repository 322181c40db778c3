"""Runs from a published checkpoint: adapters, resume, and what is exported.

The checkpoint is random and tiny, its vocabulary and chat template are real.
"""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pretrained as fetched
import pytest
import test_train

from envace_jax import commands, errors, refusals
from envace_jax import pretrained as run_pretrained
from envace_jax.model import config as model_config
from envace_jax.model import lora, transformer
from envace_jax.weights import export
from experiments import smollm2

ROOT = test_train.ROOT
environment = test_train.environment  # a fixture: one compile cache
VOCAB = 49_152
SHAPE = model_config.TransformerConfig(
  vocab_size=VOCAB,
  d_model=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=48,
  rope_theta=50_000.0,
  norm_eps=1e-5,
  max_len=512,
)
STEPS = 6, 4  # of the warm start, of RL


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  """A Hugging Face directory."""
  folder = tmp_path_factory.mktemp('published') / 'tiny'
  model = transformer.Transformer(SHAPE)
  params = transformer.init_params(model, jax.random.key(0))
  export.save(params, SHAPE, folder, dtype='float32', eos_ids=(2,))
  for file in fetched.smollm2_tokenizer().iterdir():
    shutil.copyfile(file, folder / file.name)
  return folder


def start(workdir, environment, checkpoint, *more):
  base = [
    '--config=experiments/smollm2.py:smoke',
    f'--config.pretrained.path={checkpoint}',
    '--config.lora.rank=4',
    f'--config.warm_start.steps={STEPS[0]}',
    f'--config.rl.steps={STEPS[1]}',
    '--config.checkpoint.every=2',
  ]
  return test_train.start(workdir, environment, *more, base=base)


@pytest.fixture(scope='module')
def trained(tmp_path_factory, environment, checkpoint):
  """A run whose source is gone since, and so is known from its workdir."""
  workdir = tmp_path_factory.mktemp('runs') / 'whole'
  copy = workdir.parent / 'copy'
  shutil.copytree(checkpoint, copy)
  process = start(workdir, environment, copy)
  test_train.finish(process)
  shutil.rmtree(copy)
  return workdir


def test_a_run_trains_adapters_of_it(trained, checkpoint):
  loaded = commands.load(str(trained))
  assert isinstance(loaded.params, lora.Adapted)
  published = run_pretrained.checkpoints.open_checkpoint(checkpoint)
  jax.tree.map(
    np.testing.assert_array_equal,
    loaded.params.base,
    published.load(loaded.setup.model.config, None, 'float32'),
  )
  moved = jax.tree.leaves(
    jax.tree.map(lambda x: float(np.abs(x).max()), loaded.params.adapters)
  )
  assert min(moved) > 0
  saved = sum(
    file.stat().st_size
    for file in (trained / 'checkpoints' / 'rl').rglob('*')
    if file.is_file()
  )
  base = sum(x.nbytes for x in jax.tree.leaves(loaded.params.base))
  assert saved < base / 4, 'the frozen weights are in the checkpoints'
  summary = json.loads((trained / 'summary.json').read_text())
  assert summary['compiles']['after'] == 0


def test_a_killed_run_of_adapters_resumes_exactly(
  trained, environment, checkpoint, tmp_path
):
  workdir, copy = tmp_path / 'killed', trained.parent / 'copy'
  shutil.copytree(checkpoint, copy)
  try:
    process = start(workdir, environment, copy)
    test_train.wait_for_step(process, workdir, STEPS[0] + 3)
    process.kill()
    process.communicate()
  finally:
    shutil.rmtree(copy)
  # Without its source: the workdir has what it needs.
  test_train.finish(start(workdir, environment, copy))
  test_train.assert_equal_runs(trained, workdir)


def test_what_is_exported_is_what_was_trained(trained, tmp_path):
  torch = pytest.importorskip('torch', reason='the reference implementation')
  transformers = pytest.importorskip('transformers')
  out = tmp_path / 'model'
  done = subprocess.run(
    [sys.executable, '-m', 'envace_jax.main', 'export',
     f'--workdir={trained}', f'--out={out}'],
    cwd=ROOT, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  loaded = commands.load(str(trained))
  tokenizer = transformers.AutoTokenizer.from_pretrained(out)
  texts = ['Cancel order O12.', 'Ana: "50 %"\n', 'x']
  rows = [tokenizer(text)['input_ids'] for text in texts]
  assert rows == [
    loaded.setup.data.words.tokenizer.encode(text) for text in texts
  ]
  theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
  for ids in rows:
    ids = np.asarray([ids], np.int32)
    model, variables = loaded.setup.model, lora.variables(loaded.params)
    hidden, _ = model.apply(variables, ids)
    ours = model.apply(variables, hidden, method='unembed')
    with torch.no_grad():
      logits = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(np.asarray(ours), logits, atol=2e-5)
  with pytest.raises(errors.UserError, match='exists already'):
    commands.export(str(trained), str(out), 'float32')


@pytest.mark.parametrize(
  'changes, said',
  [
    ({'pretrained.path': ''}, 'set lora.rank=0'),
    ({'rollout.max_row_tokens': 1024, 'rollout.ladder': (1024,)}, '512'),
    ({'pretrained.path': 'nowhere'}, 'nowhere'),
    ({'lora.targets': ('wx',)}, 'targets'),
  ],
)
def test_what_cannot_be_is_refused_in_a_sentence(checkpoint, changes, said):
  config = smollm2.get_config('smoke')
  config.pretrained.path = str(checkpoint)
  config.update_from_flattened_dict(changes)
  with pytest.raises(errors.UserError, match=said) as caught:
    refusals.validate(config, run_pretrained.architecture(config))
  assert '\n' not in str(caught.value)


def test_a_checkpoint_without_tokenizer_is_refused(checkpoint, tmp_path):
  config = smollm2.get_config('smoke')
  copy = tmp_path / 'copy'
  shutil.copytree(checkpoint, copy)
  (copy / 'tokenizer.json').unlink()
  config.pretrained.path = str(copy)
  with pytest.raises(errors.UserError, match='tokenizer.json'):
    run_pretrained.keep(config, tmp_path)
  assert not (tmp_path / run_pretrained.FOLDER).exists()


def test_whole_weights_can_be_trained(checkpoint, tmp_path, environment):
  """Without adapters, from the same start; longer rows, other numerics."""
  workdir = tmp_path / 'whole'
  more = '--config.lora.rank=0', '--config.rl.steps=1'
  test_train.finish(start(workdir, environment, checkpoint, *more))
  loaded = commands.load(str(workdir))
  published = run_pretrained.checkpoints.open_checkpoint(checkpoint).load(
    loaded.setup.model.config, None, 'float32'
  )
  differ = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()), loaded.params, published
  )
  assert 0 < max(jax.tree.leaves(differ)) < 0.5
  assert dataclasses.replace(loaded.setup.model.config, max_len=512) == SHAPE
