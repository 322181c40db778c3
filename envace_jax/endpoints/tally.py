"""What was spent on an endpoint, and what it did wrong, counted by kind."""

import collections
from collections.abc import Mapping
from typing import Any


class Tally:
  """Counts between two reports; one thread writes at a time.

  `errors` counts what went wrong with single calls, also where a retry mended
  it; `lost` the questions that were never answered, by the last error's kind.
  """

  def __init__(self):
    # requests, cache_hits, calls, retries, tokens_in, tokens_out, cache_faults
    self.counts = collections.Counter()
    self.errors = collections.Counter()
    self.lost = collections.Counter()

  def take(self) -> Mapping[str, Any]:
    """The counts so far by name, with `errors` and `lost`; they start anew."""
    taken = {
      **self.counts,
      'errors': dict(self.errors),
      'lost': dict(self.lost),
    }
    self.__init__()
    return taken


def spend(who: str, counts: Mapping[str, Any], *, lost: str) -> dict[str, int]:
  """What answers cost and what went wrong, as flat numbers.

  Depends on what is cached and on the network. Arguments as in `describe`.
  """
  names = (
    'cache_hits',
    'calls',
    'retries',
    'tokens_in',
    'tokens_out',
    'cache_faults',
  )
  return {
    **{f'{who}/{name}': counts.get(name, 0) for name in names},
    **{
      f'{who}/{name}/{kind}': n
      for name, kinds in (('errors', counts['errors']), (lost, counts['lost']))
      for kind, n in kinds.items()
    },
  }


def describe(
  who: str, counts: Mapping[str, Any], *, lost: str, most: int = 3
) -> str:
  """One line for the log, with the most frequent errors.

  Args:
    who: was asked.
    counts: as `Tally.take` gives them; a missing one is 0.
    lost: the word for a question that got no answer.
    most: kinds of errors that are named.
  """
  n = collections.Counter({k: v for k, v in counts.items() if v})
  errors = collections.Counter(counts['errors']).most_common(most)
  kinds = ', '.join(f'{kind} {count}' for kind, count in errors) or 'none'
  return (
    f'{who}: {n["requests"]} requests, {sum(counts["lost"].values())} {lost}, '
    f'{n["cache_hits"]} cached, {n["calls"]} calls ({n["retries"]} retries), '
    f'{n["tokens_in"]}+{n["tokens_out"]} tokens; errors: {kinds}'
  )
