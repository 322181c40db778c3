"""Episodes become arrays here, and masks are read off authors.

A `TrainBatch` row is one transcript or several, right-padded: tokens, who wrote
them, their positions in their own transcript, behaviour log-probs and
advantages. Which tokens are targets is a function of their authors, of nothing
else: no mask is inferred from a pad id or a marker, and there is no default of
"all ones". Token t of a transcript is predicted from its tokens < t, so a mask
set at t means "token t is a target"; token 0 has no context and is never one.

A policy is trained on what it sampled (`AUTHOR_OF_ROLE`). Recorded attempts
have real observations, written by `WORLD`; a model learning from them must
learn to write those too (`SUPERVISED_AUTHORS`).
"""

from collections.abc import Collection, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from envace_jax import types
from envace_jax.learning import packing
from envace_jax.model import per_role

NUM_ROLES = len(types.Role)
SAMPLED_AUTHORS = tuple(types.AUTHOR_OF_ROLE[role] for role in types.Role)
SUPERVISED_AUTHORS = (
  types.Author.ACT,
  types.Author.REHEARSE,
  types.Author.WORLD,
)


@flax.struct.dataclass
class TrainBatch:
  """B right-padded rows of transcripts. Rows of length 0 are padding."""

  tokens: jax.Array  # [B, T] int32
  authors: jax.Array  # [B, T] int32, values of types.Author
  logprobs: jax.Array  # [B, T] float32, behaviour; 0 where nobody sampled
  # [B, T] float32: the transcript's, in the role that wrote the token.
  advantages: jax.Array
  # [B, T] int32: 0 where a transcript begins, and on from there; padding goes
  # on with the last one.
  positions: jax.Array
  lengths: jax.Array  # [B] int32, tokens of all transcripts of the row
  # [B, T] float32: the trainer's own view of the same choices, before its first
  # update on these rows. None where the behaviour log-probs stand for it.
  proximal_logprobs: jax.Array | None = None


def valid(batch: TrainBatch) -> jax.Array:
  """valid_BT: True on the tokens of a row, False on its padding."""
  return jnp.arange(batch.tokens.shape[1])[None, :] < batch.lengths[:, None]


def loss_mask(
  batch: TrainBatch, authors: Collection[types.Author]
) -> jax.Array:
  """mask_BT: True where the token is a target written by one of `authors`."""
  written_BT = jnp.zeros(batch.authors.shape, bool)
  for author in authors:
    written_BT |= batch.authors == int(author)
  return written_BT & (batch.positions > 0) & valid(batch)


def role_mask(batch: TrainBatch, role: types.Role) -> jax.Array:
  """mask_BT of the tokens that the policy sampled in `role`."""
  return loss_mask(batch, (types.AUTHOR_OF_ROLE[role],))


def num_transcripts(batch: TrainBatch) -> jax.Array:
  """Transcripts in the rows of a batch, [] float32."""
  begins_BT = valid(batch) & (batch.positions == 0)
  return begins_BT.sum(dtype=jnp.float32)


def advantage_per_token(
  authors_BT: np.ndarray, advantages_BR: np.ndarray
) -> np.ndarray:
  """adv_BT float32 of B transcripts: that of the author's role, else 0."""
  adv_BT = np.zeros(np.shape(authors_BT), np.float32)
  for role in types.Role:
    written_BT = authors_BT == int(types.AUTHOR_OF_ROLE[role])
    adv_BT = np.where(written_BT, advantages_BR[:, role, None], adv_BT)
  return adv_BT.astype(np.float32)


def cut(rows: Any, length: int) -> Any:
  """The same batches without what lies beyond `length` tokens."""
  return jax.tree.map(lambda x: x if x.ndim == 1 else x[:, :length], rows)


def row_tokens(rows: Any) -> int:
  """T of the widest of some batches."""
  return max(batch.tokens.shape[1] for batch in all_of(rows))


def longest(rows: Any) -> jax.Array:
  """Tokens of the longest row of some batches, [] int32."""
  return jnp.max(jnp.stack([jnp.max(b.lengths) for b in all_of(rows)]))


def all_of(rows: Any) -> list[TrainBatch]:
  """The batches that a tree of batches holds."""
  return jax.tree.leaves(rows, is_leaf=lambda x: isinstance(x, TrainBatch))


def pack_episodes(
  episodes: Sequence[types.Episode],
  advantages_ER: np.ndarray,
  *,
  length_buckets: Sequence[int],
  batch_size: int,
  microbatches: int = 1,
  packed: bool = False,
) -> TrainBatch:
  """The transcripts of all episodes, in rows of the smallest bucket that fits.

  `packed` lets transcripts share rows, and leaves the other rows empty. Rows
  are laid out so that the microbatches of a train step hold rows of similar
  length; the order of episodes is not kept.

  Raises:
    ValueError: there are more transcripts than `batch_size`, one is longer
      than every bucket, no token is trained, or an array is not finite.
  """
  _check_episodes(episodes, advantages_ER)
  batch = _pack(
    [(r.tokens, r.authors, r.logprobs) for e in episodes for r in e.rows],
    np.repeat(advantages_ER, [len(e.rows) for e in episodes], axis=0),
    length_buckets=length_buckets,
    batch_size=batch_size,
    microbatches=microbatches,
    packed=packed,
  )
  return _with_targets(batch, SAMPLED_AUTHORS)


def pack_views(
  episodes: Sequence[types.Episode],
  advantages_ER: np.ndarray,
  *,
  length_buckets: Sequence[int],
  batch_size: int,
  microbatches: int = 1,
  packed: bool = False,
) -> per_role.PerRole:
  """Each role's row of every episode, `batch_size` for the role's own network.

  REHEARSE may have sampled nothing: an actor that calls no tool asks nothing.

  Raises:
    ValueError: an episode has not one row per role, each sampled by its role
      alone: a network would learn what the other one said.
  """
  _check_episodes(episodes, advantages_ER)
  for i, episode in enumerate(episodes):
    sampled = [
      {types.Author(a) for a in row.authors} & set(SAMPLED_AUTHORS)
      for row in episode.rows
    ]
    own = [{author} for author in SAMPLED_AUTHORS]
    if len(sampled) != NUM_ROLES or not all(map(set.issubset, sampled, own)):
      raise ValueError(
        f'episode {i} ({episode.task_id}) has not one row per role, each '
        "sampled by its role alone; roll it out with rollout.view='split'"
      )
  act, rehearse = (
    _pack(
      [(r.tokens, r.authors, r.logprobs) for r in rows],
      advantages_ER,
      length_buckets=length_buckets,
      batch_size=batch_size,
      microbatches=microbatches,
      packed=packed,
    )
    for rows in zip(*(e.rows for e in episodes), strict=True)
  )
  return per_role.PerRole(
    act=_with_targets(act, (types.Author.ACT,)), rehearse=rehearse
  )


def pack_rows(
  rows: Sequence[tuple[np.ndarray, np.ndarray]],
  *,
  length_buckets: Sequence[int],
  batch_size: int,
  microbatches: int = 1,
  packed: bool = False,
) -> TrainBatch:
  """`pack_episodes` of recorded (tokens, authors), which no policy sampled."""
  batch = _pack(
    [(tokens, authors, np.zeros(len(tokens))) for tokens, authors in rows],
    np.zeros((len(rows), NUM_ROLES)),
    length_buckets=length_buckets,
    batch_size=batch_size,
    microbatches=microbatches,
    packed=packed,
  )
  return _with_targets(batch, SUPERVISED_AUTHORS)


def _pack(
  transcripts,
  advantages_BR,
  *,
  length_buckets,
  batch_size,
  microbatches,
  packed,
):
  if len(transcripts) > batch_size:
    raise ValueError(
      f'{len(transcripts)} rows do not fit batch_size={batch_size}'
    )
  lengths = [len(tokens) for tokens, _, _ in transcripts]
  T = _bucket(lengths, length_buckets)
  if packed:
    rows = packing.first_fit(lengths, T)
  else:
    rows = [[i] for i in range(len(transcripts))]
  shape = (batch_size, T)
  batch = TrainBatch(
    tokens=np.zeros(shape, np.int32),
    authors=np.full(shape, types.Author.PROMPT, np.int32),
    logprobs=np.zeros(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    positions=np.tile(np.arange(T, dtype=np.int32), (batch_size, 1)),
    lengths=np.zeros(batch_size, np.int32),
  )
  for b, members in enumerate(rows):
    for i in members:
      _append(batch, b, i, transcripts[i], advantages_BR[i])
  order = _by_length(batch.lengths, microbatches)
  return jax.tree.map(lambda x: x[order], batch)


def _append(batch, b, index, transcript, advantages_R):
  """Writes a transcript behind what row b holds already."""
  tokens, authors, logprobs = transcript
  n, start = len(tokens), batch.lengths[b]
  if not n == len(authors) == len(logprobs):
    raise ValueError(
      f'row {index} has {n} tokens, {len(authors)} authors and '
      f'{len(logprobs)} log-probs'
    )
  span = slice(start, start + n)
  batch.tokens[b, span] = tokens
  batch.authors[b, span] = authors
  batch.logprobs[b, span] = logprobs
  (batch.advantages[b, span],) = advantage_per_token(
    np.asarray(authors)[None], advantages_R[None]
  )
  batch.positions[b, start:] = np.arange(batch.tokens.shape[1] - start)
  batch.lengths[b] += n


def _with_targets(batch, authors):
  """The batch, if it has anything to learn."""
  written_BT = np.isin(batch.authors, [int(a) for a in authors])
  if not (written_BT & (batch.positions > 0)).any():
    names = ', '.join(author.name for author in authors)
    count = int(((batch.positions == 0) & np.asarray(valid(batch))).sum())
    raise ValueError(
      f'0 trainable tokens in {count} rows: none was written by {names}'
    )
  return batch


def _by_length(lengths: np.ndarray, microbatches: int) -> np.ndarray:
  """An order of rows in which each microbatch has similar lengths.

  Microbatch m takes rows m, m + M, ... (see `step.accumulate`):

    sorted rows 0 1 2 3 4 5, M = 3  ->  laid out 0 2 4 1 3 5
  """
  if microbatches == 1:
    return np.arange(len(lengths))
  return np.argsort(lengths, kind='stable').reshape(microbatches, -1).T.ravel()


def _bucket(lengths, length_buckets):
  buckets = sorted(length_buckets)
  longest = max(lengths, default=0)
  for bucket in buckets:
    if longest <= bucket:
      return bucket
  raise ValueError(
    f'row {int(np.argmax(lengths))} has {longest} tokens, more than the '
    f'largest of length_buckets, {buckets[-1]}'
  )


def _check_episodes(episodes, advantages_ER):
  if np.shape(advantages_ER) != (len(episodes), NUM_ROLES):
    raise ValueError(
      f'advantages have shape {np.shape(advantages_ER)}; '
      f'{len(episodes)} episodes need {(len(episodes), NUM_ROLES)}'
    )
  if not np.isfinite(advantages_ER).all():
    raise ValueError('advantages are not finite')
  for i, episode in enumerate(episodes):
    _check_behaviour(i, episode)


def _check_behaviour(index, episode):
  """A sampled token without its log-prob would train on a made-up ratio."""
  for row in episode.rows:
    sampled = np.isin(row.authors, [int(a) for a in SAMPLED_AUTHORS])
    logprobs = np.asarray(row.logprobs)[sampled]
    if np.isfinite(logprobs).all() and (logprobs <= 1e-5).all():
      continue
    raise ValueError(
      f'episode {index} ({episode.task_id}) has sampled tokens whose '
      'behaviour log-probs are not finite numbers <= 0'
    )
