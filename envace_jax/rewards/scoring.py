"""Scores of many episodes at once, by checks and by a judge.

Every open criterion of every episode of a train step becomes a request, one per
message it is judged at and per judge, and all of them go to the judge together.
What a check or the episode's end decides costs no request.

Aggregation of one criterion, first over the judges at a message (majority, or
all of them), then over the messages of its turn:

  ANY_STEP    PASS if one message passes; else ABSTAIN if one abstained
  LAST_STEP   the last message
  ALL_JUDGES  the last message: one FAIL fails, else one ABSTAIN abstains

A turn that was reached but in which nothing was said fails without a request.
"""

from collections.abc import Sequence
import dataclasses

from envace_jax import types
from envace_jax.rewards import checklist, judge_prompt, turns
from envace_jax.rewards import judge as judges

PASS, FAIL, ABSTAIN = types.Verdict

# A failed call decides these without a judge, under `tool_error_fails`.
_CALL_FOCUS = (
  'tool_calls',
  'tool.content',
  'assistant.tool_calls',
)


def score_episodes(
  tasks: Sequence[types.Task],
  episodes: Sequence[types.Episode],
  judge: judges.Judge | None = None,
  *,
  success_bonus: float = 0.0,
  rule: checklist.Rule = checklist.OURS,
) -> list[types.Score]:
  """Scores each episode by its task's checklist; without a judge, by checks.

  Raises ValueError when tasks and episodes do not belong together, or when a
  judge gives another number of verdicts than it was asked for.
  """
  _validate_pairs(tasks, episodes)
  cases = [
    _Case.open(task, task.checklist, episode, rule)
    for task, episode in zip(tasks, episodes, strict=True)
  ]
  _decide(cases, judge, rule)
  return [
    checklist.conclude(
      case.criteria,
      # In the order of the list, whoever decided.
      {c.id: case.verdicts[c.id] for c in case.criteria},
      case.episode,
      success_bonus=success_bonus,
      rule=rule,
      disturbed_turns=case.disturbed_turns,
    )
    for case in cases
  ]


def allow_next_turn(
  tasks: Sequence[types.Task],
  episodes: Sequence[types.Episode],
  turns_done: Sequence[int],
  judge: judges.Judge | None = None,
  *,
  rule: checklist.Rule = checklist.OURS,
) -> list[bool]:
  """Whether each episode, so far, may go on after its turn `turns_done`.

  The reply to that turn is the last of `turn_replies` (or `reply`, of one that
  REPLIED). An unmet requirement stops it, and under `abstain_is_fail` any
  criterion of the turn that could not be judged; otherwise an ABSTAIN lets it
  pass. A judge that caches is not paid again when the episode is scored.
  """
  _validate_pairs(tasks, episodes)
  # A rollout asks because it wants requirements to end episodes.
  rule = dataclasses.replace(rule, unmet_requirement_ends=True)
  cases = []
  for task, episode, turn in zip(tasks, episodes, turns_done, strict=True):
    criteria = [
      c
      for c in task.checklist
      if c.turn == turn and (c.required_for_next_turn or rule.abstain_is_fail)
    ]
    cases.append(_Case.open(task, criteria, episode, rule))
  _decide(cases, judge, rule)
  return [
    turn
    < checklist.last_turn(
      case.criteria, case.verdicts, rule, case.disturbed_turns
    )
    for case, turn in zip(cases, turns_done, strict=True)
  ]


def allows_next_turn(
  task: types.Task,
  episode_so_far: types.Episode,
  turn: int,
  judge: judges.Judge | None = None,
  *,
  rule: checklist.Rule = checklist.OURS,
) -> bool:
  """`allow_next_turn` of one episode."""
  return allow_next_turn([task], [episode_so_far], [turn], judge, rule=rule)[0]


@dataclasses.dataclass(kw_only=True)
class _Case:
  """One episode being scored; verdicts fill up."""

  task: types.Task
  criteria: Sequence[types.Criterion]
  episode: types.Episode
  verdicts: dict[str, types.Verdict]
  checked: dict[str, types.Verdict]  # what checks say, ABSTAIN without one
  disturbed_turns: set[int] = dataclasses.field(default_factory=set)

  @staticmethod
  def open(task, criteria, episode, rule) -> '_Case':
    verdicts = checklist.settled(criteria, episode, rule)
    left = [c for c in criteria if c.id not in verdicts]
    checked = checklist.verify(left, episode, task.tools)
    if rule.precedence is checklist.Precedence.CHECKS_FIRST:
      verdicts |= {i: v for i, v in checked.items() if v is not ABSTAIN}
    return _Case(
      task=task,
      criteria=criteria,
      episode=episode,
      verdicts=verdicts,
      checked=checked,
    )

  def unanswered(self) -> list[types.Criterion]:
    """What only a judge can decide: it needs a question to be asked."""
    return [
      c for c in self.criteria if c.id not in self.verdicts and c.question
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ballot:
  """One criterion at one message: a verdict known already, or requests."""

  criterion: types.Criterion
  known: types.Verdict | None
  requests: Sequence[judge_prompt.JudgeRequest] = ()


def _decide(
  cases: Sequence[_Case],
  judge: judges.Judge | None,
  rule: checklist.Rule,
) -> None:
  """Fills in the verdicts that are missing, by one batch of requests."""
  if judge is not None:
    ballots = [_ballots(case, judge.num_judges, rule) for case in cases]
    requests = [
      request for case in ballots for b in case for request in b.requests
    ]
    verdicts = judge.judge(requests) if requests else []
    if len(verdicts) != len(requests):
      raise ValueError(
        f'{len(verdicts)} verdicts for {len(requests)} requests: a judge '
        'must give one for each'
      )
    given = iter(verdicts)
    for case, case_ballots in zip(cases, ballots, strict=True):
      _count_votes(case, case_ballots, given, rule)
  for case in cases:
    for criterion in case.criteria:
      if case.verdicts.get(criterion.id, ABSTAIN) is ABSTAIN:
        fallback = case.checked.get(criterion.id, ABSTAIN)
        case.verdicts[criterion.id] = fallback


def _ballots(
  case: _Case, num_judges: int, rule: checklist.Rule
) -> list[_Ballot]:
  ballots = []
  records: dict[int, list] = {}
  for criterion in case.unanswered():
    turn = criterion.turn
    if turn not in records:
      records[turn] = _moments(case, turn, rule)
    if not records[turn]:
      ballots.append(_Ballot(criterion=criterion, known=FAIL))
    for message, before, so_far in records[turn]:
      if (
        rule.tool_error_fails
        and criterion.focus_on in _CALL_FOCUS
        and message.has_error
      ):
        ballots.append(_Ballot(criterion=criterion, known=FAIL))
        continue
      requests = [
        judge_prompt.JudgeRequest(
          criterion=criterion, before=before, turn=so_far, judge_index=index
        )
        for index in range(num_judges)
      ]
      ballots.append(
        _Ballot(criterion=criterion, known=None, requests=requests)
      )
  return ballots


def _moments(case: _Case, turn: int, rule: checklist.Rule) -> list:
  """(message, dialogue before the turn, turn up to it) to be judged at."""
  before = []
  if case.task.system:
    before.append(
      judge_prompt.Line(speaker='instructions', text=case.task.system)
    )
  for earlier in range(turn):
    before += _lines(case, earlier)
  messages = turns.messages(case.episode, turn)
  moments, so_far = [], _lines(case, turn, messages=())
  for message in messages:
    so_far = [*so_far, *_lines_of(message)]
    moments.append((message, before, so_far))
  any_step = rule.aggregation is checklist.Aggregation.ANY_STEP
  return moments if any_step else moments[-1:]


def _count_votes(case: _Case, ballots, given, rule: checklist.Rule) -> None:
  """Takes this case's verdicts off the queue and combines them."""
  passes, abstains = set(), set()
  for ballot in ballots:
    criterion = ballot.criterion
    verdict = ballot.known
    if verdict is None:
      votes = [next(given) for _ in ballot.requests]
      if ABSTAIN in votes:
        case.disturbed_turns.add(criterion.turn)
      verdict = _of_judges(votes, rule.aggregation)
    if verdict is PASS:
      passes.add(criterion.id)
    elif verdict is ABSTAIN:
      abstains.add(criterion.id)
  for criterion in (ballot.criterion for ballot in ballots):
    unknown = ABSTAIN if criterion.id in abstains else FAIL
    case.verdicts[criterion.id] = PASS if criterion.id in passes else unknown


def _of_judges(
  votes: Sequence[types.Verdict], aggregation: checklist.Aggregation
) -> types.Verdict:
  passed, failed = votes.count(PASS), votes.count(FAIL)
  if aggregation is checklist.Aggregation.ALL_JUDGES:
    if failed:
      return FAIL
    return PASS if passed == len(votes) else ABSTAIN
  if passed == failed:
    return ABSTAIN
  return PASS if passed > failed else FAIL


def _lines(case: _Case, turn: int, messages=None) -> list[judge_prompt.Line]:
  """A whole turn, or its user message alone where no messages are wanted."""
  user = turns.user_message(case.task, turn)
  lines = [judge_prompt.Line(speaker='user', text=user)]
  if messages is None:
    messages = turns.messages(case.episode, turn)
  for message in messages:
    lines += _lines_of(message)
  return lines


def _lines_of(message: turns.Message) -> list[judge_prompt.Line]:
  return [
    judge_prompt.Line(speaker='assistant', text=message.text),
    *(
      judge_prompt.Line(speaker='tool', text=text)
      for text in message.observations
    ),
  ]


def _validate_pairs(tasks, episodes) -> None:
  if len(tasks) != len(episodes):
    raise ValueError(f'{len(episodes)} episodes of {len(tasks)} tasks')
  for task, episode in zip(tasks, episodes, strict=True):
    if task.id != episode.task_id:
      raise ValueError(f'episode of {episode.task_id} scored as {task.id}')
