"""Rehearsal with a share of real episodes, or of real steps.

  envace train --config experiments/mixed.py --workdir runs/mixed

A quarter of every group meets the real desk, the rest is rehearsed, and each
is compared with its own kind. `real_calls` in the metrics is the price, and
`source/*/reward` shows how much easier the rehearsed world is. Not studied yet.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.rollout.mode = 'host'
  c.rollout.real_fraction = 0.25
  return c


def sweep(add):
  """Fractions of episodes and of steps, pooled baselines, five seeds."""
  for seed in range(5):
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
      add({'seed': seed, 'rollout.real_fraction': fraction})
    for fraction in (0.25, 0.5):
      add(
        {
          'seed': seed,
          'rollout.real_fraction': fraction,
          'rl.baseline_by_source': False,
        }
      )
      add(
        {
          'seed': seed,
          'rollout.real_fraction': 0.0,
          'rollout.real_steps_fraction': fraction,
        }
      )
