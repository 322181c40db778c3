"""The host-driven loop: act, ask the world, extend, until nobody is left.

  ACT --call--> world answers --> ACT --call--> ... --> ACT --reply--> REPLIED

Any world fits. All live episodes of a batch move together; rows that have
stopped cost nothing but their place. Same keys, same tokens as `on_device`
when the world is the policy itself.
"""

from collections.abc import Sequence

import jax
import numpy as np

from envace_jax import types
from envace_jax.rollout import episodes
from envace_jax.sampling import generator
from envace_jax.text import template as templates
from envace_jax.text import tool_calls
from envace_jax.worlds import base as worlds


def run_episodes(
  decoder: generator.Decoder,
  template: templates.Template,
  params,
  world: worlds.World,
  attempts: Sequence[episodes.Attempt],
  prompts: Sequence[generator.Row],
  row_keys: jax.Array,
  *,
  max_calls: int | None = None,
  upstream_termination: bool = False,
) -> list[episodes.Row]:
  """Runs a batch of episodes to their ends.

  Args:
    decoder: the model and its sampling settings.
    template: the row format.
    params: the policy.
    world: answers; `open`ed here, closed by the caller.
    attempts: B attempts, group by group.
    prompts: P prompts, each for the B / P attempts of one group.
    row_keys: [B] typed keys.
    max_calls: calls the world may be asked per episode; None for no cap.
    upstream_termination: the published rule, by which a tool error ends the
      episode; by default an error is an observation like any other.

  Returns:
    B finished rows, in the order of `attempts`.
  """
  group_size = len(attempts) // len(prompts)
  session = generator.Session(decoder, params, prompts, group_size, row_keys)
  world.open(
    [attempt.task for attempt in attempts],
    [prompt for prompt in prompts for _ in range(group_size)],
  )
  loop = _Loop(decoder, template, session, world, max_calls)
  live = list(range(len(attempts)))
  while live:
    requests = loop.act(live)
    live = loop.observe(requests, upstream_termination)
  return [
    episodes.Row(
      tokens=tokens,
      authors=authors,
      logprobs=logprobs,
      stop_reason=loop.stops[row],
      real_calls=loop.calls[row],
      state_hash=world.final_state(row),
    )
    for row, (tokens, authors, logprobs) in enumerate(session.rows())
  ]


class _Loop:
  """Bookkeeping of one batch: who has stopped, why, and what it spent."""

  def __init__(self, decoder, template, session, world, max_calls):
    self._limits, self._template = decoder.limits, template
    self._session, self._world = session, world
    self._max_calls = max_calls
    self._steps = [0] * session.batch_size
    self.calls = [0] * session.batch_size
    self.stops: list[types.StopReason | None] = [None] * session.batch_size

  def act(self, live: Sequence[int]) -> list[worlds.Request]:
    """One action per live row; those that call a tool, as requests."""
    requests = []
    generations = self._session.generate(types.Role.ACT, live)
    for row, generation in generations.items():
      stop = self._stop_of_action(row, generation)
      if stop is None and not self._add_header(row, types.Role.REHEARSE):
        stop = types.StopReason.CONTEXT_FULL
      self.stops[row] = stop
      if stop is None:
        text = self._template.text(generation.ids)
        requests.append(
          worlds.Request(
            row=row,
            action=tool_calls.parse_action(text),
            action_ids=generation.ids,
          )
        )
    return requests

  def observe(
    self, requests: Sequence[worlds.Request], upstream_termination: bool
  ) -> list[int]:
    """Lets the world answer; returns the rows that go on."""
    if not requests:
      return []
    responses = self._world.respond(self._session, requests)
    live = []
    for request, response in zip(requests, responses, strict=True):
      row = request.row
      stop = self._stop_of_response(row, response)
      if stop is None:
        self._steps[row] += 1
        if upstream_termination and self._is_error(response):
          stop = types.StopReason.TOOL_ERROR
        elif not self._add_header(row, types.Role.ACT):
          stop = types.StopReason.CONTEXT_FULL
      self.stops[row] = stop
      if stop is None:
        live.append(row)
    return live

  def _stop_of_action(self, row, generation) -> types.StopReason | None:
    if not generation.finished:
      if len(generation.ids) >= self._limits.max_action_tokens:
        return types.StopReason.ACTION_TRUNCATED
      return types.StopReason.CONTEXT_FULL
    if not self._template.is_call(generation.ids):
      return types.StopReason.REPLIED
    if self._steps[row] >= self._limits.max_steps:
      return types.StopReason.MAX_STEPS
    if self._max_calls is not None and self.calls[row] >= self._max_calls:
      return types.StopReason.CALL_BUDGET
    return None

  def _stop_of_response(self, row, response) -> types.StopReason | None:
    self.calls[row] += response.text is not None
    if response.failure is not None:
      return types.StopReason.WORLD_FAILED
    if response.generation is not None:
      if response.generation.finished:
        return None
      if len(response.generation.ids) >= self._limits.max_observation_tokens:
        return types.StopReason.OBSERVATION_TRUNCATED
      return types.StopReason.CONTEXT_FULL
    ids = self._template.observation(response.text)
    if len(ids) > self._session.room(row):
      return types.StopReason.CONTEXT_FULL
    self._session.extend(
      row, ids, np.full(len(ids), types.Author.WORLD, np.int8)
    )
    return None

  def _add_header(self, row: int, role: types.Role) -> bool:
    """Opens `role`'s turn; False when nothing can follow the header."""
    if not self._session.room(row):
      return False
    self._session.extend(
      row,
      np.asarray([self._template.header_ids[role]], np.int32),
      np.asarray([types.Author.FORCED], np.int8),
    )
    return self._session.room(row) > 0

  def _is_error(self, response: worlds.Response) -> bool:
    text = response.text
    if text is None:
      text = self._template.observation_text(response.generation.ids)
    parsed = tool_calls.parse_response(tool_calls.render_response(text))
    return isinstance(parsed, types.ParseError) or (
      isinstance(parsed, dict) and 'error' in parsed
    )
