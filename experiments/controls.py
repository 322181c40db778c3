"""The arms that the quick start's gain must beat, from its own warm start.

  envace train --config experiments/controls.py:null --config.seed=0 \
    --config.warm_start.workdir=runs/study/rehearsal-0 \
    --workdir runs/study/null-0

  null        every observation replaced by a constant: is rehearsal doing it?
  supervised  as many steps of the warm start's loss, on as many rows as cost
              the same: is it just more training?
  real        the real environment answers: the ceiling
  simulator   the frozen warm start answers: is it training the world?

Each takes about as long as the quick start's RL phase, three minutes on two
CPU cores. `envace compare --workdir runs/study` sets them against each other.
"""

from experiments import quickstart

ARMS = ('null', 'supervised', 'real', 'simulator')


def get_config(arg: str = 'null'):
  """`arg` is one of ARMS."""
  if arg not in ARMS:
    raise ValueError(f'controls.py:{arg}; use one of {", ".join(ARMS)}')
  c = quickstart.get_config()
  if arg == 'supervised':
    c.rl.objective = 'supervised'
  else:
    c.rollout.world = arg
    c.rollout.mode = 'host'
  c.evaluation.every = 0  # only before and after
  c.private.attempts = 0
  return c


def sweep(add):
  """Five seeds of the arm that was asked for."""
  for seed in range(5):
    add({'seed': seed, 'warm_start.workdir': f'runs/study/rehearsal-{seed}'})
