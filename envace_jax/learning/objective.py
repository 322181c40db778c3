"""What is minimised, as pure functions of parameters and rows.

  supervised   sum_r w_r sum_t -log p(token_t) / D_r        both roles
  policy       sum_r sum_t (w_r pg_t + kl_r k_t) / D_r
               + nll_weight sum_t -log p(token_t) / D       anchor rows

The anchor is a batch of recorded attempts of which only the WORLD-authored
tokens count: what a real environment returned, next to what the policy would
like it to return. D is counted over the whole batch before any of it is cut
into microbatches; `Normalizer` says what it counts, and all terms of a role
share it. An option whose weight is 0 is not computed; its metric is 0.

pg_t is one of `learning.surrogates`, k_t one of `learning.kl`. pg_t is
homogeneous in the advantage, so the weight w_r is also the scale of role r's
advantages: w = 0 stops its gradient, 0 < w < 1 softens it. Clipping makes one
difference: -pg_t(A) is not pg_t(-A). A negative w_r therefore means advantages
of the opposite sign, weighted by |w_r|: the world is trained against the actor.
"""

from collections.abc import Mapping
import dataclasses
import enum

import jax
import jax.numpy as jnp

from envace_jax import types
from envace_jax.learning import batch as batches
from envace_jax.learning import kl, losses, row_scores, surrogates
from envace_jax.model import logprobs, per_role, transformer

Sums = dict[str, losses.WeightedSum]

# What each role learns from recorded attempts: there, the world is real.
RECORDED_AUTHORS = {
  types.Role.ACT: (types.Author.ACT,),
  types.Role.REHEARSE: (types.Author.REHEARSE, types.Author.WORLD),
}
ANCHOR_AUTHORS = (types.Author.WORLD,)


class Normalizer(enum.Enum):
  """What the summed token losses of a batch are divided by."""

  TOKEN = 'token'  # trained tokens of all roles: the published token-mean
  ROLE_TOKEN = 'role_token'  # each role by its own tokens: an equal say
  ROW = 'row'  # transcripts: token losses add up, length earns no discount


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
  """Weights and numerics. Pairs are (act, rehearse).

  Temperatures are those of the training rollout: behaviour log-probs belong
  to the distribution sampled from, so the policy is rescored under the same.
  """

  policy_weight_per_role: tuple[float, float] = (1.0, 1.0)  # 0: role is frozen
  temperature_per_role: tuple[float, float] = (1.0, 1.0)
  surrogate: surrogates.Surrogate = surrogates.Surrogate.TOKEN
  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float | None = None  # bound on the objective where A < 0, in A
  importance_cap: float | None = None  # of trainer / sampler, per token
  kl_weight_per_role: tuple[float, float] = (0.0, 0.0)
  kl_estimator: kl.KLEstimator = kl.KLEstimator.K3
  nll_weight: float = 0.0  # of the anchor batch
  supervised_weight_per_role: tuple[float, float] = (1.0, 1.0)
  normalizer: Normalizer = Normalizer.TOKEN
  logprob_chunk: int = 128  # time steps whose logits exist at once
  microbatches: int = 1
  row_buckets: tuple[int, ...] = ()  # lengths a microbatch may be cut to
  packed: bool = False  # transcripts share rows: skip microbatches left empty

  def __post_init__(self):
    for name in (
      'policy_weight_per_role',
      'kl_weight_per_role',
      'supervised_weight_per_role',
    ):
      pair = getattr(self, name)
      if len(pair) != batches.NUM_ROLES:
        raise ValueError(f'{name}={pair}; give (act, rehearse)')
      if min(pair) < 0 and name != 'policy_weight_per_role':
        raise ValueError(f'{name}={pair}; give (act, rehearse), each >= 0')
    self._check_adversary()
    if (
      len(self.temperature_per_role) != batches.NUM_ROLES
      or min(self.temperature_per_role) <= 0
    ):
      raise ValueError(
        f'temperature_per_role={self.temperature_per_role}; a rollout that '
        'is trained on is sampled at (act, rehearse) temperatures above 0'
      )
    if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
      raise ValueError(
        f'clip_low={self.clip_low} must be in [0, 1] and '
        f'clip_high={self.clip_high} at least 0'
      )
    if self.dual_clip is not None and self.dual_clip <= 1:
      raise ValueError(
        f'dual_clip={self.dual_clip} must be above 1: on-policy, everything '
        'would be stopped; None is off'
      )
    if self.importance_cap is not None and self.importance_cap < 1:
      raise ValueError(
        f'importance_cap={self.importance_cap} must be at least 1: it would '
        'scale down a sampler that agrees with the trainer; None is off'
      )
    if self.nll_weight < 0:
      raise ValueError(f'nll_weight={self.nll_weight} must not be negative')
    if min(self.microbatches, self.logprob_chunk) < 1:
      raise ValueError(
        f'microbatches={self.microbatches} and '
        f'logprob_chunk={self.logprob_chunk} must be at least 1'
      )

  def _check_adversary(self):
    act, rehearse = self.policy_weight_per_role
    is_held = self.nll_weight > 0 or self.kl_weight_per_role[1] > 0
    if act < 0 or (rehearse < 0 and not is_held):
      raise ValueError(
        f'policy_weight_per_role={self.policy_weight_per_role}: only rehearse '
        'may be negative, and needs an anchor or a KL weight, or else the '
        'world learns to answer anything that makes the actor fail'
      )

  @property
  def bounds(self) -> surrogates.Bounds:
    return surrogates.Bounds(
      low=self.clip_low, high=self.clip_high, dual=self.dual_clip
    )

  @property
  def uses_reference(self) -> bool:
    return any(self.kl_weight_per_role)

  @property
  def uses_anchor(self) -> bool:
    return self.nll_weight > 0

  @property
  def trained_roles(self) -> tuple[types.Role, ...]:
    """Roles with a policy or KL weight: the ones whose tokens count."""
    weights = (self.policy_weight_per_role, self.kl_weight_per_role)
    return tuple(r for r in types.Role if any(pair[r] for pair in weights))


def denominators(
  masks: Mapping[types.Role, jax.Array],
  num_transcripts: jax.Array,
  normalizer: Normalizer,
) -> Mapping[types.Role, jax.Array]:
  """The divisor of each role, never 0, from the masks of a whole batch."""
  tokens = {role: mask.sum(dtype=jnp.float32) for role, mask in masks.items()}
  if normalizer is Normalizer.TOKEN:
    total = sum(tokens.values(), jnp.float32(0.0))
    tokens = dict.fromkeys(tokens, total)
  elif normalizer is Normalizer.ROW:
    tokens = dict.fromkeys(tokens, num_transcripts)
  return {role: jnp.maximum(count, 1.0) for role, count in tokens.items()}


def policy_denominators(
  batch: batches.TrainBatch | per_role.PerRole, config: LossConfig
) -> Mapping[types.Role, jax.Array]:
  """Counted over both roles' rows, whether or not they share a network."""
  masks = {
    role: batches.role_mask(per_role.of(batch, role), role)
    for role in config.trained_roles
  }
  transcripts = sum(batches.num_transcripts(b) for b in batches.all_of(batch))
  return denominators(masks, transcripts, config.normalizer)


def supervised_denominators(
  batch: batches.TrainBatch, config: LossConfig
) -> Mapping[types.Role, jax.Array]:
  masks = {
    role: batches.loss_mask(batch, RECORDED_AUTHORS[role])
    for role in types.Role
    if config.supervised_weight_per_role[role]
  }
  return denominators(masks, batches.num_transcripts(batch), config.normalizer)


def anchor_denominator(
  batch: batches.TrainBatch, config: LossConfig
) -> jax.Array:
  masks = {types.Role.REHEARSE: batches.loss_mask(batch, ANCHOR_AUTHORS)}
  count = batches.num_transcripts(batch)
  return denominators(masks, count, config.normalizer)[types.Role.REHEARSE]


def supervised_loss(
  model: transformer.Transformer,
  params: logprobs.Params,
  rows: batches.TrainBatch,
  divisors: Mapping[types.Role, jax.Array],
  config: LossConfig,
) -> tuple[jax.Array, Sums]:
  """These rows' share of the supervised loss, and sums for the log."""
  scored = row_scores.logprobs_of(model, params, rows, config, None)
  value, sums = jnp.float32(0.0), {}
  for role in types.Role:
    mask_BT = batches.loss_mask(rows, RECORDED_AUTHORS[role])
    nll = losses.negative_log_likelihood(scored.logprob, mask_BT)
    sums[f'nll/{role_name(role)}'] = nll
    sums[f'entropy/{role_name(role)}'] = losses.masked_sum(
      scored.entropy, mask_BT
    )
    if role in divisors:
      weight = config.supervised_weight_per_role[role]
      value += weight * nll.total / divisors[role]
  return value, sums


def policy_loss(
  model: transformer.Transformer,
  params: logprobs.Params,
  ref_params: logprobs.Params | None,
  rows: batches.TrainBatch,
  divisors: Mapping[types.Role, jax.Array],
  config: LossConfig,
) -> tuple[jax.Array, Sums]:
  """These rows' share of the policy and KL terms, and sums for the log."""
  scored, kl_sum = row_scores.with_kl(model, params, ref_params, rows, config)
  compared_BT, weight_BT = rows.logprobs, None
  if config.importance_cap is not None:
    compared_BT = rows.proximal_logprobs
    if compared_BT is None:
      raise ValueError(
        'importance_cap needs rows with proximal_logprobs: their scores under '
        'the parameters that the first update on them starts from'
      )
  value, sums = jnp.float32(0.0), {}
  for role in types.Role:
    name = role_name(role)
    mask_BT = batches.role_mask(rows, role)
    weight = config.policy_weight_per_role[role]
    if config.importance_cap is not None:
      weight_BT, terms = surrogates.truncated_weights(
        compared_BT, rows.logprobs, mask_BT, cap=config.importance_cap
      )
      sums |= {f'{term}/{name}': pair for term, pair in terms.items()}
    surrogate, terms = surrogates.policy_gradient(
      scored.logprob,
      compared_BT,
      -rows.advantages if weight < 0 else rows.advantages,
      mask_BT,
      bounds=config.bounds,
      surrogate=config.surrogate,
      weight_BT=weight_BT,
    )
    sums |= {f'{term}/{name}': pair for term, pair in terms.items()}
    sums[f'entropy/{name}'] = losses.masked_sum(scored.entropy, mask_BT)
    sums[f'kl/{name}'] = losses.ZERO if kl_sum is None else kl_sum(mask_BT)
    # A weight of 0 removes its term: 0 * inf would not.
    if weight:
      value += abs(weight) * surrogate.total / divisors[role]
    if config.kl_weight_per_role[role]:
      weight = config.kl_weight_per_role[role]
      value += weight * sums[f'kl/{name}'].total / divisors[role]
  return value, sums


def proximal_logprobs(
  model: transformer.Transformer,
  params: logprobs.Params,
  rows: batches.TrainBatch,
  config: LossConfig,
) -> jax.Array:
  """logp_BT of the rows as `policy_loss` scores them, without a gradient."""
  temperature_BT = row_scores.sampling_temperatures(rows, config)
  return row_scores.logprobs_of(
    model, params, rows, config, temperature_BT
  ).logprob


def anchor_loss(
  model: transformer.Transformer,
  params: logprobs.Params,
  rows: batches.TrainBatch,
  divisor: jax.Array,
  config: LossConfig,
) -> tuple[jax.Array, losses.WeightedSum]:
  """These rows' share of the anchor term, and its unweighted NLL."""
  scored = row_scores.logprobs_of(model, params, rows, config, None)
  mask_BT = batches.loss_mask(rows, ANCHOR_AUTHORS)
  nll = losses.negative_log_likelihood(scored.logprob, mask_BT)
  return config.nll_weight * nll.total / divisor, nll


def role_name(role: types.Role) -> str:
  """'act' or 'rehearse', as metric keys spell it."""
  return role.name.lower()
