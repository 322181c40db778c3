"""Host records that every layer shares: plain, frozen, JAX-free.

Two vocabularies must not be confused. A `Role` is what the policy is doing
right now (ACT or REHEARSE). An `Author` is who wrote a token that is already
in a transcript. A token is born once, with its author; loss masks and
advantages are functions of the author and of nothing else.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
from typing import Any

import numpy as np

Json = Mapping[str, Any]


class Role(enum.IntEnum):
  """What the policy is doing. Indexes every `[..., R]` axis."""

  ACT = 0
  REHEARSE = 1


class Author(enum.IntEnum):
  """Who wrote a token."""

  PROMPT = 0  # the task, as shown to the policy
  FORCED = 1  # template tokens between turns: never sampled, never trained
  ACT = 2  # sampled by the policy in the ACT role, stop token included
  REHEARSE = 3  # sampled by the policy in the REHEARSE role, stop included
  WORLD = 4  # an observation written by someone other than the policy
  USER = 5  # a scripted later user turn
  COPIED = 6  # written in the other view's row, and learned from there alone


AUTHOR_OF_ROLE = {Role.ACT: Author.ACT, Role.REHEARSE: Author.REHEARSE}


class StopReason(enum.Enum):
  """Why an episode ended. Every episode has exactly one."""

  REPLIED = 'replied'  # ACT answered the user without a tool call
  MAX_STEPS = 'max_steps'  # one more tool call than `max_steps` allows
  PARALLEL_CALLS = 'parallel_calls'  # more calls in one action than allowed
  MAX_ACTIONS = 'max_actions'  # ACT spoke as often as it may
  MAX_USER_TURNS = 'max_user_turns'  # the script has more turns than allowed
  REQUIREMENT_UNMET = 'requirement_unmet'  # the next turn needs a failed item
  CALL_BUDGET = 'call_budget'  # no real tool call left to spend
  ACTION_TRUNCATED = 'action_truncated'  # ACT hit its per-action token limit
  OBSERVATION_TRUNCATED = 'observation_truncated'  # REHEARSE hit its limit
  MAX_ROWS = 'max_rows'  # the next prompt needs one more row than allowed
  CONTEXT_FULL = 'context_full'  # the row has no room for the next token
  TOOL_ERROR = 'tool_error'  # only under `upstream_termination`
  WORLD_FAILED = 'world_failed'  # the world raised or missed its deadline


class Source(enum.Enum):
  """Which world was to answer an episode, decided before it began."""

  REHEARSED = 'rehearsed'  # the policy, as REHEARSE
  SIMULATED = 'simulated'  # a frozen model
  REAL = 'real'  # an environment
  MIXED = 'mixed'  # an environment and another world, step by step
  NULL = 'null'  # a constant


class Verdict(enum.Enum):
  """Outcome of one criterion. ABSTAIN is 'could not be judged', never zero."""

  PASS = 'pass'
  FAIL = 'fail'
  ABSTAIN = 'abstain'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
  name: str
  arguments: Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """A real tool call and what really answered it."""

  call: ToolCall
  observation_text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParseError:
  """Model text that is not a tool call, and why. Never raised."""

  kind: str  # one of text.tool_calls.ERROR_KINDS
  detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Criterion:
  """One yes/no requirement of a checklist.

  `check` is the machine predicate a verifier decides, e.g.
  `{'kind': 'replied', 'contains': ['shipped']}`; kinds are listed in
  `rewards.verifiers`. An empty `check` can only be decided by a judge.
  """

  id: str
  question: str
  check: Json
  turn: int = 0  # the user turn it judges, from 0
  weight: float = 1.0
  # 'tool_calls' | 'tool.content' | 'thinking' | 'reply' | 'state'
  focus_on: str = 'reply'
  required: bool = True  # success needs every required criterion to PASS
  required_for_next_turn: bool = False
  pass_condition: str = ''
  failure_examples: Sequence[str] = ()
  evidence: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What is asked, by whom it is judged, and where it can be tried for real.

  `checklist` sees transcripts only and is the training signal; `evaluation`
  sees the environment's final state and the reply, and is never read while
  training. `plan` is an oracle solution: tool calls, then the reply.
  """

  id: str
  instruction: str  # the user's first message
  tools: Sequence[Json]  # OpenAI function schemas
  checklist: Sequence[Criterion]
  evaluation: Sequence[Criterion] = ()
  environment: Json = dataclasses.field(default_factory=dict)
  family: str = ''
  plan: Sequence[ToolCall] = ()
  plan_reply: str = ''
  user_turns: Sequence[str] = ()  # scripted, after the instruction
  system: str = ''  # a system prompt of the task's own
  records: Sequence[Record] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """One tool call and the observation that answered it."""

  action: ToolCall | ParseError
  action_text: str  # the whole message, which may hold several calls
  observation_text: str
  author: Author = Author.WORLD  # who wrote the observation
  turn: int = 0  # user turn, from 0
  message: int = 0  # which of the episode's actions, replies counted, from 0
  # Of a recorded call: 'success', or the environment's name of the error.
  outcome: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
  """A recorded attempt, good or bad; its observations are the real ones."""

  task_id: str
  instruction: str
  steps: Sequence[Step]
  reply: str  # to the last user turn
  notes: str = ''  # rehearsal memory shown in the prompt, '' for none
  habit: str = ''  # how the attempt was made, for statistics only
  tools: Sequence[Json] = ()
  system: str = ''
  user_turns: Sequence[str] = ()  # after the instruction
  turn_replies: Sequence[str] = ()  # to the instruction and all but the last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Budgets of one episode. Each has its own `StopReason`."""

  max_steps: int  # answered tool calls
  max_actions: int  # ACT generations: calls and replies
  max_user_turns: int  # the instruction included
  max_parallel_calls: int  # calls in one action; 1: several are malformed
  max_action_tokens: int  # per ACT generation, stop token included
  max_observation_tokens: int  # per REHEARSE generation, stop token included
  max_row_tokens: int  # the whole row, prompt included
  # Rows of ACT. One: a row is only ever appended to, whatever a chat template
  # would show of it later.
  max_rows: int = 1

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value < 1:
        raise ValueError(f'{field.name}={value}; use at least 1')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
  """One sampled span by one role; never re-tokenised."""

  role: Role
  ids: np.ndarray  # [T] int32, stop token included when there is one
  logprobs: np.ndarray  # [T] float32, under the distribution sampled from
  finished: bool  # a stop token was sampled (False: a limit was hit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """Tokens with their authors; `logprobs` is 0 where the policy sampled none.

  Under the joint view an episode is one row, or several where a chat template
  breaks rows (`rollout.reopening`). Split views add one, of REHEARSE: the two
  hold the same tokens after their own prompts, and each has as COPIED what was
  sampled in the other.
  """

  tokens: np.ndarray  # [T] int32
  authors: np.ndarray  # [T] int8, values of Author
  logprobs: np.ndarray  # [T] float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
  """One task attempted once, from its prompt to a stop reason.

  The first rows, as many as `opened_at`, are what ACT read; under split views
  the last one is what REHEARSE read.
  `group` is shared by the attempts at one task that are compared with each
  other; `sample_index` is global and unique within a train step.
  """

  task_id: str
  group: int
  sample_index: int
  rows: Sequence[Row]
  steps: Sequence[Step]
  reply: str | None  # to the last user turn; None unless REPLIED
  stop_reason: StopReason
  turn_replies: Sequence[str] = ()  # to the user turns before the last one
  num_turns: int = 1  # user turns that began, the instruction included
  source: Source = Source.REHEARSED
  real_calls: int = 0  # tool calls spent in the real environment
  sampled_tokens: int = 0  # by the policy, those thrown away included
  state_hash: str | None = None  # final real state, for evaluation only
  notes: str = ''
  # Where each row of ACT begins to say what no earlier one has.
  opened_at: Sequence[int] = (0,)
  breaks: int = 0  # prompts of actions that the row did not lead to as it stood


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """What a checklist says about one episode.

  `reward` is None when nothing could be judged: such an episode leaves the
  batch and its group shrinks.
  """

  verdicts: Mapping[str, Verdict]
  reward: float | None
  success: bool | None
