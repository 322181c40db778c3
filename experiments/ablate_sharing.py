"""One network for both roles, or one for each.

  envace train --config experiments/ablate_sharing.py --workdir runs/sharing

Both arms start from one warm start, which learns both roles; in the second, RL
trains a copy of it per role, each on the rows of its own. Parameters, optimizer
state and memory double, the work does not. It needs split views, where each
role has a row of its own. Not studied yet; no numbers to expect.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.rollout.view, c.rollout.mode = 'split', 'host'
  c.rl.share_roles = False
  c.private.attempts = 0
  return c


def sweep(add):
  """Shared and separate, five seeds."""
  for seed in range(5):
    for share_roles in (True, False):
      add({'seed': seed, 'rl.share_roles': share_roles})
