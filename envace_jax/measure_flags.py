"""Flags of `envace evaluate --benchmark`; reading them imports no JAX."""

import sys

from absl import flags

from envace_jax import errors

_BENCHMARK = flags.DEFINE_string(
  'benchmark',
  None,
  "evaluate: 'bfcl', 'tau2', 'finmcp:FILE', or a task file (.jsonl) for an MCP "
  'server.',
)
_POLICY = flags.DEFINE_string(
  'policy',
  None,
  "evaluate --benchmark: a run's directory, the address of an "
  "OpenAI-compatible server, 'oracle' or 'noop'.",
)
_CATEGORIES = flags.DEFINE_list(
  'categories', [], 'evaluate --benchmark: some of its categories.'
)
_TASKS = flags.DEFINE_list(
  'tasks', [], 'evaluate --benchmark: some of its task ids.'
)
_LIMIT = flags.DEFINE_integer(
  'limit', 0, 'evaluate --benchmark: the first tasks of each category; 0: all.',
  lower_bound=0,
)  # fmt: skip
_TRIALS = flags.DEFINE_integer(
  'trials', 1, 'evaluate --benchmark: attempts at each task.', lower_bound=1
)
_WORKERS = flags.DEFINE_integer(
  'workers', 8, 'evaluate --benchmark: attempts at a time.', lower_bound=1
)
_MAX_STEPS = flags.DEFINE_integer(
  'max_steps', 200, 'evaluate --benchmark: replies in an attempt.',
  lower_bound=1,
)  # fmt: skip
_MAX_CALLS = flags.DEFINE_integer(
  'max_calls', None, 'evaluate --benchmark: real calls in an attempt; default: '
  'no cap.', lower_bound=0,
)  # fmt: skip
_RETRY = flags.DEFINE_bool(
  'retry_errored', False, 'evaluate --benchmark: make errored attempts again.'
)
_RECORD = flags.DEFINE_bool(
  'record', False, 'evaluate --benchmark: keep attempts as demonstrations.'
)
_REDACT = flags.DEFINE_string(
  'redact', '', 'evaluate --benchmark --record: module:function over all text.'
)
_MODEL = flags.DEFINE_string(
  'model', '', "evaluate --benchmark: the endpoint's model."
)
_TEMPERATURE = flags.DEFINE_float(
  'temperature', 0.0, 'evaluate --benchmark: of the policy.', lower_bound=0.0
)
_MAX_TOKENS = flags.DEFINE_integer(
  'max_tokens', 1024, 'evaluate --benchmark: of one reply.', lower_bound=1
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'evaluate --benchmark: of the policy and of the intervals.'
)
_TASK_SPLIT = flags.DEFINE_string(
  'task_split', 'base', "evaluate --benchmark=tau2: 'base', 'test', 'full' ..."
)
_PROMPT = flags.DEFINE_enum(
  'prompt', 'policy', ('policy', 'short'),
  "evaluate --benchmark=tau2: the benchmark's own prompt, or a short one.",
)  # fmt: skip
_USER = flags.DEFINE_string(
  'user', '', 'evaluate --benchmark=tau2: address of the model of the user.'
)
_USER_MODEL = flags.DEFINE_string(
  'user_model', '', 'evaluate --benchmark=tau2: its name there.'
)
_SERVER = flags.DEFINE_string(
  'server', '', 'evaluate --benchmark=FILE: command or address of the server.'
)
_SCORES = flags.DEFINE_list(
  'scores',
  [],
  'compare: what `evaluate --benchmark` wrote, instead of --workdir; all '
  'policies are held against the first.',
)


def is_wanted() -> bool:
  """Whether a benchmark is to be measured."""
  return _BENCHMARK.value is not None


def measure(
  out: str, *, api_key_env: str, tools: str, context: int, rehearsal
) -> int:
  """Measures what the flags say; the arguments are flags of `main`.

  Raises:
    UserError: a flag is missing, or names what is not there.
  """
  if _POLICY.value is None:
    raise errors.UserError(
      "give --policy: a run's directory, an address, oracle or noop"
    )
  from envace_jax import measure as measuring
  from envace_jax.benchmarks import run

  settings = run.Settings(
    trials=_TRIALS.value,
    max_steps=_MAX_STEPS.value,
    max_calls=_MAX_CALLS.value,
    workers=_WORKERS.value,
    retry_errored=_RETRY.value,
    demonstrations=_RECORD.value,
    redact=measuring.redaction(_REDACT.value),
  )
  return measuring.measure(
    measuring.Options(
      benchmark=_BENCHMARK.value,
      policy=_POLICY.value,
      out=out,
      categories=_CATEGORIES.value,
      task_ids=_TASKS.value,
      limit=_LIMIT.value,
      settings=settings,
      model=_MODEL.value,
      api_key_env=api_key_env,
      temperature=_TEMPERATURE.value,
      max_tokens=_MAX_TOKENS.value,
      seed=_SEED.value,
      rehearsal=rehearsal,
      tools=tools,
      context=context,
      split=_TASK_SPLIT.value,
      prompt=_PROMPT.value,
      user=_USER.value,
      user_model=_USER_MODEL.value,
      server=_SERVER.value,
    )
  )


def compares() -> bool:
  """Whether results on a benchmark are to be compared."""
  return bool(_SCORES.value)


def compare() -> int:
  """Prints the comparison; raises UserError."""
  from envace_jax.benchmarks import comparison

  sys.stdout.write(comparison.compare(_SCORES.value, seed=_SEED.value) + '\n')
  return 0
