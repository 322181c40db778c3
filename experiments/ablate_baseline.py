"""The ablation that nobody published: role-wise against shared baselines.

  envace train --config experiments/ablate_baseline.py --workdir runs/ablate

Rehearsal is on in all four arms. `baseline` splits the mean by role,
`weighting` counts an episode once or once per output; the published "role-wise"
changes both.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.private.attempts = 0
  return c


def sweep(add):
  """Two by two, five seeds."""
  for seed in range(5):
    for baseline in ('shared', 'role'):
      for weighting in ('episode', 'row'):
        add(
          {
            'seed': seed,
            'rl.baseline': baseline,
            'rl.weighting': weighting,
          }
        )
