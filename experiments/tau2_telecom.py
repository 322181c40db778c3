"""Rehearsal over τ²-Bench's telecom tickets, the customer's phone in hand.

  pip install -e '.[envs]'
  pip install --no-deps -r constraints/benchmarks.txt
  envace train --config experiments/tau2_telecom.py --workdir runs/telecom
  envace evaluate --benchmark tau2 --policy runs/telecom --context 32768 \\
    --categories telecom_solo --split test --out scores/telecom

Trained on tickets that are none of the benchmark's; held out are its official
test tickets, those of as few faults (IID) and those of more (OOD). Recorded
attempts are those of a script that reads before it mends, with compact
signatures of all 43 tools in the prompt.
"""

from experiments import base


def get_config(arg: str = ''):
  """`arg` is '' for the real thing or 'smoke' for a fast dry run."""
  if arg not in ('', 'smoke'):
    raise ValueError(f'tau2_telecom.py:{arg}; use no argument or :smoke')
  c = base.get_config()
  c.data.world = 'tau2_telecom'
  c.data.max_faults = 2
  c.data.num_train, c.data.num_dev = 72, 12
  c.data.num_demonstrations = 720
  c.data.vocab_size = 1024
  c.prompt.tools = 'signatures'
  c.rollout.max_steps = 18
  c.rollout.max_action_tokens = 32
  c.rollout.max_observation_tokens = 208  # a customer's bills
  c.rollout.prompt_tokens = 448
  c.rollout.notes_prompt_tokens = 640
  c.rollout.max_row_tokens = 1280
  c.rollout.widths = (8, 32, 128)
  c.rollout.ladder = (768, 1280)
  c.rl.row_buckets = (832, 1024)
  c.rl.steps = 20
  c.rl.tasks_per_step = 4
  c.rl.microbatches = 8
  c.rl.anchor_batch_size = 8
  c.warm_start.steps = 200
  c.warm_start.batch_size = 16
  c.private.attempts = 0
  c.evaluation.every = 10
  c.checkpoint.every = 10
  if arg == 'smoke':
    c.data.num_train, c.data.num_dev = 16, 4
    c.data.num_demonstrations = 32
    c.warm_start.steps = 2
    c.warm_start.batch_size = 4
    c.warm_start.microbatches = 2
    c.warm_start.optimizer.warmup_steps = 1
    c.rl.steps = 1
    c.rl.optimizer.warmup_steps = 0
    c.rl.tasks_per_step = 2
    c.rl.group_size = 2
    c.rl.microbatches = 2
    c.rl.row_buckets = ()
    c.rl.anchor_batch_size = 2
    c.evaluation.every = 0
    c.evaluation.samples = 1
    c.checkpoint.every = 1
  return c
