"""The host-driven loop: act, ask the world, extend, until nobody is left.

  ACT --calls--> world answers each --> ACT --reply--> user turn, or REPLIED

Any world fits. All live episodes of a batch move together; rows that have
stopped cost nothing but their place. Same keys, same tokens as `on_device`
when the world is the policy itself, in the same row.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import jax
import numpy as np

from envace_jax import types
from envace_jax.rollout import episodes, reopening
from envace_jax.sampling import generator
from envace_jax.text import formats, row_breaks, row_reading, tool_calls
from envace_jax.text import template as templates
from envace_jax.worlds import base as worlds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Between:
  """An episode between two user turns."""

  task: types.Task
  said: row_reading.Reading
  turn: int  # the one that has just ended


# Decides on the next action of some rows: leaves one in each, and returns them.
Chooser = Callable[
  [generator.Session, Sequence[int]], Mapping[int, types.Generation]
]


def sample(
  session: generator.Session, rows: Sequence[int]
) -> dict[int, types.Generation]:
  """The first thing that the policy says."""
  return session.generate(types.Role.ACT, rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """How episodes go on, and what ends them besides their limits."""

  choose: Chooser = sample
  max_calls: int | None = None  # real calls that may be made; None: no cap
  # The published rule, by which a tool error ends the episode; otherwise an
  # error is an observation like any other.
  upstream_termination: bool = False
  # Which of some episodes go on to their next user turn; None: all.
  allow_next_turn: Callable[[Sequence[Between]], list[bool]] | None = None


def run_episodes(
  decoder: generator.Decoder,
  template: templates.Template,
  params,
  world: worlds.World,
  attempts: Sequence[episodes.Attempt],
  prompts: Sequence[generator.Row],
  row_keys: jax.Array,
  rules: Rules,
) -> list[episodes.Finished]:
  """Runs a batch of episodes to their ends.

  Args:
    decoder: the model and its sampling settings.
    template: the row format.
    params: the policy.
    world: answers; `open`ed here, closed by the caller.
    attempts: B attempts, group by group.
    prompts: P prompts, each for the B / P attempts of one group.
    row_keys: [B] typed keys.
    rules: what else ends an episode.

  Returns:
    B finished episodes, in the order of `attempts`.
  """
  tasks = [attempt.task for attempt in attempts]
  limits = decoder.limits
  row_breaks.refuse(
    template,
    user_turns=any(task.user_turns for task in tasks),
    max_rows=limits.max_rows,
  )
  batch = worlds.Batch(tasks=tasks, prompts=prompts, row_keys=row_keys)
  session = generator.Session(
    decoder, params, prompts, batch.group_size, row_keys
  )
  world.open(batch)
  opener = reopening.Reopener(limits, template, session, attempts)
  loop = _Loop(limits, template, session, world, rules, tasks, opener)
  live = list(range(len(attempts)))
  while live:
    live = loop.act(live)
    while any(loop.rows[row].calls for row in live):
      live = loop.answer(live)
  trained = world.trained_rows()
  return [
    episodes.Finished(
      rows=opener.rows(i, row) + (() if trained is None else (trained[i],)),
      opened_at=opener.opened_at(i),
      stop_reason=loop.rows[i].stop,
      provenance=world.provenance(i),
      sampled_tokens=int(session.sampled_B[i])
      + (0 if trained is None else _answered(trained[i])),
      state_hash=world.final_state(i),
    )
    for i, row in enumerate(session.rows())
  ]


@dataclasses.dataclass
class _RowState:
  """Bookkeeping of one episode."""

  steps: int = 0  # answered calls
  actions: int = 0
  turn: int = 0
  calls: list = dataclasses.field(default_factory=list)  # yet to be answered
  heard: list = dataclasses.field(default_factory=list)  # see worlds.Request
  joint: formats.Joint = formats.Joint.CALLED  # before the open observation
  before_joint: int = 0  # the row's length there
  stop: types.StopReason | None = None


class _Loop:
  """Moves all live rows of one batch together."""

  def __init__(self, limits, template, session, world, rules, tasks, opener):
    self._limits, self._template = limits, template
    self._session, self._world = session, world
    self._rules, self._tasks, self._opener = rules, tasks, opener
    self.rows = [_RowState() for _ in tasks]

  def act(self, live: Sequence[int]) -> list[int]:
    """One action per live row; returns the rows that go on."""
    generations = self._rules.choose(self._session, live)
    replied = []
    for row, said in generations.items():
      state = self.rows[row]
      state.actions += 1
      state.heard.append((said.ids, _all(said.ids, types.Author.ACT)))
      state.stop = self._stop_of_action(said)
      if state.stop is not None:
        continue
      if self._template.is_call(said.ids):
        state.calls = self._template.calls(said.ids)
        state.joint = formats.Joint.CALLED
        if len(state.calls) > self._limits.max_parallel_calls:
          state.stop = types.StopReason.PARALLEL_CALLS
        elif state.actions >= self._limits.max_actions:
          state.stop = types.StopReason.MAX_ACTIONS
      else:
        replied.append(row)
    self._next_turn(replied)
    return [row for row in live if self.rows[row].stop is None]

  def answer(self, live: Sequence[int]) -> list[int]:
    """The next call of every row that has one; returns the rows that go on."""
    requests = []
    for row in live:
      state = self.rows[row]
      if not state.calls:
        continue
      state.stop = self._stop_of_call(row)
      state.before_joint = int(self._session.lengths[row])
      if state.stop is None and not self._header(row, state.joint):
        state.stop = types.StopReason.CONTEXT_FULL
      if state.stop is None:
        requests.append(
          worlds.Request(
            row=row, action=state.calls.pop(0), heard=tuple(state.heard)
          )
        )
        state.heard = []
    responses = self._world.respond(self._session, requests) if requests else []
    for request, response in zip(requests, responses, strict=True):
      self._observe(request.row, response)
    self._open_action(
      [
        request.row
        for request in requests
        if self.rows[request.row].stop is None
        and not self.rows[request.row].calls
      ],
      formats.Joint.ANSWERED,
    )
    return [row for row in live if self.rows[row].stop is None]

  def _observe(self, row: int, response: worlds.Response) -> None:
    state = self.rows[row]
    state.stop = self._stop_of_response(row, response)
    if state.stop is not None:
      return
    state.steps += 1
    state.joint = formats.Joint.AGAIN
    if self._rules.upstream_termination and self._is_fatal(response):
      state.stop = types.StopReason.TOOL_ERROR

  def _next_turn(self, replied: Sequence[int]) -> None:
    """Lets the user speak again, where the script has more and may go on."""
    more = [
      row
      for row in replied
      if self.rows[row].turn < len(self._tasks[row].user_turns)
    ]
    for row in set(replied) - set(more):
      self.rows[row].stop = types.StopReason.REPLIED
    for row, allowed in zip(more, self._allowed(more), strict=True):
      state = self.rows[row]
      if not allowed:
        state.stop = types.StopReason.REQUIREMENT_UNMET
      elif state.turn + 1 >= self._limits.max_user_turns:
        state.stop = types.StopReason.MAX_USER_TURNS
      elif state.actions >= self._limits.max_actions:
        state.stop = types.StopReason.MAX_ACTIONS
      else:
        text = self._tasks[row].user_turns[state.turn]
        state.turn += 1
        ids = self._template.user_turn(text)
        if not self._say(row, ids, types.Author.USER):
          state.stop = types.StopReason.CONTEXT_FULL
    asked = [row for row in more if self.rows[row].stop is None]
    self._open_action(asked, formats.Joint.ASKED)

  def _allowed(self, rows: Sequence[int]) -> list[bool]:
    gate = self._rules.allow_next_turn
    if gate is None or not rows:
      return [True] * len(rows)
    finished = self._session.rows()
    return gate(
      [
        Between(
          task=self._tasks[row],
          said=row_reading.read(self._template, said.tokens, said.authors),
          turn=self.rows[row].turn,
        )
        for row in rows
        for said in [self._opener.said(row, finished[row])]
      ]
    )

  def _stop_of_action(self, said: types.Generation) -> types.StopReason | None:
    if said.finished:
      return None
    if len(said.ids) >= self._limits.max_action_tokens:
      return types.StopReason.ACTION_TRUNCATED
    return types.StopReason.CONTEXT_FULL

  def _stop_of_call(self, row: int) -> types.StopReason | None:
    if self.rows[row].steps >= self._limits.max_steps:
      return types.StopReason.MAX_STEPS
    max_calls = self._rules.max_calls
    if max_calls is None:
      return None
    if self._world.provenance(row).real_calls >= max_calls:
      return types.StopReason.CALL_BUDGET
    return None

  def _stop_of_response(self, row, response) -> types.StopReason | None:
    if response.stop is not None:
      return response.stop
    said = response.generation
    if said is None:
      return self._hand_over_text(row, response.text)
    if response.in_own_row:
      stop = self._hand_over(row, said.ids, types.Author.COPIED)
      if stop is not None:
        return stop
    if said.finished:
      return None
    if len(said.ids) >= self._limits.max_observation_tokens:
      return types.StopReason.OBSERVATION_TRUNCATED
    return types.StopReason.CONTEXT_FULL

  def _hand_over(self, row, ids, author) -> types.StopReason | None:
    """Puts an answer into ACT's row; the world has heard it already."""
    if len(ids) > self._session.room(row):
      return types.StopReason.CONTEXT_FULL
    self._session.extend(row, ids, _all(ids, author))
    return None

  def _hand_over_text(self, row: int, text: str) -> types.StopReason | None:
    """Puts somebody's words into ACT's row, as if encoded with the joint."""
    state = self.rows[row]
    joint, ids = self._template.answered(state.joint, text)
    standing, _ = self._template.header(state.joint)
    if not np.array_equal(joint, standing):  # they share a token
      self._session.rewind({row: state.before_joint})
      stop = self._hand_over(row, joint, types.Author.FORCED)
      if stop is not None:
        return stop
    return self._hand_over(row, ids, types.Author.WORLD)

  def _open_action(self, rows: Sequence[int], joint: formats.Joint) -> None:
    """Opens the next action of some rows, in a new row where it must be."""
    stops = self._opener.reopen(rows)
    for row in rows:
      state = self.rows[row]
      state.stop = stops.get(row)
      if state.stop is None and not self._header(row, joint):
        state.stop = types.StopReason.CONTEXT_FULL

  def _header(self, row: int, joint: formats.Joint) -> bool:
    """Opens the next turn; False when nothing can follow its header."""
    ids, _ = self._template.header(joint)
    return (
      self._say(row, ids, types.Author.FORCED) and self._session.room(row) > 0
    )

  def _say(self, row: int, ids: np.ndarray, author: types.Author) -> bool:
    """Puts tokens into ACT's row for all to hear; False where none fit."""
    if len(ids) > self._session.room(row):
      return False
    span = ids, _all(ids, author)
    self._session.extend(row, *span)
    self.rows[row].heard.append(span)
    return True

  def _is_fatal(self, response: worlds.Response) -> bool:
    """The published rule: a tool error, or an answer that is no JSON."""
    text = response.text
    if text is None:
      text = self._template.observation_text(response.generation.ids)
    parsed = tool_calls.parse_observation(text)
    return isinstance(parsed, types.ParseError) or tool_calls.is_error(parsed)


def _answered(row: types.Row) -> int:
  """Tokens sampled as REHEARSE in a row of its own."""
  return int((row.authors == types.Author.REHEARSE).sum())


def _all(ids: np.ndarray, author: types.Author) -> np.ndarray:
  return np.full(len(ids), author, np.int8)
