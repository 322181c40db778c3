"""Rehearsal in which only the caller learns: REHEARSE keeps its weight at 0.

  envace train --config experiments/caller_only.py --workdir runs/caller_only

The policy still answers its own calls; its answers shape no gradient, though
shared parameters let them drift.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.rl.rehearse_weight = 0.0
  return c


def sweep(add):
  """Five seeds."""
  for seed in range(5):
    add({'seed': seed})
