"""EnvACE as published (arXiv 2608.06197), on MiniDesk at the size of a laptop.

  envace train --config experiments/envace.py --workdir runs/envace

Split views, rehearsals grounded in the task's own recorded calls, validity left
to the policy, the published reward, termination and advantage. What is not
published is the scale: numbers in brackets are those of the 8 B runs. It has
not been studied here; the quick start is what the README's table is about.
"""

from experiments import base


def get_config():
  c = base.get_config()
  c.data.records = True  # the reference dialogue's calls and responses
  c.prompt.rehearse.records = 'own'
  c.prompt.rehearse.keep = 1.0  # no few-shot dropout
  c.rollout.view = 'split'
  c.rollout.mode = 'host'
  c.rollout.validation = 'policy'  # all programmatic checks are off
  c.rollout.max_actions = 30  # assistant turns
  c.rollout.max_user_turns = 30
  c.rollout.upstream_termination = True  # a tool error ends the episode
  c.reward.success_bonus = 0.0
  c.reward.rule.aggregation = 'any_step'  # OR over the steps of a turn
  c.reward.rule.unmet_requirement_ends = True  # required_for_next_turn
  c.reward.rule.unanswered_turn_fails = True
  c.reward.rule.abstain_is_fail = True  # a failed judge reads as a bad answer
  c.reward.rule.tool_error_fails = True
  c.reward.judge.temperature = 0.6  # Qwen3-30B-A3B; here checks decide
  c.rl.steps = 80  # [470]
  c.rl.tasks_per_step = 8  # prompts [16]
  c.rl.group_size = 4  # K
  c.rl.baseline = 'role'  # eq. 6-7: mu over all outputs of a role,
  c.rl.weighting = 'row'  # which counts an episode once per output
  c.rl.std = False  # mean-only
  c.rl.normalizer = 'token'  # token-mean
  c.rl.updates_per_rollout = 1  # on-policy, so that clipping is inert
  c.rl.clip_low = c.rl.clip_high = 0.2  # epsilon
  c.rl.dual_clip = 3.0
  c.rl.kl_act = c.rl.kl_rehearse = 1e-4  # the paper; off in the release
  c.rl.anchor_weight = 0.0  # nothing but the reward
  c.rl.optimizer.learning_rate = 2e-4  # [1e-6]
  return c


def sweep(add):
  """Five seeds, with the paper's KL and with none, as the release runs."""
  for seed in range(5):
    for kl in (1e-4, 0.0):
      add({'seed': seed, 'rl.kl_act': kl, 'rl.kl_rehearse': kl})
