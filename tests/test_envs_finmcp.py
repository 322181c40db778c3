"""FinMCP-Bench: its layout, its metric by hand, and hostile files."""

import json
import math

import pytest

from envace_jax import errors, types
from envace_jax.envs import benchmark
from envace_jax.envs.finmcp import benchmark as finmcp
from envace_jax.envs.finmcp import scores as finmcp_scores


def pair(gold, predicted):
  return finmcp_scores.Pair(gold=gold, predicted=predicted)


def assistant(*calls):
  return {
    'role': 'assistant',
    'content': None,
    'tool_calls': [
      {
        'id': key,
        'type': 'function',
        'index': i,
        'function': {'name': name, 'arguments': json.dumps(arguments)},
      }
      for i, (key, name, arguments) in enumerate(calls)
    ],
  }


def user(text):
  return {'role': 'user', 'content': text}


def tool(key, text):
  return {'role': 'tool', 'tool_call_id': key, 'content': text}


def said(text):
  return {'role': 'assistant', 'content': text, 'tool_calls': None}


SAMPLES = [
  {
    'id': 1,
    'task': 'multi step',
    'tool_list': [['Find'], ['Price', 'Risk']],
    'messages': [
      user('How is fund A?'),
      assistant(('a', 'Find', {'q': 'A'})),
      tool('a', 'A1'),
      assistant(('b', 'Price', {'id': 'A1', 'n': 2}), ('c', 'Risk', {})),
      tool('c', 'low'),
      tool('b', '1.5'),
      said('Fine.'),
    ],
  },
  {
    'id': 'two',
    'task': 'multi turn',
    'tool_list': ['Find', 'Find'],
    'messages': [
      user('Find B.'),
      assistant(('a', 'Find', {'q': 'B'})),
      tool('a', 'first'),
      said('Found.'),
      user('Again.'),
      assistant(('a', 'Find', {'q': 'B'})),
      tool('a', 'second'),
      said('Found again.'),
      user('Thanks.'),
      said('Gladly.'),
    ],
  },
]


@pytest.fixture
def bench(tmp_path):
  path = tmp_path / 'benchmark_final.json'
  path.write_text(json.dumps(SAMPLES))
  return finmcp.FinMcp(finmcp.load(path))


@pytest.mark.parametrize(
  'gold, predicted, counts, f1, consist, emr',
  [
    ([['a']], ['a'], (1, 0, 0), 1, True, True),
    ([['a', 'b']], ['b', 'a'], (2, 0, 0), 1, False, True),
    ([['a'], ['b']], ['b', 'a'], (2, 0, 0), 1, False, False),
    ([['a'], ['a']], ['a'], (1, 0, 1), 2 / 3, False, False),
    ([['a']], ['a', 'a', 'b'], (1, 2, 0), 1 / 2, False, False),
    ([['a']], [], (0, 0, 1), 0, False, False),
    ([], ['a'], (0, 1, 0), 0, False, False),
    ([], [], (0, 0, 0), 0, True, True),
  ],
)
def test_scores_by_hand(gold, predicted, counts, f1, consist, emr):
  scored = pair(gold, predicted)
  found = scored.counts()
  assert (found.tp, found.fp, found.fn) == counts
  assert found.f1 == pytest.approx(f1)
  assert scored.is_consistent() is consist
  assert scored.is_exact() is emr


def test_micro_weighs_calls_and_macro_samples():
  scores = finmcp_scores.aggregate(
    [pair([['a', 'b'], ['c']], ['a', 'b', 'c']), pair([['a']], [])]
  )
  assert scores['micro_f1'] == pytest.approx(6 / 7)
  assert scores['macro_f1'] == 0.5
  assert scores['consist'] == scores['emr'] == 0.5
  with pytest.raises(ValueError, match='no sample'):
    finmcp_scores.aggregate([])


def test_turns_are_pooled_by_sample():
  """A call that comes a turn late is right in the sample, not in the turn."""
  pairs = {
    'x/0': pair([['a']], []),
    'x/1': pair([['b']], ['a', 'b']),
    'y/z/0': pair([['c']], ['c']),
  }
  assert finmcp.sample_scores(pairs)['micro_f1'] == 1
  assert finmcp.sample_scores(pairs)['consist'] == 1
  alone = finmcp_scores.aggregate(list(pairs.values()))
  assert alone['micro_f1'] == pytest.approx(2 * 2 / (4 + 1 + 1))


def test_layout(bench):
  assert bench.categories() == ('multi step', 'multi turn')
  assert bench.task_ids('multi step') == ('1/0',)
  assert bench.task_ids('multi turn') == ('two/0', 'two/1', 'two/2')
  first, second = bench.open('two/0'), bench.open('two/1')
  assert first.system == '' and first.instruction == 'Find B.'
  assert 'first' in second.system and 'second' not in second.system
  names = [t['function']['name'] for t in second.tools]
  assert names == ['Find', 'Price', 'Risk']
  assert 'names only' in bench.version


def test_calls_are_answered_as_they_were(bench):
  attempt = bench.open('1/0')

  def ask(name, arguments):
    call = types.ToolCall(name=name, arguments=arguments)
    (answer,) = attempt.respond(benchmark.Reply(text='', calls=(call,)))
    return answer

  assert ask('Price', {'n': 2, 'id': 'A1'}).text == '1.5'
  assert ask('Risk', {}).text == 'low'
  for name, arguments in (
    ('Price', {'id': 'A2', 'n': 2}),
    ('Nothing', {}),
    ('Price', {'n': math.nan}),
    (None, {}),
    ('Price', {1: object()}),
  ):
    refused = ask(name, arguments)
    assert refused.text == finmcp.NOT_RECORDED
    assert refused.error == 'not_recorded'
  again = bench.open('two/1')
  call = types.ToolCall(name='Find', arguments={'q': 'B'})
  answers = [
    again.respond(benchmark.Reply(text='', calls=(call,)))[0].text
    for _ in range(3)
  ]
  assert answers == ['first', 'second', 'second']


def test_oracles_and_limits(bench):
  pairs = {}
  for category in bench.categories():
    for task_id in bench.task_ids(category):
      attempt = bench.open(task_id)
      for reply in bench.oracle(task_id):
        attempt.respond(reply)
      outcome = attempt.score()
      assert outcome.success and outcome.reward == 1
      assert attempt.respond(bench.oracle(task_id)[0]) == ()
      pairs[task_id] = attempt.pair()
  scores = finmcp.sample_scores(pairs)
  assert scores['micro_f1'] == scores['macro_f1'] == scores['emr'] == 1
  assert scores['tp'] == 5
  attempt = bench.open('1/0')
  call = types.ToolCall(name='Find', arguments={})
  for i in range(finmcp.MAX_CALLS):
    answers = attempt.respond(benchmark.Reply(text='', calls=(call,)))
    assert len(answers) == (i + 1 < finmcp.MAX_CALLS)
  assert attempt.score().parts == {'tp': 1, 'fp': 19, 'fn': 2}
  assert not attempt.score().success
  bad = types.ParseError(kind='bad_json', detail='')
  attempt = bench.open('1/0')
  (answer,) = attempt.respond(benchmark.Reply(text='', calls=(bad,)))
  assert answer.error == 'bad_json' and attempt.pair().predicted == ()


def test_what_is_recorded_is_scored_by_sample(bench):
  """Through a file and back, as the harness keeps it."""
  recorded = []
  for category in bench.categories():
    for task_id in bench.task_ids(category):
      attempt = bench.open(task_id)
      for reply in bench.oracle(task_id):
        attempt.respond(reply)
      value = json.loads(json.dumps(attempt.record()))
      for trial in (0, 1):  # the second, of which nothing is said
        kept = value if trial == 0 else value | {'predicted': []}
        recorded.append(
          benchmark.Recorded(
            task_id=task_id, trial=trial, started='', seconds=0.0, value=kept
          )
        )
  groups = bench.groups({}, recorded)
  assert groups['micro_f1'] == groups['macro_f1'] == groups['consist'] == 1
  assert bench.groups({}, []) == {}


def _changed(**fields):
  return [SAMPLES[0] | fields]


@pytest.mark.parametrize(
  'content',
  [
    '{"a": 1}',
    '[1]',
    '[',
    '[' * 100_000,
    json.dumps([SAMPLES[0], SAMPLES[0]]),
    json.dumps(_changed(task='easy')),
    json.dumps(_changed(messages=[])),
    json.dumps(_changed(messages=[tool('a', 'x')])),
    json.dumps(_changed(messages=[assistant(('a', 'Find', {}))])),
    json.dumps(_changed(messages=[{'role': 'user', 'content': 7}])),
    json.dumps(_changed(messages='hello')),
    json.dumps(_changed(messages=[user('x'), assistant(('a', ['Find'], {}))])),
    '\udcff',
  ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path, content):
  path = tmp_path / 'wrong.json'
  path.write_bytes(content.encode('utf-8', 'surrogateescape'))
  with pytest.raises(errors.UserError, match='wrong.json'):
    finmcp.load(path)


def test_schemas_from_a_file(tmp_path, bench):
  del bench
  data, tools = tmp_path / 'data.json', tmp_path / 'tools.json'
  data.write_text(json.dumps(SAMPLES))
  schema = {'type': 'function', 'function': {'name': 'Find', 'parameters': {}}}
  tools.write_text(json.dumps([schema]))
  loaded = finmcp.load(data, tools)
  assert loaded.tools == (schema,) and 'given schemas' in loaded.version
  with pytest.raises(errors.UserError, match='missing.json'):
    finmcp.load(tmp_path / 'missing.json')
