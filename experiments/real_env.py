"""The policy trained in the real environment: the honest competitor.

  envace train --config experiments/real_env.py --workdir runs/real_env

Every call of every training episode is executed; `real_calls` counts them. Only
ACT is trained, as nobody samples as REHEARSE.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.rollout.world, c.rollout.mode = 'real', 'host'
  return c


def sweep(add):
  """Five seeds."""
  for seed in range(5):
    add({'seed': seed})
