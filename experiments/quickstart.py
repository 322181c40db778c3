"""Quick start: learn a service desk without touching it, then be measured.

  envace train --config experiments/quickstart.py --workdir runs/quickstart

Two idle CPU cores, 11 minutes; greedy success on held-out tasks goes from about
0.40 to about 0.72 (seed 0). `:smoke` is the same in a few minutes, too small to
learn anything; tests and the notebook use it.
"""

from experiments import base


def get_config(arg: str = ''):
  """`arg` is '' for the real thing or 'smoke' for a fast dry run."""
  if arg not in ('', 'smoke'):
    raise ValueError(f'quickstart.py:{arg}; use no argument or :smoke')
  c = base.get_config()
  if arg == 'smoke':
    c.data.num_train, c.data.num_dev, c.data.num_test = 96, 12, 12
    c.data.num_demonstrations = 400
    c.warm_start.steps = 30
    c.warm_start.batch_size = 32
    c.rl.steps = 4
    c.rl.optimizer.warmup_steps = 1
    c.rl.tasks_per_step = 4
    c.rl.group_size = 4
    c.rl.anchor_batch_size = 8
    c.rl.microbatches = 2
    c.evaluation.every = 2
    c.evaluation.batch_tasks = 12
    c.evaluation.samples = 2
    c.private.attempts = 2
    c.private.temperatures = (0.0, 1.0)
    c.private.max_calls = (1, 3)
    c.rl.row_buckets = ()
    c.warm_start.microbatches = 2
    c.checkpoint.every = 2
  return c


def sweep(add):
  """Five seeds; `controls.py` has the arms that they are compared with."""
  for seed in range(5):
    add({'seed': seed})
