"""Checklists of several user turns: the published table, and ours beside it."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from envace_jax import types
from envace_jax.rewards import checklist, judge, judge_prompt, scoring, turns

PASS, FAIL, ABSTAIN = types.Verdict
STOP = types.StopReason
ANY_STEP = dataclasses.replace(
  checklist.OURS, aggregation=checklist.Aggregation.ANY_STEP
)


def _criterion(name, turn, weight, **changes):
  return types.Criterion(
    id=name,
    question=f'{name}?',
    check={},
    turn=turn,
    weight=weight,
    **changes,
  )


A = _criterion('A', 0, 0.6, required_for_next_turn=True)
B = _criterion('B', 0, 0.4, required=False, focus_on='tool_calls')
C = _criterion('C', 1, 1.0)
TASK = types.Task(
  id='t',
  instruction='first',
  tools=[],
  checklist=[A, B, C],
  user_turns=['second'],
  system='be brief',
)


def _step(turn, message, name='look', observation='{"ok": 1}'):
  return types.Step(
    action=types.ToolCall(name=name, arguments={}),
    action_text=f'call {message}',
    observation_text=observation,
    turn=turn,
    message=message,
  )


# Messages 0 (a call) and 1 (a reply) in turn 0; 2 (two calls) and 3 in turn 1.
STEPS = [_step(0, 0), _step(1, 2), _step(1, 2)]


BETWEEN = (STOP.REPLIED, STOP.REQUIREMENT_UNMET, STOP.MAX_USER_TURNS)


def _episode(steps=STEPS, replies=('one', 'two'), stop=STOP.REPLIED):
  last = replies[-1] if stop is STOP.REPLIED else None
  last_step = max((step.turn + 1 for step in steps), default=1)
  return types.Episode(
    task_id='t',
    group=0,
    sample_index=0,
    rows=(),
    num_turns=max(last_step, len(replies) + (stop not in BETWEEN)),
    steps=steps,
    reply=last,
    stop_reason=stop,
    turn_replies=replies[:-1] if stop is STOP.REPLIED else replies,
  )


class ScriptedJudge:
  """Verdicts by criterion, or by (criterion, lines shown, judge)."""

  def __init__(self, script=None, num_judges=1):
    self.script, self.num_judges = script or {}, num_judges
    self.asked = []

  def judge(self, requests):
    self.asked += requests
    verdicts = []
    for r in requests:
      name = r.criterion.id
      moment = (name, len(r.turn), r.judge_index)
      verdicts.append(self.script.get(moment, self.script.get(name, PASS)))
    return verdicts


def _reward(episode, script, rule, task=TASK):
  (score,) = scoring.score_episodes(
    [task], [episode], ScriptedJudge(script), rule=rule
  )
  return score.reward


STOPPED = _episode([_step(0, 0)], ('one',), STOP.REQUIREMENT_UNMET)


@pytest.mark.parametrize(
  'name, episode, script, published, ours',
  [
    ('perfect', _episode(), {}, 1.0, 1.0),
    ('A missed, stopped', STOPPED, {'A': FAIL}, 0.2, 0.2),
    ('A missed, went on', _episode(), {'A': FAIL}, 0.2, 0.7),
    ('B missed', _episode(), {'B': FAIL}, 0.8, 0.8),
    # An error of the rehearser, or of the parser, ends the episode there.
    # Ours judges a turn as it stands.
    ('error', _episode([_step(0, 0)], (), STOP.TOOL_ERROR), {}, 0.0, 0.5),
    ('error, turn 2', _episode(STEPS, ('one',), STOP.TOOL_ERROR), {}, 0.5, 1.0),
    # What could not be judged: a zero there, no weight here.
    ('judge down for B', _episode(), {'B': ABSTAIN}, 0.3, 1.0),
    ('malformed for C', _episode(), {'C': ABSTAIN}, 0.5, 1.0),
    # Another message passes B, but the failure still stops the episode.
    ('malformed once', _episode(), {('B', 3, 0): ABSTAIN}, 0.5, 1.0),
    ('all down', _episode(), dict.fromkeys('ABC', ABSTAIN), 0.0, None),
  ],
)
def test_checked_values(name, episode, script, published, ours):
  assert _reward(episode, script, checklist.PUBLISHED) == (
    pytest.approx(published, abs=1e-12)
  )
  assert _reward(episode, script, ANY_STEP) == (
    None if ours is None else pytest.approx(ours, abs=1e-12)
  )


def test_a_failed_world_is_not_judged_under_any_rule():
  episode = dataclasses.replace(_episode(), stop_reason=STOP.WORLD_FAILED)
  for rule in (checklist.OURS, checklist.PUBLISHED):
    fake = ScriptedJudge()
    (score,) = scoring.score_episodes([TASK], [episode], fake, rule=rule)
    assert (score.reward, score.success) == (None, None)
    assert not fake.asked


def test_abstain_is_fail_keeps_the_record_of_who_abstained():
  (score,) = scoring.score_episodes(
    [TASK],
    [_episode()],
    ScriptedJudge({'A': ABSTAIN}),
    rule=checklist.PUBLISHED,
  )
  assert score.verdicts == {'A': ABSTAIN, 'B': PASS, 'C': FAIL}
  assert score.success is False


@pytest.mark.parametrize(
  'episode, replies',
  [
    (_episode(), ['one', 'two', None]),
    (STOPPED, ['one', None, None]),
    (_episode([_step(0, 0)], (), STOP.MAX_STEPS), [None, None, None]),
    (_episode([_step(0, 0)], ('one',), STOP.MAX_STEPS), ['one', None, None]),
    (_episode([], ('one',), STOP.MAX_USER_TURNS), ['one', None, None]),
    (_episode([], (), STOP.CONTEXT_FULL), [None, None, None]),
  ],
)
def test_a_reply_belongs_to_its_turn(episode, replies):
  assert [turns.reply(episode, t) for t in range(3)] == replies


def test_a_message_is_what_was_said_once():
  first, second = turns.messages(_episode(), 0), turns.messages(_episode(), 1)
  assert [m.text for m in first] == ['call 0', 'one']
  assert [len(m.observations) for m in second] == [2, 0]
  assert not turns.messages(_episode(), 2)


def _checked(name, turn, check, **changes):
  return types.Criterion(
    id=name, question='', check=check, turn=turn, **changes
  )


def test_checks_see_their_own_turn_only():
  looked = {'kind': 'called', 'name': 'look'}
  said = {'kind': 'replied', 'contains': ['two']}
  quiet = {'kind': 'no_other_writes', 'writes': ['look'], 'allowed': []}
  steps = [_step(0, 0, 'other'), _step(1, 2)]
  task = dataclasses.replace(
    TASK,
    checklist=[
      _checked(f'{name}{turn}', turn, check)
      for name, check in (('look', looked), ('said', said), ('quiet', quiet))
      for turn in (0, 1)
    ],
  )
  score = checklist.score_training(task, _episode(steps))
  assert score.verdicts == {
    'look0': FAIL,
    'look1': PASS,
    'said0': FAIL,
    'said1': PASS,
    'quiet0': PASS,
    'quiet1': FAIL,
  }
  # A turn that was never reached fails, also what an empty one would pass.
  stopped = _episode(steps[:1], ('one',), STOP.MAX_USER_TURNS)
  assert checklist.score_training(task, stopped).verdicts['quiet1'] is FAIL


@given(
  verdicts=st.lists(st.sampled_from([PASS, FAIL, ABSTAIN]), max_size=9),
  weights=st.lists(st.floats(0, 10), min_size=9, max_size=9),
)
def test_score_is_the_mean_of_the_turns(verdicts, weights):
  criteria = [
    _criterion(f'c{i}', i % 3, weight)
    for i, (_, weight) in enumerate(zip(verdicts, weights, strict=False))
  ]
  given_ = {c.id: v for c, v in zip(criteria, verdicts, strict=True)}
  whole = checklist.combine(criteria, given_, success_bonus=0.0)
  parts = []
  for turn in range(3):
    some = [dataclasses.replace(c, turn=0) for c in criteria if c.turn == turn]
    part = checklist.combine(some, given_, success_bonus=0.0).reward
    parts += [] if part is None else [part]
  if not parts:
    assert whole.reward is None
  else:
    assert whole.reward == pytest.approx(np.mean(parts))


def test_a_turn_beyond_the_script_is_refused_at_load():
  checklist.validate_task(TASK)
  for turn in (-1, 2):
    task = dataclasses.replace(TASK, checklist=[_criterion('A', turn, 1.0)])
    with pytest.raises(ValueError, match='not among the 2 turns'):
      checklist.validate_task(task)


@pytest.mark.parametrize(
  'votes, any_step, last_step, all_judges',
  [
    # Two judges at message 0, two at the reply.
    ([PASS, PASS, PASS, PASS], PASS, PASS, PASS),
    ([PASS, PASS, FAIL, FAIL], PASS, FAIL, FAIL),
    ([FAIL, FAIL, PASS, PASS], PASS, PASS, PASS),
    ([FAIL, FAIL, PASS, FAIL], ABSTAIN, ABSTAIN, FAIL),  # a tie
    ([FAIL, FAIL, PASS, ABSTAIN], PASS, PASS, ABSTAIN),
    ([FAIL, FAIL, FAIL, ABSTAIN], FAIL, FAIL, FAIL),
    ([ABSTAIN, ABSTAIN, FAIL, FAIL], ABSTAIN, FAIL, FAIL),
    ([ABSTAIN, ABSTAIN, PASS, PASS], PASS, PASS, PASS),
  ],
)
def test_aggregation(votes, any_step, last_step, all_judges):
  moments = [('A', 3, 0), ('A', 3, 1), ('A', 4, 0), ('A', 4, 1)]
  script = dict(zip(moments, votes, strict=True))
  expected = {
    checklist.Aggregation.ANY_STEP: any_step,
    checklist.Aggregation.LAST_STEP: last_step,
    checklist.Aggregation.ALL_JUDGES: all_judges,
  }
  for aggregation, verdict in expected.items():
    rule = checklist.Rule(aggregation=aggregation)
    fake = ScriptedJudge(script, num_judges=2)
    (score,) = scoring.score_episodes([TASK], [_episode()], fake, rule=rule)
    assert score.verdicts['A'] is verdict, aggregation


def test_a_judge_sees_the_turn_up_to_the_message_and_what_came_before():
  fake = ScriptedJudge()
  scoring.score_episodes([TASK], [_episode()], fake, rule=ANY_STEP)
  shown = [
    (r.criterion.id, [x.text for x in r.before], [x.text for x in r.turn])
    for r in fake.asked
    if r.criterion.id != 'B'
  ]
  look = '{"ok": 1}'
  earlier = ['be brief', 'first', 'call 0', look, 'one']
  called = ['second', 'call 2', look, look]
  assert shown == [
    ('A', ['be brief'], ['first', 'call 0', look]),
    ('A', ['be brief'], ['first', 'call 0', look, 'one']),
    ('C', earlier, called),
    ('C', earlier, [*called, 'two']),
  ]


def test_calls_answered_with_an_error_fail_without_a_judge():
  steps = [_step(0, 0, observation='{"error": "no"}'), *STEPS[1:]]
  rule = dataclasses.replace(ANY_STEP, tool_error_fails=True)
  fake = ScriptedJudge({('B', 4, 0): FAIL})
  (score,) = scoring.score_episodes([TASK], [_episode(steps)], fake, rule=rule)
  asked = [(r.criterion.id, len(r.turn)) for r in fake.asked]
  assert ('B', 3) not in asked and ('A', 3) in asked and ('B', 4) in asked
  assert score.verdicts['B'] is FAIL
  assert _reward(_episode(steps), {('B', 4, 0): FAIL}, ANY_STEP) == 1.0


def test_who_decides_when_there_is_a_check_and_a_question():
  looked = {'kind': 'called', 'name': 'look'}
  never = {'kind': 'called', 'name': 'never'}
  criteria = [
    dataclasses.replace(A, id='yes', check=looked),
    dataclasses.replace(A, id='no', check=never),
    dataclasses.replace(A, id='silent', check=looked, question=''),
    dataclasses.replace(A, id='lost', check=never),
    A,
  ]
  task = dataclasses.replace(TASK, checklist=criteria)
  script = {'yes': FAIL, 'no': PASS, 'lost': ABSTAIN}
  verdicts = {}
  for precedence in checklist.Precedence:
    rule = checklist.Rule(precedence=precedence)
    fake = ScriptedJudge(script)
    (score,) = scoring.score_episodes([task], [_episode()], fake, rule=rule)
    verdicts[precedence] = list(score.verdicts.values())
  assert verdicts == {
    checklist.Precedence.CHECKS_FIRST: [PASS, FAIL, PASS, FAIL, PASS],
    checklist.Precedence.JUDGE_FIRST: [FAIL, PASS, PASS, FAIL, PASS],
  }


def test_without_a_judge_batch_scores_are_the_checklist_scores():
  looked = {'kind': 'called', 'name': 'look'}
  task = dataclasses.replace(
    TASK, checklist=[dataclasses.replace(A, check=looked), B, C]
  )
  episodes = [_episode(), STOPPED, _episode([], (), STOP.CONTEXT_FULL)]
  for rule in (checklist.OURS, checklist.PUBLISHED):
    batch = scoring.score_episodes(
      [task] * 3, episodes, success_bonus=0.3, rule=rule
    )
    alone = [
      checklist.score_training(task, e, success_bonus=0.3, rule=rule)
      for e in episodes
    ]
    assert batch == alone


def test_one_batch_for_all_episodes_and_scores_in_their_order():
  class Counting(ScriptedJudge):
    batches = 0

    def judge(self, requests):
      self.batches += 1
      return [PASS if r.turn[-1].text == 'good' else FAIL for r in requests]

  replies = ['good', 'bad', 'good', 'bad', 'bad']
  episodes = [_episode(replies=('good', reply)) for reply in replies]
  fake = Counting()
  scores = scoring.score_episodes([TASK] * 5, episodes, fake)
  assert fake.batches == 1
  assert [s.reward for s in scores] == [1.0, 0.5, 1.0, 0.5, 0.5]


def test_a_judge_that_loses_count_and_strangers_are_refused():
  class Short(ScriptedJudge):
    def judge(self, requests):
      return [PASS] * (len(requests) - 1)

  with pytest.raises(ValueError, match='2 verdicts for 3 requests'):
    scoring.score_episodes([TASK], [_episode()], Short())
  other = dataclasses.replace(_episode(), task_id='u')
  with pytest.raises(ValueError, match='episode of u'):
    scoring.score_episodes([TASK], [other], ScriptedJudge())
  with pytest.raises(ValueError, match='2 episodes of 1 tasks'):
    scoring.score_episodes([TASK], [other, other], ScriptedJudge())


@pytest.mark.parametrize(
  'script, ours, published',
  [
    ({}, True, True),
    ({'A': FAIL}, False, False),
    ({'B': FAIL}, True, True),
    ({'A': ABSTAIN}, True, False),
    ({'B': ABSTAIN}, True, False),
    ({'C': FAIL}, True, True),
  ],
)
def test_next_turn(script, ours, published):
  so_far = _episode([_step(0, 0)], ('one',), STOP.REPLIED)
  assert so_far.reply == 'one' and not so_far.turn_replies
  for episode in (so_far, STOPPED):
    for rule, allowed in (
      (checklist.OURS, ours),
      (checklist.PUBLISHED, published),
    ):
      assert allowed is scoring.allows_next_turn(
        TASK, episode, 0, ScriptedJudge(script), rule=rule
      )
  fake = ScriptedJudge()
  assert scoring.allows_next_turn(TASK, so_far, 0, fake)
  assert {r.criterion.id for r in fake.asked} == {'A'}  # what it may depend on
  assert scoring.allow_next_turn(
    [TASK] * 2, [so_far, _episode()], [0, 1], ScriptedJudge({'A': FAIL})
  ) == [False, True]


def test_function_judge_reads_texts_and_survives_them():
  def answer(passed):
    verdict = 'pass' if passed else 'fail'
    return f'{{"verdict": "{verdict}", "passed": {str(passed).lower()}}}'

  def good(prompts):
    assert all(p.startswith(judge_prompt.SYSTEM) for p in prompts)
    return [answer('A?' in p) for p in prompts]

  def prose(prompts):
    return ['it passes'] * len(prompts)

  def broken(prompts):
    raise RuntimeError('out of memory')

  def short(prompts):
    return [answer(True)] * (len(prompts) - 1)

  local = judge.FunctionJudge([good, prose, broken, short])
  (score,) = scoring.score_episodes([TASK], [_episode()], local)
  assert score.verdicts == {'A': PASS, 'B': FAIL, 'C': FAIL}
  report = local.take_report()
  assert report.requests == 12
  assert report.abstained == {'malformed': 3, 'raised': 3, 'wrong_count': 3}
  assert '9 abstained' in report.line()
  assert local.take_report().requests == 0
