"""The recommended settings where the rehearsed world must stay honest.

  envace train --config experiments/safe.py --workdir runs/safe

The quick start with every remedy against a conveniently optimistic world that
costs no real call: errors are observations and never end an episode; recorded
observations, errors among them, anchor the world's words; and its answers pay
for leaving the warm start's, over the whole vocabulary (0.1 a nat). Starting
points, not findings: whether they keep optimism down without costing success is
what the sweep is for.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.rollout.upstream_termination = False
  c.reward.rule.tool_error_fails = False
  c.rl.anchor_weight = 1.0
  c.rl.kl_rehearse = 0.1
  c.rl.kl_estimator = 'exact'
  return c


def sweep(add):
  """Five seeds: each remedy alone, both, and none."""
  for seed in range(5):
    for anchor in (0.0, 1.0):
      for kl in (0.0, 0.1):
        add({'seed': seed, 'rl.anchor_weight': anchor, 'rl.kl_rehearse': kl})
