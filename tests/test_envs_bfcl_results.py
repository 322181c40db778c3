"""Our result files under the package's own evaluation: the same verdicts.

The package's evaluation imports a handler per vendor through `model_config`;
in its place stands a table of one model, with the package's own handler for
OpenAI tool calls. Its parsers of Java and JavaScript, which need a compiled
dependency, are left out. All else is the package: decoding, runners, checkers,
and the leaderboard's arithmetic.
"""

import csv
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip('bfcl_eval', reason='bfcl-eval is an optional package')
pytest.importorskip('overrides', reason='the evaluation needs it')
pytest.importorskip('tqdm', reason='the evaluation needs it')
pytest.importorskip('dotenv', reason='the evaluation needs it')
pytest.importorskip('pandas', reason='the evaluation needs it')
pytest.importorskip('openai', reason='the evaluation needs it')

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import benchmark as bfcl
from envace_jax.envs.bfcl import results as bfcl_results
from envace_jax.envs.bfcl import scores as bfcl_scores

MODEL = 'envace-FC'
EVALUATE = """
import sys, types
def stub(name, **names):
  module = types.ModuleType(name)
  vars(module).update(names)
  sys.modules[name] = module
unused = lambda *a, **k: (lambda f: f)
stub('tenacity', retry=unused, retry_if_exception_message=unused,
     retry_if_exception_type=unused, wait_random_exponential=unused)
parsers = 'bfcl_eval.model_handler.parser.'
stub(parsers + 'java_parser', parse_java_function_call=None)
stub(parsers + 'js_parser', parse_javascript_function_call=None)
table = {}
stub('bfcl_eval.constants.model_config', MODEL_CONFIG_MAPPING=table)
from bfcl_eval.model_handler.api_inference import openai_completion
table['envace-FC'] = types.SimpleNamespace(
  model_name='envace', display_name='envace', url='', org='', license='',
  model_handler=openai_completion.OpenAICompletionsHandler, input_price=None,
  output_price=None, is_fc_model=True, underscore_to_dot=True)
from bfcl_eval.eval_checker import eval_runner
eval_runner.main(['envace-FC'], ['all_scoring'], None, None, partial_eval=True)
"""


def _play(source, task_id, replies):
  attempt = source.open(task_id)
  for reply in replies:
    attempt.respond(reply)
  outcome, result = attempt.score(), attempt.record()
  attempt.close()
  return outcome, result


def _replies(source, task_id, i):
  """Right, silent, lacking a call, and hostile, in turn."""
  oracle = source.oracle(task_id)
  if oracle is None:
    call = types.ToolCall(name='any', arguments={'a': [1]})
    oracle = [benchmark.Reply(text='', calls=[call])]
  if i % 4 == 1:
    return [benchmark.Reply(text='I cannot.')] * 8
  if i % 4 == 2:
    return [oracle[0], *oracle[2:]]
  if i % 4 == 3:
    bad = types.ToolCall(name='print', arguments={'x': "'); exit(3) #"})
    return [benchmark.Reply(text='', calls=[bad]), *oracle]
  return oracle


@pytest.fixture(scope='module')
def evaluated(tmp_path_factory):
  root = tmp_path_factory.mktemp('bfcl')
  source = bfcl.Bfcl()
  outcomes, results = {}, {}
  for category in source.categories():
    ids = source.task_ids(category)
    ids = ids[:: max(1, len(ids) // 12)]
    for i, task_id in enumerate(ids):
      outcome, result = _play(source, task_id, _replies(source, task_id, i))
      outcomes.setdefault(category, {})[task_id] = outcome
      results[task_id] = result
  paths = bfcl_results.write_results(root / 'result', MODEL, results)
  assert len(paths) == len(source.categories())
  environment = {
    **os.environ,
    'BFCL_PROJECT_ROOT': str(root),
    'OPENAI_API_KEY': 'none',
  }
  done = subprocess.run(
    [sys.executable, '-c', EVALUATE],
    env=environment,
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return outcomes, root / 'score'


def test_the_package_comes_to_the_same_verdicts(evaluated):
  outcomes, scores = evaluated
  for category, ours in outcomes.items():
    (path,) = scores.rglob(f'BFCL_v4_{category}_score.json')
    header, *failed = map(json.loads, path.read_text().splitlines())
    assert header['total_count'] == len(ours)
    wrong = {task_id for task_id, o in ours.items() if not o.success}
    assert {line['id'] for line in failed} == wrong
    assert 0 < len(wrong) < len(ours), 'both verdicts occur'


def test_groups_are_the_leaderboards(evaluated):
  outcomes, scores = evaluated
  ours = bfcl_scores.group_scores(
    {
      category: bfcl_scores.category_score(found.values())
      for category, found in outcomes.items()
    }
  )
  theirs = {}
  for name in ('non_live', 'overall'):  # of one name, the later wins
    path = scores / f'data_{name}.csv'
    names, values = list(csv.reader(path.read_text().splitlines()))[:2]
    theirs |= dict(zip(names, values, strict=True))
  for group, column in (
    ('live', 'Live Acc'),
    ('multi_turn', 'Multi Turn Acc'),
    ('irrelevance', 'Irrelevance Detection'),
    ('relevance', 'Relevance Detection'),
  ):
    assert theirs[column] == f'{100 * ours[group]:.2f}%', group
  # Their simple is the mean of three languages, of which we have one.
  simple = ours['non_live_python'] * 4 - sum(
    float(theirs[name].rstrip('%')) / 100
    for name in ('Multiple AST', 'Parallel AST', 'Parallel Multiple AST')
  )
  official = float(theirs['Python Simple AST'].rstrip('%')) / 100
  assert simple == pytest.approx(official, abs=2e-4), 'they round to 1e-4'
