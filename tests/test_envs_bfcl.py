"""BFCL behind the seam: the package's own answers earn the package's marks."""

import collections
from concurrent import futures
import dataclasses

import pytest

pytest.importorskip('bfcl_eval', reason='bfcl-eval is an optional package')

import jsonschema

from envace_jax import errors, types
from envace_jax.envs import benchmark, recording
from envace_jax.envs.bfcl import backends as bfcl_backends
from envace_jax.envs.bfcl import benchmark as bfcl
from envace_jax.envs.bfcl import calls as bfcl_calls
from envace_jax.envs.bfcl import multi as bfcl_multi
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.envs.bfcl import scores as bfcl_scores
from envace_jax.envs.bfcl import single as bfcl_single

SIZES = {
  'simple_python': 400,
  'multiple': 200,
  'parallel': 200,
  'parallel_multiple': 200,
  'live_simple': 258,
  'live_multiple': 1053,
  'live_parallel': 16,
  'live_parallel_multiple': 24,
  'irrelevance': 240,
  'live_irrelevance': 884,
  'live_relevance': 16,
  'multi_turn_base': 200,
  'multi_turn_miss_func': 200,
  'multi_turn_miss_param': 200,
  'multi_turn_long_context': 200,
  'memory_kv': 155,
  'memory_rec_sum': 155,
}
# Labels that contradict their own function docs, or list dependent choices.
UNREACHABLE = {
  'parallel_multiple_12',
  'parallel_multiple_26',
  'live_simple_106-63-0',
  'live_simple_112-68-0',
  'live_multiple_507-149-4',
  'live_multiple_862-181-3',
  'live_multiple_964-207-0',
}
JSON_TYPES = {'string', 'integer', 'number', 'boolean', 'array', 'object'}
SILENT = benchmark.Reply(text='')


@pytest.fixture(scope='module')
def source():
  return bfcl.Bfcl()


@pytest.fixture(scope='module')
def cached():
  """The globals in which the package keeps its instances."""
  return vars(bfcl_package.load().multi_turn_utils)


def _attempt(source, task_id, replies):
  attempt = source.open(task_id)
  try:
    for reply in replies:
      said = attempt.respond(reply)
    return attempt.score(), said
  finally:
    attempt.close()


def _multi_turn_ids(source, every=1):
  return [
    task_id
    for category in bfcl_multi.CATEGORIES
    for task_id in source.task_ids(category)[::every]
  ]


def test_categories_have_their_published_sizes(source):
  sizes = {c: len(source.task_ids(c)) for c in source.categories()}
  # The vector store is there where its encoder is.
  assert {**sizes, 'memory_vector': 155} == {**SIZES, 'memory_vector': 155}
  assert bfcl_package.load().version in source.version


def test_single_turn_ground_truth_earns_full_marks_but_for_known_labels(source):
  missed, total = set(), 0
  for category in (*bfcl_single.CATEGORIES, *bfcl_single.NO_CALL):
    for task_id in source.task_ids(category):
      outcome, said = _attempt(source, task_id, source.oracle(task_id))
      assert not said, 'a single turn is over after one reply'
      total += category in bfcl_single.CATEGORIES
      if not outcome.success:
        missed.add(task_id)
  assert total == 2351
  assert missed == UNREACHABLE


def test_all_multi_turn_ground_truth_earns_full_marks(source, cached):
  before = set(cached)
  for task_id in _multi_turn_ids(source):
    outcome, said = _attempt(source, task_id, source.oracle(task_id))
    assert outcome.success and outcome.reward == 1.0, (task_id, outcome)
    assert not said, 'the last reply of the plan ends the attempt'
    assert not outcome.parts['malformed']
  assert set(cached) == before, 'an attempt left its instances behind'


def test_a_plan_without_its_last_call_fails(source):
  passed = []
  for task_id in _multi_turn_ids(source, every=5):
    replies = list(source.oracle(task_id))
    last = max(i for i, reply in enumerate(replies) if reply.calls)
    outcome, _ = _attempt(source, task_id, replies[:last] + replies[last + 1 :])
    if outcome.success:
      passed.append(task_id)
  assert not passed


def test_saying_nothing_fails_whatever_must_be_called(source):
  reasons = collections.Counter()
  for task_id in _multi_turn_ids(source, every=5):
    outcome, _ = _attempt(source, task_id, [SILENT] * 8)
    reasons[outcome.reason] += 1
  assert reasons == {'multi_turn:empty_turn_model_response': 160}
  assert not _attempt(source, 'simple_python_3', [SILENT])[0].success
  assert not _attempt(source, 'live_relevance_0-0-0', [SILENT])[0].success
  assert _attempt(source, 'irrelevance_7', [SILENT])[0].success


def test_any_call_is_wrong_where_no_function_fits(source):
  call = types.ToolCall(name='any', arguments={})
  bad = types.ParseError(kind='bad_json', detail='')
  for task_id in ('irrelevance_0', 'live_irrelevance_0-0-0'):
    outcome, _ = _attempt(
      source, task_id, [benchmark.Reply(text='', calls=[call])]
    )
    assert outcome.reason == 'irrelevance_error:decoder_success'
    outcome, _ = _attempt(
      source, task_id, [benchmark.Reply(text='', calls=[bad])]
    )
    assert outcome.reason == 'malformed_call', 'garbage is no refusal'
    assert outcome.parts['valid_upstream'], 'upstream takes it for one'


def test_relevance_asks_for_one_call_that_can_be_read(source):
  good = types.ToolCall(name='any', arguments={'a': [1, {'b': None}]})
  bad = types.ToolCall(name='any', arguments={'a': float('nan')})
  for calls, reason in (
    ([good], ''),
    ([good, bad], 'malformed_call'),
    ([bad], 'malformed_call'),
    ([], 'relevance_error:decoder_failed'),
  ):
    reply = benchmark.Reply(text='', calls=calls)
    outcome, _ = _attempt(source, 'live_relevance_0-0-0', [reply])
    assert outcome.reason == reason


def test_an_unfinished_attempt_is_force_terminated(source):
  replies = source.oracle('multi_turn_base_0')
  for cut in range(len(replies) - 2):
    outcome, _ = _attempt(source, 'multi_turn_base_0', replies[: cut + 1])
    if sum(not reply.calls for reply in replies[: cut + 1]) < 3:
      assert outcome.reason == 'multi_turn:force_terminated'


def test_a_held_out_function_appears_in_its_turn(source):
  prompts = bfcl_package.load().default_prompts
  for task_id in source.task_ids('multi_turn_miss_func')[::20]:
    _, entry, _ = source._task(task_id)
    ((turn, docs),) = entry['missed_function'].items()
    names = {doc['name'] for doc in docs}
    attempt = source.open(task_id)
    for i in range(int(turn)):
      shown = {tool['function']['name'] for tool in attempt.tools}
      assert not names & shown, i
      (message,) = attempt.respond(SILENT)
    assert message.role == 'user'
    assert message.text == (
      prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    )
    assert names <= {tool['function']['name'] for tool in attempt.tools}
    attempt.close()


def test_long_context_loads_the_long_state(source):
  call = benchmark.Reply(
    text='', calls=[types.ToolCall(name='find', arguments={'path': '.'})]
  )
  sizes = {}
  for category in ('multi_turn_base', 'multi_turn_long_context'):
    attempt = source.open(f'{category}_1')
    (message,) = attempt.respond(call)
    sizes[category] = len(message.text)
    attempt.close()
  assert sizes['multi_turn_long_context'] > 10 * sizes['multi_turn_base']


@pytest.mark.parametrize('last_turn', [False, True])
def test_one_step_more_than_allowed_ends_the_attempt(source, last_turn):
  limit = bfcl_package.load().default_prompts.MAXIMUM_STEP_LIMIT
  look = benchmark.Reply(
    text='', calls=[types.ToolCall(name='pwd', arguments={})]
  )
  replies = list(source.oracle('multi_turn_base_0'))
  turns = [i for i, reply in enumerate(replies) if not reply.calls]
  start = turns[-1] if last_turn else 0
  attempt = source.open('multi_turn_base_0')
  for reply in replies[:start]:
    attempt.respond(reply)
  used = start - turns[-2] - 1 if last_turn else 0
  for _ in range(limit - used):
    assert attempt.respond(look)
  assert not attempt.respond(look)
  assert not attempt.respond(SILENT), 'nothing is heard after the end'
  outcome = attempt.score()
  attempt.close()
  # Upstream judges what was cut off in the last turn, and only there.
  assert outcome.reason == ('' if last_turn else 'multi_turn:force_terminated')


def test_scores_do_not_depend_on_order_or_company(source, cached):
  """Every other plan lacks a call; attempts share no state, in any order."""
  tasks = _multi_turn_ids(source, every=12)[::2]
  tasks += [f'multi_turn_base_{i}' for i in range(6)]  # twice, and a plan each

  def score(item):
    i, task_id = item
    replies = list(source.oracle(task_id))
    if i % 2:
      last = max(j for j, reply in enumerate(replies) if reply.calls)
      del replies[last]
    return _attempt(source, task_id, replies)[0]

  items = list(enumerate(tasks))
  before = set(cached)
  forward = [score(item) for item in items]
  backward = [score(item) for item in items[::-1]][::-1]
  with futures.ThreadPoolExecutor(4) as pool:
    together = list(pool.map(score, items))
  assert forward == backward == together
  assert [outcome.success for outcome in forward] == [
    not i % 2 for i in range(len(items))
  ]
  assert set(cached) == before


def test_interleaved_attempts_at_one_task_are_apart(source):
  one, other = (source.open('multi_turn_base_0') for _ in range(2))
  replies = source.oracle('multi_turn_base_0')
  for reply in replies:
    one.respond(reply)
    other.respond(dataclasses.replace(reply, calls=()))
  assert one.score().success and not other.score().success
  one.close()
  other.close()


def test_every_tool_is_a_json_schema_with_a_plain_name(source):
  for category in source.categories():
    ids = source.task_ids(category)
    for i, task_id in enumerate(ids[:: len(ids) // 16]):
      attempt = source.open(task_id)
      attempt.close()
      assert attempt.instruction
      functions = [tool['function'] for tool in attempt.tools]
      names = [function['name'] for function in functions]
      assert len(names) == len(set(names)), task_id
      for function in functions:
        assert '.' not in function['name']
        for schema in (function['parameters'], function.get('returns', {})):
          assert _json_types(schema) <= JSON_TYPES, function
      if i == 0:
        for function in functions[:2]:
          jsonschema.Draft202012Validator.check_schema(function['parameters'])


def _json_types(schema):
  """Every type that a schema names, at any depth."""
  found = {schema['type']} if 'type' in schema else set()
  inside = [
    *schema.get('properties', {}).values(),
    *schema.get('prefixItems', ()),
    schema.get('items', {}),
  ]
  return found.union(*map(_json_types, inside)) if schema else found


def test_unknown_tasks_and_categories_are_named(source):
  for wrong in ('multi_turn_base_900', 'web_search_base_1', 'x', ''):
    with pytest.raises(errors.UserError, match='BFCL has no task'):
      source.open(wrong)
  with pytest.raises(errors.UserError, match='search service.*simple_python'):
    source.task_ids('web_search_base')


def test_recorded_transitions_are_what_the_backend_says(source):
  outcomes = collections.Counter()
  for task_id in _multi_turn_ids(source, every=40):
    calls = [call for turn in source.plan(task_id) for call in turn]
    for lack in (None, 0):
      kept = recording.of_plan(source, task_id, without=lack)
      assert len(kept.user_turns) == len(kept.turn_replies)
      found = list(recording.transitions(kept))
      made = calls if lack is None else calls[1:]
      assert [record.call for _, record, _ in found] == made
      names = {tool['function']['name'] for tool in kept.tools}
      for i, (history, record, outcome) in enumerate(found):
        assert len(history) == i and record.call.name in names
        outcomes[lack, outcome] += 1
  assert {outcome for _, outcome in outcomes} <= {
    recording.SUCCESS,
    'refused',
    'raised',
  }
  assert outcomes[None, 'success'] > 100
  assert outcomes[0, 'refused'] >= 5, 'errors are real, and there are some'


def test_groups_follow_the_category_scores():
  def scored(correct, wrong, errored=0):
    good = benchmark.Outcome(reward=1.0, success=True)
    bad = benchmark.Outcome(reward=0.0, success=False, reason='x')
    outcomes = [good] * correct + [bad] * wrong + [None] * errored
    return bfcl_scores.category_score(outcomes)

  some = scored(3, 1, 4)
  assert (some.accuracy, some.leaderboard_accuracy) == (0.75, 0.375)
  assert some.reasons == {'x': 1}
  nothing = scored(0, 0, 2)
  assert nothing.accuracy is None and nothing.leaderboard_accuracy == 0
  scores = {
    'live_simple': scored(1, 1),
    'live_multiple': scored(1, 5),
    'live_parallel': scored(0, 1),
    'live_parallel_multiple': scored(1, 0),
    'irrelevance': scored(1, 0),
    'live_irrelevance': scored(0, 3),
  }
  assert bfcl_scores.group_scores(scores) == {'live': 0.3, 'irrelevance': 0.5}


def test_error_classes():
  for text, expected in (
    ('{"error": "cd: no such directory"}', 'refused'),
    ('Error during execution: boom', 'raised'),
    ('{"result": 3}', None),
    ('None', None),
    ('[1, 2]', None),
  ):
    assert bfcl_backends.error_of(text) == expected


def test_ground_truth_is_read_and_written_back(source):
  for task_id in _multi_turn_ids(source, every=25):
    for turn in source.plan(task_id):
      for call in turn:
        names = {call.name: list(call.arguments)}
        assert bfcl_calls.read(bfcl_calls.render(call), names) == call
