"""Host side of decoding: ragged lists of tokens in, `Generation`s out.

A `Session` is a batch of live rows. Prompts are prefilled once and shared by
the rows of their group; after that the session only ever extends rows, so the
work of an episode grows linearly with its turns. Prompt width, window widths
and cache lengths are fixed by the `Decoder`: the set of compiled programs is
closed, whatever the texts.
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from envace_jax import types
from envace_jax.model import transformer
from envace_jax.sampling import decode, samplers

Row = tuple[np.ndarray, np.ndarray]  # ids [T] int32, authors [T] int8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A model with everything that decides how it is sampled."""

  model: transformer.Transformer
  limits: types.Limits
  act: samplers.SamplerConfig
  rehearse: samplers.SamplerConfig
  act_stop_ids: tuple[int, ...]
  rehearse_stop_ids: tuple[int, ...]
  prompt_tokens: int  # every prompt is padded to this width
  widths: tuple[int, ...]  # windows in which rows are extended, ascending
  ladder: tuple[int, ...]  # cache lengths, ascending; attention covers one

  def __post_init__(self):
    for name in ('widths', 'ladder'):
      lengths = getattr(self, name)
      if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f'rollout.{name}={lengths}; use ascending lengths')
    if self.ladder[-1] != self.limits.max_row_tokens:
      raise ValueError(
        f'rollout.ladder ends at {self.ladder[-1]} but rows may have '
        f'max_row_tokens={self.limits.max_row_tokens}; make them equal'
      )
    if not 0 < self.prompt_tokens < self.limits.max_row_tokens:
      raise ValueError(
        f'prompt_tokens={self.prompt_tokens} must leave room in rows of '
        f'max_row_tokens={self.limits.max_row_tokens}'
      )

  @property
  def filtered(self) -> bool:
    return any(s.top_k > 0 or s.top_p < 1 for s in (self.act, self.rehearse))

  def settings(self) -> decode.RoleSettings:
    """Per-role settings as arrays, ACT first."""
    roles = (self.act, self.rehearse)
    stop_RV = np.zeros((2, self.model.config.vocab_size), bool)
    stop_RV[0, list(self.act_stop_ids)] = True
    stop_RV[1, list(self.rehearse_stop_ids)] = True
    return decode.RoleSettings(
      temperature=jnp.asarray([s.temperature for s in roles], jnp.float32),
      top_k=jnp.asarray([s.top_k for s in roles], jnp.int32),
      top_p=jnp.asarray([s.top_p for s in roles], jnp.float32),
      max_new=jnp.asarray(
        [self.limits.max_action_tokens, self.limits.max_observation_tokens],
        jnp.int32,
      ),
      stop=jnp.asarray(stop_RV),
    )

  def rung(self, length: int) -> int:
    """The smallest cache length on the ladder that holds `length` tokens."""
    return next(rung for rung in self.ladder if length <= rung)


class Session:
  """Live rows of one batch. Rows are numbered 0..B-1, group by group."""

  def __init__(
    self,
    decoder: Decoder,
    params,
    prompts: Sequence[Row],
    group_size: int,
    row_keys: jax.Array,
  ):
    """Prefills each prompt once and repeats it `group_size` times.

    Args:
      decoder: the model and its sampling settings.
      params: the policy's parameters.
      prompts: P rows of (ids, authors); P * group_size rows are opened.
      group_size: rows per prompt.
      row_keys: [P * group_size] typed keys.

    Raises:
      ValueError: a prompt is longer than the decoder's `prompt_tokens`.
    """
    self._decoder, self._params = decoder, params
    self._settings = decoder.settings()
    ids_PW, authors_PW, count_P = pad_prompts(decoder, prompts)
    self._cache_length = decoder.rung(decoder.prompt_tokens + 1)
    state = decode.prefill(
      decoder.model,
      params,
      ids_PW,
      authors_PW,
      count_P,
      row_keys,
      group_size=group_size,
      capacity=decoder.limits.max_row_tokens,
      cache_length=self._cache_length,
    )
    self._state = state
    self.lengths = np.repeat(count_P, group_size)
    self._queue: dict[int, list[Row]] = {}
    self.positions = ids_PW.size  # put through the model so far
    self.sampled_B = np.zeros(self.batch_size, int)  # tokens, kept or not

  @property
  def batch_size(self) -> int:
    return len(self.lengths)

  def room(self, row: int) -> int:
    """Tokens that still fit in a row."""
    return self._decoder.limits.max_row_tokens - int(self.lengths[row])

  def extend(self, row: int, ids: np.ndarray, authors: np.ndarray) -> None:
    """Appends tokens somebody else chose; they must fit.

    They reach the device together with those of the other rows, at the next
    `generate`.
    """
    if len(ids) > self.room(row):
      raise ValueError(
        f'row {row}: {len(ids)} tokens onto {self.lengths[row]} exceed '
        f'max_row_tokens={self._decoder.limits.max_row_tokens}'
      )
    self._queue.setdefault(row, []).append((ids, authors))
    self.lengths[row] += len(ids)

  def generate(
    self, role: types.Role, rows: Sequence[int]
  ) -> dict[int, types.Generation]:
    """One generation by `role` on each of the given rows."""
    self._flush()
    live_B = np.zeros((self.batch_size,), bool)
    live_B[list(rows)] = True
    limits = self._decoder.limits
    longest = int(self.lengths[list(rows)].max())
    budget = (limits.max_action_tokens, limits.max_observation_tokens)[role]
    self._make_room(min(longest + budget, limits.max_row_tokens))
    self._state, finished_B = decode.generate(
      self._decoder.model,
      self._params,
      self._state,
      live_B,
      jnp.int32(role),
      self._settings,
      filtered=self._decoder.filtered,
    )
    before, state = self.lengths, self._state
    tokens, logprobs, lengths, finished_B = jax.device_get(
      (state.tokens, state.logprobs, state.length, finished_B)
    )
    self.lengths = np.array(lengths)
    self.sampled_B += self.lengths - before
    self.positions += self.batch_size * int((lengths - before).max())
    return {
      row: types.Generation(
        role=role,
        ids=tokens[row, before[row] : lengths[row]],
        logprobs=logprobs[row, before[row] : lengths[row]],
        finished=bool(finished_B[row]),
      )
      for row in rows
    }

  def rewind(self, lengths: dict[int, int]) -> None:
    """Cuts the given rows back to some lengths, as if no more had been said.

    What is sampled next is drawn anew.
    """
    self._flush()
    length_B = np.array(self.lengths)
    for row, length in lengths.items():
      length_B[row] = min(length, length_B[row])
    self._state = decode.rewind(self._state, length_B)
    self.lengths = length_B

  def rows(self) -> list[types.Row]:
    """Every row, cut to its length."""
    self._flush()
    tokens, authors, logprobs = jax.device_get(
      (self._state.tokens, self._state.authors, self._state.logprobs)
    )
    return [
      types.Row(
        tokens=tokens[row, :n],
        authors=authors[row, :n],
        logprobs=logprobs[row, :n],
      )
      for row, n in enumerate(self.lengths)
    ]

  def _flush(self) -> None:
    """Extends all rows by what is queued, window by window."""
    queue = {
      row: tuple(np.concatenate(parts) for parts in zip(*spans, strict=True))
      for row, spans in self._queue.items()
    }
    self._queue = {}
    longest = max((len(ids) for ids, _ in queue.values()), default=0)
    self._make_room(int(self.lengths.max()))
    done = 0
    while done < longest:
      left, widths = longest - done, self._decoder.widths
      width = next((w for w in widths if left <= w), widths[-1])
      ids_BW = np.zeros((self.batch_size, width), np.int32)
      authors_BW = np.zeros((self.batch_size, width), np.int8)
      count_B = np.zeros((self.batch_size,), np.int32)
      for row, (ids, authors) in queue.items():
        window = slice(done, done + width)
        count_B[row] = n = len(ids[window])
        ids_BW[row, :n] = ids[window]
        authors_BW[row, :n] = authors[window]
      self._state = decode.extend(
        self._decoder.model,
        self._params,
        self._state,
        ids_BW,
        authors_BW,
        count_B,
      )
      self.positions += ids_BW.size
      done += width

  def _make_room(self, length: int) -> None:
    while length > self._cache_length:  # rung by rung: few programs
      self._cache_length = self._decoder.rung(self._cache_length + 1)
      self._state = decode.grow(self._state, self._cache_length)

  def warm_up(self) -> None:
    """Compiles every program that any session of this shape can need."""
    nothing_B = np.zeros((self.batch_size,), bool)
    for rung in self._decoder.ladder:
      self._make_room(rung)
      for width in self._decoder.widths:
        empty_BW = np.zeros((self.batch_size, width), np.int32)
        self._state = decode.extend(
          self._decoder.model,
          self._params,
          self._state,
          empty_BW,
          empty_BW.astype(np.int8),
          nothing_B.astype(np.int32),
        )
      self._state, _ = decode.generate(
        self._decoder.model,
        self._params,
        self._state,
        nothing_B,
        jnp.int32(0),
        self._settings,
        filtered=self._decoder.filtered,
      )
      self._state = decode.rewind(self._state, self.lengths)


def pad_prompts(
  decoder: Decoder, prompts: Sequence[Row]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Right-pads prompts: ids, authors [P, prompt_tokens] and counts [P].

  Raises:
    ValueError: a prompt is too long, with the three numbers that matter.
  """
  count_P = np.asarray([len(ids) for ids, _ in prompts], np.int32)
  width = decoder.prompt_tokens
  if count_P.max() > width:
    raise ValueError(
      f'a prompt of {count_P.max()} tokens exceeds prompt_tokens={width} '
      f'(rows hold {decoder.limits.max_row_tokens}); raise it or shorten the '
      'prompt'
    )
  ids_PW = np.zeros((len(prompts), width), np.int32)
  authors_PW = np.zeros((len(prompts), width), np.int8)
  for i, (ids, authors) in enumerate(prompts):
    ids_PW[i, : len(ids)] = ids
    authors_PW[i, : len(ids)] = authors
  return ids_PW, authors_PW, count_P
