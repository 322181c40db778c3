"""FinMCP-Bench from a file in its published layout, with recorded answers.

The benchmark asks a model to answer questions about funds through 65 tools of a
live service. Its samples can be downloaded by hand; the tools' schemas and the
service need an account there. What this gives without one:

- the samples, by user turn, each after the gold history, as the benchmark runs
  them, and its metric over whole samples (`finmcp_scores`);
- answers from the samples themselves: a call with the name and the arguments of
  a gold one is answered as that was, and any other with an error;
- for tools, what a second file holds; otherwise the names of the file's own
  gold calls with free arguments, which tells a policy less than upstream does.

So a TF1 from here is that of a policy whose unrecorded calls all failed. It is
not comparable with a published one.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from envace_jax import errors, types
from envace_jax.envs import benchmark
from envace_jax.envs.finmcp import scores as finmcp_scores
from envace_jax.text import tool_calls

CATEGORIES = ('single step', 'multi step', 'multi turn')
MAX_CALLS = 20  # in one user turn
NOT_RECORDED = 'Error: no answer to this call was recorded.'

# What reading a sample of another layout raises.
_MALFORMED = (
  AttributeError,
  LookupError,
  RecursionError,
  TypeError,
  ValueError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
  """What a user says, after what, and what should be called then."""

  sample_id: str
  category: str
  history: Sequence[types.Json]  # gold messages before it
  text: str
  gold: Sequence[Sequence[str]]  # names, by assistant message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """A file of samples."""

  turns: Mapping[str, Turn]  # by 'sample/turn'
  recorded: Mapping[str, Mapping[str, Sequence[str]]]  # sample, call -> answers
  tools: Sequence[types.Json]
  version: str


def load(path: pathlib.Path, tools: pathlib.Path | None = None) -> Data:
  """Reads samples, and the schemas of their tools if there is a file of them.

  Raises:
    UserError: a file is missing or has another layout.
  """
  samples = _list(path)
  turns, recorded, names = {}, {}, {}
  for i, sample in enumerate(samples):
    try:
      key = str(sample['id'])
      if key in recorded:
        raise ValueError(f'id {key} stands twice')
      found, recorded[key] = _read(key, sample)
    except _MALFORMED as e:
      raise errors.UserError(
        f'{path}: sample {i} is not one of FinMCP-Bench '
        f'({type(e).__name__}: {e}); give its published file'
      ) from e
    turns |= {f'{key}/{j}': turn for j, turn in enumerate(found)}
    names |= dict.fromkeys(
      name for turn in found for group in turn.gold for name in group
    )
  digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
  schemas = tuple(map(_free, names)) if tools is None else tuple(_list(tools))
  return Data(
    turns=turns,
    recorded=recorded,
    tools=schemas,
    version=(
      f'data {digest}, recorded answers, '
      f'{"names only" if tools is None else "given schemas"}'
    ),
  )


class FinMcp:
  """Implements `benchmark.Benchmark`; a task is one user turn of a sample."""

  name = 'finmcp'

  def __init__(self, data: Data):
    self._data = data
    self.version = data.version

  def categories(self) -> Sequence[str]:
    present = {turn.category for turn in self._data.turns.values()}
    return tuple(name for name in CATEGORIES if name in present)

  def task_ids(self, category: str) -> Sequence[str]:
    return tuple(
      task_id
      for task_id, turn in self._data.turns.items()
      if turn.category == category
    )

  def open(self, task_id: str) -> 'FinMcpAttempt':
    turn = self._data.turns[task_id]
    recorded = self._data.recorded[turn.sample_id]
    return FinMcpAttempt(turn, recorded, self._data.tools)

  def oracle(self, task_id: str) -> Sequence[benchmark.Reply]:
    """Gold calls, in upstream's sense: names count, arguments do not."""
    replies = [
      benchmark.Reply(
        text='',
        calls=[types.ToolCall(name=name, arguments={}) for name in group],
      )
      for group in self._data.turns[task_id].gold
    ]
    return (*replies, benchmark.Reply(text='That is my answer.'))

  def groups(
    self,
    outcomes: Mapping[str, Sequence[benchmark.Outcome | None]],
    recorded: Sequence[benchmark.Recorded],
  ) -> Mapping[str, float]:
    """TF1 and its like, of the first trial."""
    del outcomes
    pairs = {
      one.task_id: finmcp_scores.Pair(**one.value)
      for one in recorded
      if one.trial == 0
    }
    return sample_scores(pairs) if pairs else {}

  def write(
    self,
    directory: pathlib.Path,
    policy: str,
    recorded: Sequence[benchmark.Recorded],
  ) -> Sequence[pathlib.Path]:
    """Upstream's script wants its own run's files; there is nothing to read."""
    del directory, policy, recorded
    return ()


class FinMcpAttempt:
  """Implements `benchmark.Attempt`."""

  def __init__(
    self,
    turn: Turn,
    recorded: Mapping[str, Sequence[str]],
    tools: Sequence[types.Json],
  ):
    self._turn, self._recorded = turn, recorded
    self._asked = collections.Counter()
    self._predicted: list[str] = []
    self._is_over = False
    self.instruction, self.tools = turn.text, tools
    self.system = _earlier(turn.history)

  def respond(self, reply: benchmark.Reply) -> Sequence[benchmark.Message]:
    if self._is_over or not reply.calls:
      self._is_over = True
      return ()
    answers = [self._answer(call) for call in reply.calls]
    self._is_over = len(self._predicted) >= MAX_CALLS
    return () if self._is_over else answers

  def score(self) -> benchmark.Outcome:
    """Of this turn; samples are scored by `sample_scores`."""
    pair = self.pair()
    counts = pair.counts()
    perfect = pair.is_consistent()
    return benchmark.Outcome(
      # A turn without a gold call is right where nothing was called.
      reward=1.0 if perfect else counts.f1,
      success=perfect,
      reason='' if perfect else 'other_tools',
      parts=dataclasses.asdict(counts),
    )

  def pair(self) -> finmcp_scores.Pair:
    """Gold and predicted names."""
    return finmcp_scores.Pair(
      gold=self._turn.gold, predicted=tuple(self._predicted)
    )

  def record(self) -> types.Json:
    return dataclasses.asdict(self.pair())

  def close(self) -> None:
    pass

  def _answer(
    self, call: types.ToolCall | types.ParseError
  ) -> benchmark.Message:
    if isinstance(call, types.ParseError):
      return benchmark.Message(
        role='tool', text=f'Error: {call.kind}', error=call.kind
      )
    if len(self._predicted) < MAX_CALLS:
      self._predicted.append(str(call.name))
    key = _key(call.name, call.arguments)
    answers = self._recorded.get(key, ())
    if not answers:
      return benchmark.Message(
        role='tool', text=NOT_RECORDED, error='not_recorded'
      )
    self._asked[key] += 1
    nth = min(self._asked[key], len(answers)) - 1
    return benchmark.Message(role='tool', text=answers[nth])


def sample_scores(
  pairs: Mapping[str, finmcp_scores.Pair],
) -> dict[str, float]:
  """The benchmark's numbers, over samples: their turns are pooled.

  Args:
    pairs: by task id, all turns of the samples that are scored.
  """
  by_sample = collections.defaultdict(list)
  for task_id, pair in pairs.items():
    by_sample[task_id.rpartition('/')[0]].append(pair)
  return finmcp_scores.aggregate(
    [finmcp_scores.pooled(turns) for turns in by_sample.values()]
  )


def _read(
  key: str, sample: types.Json
) -> tuple[list[Turn], dict[str, list[str]]]:
  """A sample's turns, and its recorded answers by call."""
  category, messages = sample['task'], sample['messages']
  if category not in CATEGORIES:
    raise ValueError(f'task is {category!r}, and not one of {CATEGORIES}')
  turns, open_calls = [], {}
  recorded = collections.defaultdict(list)
  for i, message in enumerate(messages):
    role = message['role']
    if role == 'user':
      turns.append(([], messages[:i], _text(message)))
    elif role == 'assistant' and message.get('tool_calls'):
      calls = message['tool_calls']
      names = [call['function']['name'] for call in calls]
      if not all(isinstance(name, str) for name in names):
        raise TypeError('the name of a tool is no text')
      turns[-1][0].append(names)
      for name, call in zip(names, calls, strict=True):
        arguments = json.loads(call['function']['arguments'] or '{}')
        open_calls[call['id']] = _key(name, arguments)
    elif role == 'tool':
      recorded[open_calls[message['tool_call_id']]].append(_text(message))
  made = [
    Turn(
      sample_id=key, category=category, history=history, text=text, gold=gold
    )
    for gold, history, text in turns
  ]
  if not made:
    raise ValueError('it has no user message')
  return made, dict(recorded)


def _text(message: types.Json) -> str:
  content = message['content']
  if not isinstance(content, str):
    raise TypeError(f'the content of a {message["role"]} is no text')
  return tool_calls.clean(content)


def _key(name: Any, arguments: Any) -> str:
  """Equal for equal calls; what cannot be written down equals nothing."""
  try:
    return json.dumps([name, arguments], sort_keys=True, allow_nan=False)
  except (RecursionError, TypeError, ValueError):
    return ''


def _earlier(history: Sequence[types.Json]) -> str:
  if not history:
    return ''
  lines = '\n'.join(json.dumps(m, ensure_ascii=False) for m in history)
  return f'<earlier_messages>\n{lines}\n</earlier_messages>'


def _free(name: str) -> types.Json:
  parameters = {'type': 'object', 'properties': {}}
  function = {'name': name, 'description': '', 'parameters': parameters}
  return {'type': 'function', 'function': function}


def _list(path: pathlib.Path) -> list[Any]:
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, RecursionError) as e:
    raise errors.UserError(f'{path} cannot be read as JSON: {e}') from e
  if not isinstance(found, list):
    raise errors.UserError(f'{path} holds no list; give the published file')
  return found
