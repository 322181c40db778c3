"""Checklists: verdicts on criteria, and one score out of them.

  share  = sum of weights that PASS / sum of weights that were judged
  reward = (1 - success_bonus) share + success_bonus [every required one PASSes]

A criterion that ABSTAINs leaves the numerator, the denominator and the bracket:
"could not be judged" is not a zero. If nothing was judged the reward is None
and the episode leaves its group. `success` is for statistics and is stricter:
one required ABSTAIN makes it None, also beside a FAIL, since counting only the
failures of half-judged episodes would bias the rate. Without any required
criterion success is None too, and the reward is the share.

An episode whose world failed is not judged at all (an outage is not a bad
answer); any other episode that ended without a reply is judged as it stands,
with no reply.

The published rule (EnvACE, arXiv 2608.06197, and its CM2 checklists) differs:
there weights sum to one per turn and the turns are averaged, an item passes if
any step of the turn passes, a tool error ends the episode and its turn earns
zero, and there is no success bonus. Ours is that rule for one turn with
success_bonus=0 and no fatal errors.

Training reads `task.checklist` and has no way to pass a state; evaluation reads
`task.evaluation`. Neither reads the other's list.
"""

from collections.abc import Sequence
import math

from envace_jax import types
from envace_jax.rewards import verifiers


def score_training(
  task: types.Task, episode: types.Episode, *, success_bonus: float = 0.0
) -> types.Score:
  """Scores an episode by its transcript alone."""
  return _score_episode(task, task.checklist, episode, None, success_bonus)


def score_evaluation(
  task: types.Task,
  episode: types.Episode,
  state_hash: str | None,
  *,
  success_bonus: float = 0.0,
) -> types.Score:
  """Scores an episode by the environment's final state and its transcript."""
  return _score_episode(
    task, task.evaluation, episode, state_hash, success_bonus
  )


def transcript_of(
  episode: types.Episode,
  tools: Sequence[types.Json],
  state_hash: str | None = None,
) -> verifiers.Transcript:
  """What verifiers may see; only an episode that REPLIED has a reply."""
  replied = episode.stop_reason is types.StopReason.REPLIED
  return verifiers.Transcript(
    steps=episode.steps,
    reply=episode.reply if replied else None,
    tools=tools,
    state_hash=state_hash,
  )


def score(
  criteria: Sequence[types.Criterion],
  transcript: verifiers.Transcript,
  *,
  success_bonus: float,
) -> types.Score:
  """Decides every criterion by its verifier and combines the verdicts."""
  verdicts = {c.id: verifiers.decide(c.check, transcript) for c in criteria}
  return combine(criteria, verdicts, success_bonus=success_bonus)


def combine(
  criteria: Sequence[types.Criterion],
  verdicts: dict[str, types.Verdict],
  *,
  success_bonus: float,
) -> types.Score:
  """Combines verdicts, whoever gave them, by the equations above."""
  _validate_weights(criteria)
  if not 0 <= success_bonus <= 1:
    raise ValueError(f'success_bonus={success_bonus} must be in [0, 1]')
  abstain, passed = types.Verdict.ABSTAIN, types.Verdict.PASS
  judged = [c for c in criteria if verdicts[c.id] is not abstain]
  required = [c for c in criteria if c.required]
  met = [verdicts[c.id] is passed for c in judged if c.required]
  success = all(met) if required and len(met) == len(required) else None
  total = math.fsum(c.weight for c in judged)
  if total <= 0:
    return types.Score(verdicts=verdicts, reward=None, success=success)
  earned = math.fsum(c.weight for c in judged if verdicts[c.id] is passed)
  reward = earned / total
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
) -> types.Score:
  if episode.task_id != task.id:
    raise ValueError(f'episode of {episode.task_id} scored as {task.id}')
  if episode.stop_reason is types.StopReason.WORLD_FAILED:
    verdicts = {c.id: types.Verdict.ABSTAIN for c in criteria}
    return combine(criteria, verdicts, success_bonus=success_bonus)
  transcript = transcript_of(episode, task.tools, state_hash)
  return score(criteria, transcript, success_bonus=success_bonus)


def _validate_weights(criteria: Sequence[types.Criterion]) -> None:
  ids = [c.id for c in criteria]
  if len(set(ids)) < len(ids):
    raise ValueError(f'criterion ids repeat: {sorted(ids)}')
  for c in criteria:
    if not 0 <= c.weight <= 1e6:  # false for NaN as well
      raise ValueError(
        f'criterion {c.id}: weight={c.weight} must be in [0, 1e6]'
      )
