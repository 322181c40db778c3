"""The policy trained against a frozen simulator: its own warm start.

  envace train --config experiments/simulator.py --workdir runs/simulator

`--config.rollout.simulator_workdir=runs/other` takes the policy of another run
instead, which must share the tokenizer and the architecture. A model behind an
OpenAI-compatible endpoint plays it with

  --config.rollout.simulator_endpoint.base_url=http://localhost:8000/v1
  --config.rollout.simulator_endpoint.model=NAME

whose answers are kept in the workdir, so that the run resumes exactly unless
`simulator/lost` is above 0: what was never answered is asked anew.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.rollout.world, c.rollout.mode = 'simulator', 'host'
  return c


def sweep(add):
  """Five seeds."""
  for seed in range(5):
    add({'seed': seed})
