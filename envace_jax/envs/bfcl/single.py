"""Single-turn categories: one question, one reply, nothing is executed.

Where functions fit, the package's `ast_checker` compares the calls with the
accepted answers. Where none fits (irrelevance), any call is wrong; where some
do (relevance), any well-formed call is right: the package's rules, but for one.
It takes what cannot be read for "no call", so garbage would refuse
perfectly; here it is malformed, and wrong, and `valid_upstream` in the parts
says what the package would have said.
"""

from collections.abc import Sequence
import json
from typing import Any

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import calls as bfcl_calls
from envace_jax.envs.bfcl import package as bfcl_package
from envace_jax.envs.bfcl import tools as bfcl_tools

CATEGORIES = (
  'simple_python',
  'multiple',
  'parallel',
  'parallel_multiple',
  'live_simple',
  'live_multiple',
  'live_parallel',
  'live_parallel_multiple',
)
NO_CALL = ('irrelevance', 'live_irrelevance')
ANY_CALL = ('live_relevance',)


class SingleTurn:
  """An attempt that is over after one reply."""

  def __init__(
    self,
    package: bfcl_package.Package,
    category: str,
    entry: types.Json,
    answers: Sequence[types.Json] | None,
  ):
    self._package, self._category = package, category
    self._entry, self._answers = entry, answers
    self._reply: benchmark.Reply | None = None
    self.system, self.instruction = _prompt(entry['question'][0])
    mapping = package.type_mappings.GORILLA_TO_OPENAPI
    self.tools = [
      bfcl_tools.to_openai(doc, mapping) for doc in entry['function']
    ]

  def record(self) -> Any:
    if self._reply is None:
      return 'Error during inference: no reply'
    return as_result(self._reply)

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    if self._reply is None:
      self._reply = reply
    return ()

  def score(self) -> benchmark.Outcome:
    reply = self._reply or benchmark.Reply(text='')
    calls = [call for call in reply.calls if is_well_formed(call)]
    malformed = len(reply.calls) - len(calls)
    if self._category in NO_CALL:
      reason = 'irrelevance_error:decoder_success' if calls else ''
      # A step with one bad call does not decode at all.
      upstream = not reply.calls or malformed > 0
    elif self._category in ANY_CALL:
      reason = '' if calls else 'relevance_error:decoder_failed'
      upstream = bool(calls) and not malformed
    else:
      reason = self._mismatch(calls)
      upstream = not malformed and not reason
    if malformed and not (self._category in NO_CALL and calls):
      reason = 'malformed_call'
    if self._reply is None:
      reason, upstream = 'no_reply', False
    return benchmark.Outcome(
      reward=float(not reason),
      success=not reason,
      reason=reason,
      parts={
        'calls': len(reply.calls),
        'malformed': malformed,
        'valid_upstream': upstream,
      },
    )

  def close(self) -> None:
    self._reply = None

  def _mismatch(self, calls: Sequence[types.ToolCall]) -> str:
    """The package's name of what is wrong with some calls, '' for nothing."""
    if not calls:
      return 'ast_decoder:decoder_failed'
    try:
      verdict = self._package.ast_checker.ast_checker(
        bfcl_tools.renamed_docs(self._entry['function']),
        [{call.name: dict(call.arguments)} for call in calls],
        bfcl_tools.renamed_answers(self._answers),
        self._package.enums.Language.PYTHON,
        self._category,
        'envace',
      )
    except (AttributeError, TypeError, KeyError, ValueError, IndexError):
      # The checker indexes into values of a shape that it did not expect.
      return 'ast_checker:unexpected_shape'
    return '' if verdict['valid'] else verdict['error_type']


def is_well_formed(call: types.ToolCall | types.ParseError) -> bool:
  """Whether it is a call whose arguments are plain values."""
  if isinstance(call, types.ParseError) or not isinstance(call.name, str):
    return False
  try:
    bfcl_calls.check_arguments(call.arguments)
  except bfcl_calls.Malformed:
    return False
  return True


def as_result(reply: benchmark.Reply) -> str | list[types.Json]:
  """A reply as the package records it of function-calling models.

  What cannot be read is recorded as text, which its decoders refuse.
  """
  if not reply.calls:
    return reply.text
  if not all(map(is_well_formed, reply.calls)):
    return f'{reply.text}\n[a call that could not be read]'.lstrip()
  return [{call.name: json.dumps(call.arguments)} for call in reply.calls]


def first_choice(answers: Sequence[types.Json]) -> list[types.ToolCall]:
  """Calls with the first value that each argument may have."""
  return [
    types.ToolCall(
      name=bfcl_tools.renamed(name), arguments=_first_values(accepted)
    )
    for answer in answers
    for name, accepted in answer.items()
  ]


def _first_values(accepted: types.Json) -> types.Json:
  """'' beside other values stands for an argument that may be left out."""
  chosen = {}
  for name, values in accepted.items():
    if not isinstance(values, list):  # a handful of labels omit the list
      chosen[name] = values
    elif said := [value for value in values if value != '']:
      chosen[name] = _plain(said[0])
  return chosen


def _plain(value):
  """Objects inside an answer list, in turn, what their fields may be."""
  if isinstance(value, dict):
    return _first_values(value)
  if isinstance(value, list):
    return [_plain(item) for item in value]
  return value


def _prompt(messages: Sequence[types.Json]) -> tuple[str, str]:
  """System prompt and instruction.

  Ten questions of live_irrelevance open with several messages. Those of users
  alone are joined, as the package does for models that need turns to
  alternate; where an assistant has spoken the dialogue becomes the instruction,
  each message after the name of its role.
  """
  system = [m['content'] for m in messages if m['role'] == 'system']
  spoken = [m for m in messages if m['role'] != 'system']
  if any(m['role'] == 'assistant' for m in spoken):
    texts = [f'{m["role"]}: {m["content"]}' for m in spoken]
  else:
    texts = [m['content'] for m in spoken]
  return '\n\n'.join(system), '\n\n'.join(texts)
