"""Verifiers by table, checklists by hand-made arithmetic."""

import dataclasses
import json
import math

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from envace_jax import types
from envace_jax.rewards import checklist, phrases, verifiers

PASS, FAIL, ABSTAIN = types.Verdict

TOOLS = [
  {'type': 'function', 'function': {'name': 'get_order'}},
  {
    'type': 'function',
    'function': {
      'name': 'cancel_order',
      'returns': {
        'type': 'object',
        'properties': {'order_id': {'type': 'string'}},
        'required': ['order_id', 'status'],
      },
    },
  },
  {
    'type': 'function',
    'function': {'name': 'broken', 'returns': {'$ref': 'http://x.invalid/s'}},
  },
]


def _step(name, arguments, observation):
  text = (
    observation if isinstance(observation, str) else json.dumps(observation)
  )
  return types.Step(
    action=types.ToolCall(name=name, arguments=arguments),
    action_text='',
    observation_text=text,
  )


BAD_CALL = types.Step(
  action=types.ParseError(kind='bad_json', detail=''),
  action_text='<tool_call>{</tool_call>',
  observation_text='{"error": "bad_json", "detail": ""}',
)
STEPS = [
  BAD_CALL,
  _step(
    'get_order',
    {'order_id': 'O12', 'limit': 1, 'full': True},
    {'order_id': 'O12', 'status': 'shipped', 'total': 12.5, 'item': '5" lamp'},
  ),
  _step('get_order', {'order_id': 'O7'}, {'order_id': 'O7', 'count': 40}),
  _step(
    'cancel_order',
    {'order_id': 'O7'},
    {'order_id': 'O7', 'status': 'cancelled', 'n': 1},
  ),
  _step('cancel_order', {'order_id': 'O12'}, {'error': 'not_pending'}),
  _step('refund', {'order_id': 'O9'}, 'not JSON at all'),
  _step('note', {'text': 'a'}, [1, 2]),
  _step('broken', {}, {'ok': True}),
]
REPLY = (
  'Order O7 is cancelled; O12 has shipped. You get $1,240.50 and 4 points.'
)


def _decide(check, steps=STEPS, reply=REPLY, state_hash=None):
  verifiers.validate_check(check)
  transcript = verifiers.Transcript(
    steps=steps, reply=reply, tools=TOOLS, state_hash=state_hash
  )
  return verifiers.decide(check, transcript)


@pytest.mark.parametrize(
  'contains, excludes, verdict',
  [
    (['cancelled', 'o12'], [], PASS),
    (['cancelled', 'pending'], [], FAIL),
    (['cancel'], [], FAIL),
    (['has  shipped'], [], PASS),
    (['O1'], [], FAIL),
    (['4'], [], PASS),
    (['40'], [], FAIL),
    (['1240.5'], [], PASS),
    (['1240'], [], FAIL),
    (['12'], [], FAIL),
    (['O12 has'], ['refund'], PASS),
    ([], ['cancelled'], FAIL),
    (['4'], ['7'], PASS),
    ([], [], PASS),
  ],
)
def test_replied(contains, excludes, verdict):
  check = {'kind': 'replied', 'contains': contains, 'excludes': excludes}
  assert _decide(check) is verdict
  assert _decide(check, reply=None) is FAIL
  assert _decide(check, reply=' \n') is FAIL


@pytest.mark.parametrize(
  'text, phrase, found',
  [
    ('40 left', '4', False),
    ('14', '4', False),
    ('4.5', '4', False),
    ('0.4', '4', False),
    ('.4', '4', False),
    ('O4', '4', False),
    ('4th', '4', False),
    ('3-4', '4', False),
    ('2024-05-4', '4', False),
    ('at 4:30', '4', False),
    ('-4', '4', False),
    ('-4', '-4', True),
    ('04', '4', False),
    ('4.', '4', True),
    ('(4), "4"', '4', True),
    ('{"n":4}', '4', True),
    ('[3,4]', '4', True),
    ('4.00', '4', True),
    ('1,234', '234', False),
    ('1234', '1,234', True),
    ('O12-3', 'O12', False),
    ('XO-O12', 'O12', False),
    ('order 4.5', 'order 4', False),
    ('order 4.', 'Order 4', True),
    ('a.b', 'a.', True),
    ('(.*)', '.*', True),
    ('abc', '.*', False),
    ('取消了', '取消', False),
  ],
)
def test_mentions(text, phrase, found):
  assert phrases.mentions(text, phrase) is found


@pytest.mark.parametrize(
  'check, verdict',
  [
    ({'contains': ['shipped', '12.5']}, PASS),
    ({'contains': ['shipped', 'cancelled']}, FAIL),  # not in one observation
    ({'contains': ['shipped'], 'about': 'O12'}, PASS),
    ({'contains': ['shipped'], 'about': 'O7'}, FAIL),
    ({'contains': ['shipped'], 'about': 'O1'}, FAIL),
    ({'contains': ['shipped'], 'about': '1'}, PASS),
    ({'contains': ['4']}, FAIL),
    ({'contains': ['40']}, PASS),
    ({'contains': ['5" lamp']}, PASS),
    ({'contains': ['not JSON']}, PASS),
    ({'contains': ['bad_json']}, PASS),
  ],
)
def test_observed(check, verdict):
  assert _decide({'kind': 'observed', **check}) is verdict
  assert _decide({'kind': 'observed', **check}, steps=[]) is FAIL


@pytest.mark.parametrize(
  'name, arguments, verdict',
  [
    ('get_order', {}, PASS),
    ('get_order', {'order_id': 'O12'}, PASS),
    ('get_order', {'order_id': 'O12', 'limit': 1.0}, PASS),
    ('get_order', {'order_id': 'O7', 'limit': 1}, FAIL),  # two different calls
    ('get_order', {'limit': '1'}, FAIL),
    ('get_order', {'limit': True}, FAIL),
    ('get_order', {'full': 1}, FAIL),
    ('get_order', {'order_id': 'o12'}, FAIL),
    ('get_order', {'missing': None}, FAIL),
    ('get', {}, FAIL),
  ],
)
def test_called(name, arguments, verdict):
  check = {'kind': 'called', 'name': name, 'arguments': arguments}
  assert _decide(check) is verdict


@pytest.mark.parametrize(
  'check, verdict',
  [
    ({'name': 'get_order', 'arguments': {'order_id': 'O12'}}, PASS),
    ({'name': 'cancel_order', 'arguments': {'order_id': 'O7'}}, PASS),
    ({'name': 'cancel_order', 'arguments': {'order_id': 'O12'}}, FAIL),
    ({'name': 'cancel_order', 'echo': {'order_id': 'O7'}}, PASS),
    ({'name': 'cancel_order', 'echo': {'order_id': 'O12'}}, FAIL),
    ({'name': 'cancel_order', 'echo': {'n': True}}, FAIL),
    ({'name': 'refund'}, FAIL),
    ({'name': 'note'}, FAIL),
    ({'name': 'broken'}, ABSTAIN),
  ],
)
def test_acknowledged(check, verdict):
  assert _decide({'kind': 'acknowledged', **check}) is verdict


@pytest.mark.parametrize(
  'observation, verdict',
  [
    ({'order_id': 'O7', 'status': 'cancelled'}, PASS),
    ({'order_id': 'O7'}, FAIL),
    ({'order_id': 7, 'status': 'cancelled'}, FAIL),
    ({'order_id': 'O7', 'status': 'cancelled', 'error': None}, FAIL),
    ('{"order_id": "O7", "status": "cancel', FAIL),
    ('<tool_response>{"order_id": "", "status": 1}</tool_response>', PASS),
    ('', FAIL),
  ],
)
def test_acknowledged_obeys_the_output_schema(observation, verdict):
  steps = [_step('cancel_order', {}, observation)]
  check = {'kind': 'acknowledged', 'name': 'cancel_order'}
  assert _decide(check, steps=steps) is verdict


@pytest.mark.parametrize(
  'writes, allowed, verdict',
  [
    (['cancel_order'], [{'name': 'cancel_order'}], PASS),
    (
      ['cancel_order'],
      [{'name': 'cancel_order', 'arguments': {'order_id': 'O7'}}],
      PASS,  # the one about O12 was refused
    ),
    (
      ['cancel_order'],
      [{'name': 'cancel_order', 'arguments': {'order_id': 'O12'}}],
      FAIL,
    ),
    (['cancel_order'], [], FAIL),
    (['refund'], [], FAIL),  # a garbled acknowledgement does not hide it
    (['other'], [], PASS),
    ([], [], PASS),
  ],
)
def test_no_other_writes(writes, allowed, verdict):
  check = {'kind': 'no_other_writes', 'writes': writes, 'allowed': allowed}
  assert _decide(check) is verdict


def test_state_abstains_without_a_state():
  check = {'kind': 'state', 'state_hash': 'abc'}
  assert _decide(check) is ABSTAIN
  assert _decide(check, state_hash='abc') is PASS
  assert _decide(check, state_hash='') is FAIL


def test_empty_check_abstains():
  assert _decide({}) is ABSTAIN


@pytest.mark.parametrize(
  'check, message',
  [
    ({'kind': 'vibes'}, 'legal kinds.*no_other_writes'),
    ({'contains': ['a']}, 'unknown check kind None'),
    ({'kind': 'called'}, r"lacks \['name'\]"),
    ({'kind': 'called', 'name': 'f', 'arguements': {}}, 'arguements.*legal'),
    ({'kind': 'called', 'name': 'f', 'arguments': [1]}, 'malformed'),
    ({'kind': 'replied', 'contains': 'shipped'}, 'malformed'),
    ({'kind': 'replied', 'contains': ['']}, 'malformed'),
    ({'kind': 'observed'}, 'lacks'),
    ({'kind': 'no_other_writes', 'writes': ['f']}, 'lacks'),
    (
      {'kind': 'no_other_writes', 'writes': [], 'allowed': [{'tool': 'f'}]},
      'malformed',
    ),
    ({'kind': 'state', 'state_hash': None}, 'malformed'),
  ],
)
def test_malformed_checks_are_refused_at_load(check, message):
  with pytest.raises(ValueError, match=message):
    verifiers.validate_check(check)


json_values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda v: st.lists(v) | st.dictionaries(st.text(), v),
  max_leaves=5,
)


@given(
  observation=st.text() | json_values.map(json.dumps),
  arguments=st.dictionaries(st.text(), json_values, max_size=3),
  reply=st.none() | st.text(),
  phrase=st.text().filter(str.strip),
)
def test_hostile_transcripts_are_decided(observation, arguments, reply, phrase):
  steps = [BAD_CALL, _step('cancel_order', arguments, observation)]
  for check in (
    {'kind': 'replied', 'contains': [phrase], 'excludes': [phrase]},
    {'kind': 'observed', 'contains': [phrase], 'about': phrase},
    {'kind': 'called', 'name': 'cancel_order', 'arguments': arguments},
    {'kind': 'acknowledged', 'name': 'cancel_order', 'echo': arguments},
    {'kind': 'no_other_writes', 'writes': ['cancel_order'], 'allowed': []},
  ):
    assert _decide(check, steps=steps, reply=reply) in (PASS, FAIL)


# Checklists ------------------------------------------------------------------


def _criterion(name, verdict, weight=1.0, required=True):
  check = {
    PASS: {'kind': 'called', 'name': 'get_order'},
    FAIL: {'kind': 'called', 'name': 'nothing'},
    ABSTAIN: {},
  }[verdict]
  return types.Criterion(
    id=name, question='', check=check, weight=weight, required=required
  )


OPTIONAL = False
TRANSCRIPT = verifiers.Transcript(steps=STEPS, reply=REPLY, tools=TOOLS)


@pytest.mark.parametrize(
  'rows, bonus, reward, success',
  [
    ([(PASS, 1), (PASS, 1)], 0.0, 1.0, True),
    ([(PASS, 1), (FAIL, 3)], 0.0, 0.25, False),
    ([(PASS, 1), (FAIL, 3)], 0.5, 0.125, False),
    ([(PASS, 1), (PASS, 3)], 0.3, 1.0, True),
    ([(FAIL, 1), (FAIL, 2)], 0.5, 0.0, False),
    # An optional failure costs share, not success.
    ([(PASS, 1), (FAIL, 1, OPTIONAL)], 0.5, 0.75, True),
    # ABSTAIN leaves numerator and denominator.
    ([(PASS, 1), (FAIL, 1), (ABSTAIN, 8)], 0.0, 0.5, None),
    ([(PASS, 1), (FAIL, 1), (ABSTAIN, 8, OPTIONAL)], 0.0, 0.5, False),
    ([(PASS, 1), (ABSTAIN, 8, OPTIONAL)], 0.5, 1.0, True),
    ([(PASS, 1), (ABSTAIN, 1)], 0.5, 1.0, None),
    ([(FAIL, 1), (PASS, 1, OPTIONAL), (ABSTAIN, 1)], 0.5, 0.25, None),
    # Nothing judged, nothing said.
    ([(ABSTAIN, 1), (ABSTAIN, 1, OPTIONAL)], 0.5, None, None),
    ([], 0.5, None, None),
    # No required criterion: no success to speak of.
    ([(PASS, 1, OPTIONAL), (FAIL, 1, OPTIONAL)], 0.5, 0.5, None),
    # A weightless criterion counts for success only.
    ([(PASS, 1), (FAIL, 0)], 0.5, 0.5, False),
    ([(PASS, 0), (PASS, 0)], 0.5, None, True),
  ],
)
def test_score(rows, bonus, reward, success):
  criteria = [_criterion(f'c{i}', *row) for i, row in enumerate(rows)]
  score = checklist.score(criteria, TRANSCRIPT, success_bonus=bonus)
  assert score.reward == (None if reward is None else pytest.approx(reward))
  assert score.success is success
  assert list(score.verdicts.values()) == [row[0] for row in rows]


@given(
  rows=st.lists(
    st.tuples(
      st.sampled_from([PASS, FAIL, ABSTAIN]),
      st.floats(0, 1e6),
      st.booleans(),
    ),
    min_size=1,
    max_size=8,
  ),
  bonus=st.floats(0, 1),
)
def test_reward_is_bounded_and_order_free(rows, bonus):
  criteria = [_criterion(f'c{i}', *row) for i, row in enumerate(rows)]
  one = checklist.score(criteria, TRANSCRIPT, success_bonus=bonus)
  two = checklist.score(criteria[::-1], TRANSCRIPT, success_bonus=bonus)
  assert (one.reward, one.success) == (two.reward, two.success)
  assert one.reward is None or 0 <= one.reward <= 1


@pytest.mark.parametrize('weight', [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_unusable_weights_are_refused(weight):
  criteria = [_criterion('a', PASS), _criterion('b', ABSTAIN, weight)]
  with pytest.raises(ValueError, match='criterion b: weight'):
    checklist.score(criteria, TRANSCRIPT, success_bonus=0.0)


def test_repeated_ids_and_bad_bonus_are_refused():
  criteria = [_criterion('a', PASS), _criterion('a', FAIL)]
  with pytest.raises(ValueError, match='repeat'):
    checklist.score(criteria, TRANSCRIPT, success_bonus=0.0)
  for bonus in (-0.1, 1.1, math.nan):
    with pytest.raises(ValueError, match='success_bonus'):
      checklist.score(criteria[:1], TRANSCRIPT, success_bonus=bonus)


def _check(name, check):
  return types.Criterion(id=name, question='', check=check)


TASK = types.Task(
  id='t',
  instruction='Cancel O7.',
  tools=TOOLS,
  checklist=[
    _check('reply', {'kind': 'replied', 'contains': ['cancelled']}),
    _check('cancel', {'kind': 'acknowledged', 'name': 'cancel_order'}),
  ],
  evaluation=[
    _check('state', {'kind': 'state', 'state_hash': 'abc'}),
    _check('reply', {'kind': 'replied', 'contains': ['O7']}),
  ],
)
EPISODE = types.Episode(
  task_id='t',
  group=0,
  sample_index=0,
  rows=(
    types.Row(
      tokens=np.zeros(0, np.int32),
      authors=np.zeros(0, np.int8),
      logprobs=np.zeros(0, np.float32),
    ),
  ),
  steps=STEPS,
  reply=REPLY,
  stop_reason=types.StopReason.REPLIED,
)


@pytest.mark.parametrize(
  'evaluation',
  [
    (),
    [_criterion('x', FAIL, weight=100.0)],
    [_check('cancel', {'kind': 'state', 'state_hash': 'zzz'})],
    [_check('reply', {'kind': 'no such kind'})],
    [_criterion('y', PASS, weight=math.nan)],
  ],
)
def test_training_score_ignores_the_evaluation(evaluation):
  plain = checklist.score_training(TASK, EPISODE, success_bonus=0.5)
  task = dataclasses.replace(TASK, evaluation=evaluation)
  assert checklist.score_training(task, EPISODE, success_bonus=0.5) == plain
  assert plain == types.Score(
    verdicts={'reply': PASS, 'cancel': PASS}, reward=1.0, success=True
  )


def test_evaluation_reads_state_and_ignores_the_checklist():
  task = dataclasses.replace(TASK, checklist=[_check('a', {'kind': 'nothing'})])
  good = checklist.score_evaluation(task, EPISODE, 'abc')
  assert (good.reward, good.success) == (1.0, True)
  bad = checklist.score_evaluation(task, EPISODE, 'xyz')
  assert (bad.reward, bad.success) == (0.5, False)
  unknown = checklist.score_evaluation(task, EPISODE, None)
  assert (unknown.reward, unknown.success) == (1.0, None)


@pytest.mark.parametrize('reason', types.StopReason)
def test_only_a_reply_that_ended_the_episode_counts(reason):
  episode = dataclasses.replace(EPISODE, stop_reason=reason)
  score = checklist.score_training(TASK, episode)
  if reason is types.StopReason.REPLIED:
    assert (score.reward, score.success) == (1.0, True)
  elif reason is types.StopReason.WORLD_FAILED:
    assert (score.reward, score.success) == (None, None)
    assert set(score.verdicts.values()) == {ABSTAIN}
  else:
    assert (score.reward, score.success) == (0.5, False)


def test_an_episode_of_another_task_is_refused():
  episode = dataclasses.replace(EPISODE, task_id='u')
  with pytest.raises(ValueError, match='episode of u'):
    checklist.score_training(TASK, episode)


@pytest.mark.parametrize(
  'change, message',
  [
    ({'checklist': [_check('a', {'kind': 'x'})]}, 'task t: unknown check kind'),
    ({'evaluation': [_criterion('a', PASS, math.nan)]}, 'task t: criterion a'),
    (
      {'checklist': [_check('s', {'kind': 'state', 'state_hash': 'abc'})]},
      'put it in evaluation',
    ),
    (
      {'tools': [{'function': {'name': 'f', 'returns': {'type': 'ojbect'}}}]},
      'tool f: bad returns',
    ),
  ],
)
def test_bad_tasks_are_refused_at_load(change, message):
  checklist.validate_task(TASK)
  with pytest.raises(ValueError, match=message):
    checklist.validate_task(dataclasses.replace(TASK, **change))
