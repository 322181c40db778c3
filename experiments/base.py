"""Every option of envace_jax, with its unit and its default.

An experiment file imports this one, changes what it is about, and says in its
docstring what it needs and what to expect. Code reads `config.x.y` and nothing
else: an option that is not here does not exist, and `envace check` lists the
options that do nothing at the current settings.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """The defaults: the small fixed MiniDesk, sized for two CPU cores."""
  c = ml_collections.ConfigDict()
  c.seed = 0  # everything random derives from it

  # The world, its tasks, and the recorded attempts at them.
  c.data = ml_collections.ConfigDict()
  # MiniDesk, 'small' | 'resampled'; your files, 'jsonl' | 'published'; or a
  # benchmark's own environment, 'tau2_telecom' | 'bfcl_files'.
  c.data.world = 'small'
  c.data.world_seed = 0  # contents of the database; not changed by `seed`
  c.data.num_train = 960  # tasks
  c.data.num_dev = 48  # tasks; the only ones that may be tuned on
  c.data.num_test = 120  # tasks, each of IID and OOD
  c.data.num_demonstrations = 4000
  c.data.habits = ml_collections.ConfigDict()  # shares of the demonstrations
  c.data.habits.expert = 0.22  # looks first, acts right
  c.data.habits.hasty = 0.50  # acts unchecked, claims success on any error
  c.data.habits.recover = 0.10  # acts unchecked, but heeds the error
  c.data.habits.dither = 0.08  # expert, with a superfluous look
  c.data.habits.slip = 0.10  # expert, after one wrong identifier
  c.data.notes_fraction = 0.3  # demonstrations with rehearsal notes
  c.data.left_out = 0.3  # benchmarks: share whose plan lacks one call
  c.data.max_faults = 3  # 'tau2_telecom': of tickets that are trained on
  c.data.reflections = 0.0  # share that ends in the attempt's own assessment
  c.data.records = False  # training tasks carry their executed oracle plan
  c.data.vocab_size = 768  # cap, 256 byte pieces included
  # Your files, with {split} in the name: train, dev, test_iid, test_ood. For
  # 'jsonl' they hold records of ours, demonstrations being a fifth split; for
  # 'published' checklist samples, and * in the name stands for anything.
  c.data.files = ''
  c.data.strict = False  # 'published': the first fault of a sample is an error

  c.prompt = ml_collections.ConfigDict()
  # Of the tools, in the prompt: 'none' | 'names' | 'signatures' | 'schemas'
  c.prompt.tools = 'none'
  c.prompt.thoughts = False  # <think> and </think> are pieces of their own
  c.prompt.rehearse = ml_collections.ConfigDict()  # view='split': its prompt
  c.prompt.rehearse.tools = 'none'  # the same choices
  c.prompt.rehearse.instructions = ''  # system prompt of the role
  c.prompt.rehearse.records = 'own'  # 'none' | 'own' | 'others': grounding
  c.prompt.rehearse.max_records = 4
  c.prompt.rehearse.keep = 0.5  # probability of each record to be shown

  # A published checkpoint to start from: its architecture, weights, tokenizer
  # and chat format replace data.vocab_size and the sizes in `model`.
  c.pretrained = ml_collections.ConfigDict()
  c.pretrained.path = ''  # Hugging Face directory, or .gguf file; '' = none
  c.pretrained.dtype = 'float32'  # | 'bfloat16', of weights that lora freezes

  # Train small corrections of frozen weights instead of the weights.
  c.lora = ml_collections.ConfigDict()
  c.lora.rank = 0  # 0 = train the weights
  c.lora.alpha = 32.0  # corrections are scaled by alpha / rank
  c.lora.targets = ('wq', 'wk', 'wv', 'wo', 'w_gate', 'w_up', 'w_down')

  c.model = ml_collections.ConfigDict()
  c.model.d_model = 128
  c.model.num_layers = 3
  c.model.num_heads = 4
  c.model.num_kv_heads = 2
  c.model.head_dim = 32
  c.model.d_ff = 384
  c.model.rope_theta = 10000.0
  c.model.norm_eps = 1e-6
  c.model.qk_norm = True
  c.model.tie_embeddings = True
  c.model.dtype = 'float32'  # compute; parameters are always float32
  c.model.scan_layers = False  # scan over layers in training (deep models)
  c.model.remat = False
  # Of rows: 'auto' by platform | 'reference' | 'fused' (GPU) | 'splash' (TPU).
  c.model.attention = 'auto'

  c.mesh = ml_collections.ConfigDict()  # product = number of devices used
  c.mesh.data = 1
  c.mesh.fsdp = 1
  c.mesh.tensor = 1

  # How episodes are made.
  c.rollout = ml_collections.ConfigDict()
  c.rollout.world = 'rehearsal'  # 'rehearsal' | 'real' | 'simulator' | 'null'
  # Who plays world='simulator': a model behind an endpoint, or another run's
  # policy; without either, the warm start.
  c.rollout.simulator_workdir = ''
  c.rollout.simulator_endpoint = ml_collections.ConfigDict()
  c.rollout.simulator_endpoint.base_url = ''  # OpenAI-compatible; '' = none
  c.rollout.simulator_endpoint.model = ''
  c.rollout.simulator_endpoint.api_key_env = ''  # name of the variable
  c.rollout.simulator_endpoint.temperature = 1.0
  c.rollout.simulator_endpoint.max_tokens = 2048  # reasoning included
  c.rollout.simulator_endpoint.max_chars = 24_000  # of a prompt
  c.rollout.simulator_endpoint.concurrency = 32  # calls in flight
  c.rollout.simulator_endpoint.batch_deadline_s = 600.0  # one wave of calls
  c.rollout.simulator_attempts = _attempts()
  # Mixing, for 'rehearsal' and 'simulator' on the host. Of every group this
  # share of episodes is real, a whole number; of the calls of the others this
  # share is answered for real, for which all of them are executed.
  c.rollout.real_fraction = 0.0
  c.rollout.real_steps_fraction = 0.0
  c.rollout.mode = 'on_device'  # 'on_device' (rehearsal only) | 'host'
  c.rollout.view = 'joint'  # 'joint': one row | 'split': each role its own
  # Who rejects impossible calls and answers: 'policy' (itself, as published) or
  # 'program', which draws an answer anew up to max_resamples times.
  c.rollout.validation = 'policy'
  c.rollout.max_resamples = 3
  c.rollout.max_steps = 5  # answered tool calls per episode
  c.rollout.max_actions = 30  # calls and replies per episode
  c.rollout.max_user_turns = 30  # the instruction included
  c.rollout.max_parallel_calls = 1  # in one action; 1: several are malformed
  c.rollout.max_action_tokens = 16
  c.rollout.max_observation_tokens = 24
  c.rollout.max_row_tokens = 160  # longer demonstrations are left out, whole
  # Rows of ACT per episode. Above 1, on the host: a chat template that shows
  # earlier turns otherwise than they were said has another row opened.
  # Batches hold this many rows an episode, and means of rows count rows.
  c.rollout.max_rows = 1
  c.rollout.prompt_tokens = 32  # every prompt without notes fits
  c.rollout.notes_prompt_tokens = 112  # every prompt with notes fits
  c.rollout.rehearse_prompt_tokens = 96  # view='split': records fit in
  c.rollout.widths = (8, 32)  # windows in which rows are extended
  c.rollout.ladder = (64, 160)  # cache lengths
  c.rollout.upstream_termination = False  # a tool error ends the episode
  for role in ('act', 'rehearse'):
    c.rollout[role] = ml_collections.ConfigDict()
    c.rollout[role].temperature = 1.0  # 0 = greedy
    c.rollout[role].top_k = 0  # 0 = off
    c.rollout[role].top_p = 1.0  # 1 = off

  c.reward = ml_collections.ConfigDict()
  c.reward.success_bonus = 0.5  # share paid only for the whole checklist
  # How verdicts come about, and what they end (`rewards.checklist.Rule`).
  c.reward.rule = ml_collections.ConfigDict()
  c.reward.rule.aggregation = 'last_step'  # | 'any_step' | 'all_judges'
  c.reward.rule.precedence = 'checks_first'  # | 'judge_first'
  c.reward.rule.unmet_requirement_ends = False  # `required_for_next_turn`
  c.reward.rule.unanswered_turn_fails = False
  c.reward.rule.abstain_is_fail = False  # an outage reads as a bad answer
  c.reward.rule.tool_error_fails = False  # call items, without a judge
  # Who decides criteria that no check can; without it they ABSTAIN.
  c.reward.judge = ml_collections.ConfigDict()
  c.reward.judge.base_url = ''  # OpenAI-compatible; '' = no judge
  c.reward.judge.models = ('',)
  c.reward.judge.num_judges = 1
  c.reward.judge.api_key_env = ''  # name of the variable with the key
  c.reward.judge.temperature = 0.0
  c.reward.judge.max_tokens = 1024  # of an answer, reasoning included
  c.reward.judge.max_chars = 24_000  # of a prompt
  c.reward.judge.concurrency = 32  # calls in flight
  c.reward.judge.batch_deadline_s = 1800.0  # for one train step's requests
  c.reward.judge_attempts = _attempts()

  # Supervised start, both roles, from recorded attempts good and bad.
  c.warm_start = ml_collections.ConfigDict()
  c.warm_start.workdir = ''  # take the warm start of this run; '' = make one
  c.warm_start.steps = 220
  c.warm_start.batch_size = 64  # rows
  c.warm_start.microbatches = 4
  c.warm_start.optimizer = _optimizer(learning_rate=2e-3, schedule='cosine')

  # Role-wise GRPO.
  c.rl = ml_collections.ConfigDict()
  c.rl.objective = 'policy_gradient'  # | 'supervised': the control, same rows
  c.rl.steps = 80
  c.rl.tasks_per_step = 8
  c.rl.group_size = 8
  c.rl.baseline = 'role'  # 'shared' | 'role'
  c.rl.weighting = 'row'  # 'episode' | 'row'
  # Real episodes are compared with real ones only: they meet refusals that a
  # rehearsal spares, and a common mean would hold that against them.
  c.rl.baseline_by_source = True
  c.rl.leave_one_out = False
  c.rl.std = False
  # One network plays both roles; False: a copy of the warm start for each.
  c.rl.share_roles = True
  # Of the policy loss, and so of the advantages; 0 does not train the role.
  c.rl.act_weight = 1.0
  c.rl.rehearse_weight = 1.0  # < 0: against the actor; needs an anchor or KL
  c.rl.updates_per_rollout = 1  # a multiple of minibatches; 1 = on-policy
  c.rl.minibatches = 1  # parts of a rollout, one update each
  c.rl.surrogate = 'token'  # 'token' PPO, DAPO | 'sequence' GSPO | 'cispo'
  c.rl.clip_low = 0.2  # ratios below 1 - clip_low; published: GSPO 3e-4
  c.rl.clip_high = 0.2  # ratios above 1 + clip_high; DAPO 0.28, GSPO 4e-4
  c.rl.dual_clip = 0.0  # x A, bound where A < 0, above 1 (3); 0 = off
  c.rl.importance_cap = 0.0  # of trainer / sampler, at least 1 (2); 0 = off
  c.rl.dynamic_sampling_draws = 0  # more draws to replace equal-reward groups
  c.rl.kl_act = 0.0  # coefficient of KL to the warm start, per role
  c.rl.kl_rehearse = 0.0
  c.rl.kl_estimator = 'k3'  # 'k1' | 'k2' | 'k3' | 'exact': whole vocabulary
  c.rl.normalizer = 'token'  # 'token' | 'role_token'
  c.rl.anchor_weight = 1.0  # NLL of recorded real observations
  c.rl.anchor_batch_size = 16  # rows
  c.rl.supervised_batch_size = 128  # objective='supervised': equal FLOPs
  c.rl.microbatches = 4
  c.rl.row_buckets = (64, 96)  # lengths a microbatch may be cut to
  # Short transcripts share rows of max_row_tokens, also in the warm start. Only
  # whole microbatches are saved: use many of few rows (16 of 4), in both.
  c.rl.packing = False
  c.rl.logprob_chunk = 64  # time steps unembedded at once
  c.rl.optimizer = _optimizer(learning_rate=2e-4, schedule='constant')

  c.evaluation = ml_collections.ConfigDict()
  c.evaluation.every = 20  # train steps, on dev; 0 = only before and after
  c.evaluation.batch_tasks = 32  # x samples rows at once
  c.evaluation.samples = 4  # episodes per task at the training temperature

  # Rehearse privately, then commit once.
  c.private = ml_collections.ConfigDict()
  c.private.attempts = 4  # private rehearsals per task; 0 = not measured
  c.private.mode = 'parallel'  # | 'sequential': each sees what came before
  # 'agreed' by rule | 'written' by the policy, which needs data.reflections
  c.private.memory = 'agreed'
  c.private.max_notes = 4  # remembered calls; those that fit are shown
  c.private.max_reflection_tokens = 64  # said about an attempt
  c.private.temperatures = (0.0, 0.5)  # tuned on dev, for every arm
  c.private.max_calls = (0, 1, 2, 3, 5)  # caps on real calls compared
  c.private.headline_calls = 1  # the cap quoted in the summary
  # Rehearsal before each action, measured by `envace evaluate --private`.
  c.private.candidates = 4  # actions drawn
  c.private.answers = 4  # rehearsed for each call that was drawn
  c.private.uncertainty_weight = 1.0  # against the share that is not refused
  c.private.action_temperatures = (0.5, 1.0)  # of candidates, tuned on dev
  c.private.max_refused = 0.5  # a write passes up to this share of refusals

  c.checkpoint = ml_collections.ConfigDict()
  c.checkpoint.every = 40  # train steps
  c.checkpoint.keep = 2
  return c


def _attempts():
  """One request to an endpoint."""
  c = ml_collections.ConfigDict()
  c.max_attempts = 4
  c.timeout_s = 60.0  # one attempt
  c.deadline_s = 180.0  # all attempts and waits
  c.backoff_s = 0.5  # doubled from wait to wait
  c.max_backoff_s = 30.0
  return c


def _optimizer(learning_rate: float, schedule: str):
  c = ml_collections.ConfigDict()
  c.kind = 'adamw'  # | 'adafactor': statistics of rows and columns, no momentum
  c.moments_dtype = 'float32'  # | 'bfloat16': half the optimizer's memory
  c.learning_rate = learning_rate  # peak
  c.schedule = schedule  # 'constant' | 'cosine' | 'linear', after the warm-up
  c.warmup_steps = 5
  c.weight_decay = 0.0  # matrices only
  c.clip_norm = 1.0  # global gradient norm
  c.b1 = 0.9
  c.b2 = 0.99
  return c
