"""Episodes become arrays here, and masks are read off authors.

A `TrainBatch` row is one transcript, right-padded: tokens, who wrote them,
the behaviour log-probs, and one advantage per role. Which tokens are targets
is a function of their authors, of nothing else: no mask is inferred from a
pad id or a marker, and there is no default of "all ones". Token t of a row is
predicted from tokens < t, so a mask set at t means "token t is a target";
token 0 has no context and is never one.

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
  """B right-padded rows. Rows of length 0 are padding."""

  tokens: jax.Array  # [B, T] int32
  authors: jax.Array  # [B, T] int32, values of types.Author
  logprobs: jax.Array  # [B, T] float32, behaviour; 0 where nobody sampled
  advantages: jax.Array  # [B, R] float32
  lengths: jax.Array  # [B] int32
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
  has_context_BT = jnp.arange(batch.tokens.shape[1])[None, :] > 0
  return written_BT & has_context_BT & valid(batch)


def role_mask(batch: TrainBatch, role: types.Role) -> jax.Array:
  """mask_BT of the tokens that the policy sampled in `role`."""
  return loss_mask(batch, (types.AUTHOR_OF_ROLE[role],))


def advantage_per_token(batch: TrainBatch) -> jax.Array:
  """adv_BT: the row's advantage in the role that wrote the token, else 0."""
  adv_BT = jnp.zeros(batch.tokens.shape, jnp.float32)
  for role in types.Role:
    adv_B1 = batch.advantages[:, role, None]
    adv_BT = jnp.where(role_mask(batch, role), adv_B1, adv_BT)
  return adv_BT


def cut(rows: Any, length: int) -> Any:
  """The same batches without what lies beyond `length` tokens."""
  return jax.tree.map(
    lambda batch: batch.replace(
      tokens=batch.tokens[:, :length],
      authors=batch.authors[:, :length],
      logprobs=batch.logprobs[:, :length],
      proximal_logprobs=(
        None
        if batch.proximal_logprobs is None
        else batch.proximal_logprobs[:, :length]
      ),
    ),
    rows,
    is_leaf=lambda x: isinstance(x, TrainBatch),
  )


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
) -> TrainBatch:
  """The rows of all episodes, padded to the smallest bucket that fits them.

  Rows are laid out so that the microbatches of a train step hold rows of
  similar length; the order of episodes is not kept.
  """
  _check_episodes(episodes, advantages_ER)
  packed = _pack(
    [(r.tokens, r.authors, r.logprobs) for e in episodes for r in e.rows],
    np.repeat(advantages_ER, [len(e.rows) for e in episodes], axis=0),
    length_buckets=length_buckets,
    batch_size=batch_size,
    microbatches=microbatches,
  )
  return _with_targets(packed, SAMPLED_AUTHORS)


def pack_views(
  episodes: Sequence[types.Episode],
  advantages_ER: np.ndarray,
  *,
  length_buckets: Sequence[int],
  batch_size: int,
  microbatches: int = 1,
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
) -> TrainBatch:
  """Packs recorded (tokens, authors) rows, which have no behaviour policy."""
  packed = _pack(
    [(tokens, authors, np.zeros(len(tokens))) for tokens, authors in rows],
    np.zeros((len(rows), NUM_ROLES)),
    length_buckets=length_buckets,
    batch_size=batch_size,
    microbatches=microbatches,
  )
  return _with_targets(packed, SUPERVISED_AUTHORS)


def _pack(rows, advantages_BR, *, length_buckets, batch_size, microbatches):
  if len(rows) > batch_size:
    raise ValueError(f'{len(rows)} rows do not fit batch_size={batch_size}')
  length = _bucket([len(tokens) for tokens, _, _ in rows], length_buckets)
  packed = TrainBatch(
    tokens=np.zeros((batch_size, length), np.int32),
    authors=np.full((batch_size, length), types.Author.PROMPT, np.int32),
    logprobs=np.zeros((batch_size, length), np.float32),
    advantages=np.zeros((batch_size, NUM_ROLES), np.float32),
    lengths=np.zeros(batch_size, np.int32),
  )
  for i, (tokens, authors, logprobs) in enumerate(rows):
    n = len(tokens)
    if not n == len(authors) == len(logprobs):
      raise ValueError(
        f'row {i} has {n} tokens, {len(authors)} authors and '
        f'{len(logprobs)} log-probs'
      )
    packed.tokens[i, :n] = tokens
    packed.authors[i, :n] = authors
    packed.logprobs[i, :n] = logprobs
    packed.lengths[i] = n
  packed.advantages[: len(rows)] = advantages_BR
  order = _by_length(packed.lengths, microbatches)
  return jax.tree.map(lambda x: x[order], packed)


def _with_targets(packed, authors):
  """The batch, if it has anything to learn."""
  if not np.isin(packed.authors[:, 1:], [int(a) for a in authors]).any():
    names = ', '.join(author.name for author in authors)
    rows = int((packed.lengths > 0).sum())
    raise ValueError(
      f'0 trainable tokens in {rows} rows: none was written by {names}'
    )
  return packed


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
