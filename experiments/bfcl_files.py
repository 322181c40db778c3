"""Rehearsal over BFCL's file system: trained on generated tasks.

  pip install -e '.[envs]'
  pip install --no-deps -r constraints/benchmarks.txt
  envace train --config experiments/bfcl_files.py --workdir runs/files
  envace evaluate --benchmark bfcl --policy runs/files --context 2048 \\
    --categories multi_turn_base --out scores/files

The environment is the benchmark's own backend; its official tasks are never
trained on. Held out here are other trees (IID) and chains of what is trained
(OOD). A policy sees no tree, so a number that only `grep` can tell is made up
in a rehearsal. About 15 minutes of two idle cores; real success on held-out
trees was 0.40 before and after RL (seed 0): files are moved and copied, and no
text is written yet (`LOG.md`). `:smoke` is the same in a few minutes.
"""

from experiments import base


def get_config(arg: str = ''):
  """`arg` is '' for the real thing or 'smoke' for a fast dry run."""
  if arg not in ('', 'smoke'):
    raise ValueError(f'bfcl_files.py:{arg}; use no argument or :smoke')
  c = base.get_config()
  c.data.world = 'bfcl_files'
  c.data.num_train, c.data.num_dev, c.data.num_test = 600, 24, 60
  c.data.num_demonstrations = 3000
  c.data.vocab_size = 1024
  c.rollout.max_steps = 5
  c.rollout.max_action_tokens = 48
  c.rollout.max_observation_tokens = 36
  c.rollout.prompt_tokens = 64
  c.rollout.notes_prompt_tokens = 160
  c.rollout.max_row_tokens = 192
  c.rollout.ladder = (96, 192)
  c.rl.row_buckets = (96, 128)
  c.rl.steps = 40
  c.warm_start.steps = 200
  c.private.attempts = 0
  c.evaluation.every = 20
  if arg == 'smoke':
    c.data.num_train, c.data.num_dev, c.data.num_test = 40, 6, 6
    c.data.num_demonstrations = 100
    c.warm_start.steps = 4
    c.warm_start.batch_size = 16
    c.warm_start.microbatches = 2
    c.warm_start.optimizer.warmup_steps = 1
    c.rl.steps = 2
    c.rl.optimizer.warmup_steps = 1
    c.rl.tasks_per_step = 4
    c.rl.group_size = 4
    c.rl.microbatches = 2
    c.rl.row_buckets = ()
    c.rl.anchor_batch_size = 8
    c.evaluation.every = 0
    c.evaluation.batch_tasks = 6
    c.evaluation.samples = 2
    c.checkpoint.every = 1
  return c
