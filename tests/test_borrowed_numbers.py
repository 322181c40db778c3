"""A run takes its warm start's numbers from the run it took the policy from."""

import json
import types as python_types

from envace_jax import results
from experiments import base


def borrower(tmp_path, change=lambda written: None):
  """The setup of a run that borrows from one with a changed config file."""
  written = json.loads(base.get_config().to_json())
  change(written)
  (tmp_path / 'config.json').write_text(json.dumps(written))
  evaluations = tmp_path / 'evaluations'
  evaluations.mkdir()
  (evaluations / 'warm_start.json').write_text('{"fidelity": 1}')
  config = base.get_config()
  config.warm_start.workdir = str(tmp_path)
  return python_types.SimpleNamespace(config=config)


def test_equal_data_and_model_need_no_second_measurement(tmp_path):
  setup = borrower(tmp_path)
  assert results._borrowed(setup, 'warm_start') == {'fidelity': 1}
  assert results._borrowed(setup, 'after') is None


def test_another_seed_is_measured(tmp_path):
  setup = borrower(tmp_path, lambda c: c.update(seed=1))
  assert results._borrowed(setup, 'warm_start') is None


def test_a_run_older_than_an_option_is_measured(tmp_path):
  setup = borrower(tmp_path, lambda c: c['data'].pop('records'))
  assert results._borrowed(setup, 'warm_start') is None
