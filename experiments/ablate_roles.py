"""Which role must be trained: both, the caller alone, or the rehearser alone.

  envace train --config experiments/ablate_roles.py --workdir runs/ablate_roles

The published release has switches for all three and a number for none but the
first. A frozen role keeps its weight at 0; its parameters are those of the
other role, so it may still drift (`experiments/ablate_sharing.py` parts them).
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.private.attempts = 0
  return c


def sweep(add):
  """Both roles, the caller, the rehearser, the caller against the rehearser."""
  for seed in range(5):
    for act, rehearse in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, -0.5)):
      add({'seed': seed, 'rl.act_weight': act, 'rl.rehearse_weight': rehearse})
