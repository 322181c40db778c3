"""A frozen model behind an endpoint answers, told what REHEARSE would be told.

It sees the tools, recorded exchanges, the dialogue without ACT's thoughts, and
the call. Its answer is an observation like any other: nobody's to be trained.
What could not be had, after all attempts, ends the episode as WORLD_FAILED,
which is scored as 'could not be judged', and not as a failure of the policy.

Each call is drawn with a seed of its own, from the row's key (which comes from
the run's seed, the train step and the sample index) and the number of the call.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import random

import numpy as np

from envace_jax import types
from envace_jax.sampling import generator, keys
from envace_jax.text import quoting, simulator_prompt
from envace_jax.text import template as templates
from envace_jax.worlds import base, simulator, validation


class EndpointWorld:
  """Asks a `Simulator`, all rows of a step at once."""

  def __init__(
    self,
    asked: simulator.Simulator,
    template: templates.Template,
    records_for: Callable[[types.Task], Sequence[types.Record]],
    *,
    instructions: str,
    max_observation_tokens: int,
    checks_answers: bool,
  ):
    """Makes such a world.

    Args:
      asked: the model; lives longer than this world.
      template: the row format.
      records_for: the real exchanges that are shown for a task.
      instructions: of REHEARSE, '' for none.
      max_observation_tokens: longer answers are refused, as 'too_long'.
      checks_answers: what no such tool could return is refused, under the
        codes of `validation`, in lower case.
    """
    self._asked, self._template = asked, template
    self._records_for = records_for
    self._system = simulator_prompt.system(instructions)
    self._max_observation_tokens = max_observation_tokens
    self._checks_answers = checks_answers

  def open(self, batch: base.Batch) -> None:
    self._tasks = batch.tasks
    first = batch.tasks[:: batch.group_size]
    self._records = [tuple(self._records_for(task)) for task in first]
    self._group_size = batch.group_size
    self._names = keys.names(batch.row_keys)
    self._calls = collections.Counter()  # by row
    self._heard: list[list[generator.Row]] = [[] for _ in batch.tasks]

  def respond(
    self, session: generator.Session, requests: Sequence[base.Request]
  ) -> list[base.Response]:
    del session
    outcomes = self._asked.ask([self._question(r) for r in requests])
    responses = []
    for request, outcome in zip(requests, outcomes, strict=True):
      if outcome.error:
        failed = types.StopReason.WORLD_FAILED
        responses.append(base.Response(stop=failed))
        continue
      ids = self._template.observation(outcome.value)
      world = np.full(len(ids), types.Author.WORLD, np.int8)
      self._heard[request.row].append((ids, world))
      responses.append(base.Response(text=outcome.value))
    return responses

  def warm_up(self, batch: base.Batch) -> None:
    del batch

  def trained_rows(self) -> None:
    return None

  def provenance(self, row: int) -> base.Provenance:
    del row
    return base.Provenance(source=types.Source.SIMULATED)

  def interventions(self) -> Mapping[str, int]:
    return {}

  def final_state(self, row: int) -> None:
    del row

  def close(self) -> None:
    pass  # the simulator is not ours

  def _question(self, request: base.Request) -> simulator.Question:
    row, action = request.row, request.action
    self._heard[row] += request.heard
    number = self._calls[row]
    self._calls[row] += 1
    scene = simulator_prompt.Scene(
      tools=self._tasks[row].tools,
      records=self._records[row // self._group_size],
      dialogue=self._dialogue(row),
      action=action,
    )
    draw = random.Random(f'simulator {self._names[row]} {number}')
    return simulator.Question(
      system=self._system,
      prompt=simulator_prompt.render(scene, self._asked.endpoint.max_chars),
      seed=draw.getrandbits(simulator.SEED_BITS),
      fault=lambda text: self._fault(text, action, self._tasks[row].tools),
    )

  def _dialogue(self, row: int) -> list[quoting.Line]:
    """The episode so far, by authors alone."""
    ids, authors = templates.join(self._heard[row])
    copied = np.where(authors == types.Author.ACT, types.Author.COPIED, authors)
    ids, authors = self._template.without_thoughts(ids, copied.astype(np.int8))
    task = self._tasks[row]
    said = iter(task.user_turns)
    lines = [quoting.Line(speaker='user', text=task.instruction)]
    for author, start, stop in templates.runs(authors):
      part = ids[start:stop]
      if author == types.Author.COPIED:
        text = self._template.text(part)
        lines.append(quoting.Line(speaker='assistant', text=text))
      elif author == types.Author.WORLD:
        text = self._template.observation_text(part)
        lines.append(quoting.Line(speaker='tool', text=text))
      elif author == types.Author.USER:
        lines.append(quoting.Line(speaker='user', text=next(said)))
    return lines

  def _fault(
    self,
    text: str,
    action: types.ToolCall | types.ParseError,
    tools: Sequence[types.Json],
  ) -> str:
    if len(self._template.observation(text)) > self._max_observation_tokens:
      return 'too_long'
    if self._checks_answers and isinstance(action, types.ToolCall):
      fault = validation.answer_fault(text, action, tools)
      return fault[0].lower() if fault else ''
    return ''
