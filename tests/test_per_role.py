"""A network per role: each learns and says what is its role's, and no more."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import talkative
from talkative import ANYTHING, NO_RULES, TEMPLATE, decoder_for, task

from envace_jax import (
  build,
  components,
  errors,
  experience,
  refusals,
  restore,
  train,
  types,
  workdirs,
)
from envace_jax import data as datasets
from envace_jax.learning import batch as batches
from envace_jax.learning import checkpoints, objective, reuse
from envace_jax.learning import optimizer as optimizers
from envace_jax.learning import state as states
from envace_jax.learning import step as learning
from envace_jax.model import per_role, sharding
from envace_jax.rollout import collect
from envace_jax.sampling import keys, scripted
from envace_jax.worlds import own_row
from experiments import ablate_sharing

A, Role, PerRole = types.Author, types.Role, per_role.PerRole
LENGTHS = ((12, 9), (7, 5), (10, 12), (5, 3))  # of each episode's two rows
ADVANTAGES_ER = np.asarray([[1, -2], [-1, 1], [0.5, 2], [-2, -1]], np.float32)
FULL = objective.LossConfig(
  policy_weight_per_role=(1.0, 0.5),
  kl_weight_per_role=(0.1, 0.2),
  nll_weight=0.3,
  temperature_per_role=(0.7, 1.3),
  logprob_chunk=5,
  microbatches=2,
)


def episode(lengths, seed):
  """Two rows: in each, the role's own words and a copy of the other's."""
  rng, rows = np.random.default_rng(seed), []
  own_and_copied = ((A.ACT, A.COPIED), (A.COPIED, A.REHEARSE))
  for length, (act, rehearse) in zip(lengths, own_and_copied, strict=True):
    authors = [A.PROMPT, A.FORCED]
    while len(authors) < length:
      authors += [act, act, A.FORCED, rehearse, A.FORCED]
    authors = np.asarray(authors[:length], np.int8)
    sampled = np.isin(authors, [A.ACT, A.REHEARSE])
    rows.append(
      types.Row(
        tokens=rng.integers(0, 64, length).astype(np.int32),
        authors=authors,
        logprobs=np.where(sampled, -4.0, 0.0).astype(np.float32),
      )
    )
  return types.Episode(
    task_id=f't{seed}', group=0, sample_index=seed, rows=tuple(rows),
    steps=(), reply=None, stop_reason=types.StopReason.MAX_STEPS,
  )  # fmt: skip


EPISODES = [episode(lengths, i) for i, lengths in enumerate(LENGTHS)]
OPTIONS = {'length_buckets': (12,), 'microbatches': 2}


def views(episodes=EPISODES, batch_size=4):
  return batches.pack_views(
    episodes, ADVANTAGES_ER[: len(episodes)], batch_size=batch_size, **OPTIONS
  )


def anchor():
  rows = [(e.rows[1].tokens, e.rows[1].authors) for e in EPISODES]
  recorded = [(t, np.where(a == A.REHEARSE, A.WORLD, a)) for t, a in rows]
  return batches.pack_rows(recorded, batch_size=4, **OPTIONS)


@pytest.fixture(scope='module')
def net(draw_thin_model):
  """A small model, its parameters, and others."""
  model, draw = draw_thin_model()
  return model, draw(), draw()


def one_step(net, tx, config, params):
  """Parameters after one step of networks per role, and metrics."""
  model, _, ref_params = net
  mesh = sharding.make_mesh()
  step = learning.make_policy_step(model, tx, config, mesh, share_roles=False)
  shared = states.TrainState(jnp.int32(0), params, ())
  state = states.restart(states.separate(shared), tx, mesh)
  state, metrics = step(state, views(), jax.device_put(ref_params), anchor())
  assert state.step == 1
  return jax.tree.map(np.asarray, (state.params, metrics))


def test_gradients_are_those_of_the_one_network_on_the_role_s_rows(net):
  model, params, ref_params = net
  tx = optimizers.for_each_role(act=optax.sgd(1.0), rehearse=optax.sgd(1.0))
  new, metrics = one_step(net, tx, FULL, params)
  rows = batches.pack_episodes(EPISODES, ADVANTAGES_ER, batch_size=8, **OPTIONS)
  divisors = objective.policy_denominators(rows, FULL)
  recorded = anchor()
  recorded_divisor = objective.anchor_denominator(recorded, FULL)

  def loss(params, role):
    """The shared network's, of one role."""
    alone = lambda pair: tuple(np.eye(2)[role] * pair)
    config = dataclasses.replace(
      FULL,
      policy_weight_per_role=alone(FULL.policy_weight_per_role),
      kl_weight_per_role=alone(FULL.kl_weight_per_role),
    )
    value, _ = objective.policy_loss(
      model, params, ref_params, rows, divisors, config
    )
    if role is Role.REHEARSE:
      value += objective.anchor_loss(
        model, params, recorded, recorded_divisor, FULL
      )[0]
    return value

  total = 0
  for role in Role:
    value, grads = jax.jit(
      jax.value_and_grad(lambda params, role=role: loss(params, role))
    )(params)
    total += value
    moved = jax.tree.map(np.subtract, params, new[role])
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
      moved,
      grads,
    )
    assert float(optax.tree.norm(grads)) > 1e-2
    count = int(batches.role_mask(rows, role).sum())
    assert metrics[f'tokens/{role.name.lower()}'] == count > 0
  np.testing.assert_allclose(metrics['loss'], total, rtol=1e-4)


def settings(**changes):
  config = ablate_sharing.get_config()
  config.rl.optimizer.weight_decay = 0.5
  config.rl.optimizer.warmup_steps = 0
  config.rl.microbatches = 2
  config.rl.row_buckets = ()
  config.update_from_flattened_dict(changes)
  return config


@pytest.mark.parametrize(
  'frozen, changes',
  [
    (Role.ACT, {'rl.act_weight': 0.0}),
    (Role.REHEARSE, {'rl.rehearse_weight': 0.0, 'rl.anchor_weight': 0.0}),
  ],
)
def test_a_frozen_role_keeps_its_network_bit_for_bit(net, frozen, changes):
  config = settings(**changes)
  new, _ = one_step(
    net,
    components.rl_optimizer(config),
    components.policy_loss(config),
    net[1],
  )
  same = [
    all(jax.tree.leaves(jax.tree.map(np.array_equal, new[role], net[1])))
    for role in Role
  ]
  assert same == [role is frozen for role in Role]


@pytest.mark.parametrize(
  'changes',
  [
    {'rl.rehearse_weight': 0.0},  # the anchor pulls
    {'rl.rehearse_weight': 0.0, 'rl.anchor_weight': 0.0, 'rl.kl_rehearse': 0.1},
  ],
)
def test_what_an_anchor_or_a_kl_pulls_at_is_not_frozen(changes):
  tx = components.rl_optimizer(settings(**changes))
  weight = {'w': jnp.ones((2, 2))}
  pair = PerRole(act=weight, rehearse=weight)
  updates, _ = tx.update(pair, tx.init(pair), pair)
  assert (updates.act['w'] != 0).all() and (updates.rehearse['w'] != 0).all()


def test_each_network_is_scored_on_its_own_rows(net):
  model, params, others = net
  score = reuse.make_proximal_scorer(model, FULL, sharding.make_mesh())
  rows = views()
  scored = score(PerRole(act=params, rehearse=others), rows)
  for role, network in ((Role.ACT, params), (Role.REHEARSE, others)):
    np.testing.assert_array_equal(
      scored[role].proximal_logprobs,
      score(network, rows[role]).proximal_logprobs,
    )


def test_views_are_packed_apart_and_only_views():
  rows = views()
  assert sorted(rows.act.lengths) == sorted(act for act, _ in LENGTHS)
  assert sorted(rows.rehearse.lengths) == sorted(own for _, own in LENGTHS)
  assert not (rows.act.authors == A.REHEARSE).any()
  assert not (rows.rehearse.authors == A.ACT).any()
  # Whose row it is shows in its advantages.
  seen = 0
  for lengths, expected in zip(LENGTHS, ADVANTAGES_ER, strict=True):
    for role in Role:
      i = list(rows[role].lengths).index(lengths[role])
      sampled = rows[role].authors[i] == types.AUTHOR_OF_ROLE[role]
      given = np.asarray(rows[role].advantages[i])
      seen += sampled.any()
      np.testing.assert_array_equal(given[sampled], expected[role])
      assert not given[~sampled].any()
  assert seen >= 6  # a row of three tokens may hold none
  padded = views(batch_size=6)
  assert [len(padded[role].lengths) for role in Role] == [6, 6]
  assert sorted(padded.rehearse.lengths)[:2] == [0, 0]
  act, own = EPISODES[0].rows
  for wrong in ((act,), (act, own, own), (own, act)):
    with pytest.raises(ValueError, match="rollout.view='split'"):
      views([dataclasses.replace(EPISODES[0], rows=wrong), EPISODES[1]])
  silent = dataclasses.replace(own, authors=np.zeros_like(own.authors))
  unasked = [dataclasses.replace(e, rows=(act, silent)) for e in EPISODES[:2]]
  assert not batches.role_mask(views(unasked).rehearse, Role.REHEARSE).any()
  mute = dataclasses.replace(act, authors=np.zeros_like(act.authors))
  with pytest.raises(ValueError, match='0 trainable tokens.*ACT'):
    views([dataclasses.replace(e, rows=(mute, own)) for e in EPISODES[:2]])


def rolled_out(model, params):
  """Split-view episodes of a policy, which may be a network per role."""
  decoder = decoder_for(model, max_row_tokens=128)
  world = own_row.OwnRowWorld(
    dataclasses.replace(decoder, prompt_tokens=40),
    TEMPLATE,
    per_role.of(params, Role.REHEARSE),
    lambda one: TEMPLATE.prompt(one.instruction, 'a desk'),
    ANYTHING,
    trained=True,
  )
  return collect.Collector(
    decoder=decoder, template=TEMPLATE, batch_tasks=3, group_size=2
  ).collect(
    params,
    world,
    [task(text) for text in 3 * ('a', 'a longer one', 'mid')],
    keys.stream(0, 'rollout', 0),
    rules=NO_RULES,
  )


def test_equal_networks_are_one(policy):
  model, params = policy
  shared = rolled_out(model, params)
  separate = rolled_out(model, PerRole(act=params, rehearse=params))
  assert sum(len(e.steps) for e in shared) > 3
  for left, right in zip(shared, separate, strict=True):
    jax.tree.map(np.testing.assert_array_equal, *(
      [dataclasses.astuple(row) for row in e.rows] for e in (left, right)
    ))  # fmt: skip


def test_rehearse_s_network_reaches_an_action_only_through_an_answer(policy):
  model, params = policy
  rng = np.random.default_rng(0)
  disturbed = jax.tree.map(
    lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params
  )
  plain = rolled_out(model, PerRole(act=params, rehearse=params))
  other = rolled_out(model, PerRole(act=params, rehearse=disturbed))
  talkative.assert_only_answers_part(plain, other)


@pytest.fixture(scope='module')
def setup(tmp_path_factory):
  """A run of a desk so small that it is made in seconds."""
  config = ablate_sharing.get_config()
  config.data.num_train, config.data.num_dev, config.data.num_test = 24, 4, 4
  config.data.num_demonstrations = 60
  config.rollout.prompt_tokens = 48  # few texts make long tokenizations
  config.model.d_model = config.model.d_ff = 64
  config.model.num_layers, config.model.head_dim = 1, 8
  config.model.tie_embeddings = False
  for role in ('act', 'rehearse'):
    config.rollout[role].temperature = 0.05  # scripted policies are sampled
  config.rl.tasks_per_step = config.rl.group_size = 2
  config.rl.microbatches = 1
  config.evaluation.batch_tasks, config.evaluation.samples = 2, 2
  return build.Setup(config, tmp_path_factory.mktemp('run'))


def network(setup, action, answer):
  """Says one letter as ACT, after a tool call's marker, one as REHEARSE."""
  template = setup.data.template
  control = setup.data.words.tokenizer.control
  successor = {}
  for chain in (
    [control['<|act|>'], control['<tool_call>'], *letter(setup, action)],
    [control['<|rehearse|>'], *letter(setup, answer)],
  ):
    successor |= dict(
      zip(
        chain, [*chain[1:], template.stop_ids[types.Role.ACT][0]], strict=True
      )
    )
  return scripted.params(setup.model, successor)


def letter(setup, text):
  (piece,) = setup.data.words.tokenizer.encode(text)
  return [piece]


def test_a_run_asks_each_network_for_its_role(setup):
  params = PerRole(
    act=network(setup, 'q', 'x'), rehearse=network(setup, 'z', 'y')
  )
  tasks = setup.data.tasks['train'][:2]
  training = setup.collector.collect(
    params,
    setup.training_world(params, None, 0),
    tasks,
    keys.stream(0, 'rollout', 0),
    rules=NO_RULES,
  )
  measured = setup.runner.rehearsed(params, tasks, stream=0, samples=2)
  for one in (*training, *measured):
    assert one.steps and {s.observation_text for s in one.steps} == {'y'}
    assert all('q' in step.action_text for step in one.steps)
  for one in setup.runner.real(params, tasks, stream=0):
    assert one.steps and all('q' in step.action_text for step in one.steps)


def score_by_length(tasks, episodes, *_, **__):
  length = lambda episode: len(episode.rows[0].tokens)
  return [
    types.Score(verdicts={}, reward=length(episode) / 160, success=False)
    for episode in episodes
  ]


def test_a_restored_run_goes_on_bit_for_bit(setup, tmp_path, monkeypatch):
  config = setup.config.copy_and_resolve_references()
  config.rollout.act.temperature = config.rollout.rehearse.temperature = 1.0
  config.rl.kl_act = config.rl.kl_rehearse = 0.1
  config.rl.importance_cap, config.rl.updates_per_rollout = 2.0, 2
  loud = build.Setup(config, setup.path)
  # Nobody solves a task here: longer is better.
  monkeypatch.setattr(
    experience.scoring,
    'score_episodes',
    lambda tasks, episodes, *_, **__: [
      types.Score(
        verdicts={}, reward=len(e.rows[0].tokens) / 160, success=False
      )
      for e in episodes
    ],
  )
  warm = states.TrainState(
    jnp.int32(0), jax.device_put(network(loud, 'q', 'x')), ()
  )
  tx = components.rl_optimizer(config)
  advance = train._policy_advance(loud, warm, tx)
  state = states.restart(states.separate(warm), tx, loud.mesh)
  carry, lines = {'task_cursor': 0}, []
  with checkpoints.Checkpointer(tmp_path / 'rl') as saves:
    for step in range(3):
      state, metrics, _, carry = advance(state, step, carry)
      lines.append(jax.device_get(metrics))
      if step == 1:
        saves.save(2, state, {'carry': dict(carry)})
    again, carry = train._restore(loud, saves, tx, share_roles=False)
  again, metrics, *_ = advance(again, 2, carry)
  assert jax.device_get(metrics) == lines[2] != lines[1]
  jax.tree.map(np.testing.assert_array_equal, again, state)
  assert all(
    line[f'tokens/{name}'] > 0 and line[f'kl/{name}'] > 0
    for line in lines
    for name in ('act', 'rehearse')
  )
  # Two networks by now, and two states of two optimizers.
  for pair in (state.params, state.opt_state):
    arrays = map(jax.tree.leaves, (pair.act, pair.rehearse))
    assert not all(map(np.array_equal, *arrays))


@pytest.mark.parametrize('age', ['today', 'older than the option'])
def test_another_run_s_rehearse_network_is_the_simulator(setup, tmp_path, age):
  theirs, params = ablate_sharing.get_config(), network(setup, 'q', 'x')
  theirs.model = setup.config.model
  pair = PerRole(act=params, rehearse=network(setup, 'z', 'y'))
  expected = pair.rehearse
  if age == 'older than the option':
    del theirs.rl.share_roles
    pair = expected = params
  other = workdirs.claim(str(tmp_path / 'other'), theirs)
  (other / 'data').mkdir()
  tokenizer = (setup.path / 'data' / datasets.TOKENIZER_FILE).read_bytes()
  (other / 'data' / datasets.TOKENIZER_FILE).write_bytes(tokenizer)
  state = states.TrainState(jnp.int32(3), jax.device_put(pair), ())
  with checkpoints.Checkpointer(other / 'checkpoints' / 'rl') as saves:
    saves.save(3, state, {})
  same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
  same(restore.simulator_of(str(other), setup), expected)
  phase, step, params = restore.newest(str(other), setup)
  assert (phase, step) == ('rl', 3)
  same(params, pair)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'rollout.view': 'joint'}, "rollout.view='split'"),
    ({'rollout.world': 'real'}, "rollout.world='rehearsal'"),
    ({'rl.objective': 'supervised'}, 'rl.share_roles=True'),
  ],
)
def test_what_a_network_per_role_cannot_do_is_refused(changes, words):
  refusals.validate(settings())
  with pytest.raises(errors.UserError, match=words):
    refusals.validate(settings(**changes))
  refusals.validate(settings(**changes, **{'rl.share_roles': True}))
