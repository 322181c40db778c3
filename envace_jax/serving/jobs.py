"""What is asked of the engine, and what comes back."""

from collections.abc import Callable
import concurrent.futures
import dataclasses
import enum

import numpy as np

from envace_jax import types


class Refused(Exception):
  """A request that is not answered: which HTTP status, and why."""

  def __init__(
    self, status: int, code: str, message: str, param: str | None = None
  ):
    super().__init__(message)
    self.status, self.code, self.param = status, code, param


class Ended(enum.Enum):
  """Why a generation is over."""

  STOPPED = 'stopped'  # it sampled a stop token
  LENGTH = 'length'  # it may not be, or the row cannot get, any longer
  SEEN = 'seen'  # whoever listens had enough


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
  """Some sampled tokens with what is known of them."""

  ids: np.ndarray  # [T] int32
  logprobs: np.ndarray  # [T] float32, of the policy itself, at temperature 1
  top_ids: np.ndarray  # [T, K] int32; K is 0 where nobody asked
  top_logprobs: np.ndarray  # [T, K] float32


def concatenate(parts: list[Tokens]) -> Tokens:
  names = [field.name for field in dataclasses.fields(Tokens)]
  join = lambda name: np.concatenate([getattr(p, name) for p in parts])
  return Tokens(**{name: join(name) for name in names})


NOTHING = Tokens(
  ids=np.zeros((0,), np.int32),
  logprobs=np.zeros((0,), np.float32),
  top_ids=np.zeros((0, 0), np.int32),
  top_logprobs=np.zeros((0, 0), np.float32),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How one answer is sampled."""

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  max_tokens: int | None = None  # None: as many as the row holds
  seed: int | None = None  # None: drawn
  top: int = 0  # alternatives that are reported for each token


@dataclasses.dataclass(eq=False, kw_only=True)
class Job:
  """One answer to one prompt. Jobs are equal only if they are the same."""

  prompt: np.ndarray  # [T] int32, never empty
  sampling: Sampling
  stop_ids: tuple[int, ...]
  author: types.Author = types.Author.ACT
  choice: int = 0  # which of several answers under one seed
  leader: 'Job | None' = None  # whose prompt is read for this one too
  deadline: float | None = None  # in `time.monotonic()`
  # Told of tokens as they come, by the engine's thread; True ends it.
  listen: Callable[[Tokens], bool] = lambda tokens: False
  done: concurrent.futures.Future = dataclasses.field(
    default_factory=concurrent.futures.Future
  )
  is_cancelled: bool = False
  is_read: bool = False  # the whole prompt is in its row
  reused: int = 0  # tokens of the prompt that a row held already

  def cancel(self) -> None:
    """Nobody waits any more; the row is free a moment later."""
    self.is_cancelled = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """What a job comes to."""

  tokens: Tokens
  ended: Ended
  reused: int  # prompt tokens that were not read again
