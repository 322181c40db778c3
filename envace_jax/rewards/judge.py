"""Who decides what no check can: the seam, the counts, and a local judge.

A judge gets the requests of a whole train step at once and gives one verdict
for each, in their order. It never raises for what a model or a network did:
what could not be judged ABSTAINs, and is counted by kind.

`judge_endpoint.EndpointJudge` asks a server. `FunctionJudge` asks functions
from texts to texts, such as a local policy; it caches nothing, since the
parameters behind a function change.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Protocol

from absl import logging

from envace_jax import types
from envace_jax.endpoints import tally as tallies
from envace_jax.rewards import judge_prompt


class Judge(Protocol):
  """Decides criteria at messages."""

  @property
  def num_judges(self) -> int:
    """How many judges are asked; `JudgeRequest.judge_index` is below it."""

  def judge(
    self, requests: Sequence[judge_prompt.JudgeRequest]
  ) -> list[types.Verdict]:
    """One verdict per request, in order."""

  def take_report(self) -> 'JudgeReport':
    """What happened since the last report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeReport:
  """What a judge did since its last report.

  `errors` counts what went wrong with single calls, also where a retry mended
  it; `abstained` counts the verdicts that were lost, by the last error's kind.
  """

  requests: int = 0
  cache_hits: int = 0  # answered from disk, or by an equal request of the batch
  calls: int = 0
  retries: int = 0  # calls after the first one of a request
  tokens_in: int = 0  # as the server counts them
  tokens_out: int = 0
  cache_faults: int = 0
  errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
  abstained: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def num_abstained(self) -> int:
    return sum(self.abstained.values())

  def verdicts(self) -> dict[str, int]:
    """What follows from the verdicts alone, as flat numbers.

    An interruption changes them only as far as it changes rewards.
    """
    return {
      'judge/requests': self.requests,
      'judge/abstained': self.num_abstained,
    }

  def spend(self) -> dict[str, int]:
    """What the verdicts cost, and what went wrong, as flat numbers.

    Depends on what is cached and on the network.
    """
    return tallies.spend('judge', self._counts(), lost='abstained')

  def line(self, most: int = 3) -> str:
    """One line for the log, with the most frequent errors."""
    return tallies.describe(
      'judge', self._counts(), lost='abstained', most=most
    )

  def _counts(self) -> dict:
    """The report as `endpoints.tally` has it."""
    counts = dataclasses.asdict(self)
    counts['lost'] = counts.pop('abstained')
    return counts


def take_report(tally: tallies.Tally) -> JudgeReport:
  """The counts so far, which start anew."""
  counts = dict(tally.take())
  return JudgeReport(abstained=counts.pop('lost'), **counts)


class FunctionJudge:
  """Asks functions, one per judge, that map a batch of prompts to answers."""

  def __init__(
    self,
    functions: Sequence[Callable[[Sequence[str]], Sequence[str]]],
    *,
    max_chars: int = 24_000,
  ):
    if not functions:
      raise ValueError('a FunctionJudge needs a function')
    self._functions = tuple(functions)
    self._max_chars = max_chars
    self._tally = tallies.Tally()

  @property
  def num_judges(self) -> int:
    return len(self._functions)

  def judge(
    self, requests: Sequence[judge_prompt.JudgeRequest]
  ) -> list[types.Verdict]:
    self._tally.counts['requests'] += len(requests)
    verdicts = [types.Verdict.ABSTAIN] * len(requests)
    for index, function in enumerate(self._functions):
      mine = [i for i, r in enumerate(requests) if r.judge_index == index]
      if not mine:
        continue
      prompts = [
        judge_prompt.SYSTEM
        + '\n\n'
        + judge_prompt.render(requests[i], self._max_chars)
        for i in mine
      ]
      for i, answer in zip(mine, self._ask(function, prompts), strict=True):
        verdicts[i] = answer.verdict
        if answer.error:
          self._tally.errors[answer.error] += 1
          self._tally.lost[answer.error] += 1
    return verdicts

  def take_report(self) -> JudgeReport:
    """What happened since the last report."""
    return take_report(self._tally)

  def _ask(self, function, prompts) -> list[judge_prompt.Answer]:
    self._tally.counts['calls'] += len(prompts)
    try:
      texts = list(function(prompts))
    except Exception as e:  # whatever a model does, the run goes on
      logging.warning('a judge function raised %s: %s', type(e).__name__, e)
      return [_failed('raised')] * len(prompts)
    if len(texts) != len(prompts):
      return [_failed('wrong_count')] * len(prompts)
    return [
      judge_prompt.read(text) if isinstance(text, str) else _failed('empty')
      for text in texts
    ]


def _failed(kind: str) -> judge_prompt.Answer:
  return judge_prompt.Answer(verdict=types.Verdict.ABSTAIN, error=kind)
