"""A whole batch of rehearsed episodes as one jitted program.

When both roles see the same view, nothing outside the policy is needed: every
row is a small state machine that samples, changes role on a stop token, is
handed the next role's header, counts steps and budgets, and stops for a named
reason. Rows are in different phases at the same time, so no row waits for
another to finish its turn, and the host is not asked until all are done.

  ACT --stop, call--> [header] REHEARSE --stop--> [header] ACT --reply--> end

Tokens are those of the host-driven loop in `alternation`, for the same keys.
Attention covers the used rung of the length ladder: one `while_loop` per rung,
the caches growing in between.
"""

from collections.abc import Sequence
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np

from envace_jax import types
from envace_jax.model import transformer
from envace_jax.rollout import episodes
from envace_jax.sampling import decode, generator
from envace_jax.text import formats, row_breaks
from envace_jax.text import template as templates
from envace_jax.worlds import base as worlds

# Stop codes on the device; 0 is 'still live'.
STOP_REASONS = (
  None,
  types.StopReason.REPLIED,
  types.StopReason.MAX_STEPS,
  types.StopReason.ACTION_TRUNCATED,
  types.StopReason.OBSERVATION_TRUNCATED,
  types.StopReason.CONTEXT_FULL,
)
_CODE = {reason: code for code, reason in enumerate(STOP_REASONS)}


@flax.struct.dataclass
class EpisodeState:
  decode: decode.DecodeState
  role: jax.Array  # [B] int32, whose generation is under way
  forced: jax.Array  # [B] int32, tokens of the role's header yet to come
  new_tokens: jax.Array  # [B] int32, tokens of this generation so far
  is_call: jax.Array  # [B] bool, the call marker stands in this action
  steps: jax.Array  # [B] int32, answered calls
  stop: jax.Array  # [B] int32, index into STOP_REASONS

  @property
  def live(self) -> jax.Array:
    return self.stop == 0


def rehearse_episodes(
  decoder: generator.Decoder,
  template: templates.Template,
  params,
  prompts: Sequence[generator.Row],
  group_size: int,
  row_keys: jax.Array,
) -> list[episodes.Finished]:
  """Rehearses `group_size` episodes per prompt, both roles by `params`.

  Args:
    decoder: the model and its sampling settings.
    template: gives the headers and the call marker.
    params: the policy.
    prompts: P rows ending in the ACT header.
    group_size: episodes per prompt.
    row_keys: [P * group_size] typed keys.

  Returns:
    P * group_size finished episodes, group by group.
  """
  row_breaks.refuse(template, user_turns=False, max_rows=1)
  ids_PW, authors_PW, count_P = generator.pad_prompts(decoder, prompts)
  header_RW, header_count_R = headers(template)
  state = run(
    decoder.model,
    params,
    ids_PW,
    authors_PW,
    count_P,
    row_keys,
    decoder.settings(),
    header_RW,
    header_count_R,
    np.asarray(template.marker.ids, np.int32),
    np.int32(decoder.limits.max_steps),
    group_size=group_size,
    ladder=decoder.ladder,
    filtered=decoder.filtered,
    marker_at_start=template.marker.at_start,
  )
  tokens, authors, logprobs, length, stop = jax.device_get(
    (
      state.decode.tokens,
      state.decode.authors,
      state.decode.logprobs,
      state.decode.length,
      state.stop,
    )
  )
  return [
    episodes.Finished(
      rows=(
        types.Row(
          tokens=tokens[row, :n],
          authors=authors[row, :n],
          logprobs=logprobs[row, :n],
        ),
      ),
      stop_reason=STOP_REASONS[stop[row]],
      sampled_tokens=int(np.isin(authors[row, :n], decode.ACT_REHEARSE).sum()),
      provenance=worlds.Provenance(source=types.Source.REHEARSED),
    )
    for row, n in enumerate(length)
  ]


def headers(template: templates.Template) -> tuple[np.ndarray, np.ndarray]:
  """What opens each role's later turns: ids [R, W], padded, and counts [R]."""
  spans = [
    template.header(joint)[0]
    for joint in (formats.Joint.ANSWERED, formats.Joint.CALLED)
  ]
  count_R = np.asarray([len(ids) for ids in spans], np.int32)
  header_RW = np.zeros((len(spans), max(1, count_R.max())), np.int32)
  for role, ids in enumerate(spans):
    header_RW[role, : len(ids)] = ids
  return header_RW, count_R


@functools.partial(
  jax.jit,
  static_argnums=0,
  static_argnames=('group_size', 'ladder', 'filtered', 'marker_at_start'),
)
def run(
  model: transformer.Transformer,
  params,
  ids_PW: jax.Array,
  authors_PW: jax.Array,
  count_P: jax.Array,
  row_keys: jax.Array,
  settings: decode.RoleSettings,
  header_RW: jax.Array,
  header_count_R: jax.Array,
  marker_M: jax.Array,
  max_steps: jax.Array,
  *,
  group_size: int,
  ladder: tuple[int, ...],
  filtered: bool,
  marker_at_start: bool = False,
) -> EpisodeState:
  """The program: prefill once per prompt, then decode rung by rung."""
  rungs = [rung for rung in ladder if rung > ids_PW.shape[1]]
  rows = decode.prefill(
    model,
    params,
    ids_PW,
    authors_PW,
    count_P,
    row_keys,
    group_size=group_size,
    capacity=rungs[-1],
    cache_length=rungs[0],
  )
  zeros_B = jnp.zeros_like(rows.length)
  state = EpisodeState(
    decode=rows,
    role=zeros_B,
    forced=zeros_B,  # prompts end in the first header
    new_tokens=zeros_B,
    is_call=zeros_B > 0,
    steps=zeros_B,
    stop=zeros_B,
  )
  advance = functools.partial(
    _advance,
    model=model,
    params=params,
    settings=settings,
    header_RW=header_RW,
    header_count_R=header_count_R,
    marker_M=marker_M,
    marker_at_start=marker_at_start,
    max_steps=max_steps,
    filtered=filtered,
  )
  for rung in rungs:
    state = state.replace(decode=decode.grow(state.decode, rung))
    # Feeding the pending token of a row of length n writes slot n - 1.
    fits = lambda state, rung=rung: (
      jnp.any(state.live)
      & (jnp.max(jnp.where(state.live, state.decode.length, 0)) <= rung)
    )
    state = jax.lax.while_loop(fits, advance, state)
  return state


def _advance(
  state: EpisodeState,
  *,
  model,
  params,
  settings,
  header_RW,
  header_count_R,
  marker_M,
  marker_at_start,
  max_steps,
  filtered,
) -> EpisodeState:
  """One token on every live row: its header, or a sample by its role."""
  rows, live_B = state.decode, state.live
  logits_BV, cache = decode.feed_pending(model, params, rows, live_B)
  sampled_B, logprob_B = decode.sample(
    logits_BV, rows, state.role, settings, filtered=filtered
  )
  forced_B = state.forced > 0
  # Of a header of n tokens, `forced` are left: the next is number n - forced.
  place_B = header_count_R[state.role] - state.forced
  token_B = jnp.where(forced_B, header_RW[state.role, place_B], sampled_B)
  author_B = jnp.where(
    forced_B,
    jnp.int8(types.Author.FORCED),
    jnp.asarray(decode.ACT_REHEARSE)[state.role],
  )
  rows = decode.append(
    rows.replace(cache=cache),
    token_B[:, None],
    author_B[:, None],
    live_B.astype(jnp.int32),
    jnp.where(forced_B, 0.0, logprob_B)[:, None],
  )

  sampled_B = live_B & ~forced_B
  new_B = state.new_tokens + sampled_B
  acts_B = state.role == types.Role.ACT
  ended_B = sampled_B & settings.stop[state.role, token_B]
  marked_B = _ends_in(rows, marker_M) & (
    new_B == len(marker_M) if marker_at_start else new_B >= len(marker_M)
  )
  is_call_B = state.is_call | (sampled_B & acts_B & marked_B)
  answered_B = ended_B & ~acts_B
  called_B = ended_B & acts_B & is_call_B
  cut_B = sampled_B & ~ended_B & (new_B >= settings.max_new[state.role])
  steps_B = state.steps + answered_B
  turns_B = answered_B | (called_B & (steps_B < max_steps))

  reasons = (
    (ended_B & acts_B & ~is_call_B, types.StopReason.REPLIED),
    (called_B & (steps_B >= max_steps), types.StopReason.MAX_STEPS),
    (cut_B & acts_B, types.StopReason.ACTION_TRUNCATED),
    (cut_B & ~acts_B, types.StopReason.OBSERVATION_TRUNCATED),
    (live_B & (rows.length >= rows.tokens.shape[1]),
     types.StopReason.CONTEXT_FULL),
  )  # fmt: skip
  stop_B = state.stop
  for happened_B, reason in reasons:
    stop_B = jnp.where((stop_B == 0) & happened_B, _CODE[reason], stop_B)
  role_B = jnp.where(turns_B, 1 - state.role, state.role)
  left_B = jnp.where(turns_B, header_count_R[role_B], state.forced - forced_B)
  return EpisodeState(
    decode=rows,
    role=role_B,
    forced=jnp.where(live_B, left_B, state.forced),
    new_tokens=jnp.where(turns_B, 0, new_B),
    is_call=is_call_B & ~answered_B,
    steps=steps_B,
    stop=stop_B,
  )


def _ends_in(rows: decode.DecodeState, marker_M: jax.Array) -> jax.Array:
  """[B] bool: whether a row's last tokens are the marker."""
  size = len(marker_M)
  place_BM = rows.length[:, None] - size + jnp.arange(size)[None, :]
  last_BM = jnp.take_along_axis(rows.tokens, jnp.maximum(place_BM, 0), axis=1)
  return jnp.all(last_BM == marker_M[None, :], axis=1)
