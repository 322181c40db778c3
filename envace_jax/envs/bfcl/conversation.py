"""A scripted user's lines, a stateful backend, and what the policy did.

A turn goes on while replies hold calls; a reply without any, or with one that
cannot be read, ends it, and the next user line is said. Who goes on calling
after the package's limit of steps is cut off there.
"""

from collections.abc import Sequence
import json

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import backends as bfcl_backends
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.envs.bfcl import single as bfcl_single
from envace_jax.envs.bfcl import tools as bfcl_tools


class Conversation:
  """One dialogue over an entry's instances; no verdict."""

  def __init__(self, package: bfcl_package.Package, entry: types.Json):
    self._package, self._entry = package, entry
    self._limit = package.default_prompts.MAXIMUM_STEP_LIMIT
    self.backends = bfcl_backends.Backends(package, entry)
    self.over = ''  # why, when it is
    self._steps = 0  # of this turn, that were executed
    self.turns: list[list[list[str]]] = []  # calls by turn and step
    self.results: list[list] = []  # the same, as the result file has them
    self.counts = {'calls': 0, 'errors': 0, 'malformed': 0}
    self.tools: list[types.Json] = []
    self._show(entry['function'])
    self.instruction = self._next_turn()

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    if self.over:
      return ()
    unread = [c for c in reply.calls if isinstance(c, types.ParseError)]
    self.counts['malformed'] += len(unread)
    if unread or not reply.calls:
      self.results[-1].append(bfcl_single.as_result(reply))
      return self._end_turn()
    return self._execute(reply.calls)

  def close(self) -> None:
    self.over = self.over or 'closed'
    self.backends.forget()

  def _execute(self, calls) -> Sequence[benchmark.Message]:
    try:
      observations, texts = self.backends.execute(calls)
    except bfcl_backends.Overgrown:
      self.over = 'overgrown'
      return ()
    self.turns[-1].append(texts)
    self.results[-1].append(
      [
        # The package evaluates what the file says: no name of a policy's own.
        {bfcl_backends.NO_NAME: '{}'}
        if text == bfcl_backends.REFUSED
        else {call.name: json.dumps(call.arguments)}
        for call, text in zip(calls, texts, strict=True)
      ]
    )
    messages = [
      benchmark.Message(
        role='tool', text=text, error=bfcl_backends.error_of(text)
      )
      for text in observations
    ]
    self.counts['calls'] += len(calls)
    self.counts['errors'] += sum(m.error is not None for m in messages)
    self._steps += 1
    if self._steps > self._limit:  # as the package counts: the one after
      self.over = 'force_terminated'
      return ()
    return messages

  def _end_turn(self) -> Sequence[benchmark.Message]:
    if len(self.turns) == len(self._entry['question']):
      self.over = 'finished'
      return ()
    return [benchmark.Message(role='user', text=self._next_turn())]

  def _next_turn(self) -> str:
    """Opens a turn; functions that were held out until now are shown."""
    turn = len(self.turns)
    self.turns.append([])
    self.results.append([])
    self._steps = 0
    shown = self._entry.get('missed_function', {}).get(str(turn))
    if shown is not None:
      self._show(shown)
      prompts = self._package.default_prompts
      return prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    said = self._entry['question'][turn]
    return '\n\n'.join(m['content'] for m in said if m['role'] == 'user')

  def _show(self, docs: Sequence[types.Json]) -> None:
    mapping = self._package.type_mappings.GORILLA_TO_OPENAPI
    shown = [bfcl_tools.to_openai(doc, mapping) for doc in docs]
    self.tools = [*self.tools, *shown]
