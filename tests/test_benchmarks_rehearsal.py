"""A policy with and without private rehearsals, at equal real calls."""

import dataclasses

import pytest
import serving
import test_benchmarks
import test_benchmarks_endpoint

from envace_jax import measure, policy_service, run_policy
from envace_jax.benchmarks import comparison, endpoint, run, writes
from envace_jax.endpoints import attempts, client
from envace_jax.serving import chat, engine, private

model = test_benchmarks_endpoint.model  # a server that knows no rehearsal
CAP = 2
ASKED = private.Settings(attempts=3, max_tokens=60)
SAMPLING = {'temperature': 1.0, 'max_tokens': 40, 'seed': 1}


class Going(test_benchmarks.Counting):
  """Counts calls of the tool that the policy knows."""

  def open(self, task_id):
    attempt = super().open(task_id)
    attempt.tools = [serving.TOOL]
    return attempt


@pytest.fixture
def runs(rehearsing, monkeypatch):
  """Makes a policy of a run, with rehearsals or without."""
  service = chat.Service(rehearsing, serving.TEMPLATE, deadline_s=60)
  opened = policy_service.Opened(
    service=service, tokenizer=serving.TOKENIZER, phase='rl', step=3,
    programs=1, tools='names',
  )  # fmt: skip
  monkeypatch.setattr(policy_service, 'open_run', lambda *args: opened)
  return lambda rehearsal: run_policy.RunPolicy(
    'runs/a',
    run_policy.Options(
      service=policy_service.Options(), rehearsal=rehearsal, **SAMPLING
    ),
  )


@pytest.fixture(scope='module')
def served(rehearsing):
  """Makes the same policy behind an endpoint."""
  pytest.importorskip('openai', reason='asks the endpoint')
  with serving.listening(rehearsing) as (url, _):
    made = []

    def make(rehearsal):
      made.append(at(f'{url}/v1', rehearsal))
      return made[-1]

    yield make
    for policy in made:
      policy.close()


def at(url, rehearsal):
  server = client.Server(
    base_url=url, api_key_env='KEY', concurrency=4, batch_deadline_s=60
  )
  sampling = endpoint.Sampling(
    model=serving.MODEL, rehearsal=rehearsal.as_request(), **SAMPLING
  )
  retries = attempts.Policy(max_attempts=2, timeout_s=30, backoff_s=0.01)
  return endpoint.Endpoint(server, sampling, retries)


def measured(path, policy, workers=1):
  whole = Going()
  return run.measure(
    whole,
    policy,
    run.select(whole),
    path / 'results.jsonl',
    run.Settings(max_steps=8, max_calls=CAP, workers=workers, trials=2),
  )


@pytest.fixture(autouse=True, scope='module')
def key():
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('KEY', serving.KEY)
    yield


def test_rehearsals_cost_tokens_and_no_calls(tmp_path, runs, served):
  """In this process and behind an endpoint, alone and side by side."""
  without = measured(tmp_path / 'without', runs(private.Settings()))
  found = measured(tmp_path / 'with', runs(ASKED), workers=3)
  assert not any(one.error for one in [*without, *found])
  assert {one.rehearsal_tokens for one in without} == {0}
  for one in found:
    assert 0 < one.rehearsal_tokens <= 60  # once an attempt, not once a reply
    assert one.calls <= CAP
  assert any(one.steps > 1 for one in found)
  again = measured(tmp_path / 'served', served(ASKED), workers=3)
  plain = ('task_id', 'trial', 'calls', 'steps', 'tokens_in', 'tokens_out',
           'rehearsal_tokens', 'success')  # fmt: skip
  facts = lambda results: [
    [getattr(r, name) for name in plain] for r in results
  ]
  assert facts(again) == facts(found)
  assert facts(measured(tmp_path / 'bare', served(private.Settings()))) == (
    facts(without)
  )
  said = comparison.compare([tmp_path / 'without', tmp_path / 'with'], seed=0)
  rows = [
    [c.strip() for c in r.split('|')[1:-1]] for r in said.splitlines()[4:]
  ]
  assert [row[7] == '0.0' for row in rows] == [True, False] * 2
  assert '"attempts": 3' in rows[1][1] and 'rehearsal' not in rows[0][1]
  assert float(rows[1][5]) <= CAP and 'conversation' not in rows[1][1]
  named = rows[1][1]
  for part in ('"max_tokens": 60', '"mode": "parallel"', '"max_notes": 4'):
    assert part in named  # a results' file of other rehearsals is another's


def test_a_server_that_only_ignores_them_is_errored(model, tmp_path):
  policy = at(f'http://127.0.0.1:{model.server_port}/v1', ASKED)
  try:
    found = measured(tmp_path, policy)
    assert {one.error for one in found} == {'policy: no_rehearsal'}
    asked = model.bodies[0]['rehearsal']
    assert asked['attempts'] == 3 and asked['conversation'] == '1/n1/0'
    assert 'writes' not in asked  # the server knows them, or nobody does
  finally:
    policy.close()


def test_a_server_that_rehearses_unasked_is_errored(tmp_path):
  """The arm without rehearsals has none, or is not measured."""
  pytest.importorskip('openai', reason='asks the endpoint')
  own = engine.Engine(*serving.rehearser(), serving.REHEARSING)
  own.start()
  with serving.listening(own, rehearsal=ASKED) as (url, _):
    policy = at(f'{url}/v1', private.Settings())
    try:
      found = measured(tmp_path, policy)
    finally:
      policy.close()
  assert {one.error for one in found} == {'policy: unasked_rehearsal'}


def test_an_attempt_without_tools_is_not_rehearsed(tmp_path, runs, served):
  ask = [{'role': 'user', 'content': 'ab'}]
  for made in (runs(ASKED), served(ASKED)):
    answer = made.begin('n1', 0).ask(ask, [])
    assert answer.rehearsal_tokens == 0 and answer.tokens_out
    assert made.begin('n1', 0).ask(ask, [serving.TOOL]).rehearsal_tokens


def test_the_benchmark_says_which_tools_change_something():
  pytest.importorskip('tau2', reason='needs constraints/benchmarks.txt')
  names = writes.of('tau2', ['telecom_solo', 'retail'])
  assert {'enable_roaming', 'toggle_data', 'cancel_pending_order'} <= set(names)
  assert 'get_order_details' not in names
  assert 'book_reservation' in writes.of('tau2', ['airline'])
  assert writes.of('bfcl', ['multi_turn_base']) is None


def test_what_is_measured_is_told_which_tools_change(tmp_path, monkeypatch):
  pytest.importorskip('tau2', reason='needs constraints/benchmarks.txt')
  seen = []

  def open_policy(options, measured):
    seen.append(options.rehearsal)
    return measure.policies.Noop()

  monkeypatch.setattr(measure, 'open_policy', open_policy)
  options = measure.Options(
    benchmark='tau2', policy='noop', categories=['mock_solo'], limit=1,
    out=str(tmp_path), rehearsal=ASKED,
  )  # fmt: skip
  measure.measure(options)
  own = dataclasses.replace(ASKED, writes=('go',))
  measure.measure(dataclasses.replace(options, rehearsal=own))
  assert 'create_task' in seen[0].writes and seen[1].writes == ('go',)
