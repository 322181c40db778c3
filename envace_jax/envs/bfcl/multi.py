"""Multi-turn categories: scripted users, stateful backends, a check a turn.

The package's checker decides: after every turn the state must equal that of the
ground truth, and what its calls returned must be among what the policy's calls
returned.

Under miss_func a function is held out, and appears in a later turn with the
package's own line in place of the user's.
"""

from collections.abc import Sequence
from typing import Any

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import conversation as bfcl_conversation
from envace_jax.envs.bfcl import package as bfcl_package

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
    self._id, self._truth = entry['id'], truth
    self._talk = bfcl_conversation.Conversation(package, entry)
    self.instruction = self._talk.instruction

  @property
  def tools(self) -> Sequence[types.Json]:
    return self._talk.tools

  def record(self) -> Any:
    return [list(turn) for turn in self._talk.results]

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    return self._talk.respond(reply)

  def score(self) -> benchmark.Outcome:
    reason = self._verdict()
    return benchmark.Outcome(
      reward=float(not reason),
      success=not reason,
      reason=reason,
      parts={**self._talk.counts, 'turns': len(self._talk.turns)},
    )

  def close(self) -> None:
    self._talk.close()

  def _verdict(self) -> str:
    """The package's name of what went wrong, '' for nothing."""
    if self._talk.over == 'overgrown':
      return 'overgrown'
    # Cut off in the last turn, an attempt is still judged.
    if len(self._talk.turns) != len(self._truth):
      return 'multi_turn:force_terminated'
    try:
      verdict = self._talk.backends.check(self._talk.turns, self._truth)
    except RecursionError:  # states that hold themselves cannot be compared
      return 'multi_turn:instance_state_mismatch'
    except Exception as error:
      raise benchmark.AttemptFailed(
        f'{self._id}: the checker failed: {error!r}'
      ) from error
    return '' if verdict['valid'] else verdict['error_type']
