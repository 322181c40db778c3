"""Checklists: verdicts on criteria, and one score out of them.

  r_t    = sum of weights that PASS / sum of weights that were judged, in turn t
  share  = mean of r_t over the turns
  reward = (1 - success_bonus) share + success_bonus [every required one PASSes]

A criterion belongs to one user turn and is decided on what happened in it. A
turn that was never reached counts 0, its criteria FAIL. A turn without a judged
criterion leaves the mean.

A criterion that ABSTAINs leaves the numerator, the denominator and the bracket:
"could not be judged" is not a zero. If nothing was judged the reward is None
and the episode leaves its group. `success` is for statistics and is stricter:
one required ABSTAIN makes it None, also beside a FAIL, since counting only the
failures of half-judged episodes would bias the rate. Without any required
criterion success is None too, and the reward is the share.

An episode whose world failed is not judged at all (an outage is not a bad
answer); any other turn that ended without a reply is judged as it stands, with
no reply.

`OURS` is the rule above; `PUBLISHED` is that of EnvACE (arXiv 2608.06197) with
its CM2 checklists. It differs by the switches of `Rule`: there a failed judge
reads as FAIL and stops the episode, so that an outage looks like bad answers.
Weights sum to one per turn there, and are divided by their sum here.

Training reads `task.checklist` and has no way to pass a state; evaluation reads
`task.evaluation`. Neither reads the other's list. Criteria that need a model to
decide them ABSTAIN here; `scoring` asks a judge.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import enum
import math

from envace_jax import types
from envace_jax.rewards import turns, verifiers

PASS, FAIL, ABSTAIN = types.Verdict


class Aggregation(enum.Enum):
  """Where in a turn a judge looks, and how its verdicts become one.

  Several judges decide by strict majority of those who gave a verdict (a tie
  ABSTAINs), except under ALL_JUDGES. Verifiers always see the whole turn: a
  prefix of it would let 'no_other_writes' PASS before the write.
  """

  ANY_STEP = 'any_step'  # passes if any message of the turn does; published
  LAST_STEP = 'last_step'  # at the last message of the turn
  ALL_JUDGES = 'all_judges'  # at the last message, and every judge agrees


class Precedence(enum.Enum):
  """Who decides a criterion that has both a check and a question."""

  CHECKS_FIRST = 'checks_first'  # the judge only where the check ABSTAINs
  JUDGE_FIRST = 'judge_first'  # the check only where the judge ABSTAINs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """How verdicts come about and what they end. Defaults are ours."""

  aggregation: Aggregation = Aggregation.LAST_STEP
  precedence: Precedence = Precedence.CHECKS_FIRST
  # An unmet `required_for_next_turn` makes later turns count as not reached.
  unmet_requirement_ends: bool = False
  # A turn that ended without a reply (a tool or parse error, a limit) earns 0.
  unanswered_turn_fails: bool = False
  # An ABSTAIN counts as FAIL and makes later turns count as not reached.
  abstain_is_fail: bool = False
  # A judge is not asked about calls that were answered with an error: FAIL.
  tool_error_fails: bool = False


OURS = Rule()
PUBLISHED = Rule(
  aggregation=Aggregation.ANY_STEP,
  unmet_requirement_ends=True,
  unanswered_turn_fails=True,
  abstain_is_fail=True,
  tool_error_fails=True,
)


def score_training(
  task: types.Task,
  episode: types.Episode,
  *,
  success_bonus: float = 0.0,
  rule: Rule = OURS,
) -> types.Score:
  """Scores an episode by its transcript alone, without any judge."""
  return _score_episode(
    task, task.checklist, episode, None, success_bonus, rule
  )


def score_evaluation(
  task: types.Task,
  episode: types.Episode,
  state_hash: str | None,
  *,
  success_bonus: float = 0.0,
  rule: Rule = OURS,
) -> types.Score:
  """Scores an episode by the environment's final state and its transcript."""
  return _score_episode(
    task, task.evaluation, episode, state_hash, success_bonus, rule
  )


def score(
  criteria: Sequence[types.Criterion],
  transcript: verifiers.Transcript,
  *,
  success_bonus: float,
) -> types.Score:
  """Decides every criterion on one transcript and combines the verdicts."""
  verdicts = {c.id: verifiers.decide(c.check, transcript) for c in criteria}
  return combine(criteria, verdicts, success_bonus=success_bonus)


def settled(
  criteria: Sequence[types.Criterion], episode: types.Episode, rule: Rule
) -> dict[str, types.Verdict]:
  """The verdicts that follow from how far an episode got, without a look."""
  if episode.stop_reason is types.StopReason.WORLD_FAILED:
    return {c.id: ABSTAIN for c in criteria}
  return {
    c.id: FAIL
    for c in criteria
    if c.turn >= episode.num_turns
    or (rule.unanswered_turn_fails and turns.reply(episode, c.turn) is None)
  }


def verify(
  criteria: Sequence[types.Criterion],
  episode: types.Episode,
  tools: Sequence[types.Json],
  state_hash: str | None = None,
) -> dict[str, types.Verdict]:
  """Decides every criterion by its check, on the turn that it belongs to."""
  views = {
    turn: turns.transcript(episode, tools, turn, state_hash)
    for turn in {c.turn for c in criteria}
  }
  return {c.id: verifiers.decide(c.check, views[c.turn]) for c in criteria}


def conclude(
  criteria: Sequence[types.Criterion],
  verdicts: Mapping[str, types.Verdict],
  episode: types.Episode,
  *,
  success_bonus: float,
  rule: Rule,
  disturbed_turns: Collection[int] = (),
) -> types.Score:
  """Applies what the rule says about ABSTAINs and later turns, and combines.

  `disturbed_turns` had a judge that failed at some message, whatever the
  verdicts became in the end; only `abstain_is_fail` reads them.
  """
  verdicts = dict(verdicts)
  if episode.stop_reason is not types.StopReason.WORLD_FAILED:
    end = last_turn(criteria, verdicts, rule, disturbed_turns)
    verdicts |= {c.id: FAIL for c in criteria if c.turn > end}
    if rule.abstain_is_fail:
      counted = {i: FAIL if v is ABSTAIN else v for i, v in verdicts.items()}
      total = combine(criteria, counted, success_bonus=success_bonus)
      # The record keeps who abstained; only the numbers take it for a FAIL.
      return dataclasses.replace(total, verdicts=verdicts)
  return combine(criteria, verdicts, success_bonus=success_bonus)


def last_turn(
  criteria: Sequence[types.Criterion],
  verdicts: Mapping[str, types.Verdict],
  rule: Rule,
  disturbed_turns: Collection[int] = (),
) -> float:
  """The turn after which the rule ends an episode; infinite for none."""
  ends = set(disturbed_turns) if rule.abstain_is_fail else set()
  for c in criteria:
    verdict = verdicts[c.id]
    if rule.abstain_is_fail and verdict is ABSTAIN:
      ends.add(c.turn)
    if rule.unmet_requirement_ends and c.required_for_next_turn:
      if verdict is FAIL:
        ends.add(c.turn)
  return min(ends, default=math.inf)


def combine(
  criteria: Sequence[types.Criterion],
  verdicts: Mapping[str, types.Verdict],
  *,
  success_bonus: float,
) -> types.Score:
  """Combines verdicts, whoever gave them, by the equations above."""
  _validate_weights(criteria)
  if not 0 <= success_bonus <= 1:
    raise ValueError(f'success_bonus={success_bonus} must be in [0, 1]')
  judged = [c for c in criteria if verdicts[c.id] is not ABSTAIN]
  required = [c for c in criteria if c.required]
  met = [verdicts[c.id] is PASS for c in judged if c.required]
  success = all(met) if required and len(met) == len(required) else None
  shares = []
  for turn in sorted({c.turn for c in judged}):
    in_turn = [c for c in judged if c.turn == turn]
    total = math.fsum(c.weight for c in in_turn)
    if total > 0:
      passed = (c.weight for c in in_turn if verdicts[c.id] is PASS)
      shares.append(math.fsum(passed) / total)
  if not shares:
    return types.Score(verdicts=verdicts, reward=None, success=success)
  reward = math.fsum(shares) / len(shares)
  if met:
    reward = (1 - success_bonus) * reward + success_bonus * all(met)
  return types.Score(
    verdicts=verdicts, reward=min(reward, 1.0), success=success
  )


def validate_task(task: types.Task) -> None:
  """Raises ValueError, naming the task, on a checklist that cannot score."""
  try:
    for criteria in (task.checklist, task.evaluation):
      _validate_weights(criteria)
      for criterion in criteria:
        if not 0 <= criterion.turn <= len(task.user_turns):
          raise ValueError(
            f'criterion {criterion.id}: turn={criterion.turn} is not among '
            f'the {1 + len(task.user_turns)} turns, counted from 0'
          )
        verifiers.validate_check(criterion.check)
    if any(c.check.get('kind') == 'state' for c in task.checklist):
      raise ValueError('checklist has a state check; put it in evaluation')
    verifiers.validate_tools(task.tools)
  except ValueError as e:
    raise ValueError(f'task {task.id}: {e}') from e


def _score_episode(
  task: types.Task,
  criteria: Sequence[types.Criterion],
  episode: types.Episode,
  state_hash: str | None,
  success_bonus: float,
  rule: Rule,
) -> types.Score:
  if episode.task_id != task.id:
    raise ValueError(f'episode of {episode.task_id} scored as {task.id}')
  verdicts = settled(criteria, episode, rule)
  open_criteria = [c for c in criteria if c.id not in verdicts]
  verdicts |= verify(open_criteria, episode, task.tools, state_hash)
  # In the order of the list, whichever way each was decided.
  verdicts = {c.id: verdicts[c.id] for c in criteria}
  return conclude(
    criteria, verdicts, episode, success_bonus=success_bonus, rule=rule
  )


def _validate_weights(criteria: Sequence[types.Criterion]) -> None:
  ids = [c.id for c in criteria]
  if len(set(ids)) < len(ids):
    raise ValueError(f'criterion ids repeat: {sorted(ids)}')
  for c in criteria:
    if not 0 <= c.weight <= 1e6:  # false for NaN as well
      raise ValueError(
        f'criterion {c.id}: weight={c.weight} must be in [0, 1e6]'
      )
