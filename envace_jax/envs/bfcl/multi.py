"""Multi-turn categories: scripted users, stateful backends, a check a turn.

A turn goes on while replies hold calls; a reply without any, or with one that
cannot be read, ends it, and the next user line is said. Who goes on calling
after the package's limit of steps is cut off there. The package's checker
decides: after every turn the state must equal that of the ground truth, and
what its calls returned must be among what the policy's calls returned.

Under miss_func a function is held out, and appears in a later turn with the
package's own line in place of the user's.
"""

from collections.abc import Sequence
import json
from typing import Any

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import backends as bfcl_backends
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.envs.bfcl import single as bfcl_single
from envace_jax.envs.bfcl import tools as bfcl_tools

CATEGORIES = (
  'multi_turn_base',
  'multi_turn_miss_func',
  'multi_turn_miss_param',
  'multi_turn_long_context',
)


class MultiTurn:
  """An attempt at a scripted dialogue."""

  system = ''

  def __init__(
    self,
    package: bfcl_package.Package,
    entry: types.Json,
    truth: Sequence[Sequence[str]],
  ):
    self._package, self._entry, self._truth = package, entry, truth
    self._limit = package.default_prompts.MAXIMUM_STEP_LIMIT
    self._backends = bfcl_backends.Backends(package, entry)
    self._over = ''  # why, when it is
    self._steps = 0  # of this turn, that were executed
    self._turns: list[list[list[str]]] = []  # calls by turn and step
    self._results: list[list] = []  # the same, as the result file has them
    self._counts = {'calls': 0, 'errors': 0, 'malformed': 0}
    self.tools: list[types.Json] = []
    self._show(entry['function'])
    self.instruction = self._next_turn()

  def record(self) -> Any:
    return [list(turn) for turn in self._results]

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    if self._over:
      return ()
    unread = [c for c in reply.calls if isinstance(c, types.ParseError)]
    self._counts['malformed'] += len(unread)
    if unread or not reply.calls:
      self._results[-1].append(bfcl_single.as_result(reply))
      return self._end_turn()
    return self._execute(reply.calls)

  def score(self) -> benchmark.Outcome:
    reason = self._verdict()
    return benchmark.Outcome(
      reward=float(not reason),
      success=not reason,
      reason=reason,
      parts={**self._counts, 'turns': len(self._turns)},
    )

  def close(self) -> None:
    self._over = self._over or 'closed'
    self._backends.forget()

  def _execute(self, calls) -> Sequence[benchmark.Message]:
    try:
      observations, texts = self._backends.execute(calls)
    except bfcl_backends.Overgrown:
      self._over = 'overgrown'
      return ()
    self._turns[-1].append(texts)
    self._results[-1].append(
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
    self._counts['calls'] += len(calls)
    self._counts['errors'] += sum(m.error is not None for m in messages)
    self._steps += 1
    if self._steps > self._limit:  # as the package counts: the one after
      self._over = 'force_terminated'
      return ()
    return messages

  def _end_turn(self) -> Sequence[benchmark.Message]:
    if len(self._turns) == len(self._entry['question']):
      self._over = 'finished'
      return ()
    return [benchmark.Message(role='user', text=self._next_turn())]

  def _next_turn(self) -> str:
    """Opens a turn; functions that were held out until now are shown."""
    turn = len(self._turns)
    self._turns.append([])
    self._results.append([])
    self._steps = 0
    shown = self._entry.get('missed_function', {}).get(str(turn))
    if shown is not None:
      self._show(shown)
      prompts = self._package.default_prompts
      return prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
    return '\n\n'.join(m['content'] for m in self._entry['question'][turn])

  def _show(self, docs: Sequence[types.Json]) -> None:
    mapping = self._package.type_mappings.GORILLA_TO_OPENAPI
    shown = [bfcl_tools.to_openai(doc, mapping) for doc in docs]
    self.tools = [*self.tools, *shown]

  def _verdict(self) -> str:
    """The package's name of what went wrong, '' for nothing."""
    if self._over == 'overgrown':
      return 'overgrown'
    # Cut off in the last turn, an attempt is still judged.
    if len(self._turns) != len(self._truth):
      return 'multi_turn:force_terminated'
    try:
      verdict = self._backends.check(self._turns, self._truth)
    except RecursionError:  # states that hold themselves cannot be compared
      return 'multi_turn:instance_state_mismatch'
    except Exception as error:
      raise benchmark.AttemptFailed(
        f'{self._entry["id"]}: the checker failed: {error!r}'
      ) from error
    return '' if verdict['valid'] else verdict['error_type']
