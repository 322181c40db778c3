"""One request to a server, in as many attempts as it is worth.

  wait before attempt n = min(max_backoff, backoff 2^(n-1)) (1/2 + u/2),
                          or what the server asks for, if that is longer

u in [0, 1) is a hash of the request and n: two requests do not retry in step,
and a rerun waits exactly as long. An attempt has its own time limit, and all of
them with their waits have a deadline; a wait that would pass it is not begun.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
import dataclasses
import email.utils
import hashlib
import math
import time
from typing import Any, Generic, TypeVar

from envace_jax.endpoints import tally as tallies

T = TypeVar('T')

# Worth another try: the server's state, not the request, is to blame.
_TRANSIENT_STATUS = (408, 409, 425, 429)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """Limits of one request, in seconds."""

  max_attempts: int = 4
  timeout_s: float = 60.0  # one attempt
  deadline_s: float = 180.0  # all attempts and waits, once a slot is free
  backoff_s: float = 0.5
  max_backoff_s: float = 30.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise ValueError(f'{field.name}={value} must be positive')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
  """What a server sent, read as far as it could be."""

  text: str | None
  error: str = ''  # '' | 'bad_body' | 'truncated' | 'filtered'
  tokens_in: int = 0
  tokens_out: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
  """What became of a question: a value, or what went wrong last."""

  value: T | None = None
  error: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """Why an attempt gave no reply."""

  kind: str
  transient: bool = True
  retry_after_s: float = 0.0


async def ask(
  attempt: Callable[[int], Awaitable[Reply]],
  read: Callable[[str | None], tuple[T, str]],
  policy: Policy,
  key: str,
  tally: tallies.Tally,
  *,
  sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
  clock: Callable[[], float] = time.monotonic,
) -> Outcome[T]:
  """Attempts until there is a value; otherwise says what went wrong last.

  Args:
    attempt: makes the call number `n`, counted from 0; may raise anything.
    read: a reply's text -> (value, kind of what is wrong with it or '').
    policy: how often, and for how long.
    key: of the request's content; decides the jitter.
    tally: counts calls, retries, tokens and errors.
  """
  end = clock() + policy.deadline_s
  for n in range(policy.max_attempts):
    tally.counts['calls'] += 1
    tally.counts['retries'] += n > 0
    limit = max(0.0, min(policy.timeout_s, end - clock()))
    try:
      reply = await asyncio.wait_for(attempt(n), limit)
    except Exception as e:  # a client raises more than it documents
      fault = _fault_of(e)
    else:
      tally.counts['tokens_in'] += reply.tokens_in
      tally.counts['tokens_out'] += reply.tokens_out
      value, wrong = read(reply.text)
      if not (error := reply.error or wrong):
        return Outcome(value=value)
      fault = Fault(kind=error)
    tally.errors[fault.kind] += 1
    if not fault.transient:
      break
    pause = max(fault.retry_after_s, backoff_s(policy, key, n))
    if n + 1 == policy.max_attempts or clock() + pause >= end:
      break
    await sleep(pause)
  return Outcome(error=fault.kind)


def backoff_s(policy: Policy, key: str, attempt: int) -> float:
  """The wait after an attempt, jittered by content."""
  digest = hashlib.sha256(f'{key}/{attempt}'.encode()).digest()
  jitter = int.from_bytes(digest[:8], 'big') / 2**64
  longest = min(policy.max_backoff_s, policy.backoff_s * 2**attempt)
  return longest * (0.5 + 0.5 * jitter)


def retry_after_s(headers: Mapping[str, str], now: float) -> float:
  """Seconds a server asks to wait: a number or a date; 0 for neither."""
  text = headers.get('retry-after') or ''
  try:
    seconds = float(text)
  except ValueError:
    try:
      seconds = email.utils.parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
      return 0.0
  return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def reply_of(completion: Any) -> Reply:
  """Reads the JSON of a chat completion, whatever was sent."""
  usage = _get(completion, 'usage')
  tokens = {
    'tokens_in': _count(_get(usage, 'prompt_tokens')),
    'tokens_out': _count(_get(usage, 'completion_tokens')),
  }
  choices = _get(completion, 'choices')
  choice = choices[0] if isinstance(choices, list) and choices else None
  message = _get(choice, 'message')
  text = _get(message, 'content')
  error = ''
  if not isinstance(message, dict) or not isinstance(text, str | None):
    text, error = None, 'bad_body'
  elif choice.get('finish_reason') == 'length':
    error = 'truncated'
  elif choice.get('finish_reason') == 'content_filter':
    error = 'filtered'
  return Reply(text=text, error=error, **tokens)


def _fault_of(error: Exception) -> Fault:
  """The kind of an exception, by its shape: the client is not imported here."""
  status = getattr(error, 'status_code', None)
  if isinstance(status, int) and status >= 400:
    headers = getattr(getattr(error, 'response', None), 'headers', {})
    wait = retry_after_s(headers, time.time())
    if status == 429:
      return Fault(kind='rate_limited', retry_after_s=wait)
    if status >= 500 or status in _TRANSIENT_STATUS:
      return Fault(kind='server_error', retry_after_s=wait)
    return Fault(kind=f'refused_{status}', transient=False)
  names = {cls.__name__ for cls in type(error).__mro__}
  if isinstance(error, TimeoutError) or 'APITimeoutError' in names:
    return Fault(kind='timeout')
  if isinstance(error, OSError) or 'APIConnectionError' in names:
    return Fault(kind='connection')
  return Fault(kind='bad_body')


def _get(value: Any, key: str) -> Any:
  return value.get(key) if isinstance(value, dict) else None


def _count(value: Any) -> int:
  return value if isinstance(value, int) and value > 0 else 0
