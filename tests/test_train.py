"""Whole runs in their own processes: what is left behind, and what a kill
changes, which is nothing."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from envace_jax import commands
from envace_jax.report import summary as summaries

ROOT = pathlib.Path(__file__).parent.parent
TINY = [
  '--config=experiments/quickstart.py:smoke',
  '--config.data.num_train=48',
  '--config.data.num_dev=6',
  '--config.data.num_test=6',
  '--config.data.num_demonstrations=150',
  '--config.model.d_model=32',
  '--config.model.head_dim=8',
  '--config.model.d_ff=64',
  '--config.model.num_layers=2',
  '--config.warm_start.steps=12',
  '--config.rl.steps=6',
  '--config.checkpoint.every=3',
  '--config.evaluation.every=3',
  '--config.evaluation.batch_tasks=6',
]
# What carries more than parameters from step to step, or updates more often;
# warmed up until some groups differ and some do not.
REUSE = [
  '--config.warm_start.steps=200',
  '--config.rl.group_size=8',
  '--config.private.attempts=0',
  '--config.evaluation.every=0',
  '--config.rl.updates_per_rollout=4',
  '--config.rl.minibatches=2',
  '--config.rl.surrogate=sequence',
  '--config.rl.importance_cap=2.0',
  '--config.rl.dynamic_sampling_draws=2',
]
# A network per role, warmed up until they call and answer.
SEPARATE = [
  '--config.warm_start.steps=200',
  '--config.rollout.view=split',
  '--config.rollout.mode=host',
  '--config.rl.share_roles=False',
  '--config.private.attempts=0',
  '--config.evaluation.every=0',
]
# Steps after which the process is shot: in the warm start, and in RL.
KILLS = (8, 16)


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
  """One compile cache for all runs of this module."""
  cache = tmp_path_factory.mktemp('compile_cache')
  return os.environ | {
    'JAX_COMPILATION_CACHE_DIR': str(cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PLATFORMS': 'cpu',
  }


def start(workdir, environment, *overrides, base=TINY):
  return subprocess.Popen(
    [sys.executable, '-m', 'envace_jax.main', 'train', *base, *overrides,
     f'--workdir={workdir}'],
    cwd=ROOT, env=environment, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip


def finish(process):
  output, _ = process.communicate(timeout=500)
  assert process.returncode == 0, output[-3000:]
  return output


def lines(workdir):
  path = workdir / 'metrics.jsonl'
  return path.read_bytes().splitlines() if path.exists() else []


def wait_for_step(process, workdir, step):
  deadline = time.monotonic() + 300
  while len(lines(workdir)) < step:
    assert process.poll() is None, process.communicate()[0][-3000:]
    assert time.monotonic() < deadline, 'the run does not get on'
    time.sleep(0.02)


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory, environment):
  workdir = tmp_path_factory.mktemp('runs') / 'unbroken'
  finish(start(workdir, environment))
  return workdir


def assert_equal_runs(left, right):
  assert lines(left) == lines(right)
  for name in ('warm_start', 'after'):
    file = pathlib.Path('evaluations') / f'{name}.json'
    assert (left / file).read_bytes() == (right / file).read_bytes()
  params = [commands.load(str(run)).params for run in (left, right)]
  jax.tree.map(np.testing.assert_array_equal, *params)


def test_a_run_leaves_what_it_promises(unbroken):
  summary = json.loads((unbroken / 'summary.json').read_text())
  summaries.validate(summary)
  assert summary['compiles']['after'] == 0, 'something compiled after warm-up'
  assert summary['compiles']['warm_up'] > 0
  assert len(lines(unbroken)) == 12 + 6
  report = (unbroken / 'report.html').read_text()
  assert '<svg' in report and 'http://' not in report.replace(
    'http://www.w3.org', ''
  )
  transcripts = (unbroken / 'transcripts.jsonl').read_text().splitlines()
  assert len(transcripts) == 6
  steps = [json.loads(line)['step'] for line in lines(unbroken)]
  assert steps == list(range(1, 19))
  evaluated = [
    json.loads(line)['step'] for line in lines(unbroken) if b'eval/' in line
  ]
  assert evaluated == [12, 15, 18]
  assert list((unbroken / 'tensorboard').glob('events*'))


def test_a_killed_run_equals_an_unbroken_one(unbroken, environment, tmp_path):
  workdir = tmp_path / 'killed'
  for step in KILLS:
    process = start(workdir, environment)
    wait_for_step(process, workdir, step)
    process.kill()
    process.communicate()
  finish(start(workdir, environment))
  assert_equal_runs(unbroken, workdir)


def equal_after_a_kill(environment, tmp_path, *options):
  """A whole run, which one that was killed in its RL phase equals."""
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  finish(start(whole, environment, *options))
  process = start(killed, environment, *options)
  wait_for_step(process, killed, 204)
  process.kill()
  process.communicate()
  finish(start(killed, environment, *options))
  assert_equal_runs(whole, killed)
  return whole


@pytest.mark.nightly
def test_a_killed_run_with_reuse_and_dynamic_sampling_resumes_exactly(
  environment, tmp_path
):
  """The task cursor is state here: no step tells how many were drawn."""
  whole = equal_after_a_kill(environment, tmp_path, *REUSE)
  tuned = [json.loads(line) for line in lines(whole) if b'rl/' in line]
  drawn = [line['rl/groups/drawn'] for line in tuned]
  assert max(drawn) > min(drawn) == 4
  assert all(
    line['rl/groups/kept'] == 4 or line['rl/groups/budget_exhausted']
    for line in tuned
  )
  summary = json.loads((whole / 'summary.json').read_text())
  assert summary['compiles']['after'] == 0


@pytest.mark.nightly
def test_a_killed_run_of_a_network_per_role_resumes_exactly(
  environment, tmp_path
):
  whole = equal_after_a_kill(environment, tmp_path, *SEPARATE)
  tuned = [json.loads(line) for line in lines(whole) if b'rl/' in line]
  assert all(line['rl/tokens/rehearse'] > 0 for line in tuned)
  pair = commands.load(str(whole)).params
  differ = jax.tree.map(np.array_equal, pair.act, pair.rehearse)
  assert not any(jax.tree.leaves(differ))
  summary = json.loads((whole / 'summary.json').read_text())
  assert summary['compiles']['after'] == 0


def test_sigterm_saves_and_exits_cleanly(unbroken, environment, tmp_path):
  workdir = tmp_path / 'stopped'
  process = start(workdir, environment)
  wait_for_step(process, workdir, 13)
  process.send_signal(signal.SIGTERM)
  output = finish(process)
  assert 'stopped after rl step' in output
  assert not (workdir / 'summary.json').exists()
  finish(start(workdir, environment))
  assert_equal_runs(unbroken, workdir)


@pytest.mark.parametrize(
  'world',
  [
    *(pytest.param(w, marks=pytest.mark.nightly) for w in ('real', 'null')),
    'simulator',
    'rehearsal',
    'split',
  ],
)
def test_every_world_trains_from_a_borrowed_warm_start(
  world, unbroken, environment, tmp_path
):
  workdir = tmp_path / world
  finish(
    start(
      workdir,
      environment,
      f'--config.warm_start.workdir={unbroken}',
      '--config.rollout.mode=host',
      '--config.rl.steps=2',
      '--config.private.attempts=0',
      *(
        ('--config.rollout.view=split',)
        if world == 'split'
        else (f'--config.rollout.world={world}',)
      ),
      *(
        (f'--config.rollout.simulator_workdir={unbroken}',)
        if world == 'simulator'
        else ()
      ),
    )
  )
  assert not (workdir / 'evaluations' / 'warm_start.json').exists()
  summary = json.loads((workdir / 'summary.json').read_text())
  theirs = json.loads((unbroken / 'summary.json').read_text())
  assert (
    summary['real_success']['warm_start']
    == theirs['real_success']['warm_start']
  )
  mine, other = (
    json.loads(line) for line in (lines(workdir)[0], lines(unbroken)[12])
  )
  assert mine['step'] == other['step'] == 13
  if world == 'rehearsal':  # the host's tokens are the device's
    assert mine['rl/reward'] == other['rl/reward']
    assert mine['rl/act_tokens'] == other['rl/act_tokens']
  elif world == 'split':  # the same tokens would be chance
    assert mine['rl/tokens/act'] > 0
    assert summary['compiles']['after'] == 0
  else:
    assert mine['rl/rehearse_tokens'] == 0
