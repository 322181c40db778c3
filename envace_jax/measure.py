"""`envace evaluate --benchmark`: a policy on a benchmark of the field.

  OUT/results.jsonl      an attempt a line; the same command goes on from it
  OUT/table.md           rates with intervals by category, baselines, and cost
  OUT/native/            result files as the benchmark's own tools read them
  OUT/recorded/          with `record`: attempts as demonstrations (ArrayRecord)

The benchmark's own package executes and scores. A policy is a run's directory
(its newest checkpoint, in this process), the address of an OpenAI-compatible
server, 'oracle' (replays the ground truth) or 'noop' (does nothing): the last
two show what the harness itself gives away.

Recorded attempts hold what users and tools said. `redact` names a function of
one's own that is given every text first; results.jsonl and native/ are not
redacted, they are what was measured.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import importlib
import json
import pathlib
import shlex
import shutil
import sys

from envace_jax import errors, policy_service, run_policy
from envace_jax.benchmarks import (
  baselines,
  endpoint,
  policies,
  results,
  run,
  table,
  writes,
)
from envace_jax.endpoints import attempts, client
from envace_jax.envs import benchmark, recording
from envace_jax.rewards import checklist
from envace_jax.serving import private
from envace_jax.tasks import dataset, records

# A model on a slow machine may take minutes for a reply.
_RETRIES = attempts.Policy(timeout_s=600.0, deadline_s=1800.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """What is measured, and how. An empty choice is everything."""

  # 'bfcl' | 'tau2' | 'finmcp:FILE' | a task file (.jsonl) for an MCP server
  benchmark: str
  policy: str
  out: str
  categories: Sequence[str] = ()
  task_ids: Sequence[str] = ()
  limit: int = 0  # tasks of each category, from the first; 0 for all
  settings: run.Settings = run.Settings()
  model: str = ''  # of an endpoint
  api_key_env: str = ''
  temperature: float = 0.0
  max_tokens: int = 1024  # of one reply
  seed: int = 0
  # Private rehearsals before the first reply of an attempt; they make no calls.
  rehearsal: private.Settings = private.Settings()
  tools: str = ''  # how a run's prompts show tools; '' is as in training
  context: int = 0  # tokens of a run's rows; 0 is as in training
  split: str = 'base'  # of tau2's tasks
  prompt: str = 'policy'  # tau2's system prompt: 'policy' | 'short'
  user: str = ''  # tau2: the address of the model that plays the user
  user_model: str = ''
  server: str = ''  # MCP: a command, or an address


def measure(options: Options) -> int:
  """Measures, writes the files and prints the table.

  Raises:
    UserError: something that was asked for is not there.
  """
  measured = open_benchmark(options)
  tasks = run.select(measured, options.categories, options.task_ids)
  rehearsal = options.rehearsal
  if rehearsal.attempts and rehearsal.writes is None:
    found = writes.of(options.benchmark, tuple(tasks))
    rehearsal = dataclasses.replace(rehearsal, writes=found)
    options = dataclasses.replace(options, rehearsal=rehearsal)
  if options.limit:
    tasks = {name: ids[: options.limit] for name, ids in tasks.items()}
  out = pathlib.Path(options.out)
  policy = open_policy(options, measured)
  try:
    found = run.measure(
      measured, policy, tasks, out / 'results.jsonl', options.settings
    )
  finally:
    policy.close()
  recorded = _recorded(found)
  lines = [
    f'{measured.name} ({measured.version})',
    f'policy: {policy.name}',
    '',
    table.render(table.rows(found, seed=options.seed)),
    *_groups(measured, found, recorded),
    *_baselines(options, measured, tasks),
  ]
  if options.policy == 'oracle' and any(one.prerequisite for one in found):
    lines += ['', measured.oracle_note]
  text = '\n'.join(lines) + '\n'
  (out / 'table.md').write_text(text)
  measured.write(out / 'native', policy.name, recorded)
  if options.settings.demonstrations:
    _store(out, found)
  sys.stdout.write(text)
  return 0


def open_benchmark(options: Options) -> benchmark.Benchmark:
  """The benchmark of a name, or of a task file of one's own."""
  # Imported here: each needs a package that only its users have.
  if options.benchmark == 'bfcl':
    from envace_jax.envs.bfcl import benchmark as bfcl

    return bfcl.Bfcl()
  if options.benchmark == 'tau2':
    return _tau2(options)
  if options.benchmark.startswith('finmcp:'):
    from envace_jax.envs.finmcp import benchmark as finmcp

    path = pathlib.Path(options.benchmark.removeprefix('finmcp:'))
    return finmcp.FinMcp(finmcp.load(path))
  if options.benchmark.endswith('.jsonl'):
    return _mcp(options)
  raise errors.UserError(
    f'benchmark={options.benchmark!r} is neither bfcl, tau2, finmcp:FILE nor a '
    'task file (.jsonl)'
  )


def open_policy(
  options: Options, measured: benchmark.Benchmark
) -> policies.Policy:
  """Whoever is measured."""
  if options.rehearsal.attempts and options.policy in ('oracle', 'noop'):
    raise errors.UserError(
      f'{options.policy} does not rehearse; leave out --rehearsals'
    )
  if options.policy == 'oracle':
    return policies.Oracle(measured)
  if options.policy == 'noop':
    return policies.Noop()
  if options.policy.startswith(('http://', 'https://')):
    if not options.model:
      raise errors.UserError('an endpoint serves several models: give --model')
    return endpoint.Endpoint(
      client.Server(
        base_url=options.policy,
        api_key_env=options.api_key_env,
        concurrency=options.settings.workers,
        batch_deadline_s=_RETRIES.deadline_s + 60,
      ),
      endpoint.Sampling(
        model=options.model,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        seed=options.seed,
        rehearsal=options.rehearsal.as_request(),
      ),
      _RETRIES,
    )
  if not (pathlib.Path(options.policy) / 'config.json').exists():
    raise errors.UserError(
      f'policy={options.policy!r} is no run (it has no config.json), no '
      "address, and not 'oracle' or 'noop'; give one of these"
    )
  service = policy_service.Options(
    rows=options.settings.workers,
    queue=options.settings.workers * max(1, options.rehearsal.attempts),
    context=options.context,
    tools=options.tools,
    deadline_s=_RETRIES.deadline_s,
  )
  return run_policy.RunPolicy(
    options.policy,
    run_policy.Options(
      service=service,
      temperature=options.temperature,
      max_tokens=options.max_tokens,
      seed=options.seed,
      rehearsal=options.rehearsal,
    ),
  )


def _tau2(options: Options) -> benchmark.Benchmark:
  from envace_jax.envs.tau2 import benchmark as tau2
  from envace_jax.envs.tau2 import users as tau2_users

  if options.user and not options.user_model:
    raise errors.UserError('--user serves several models: give --user_model')
  if not options.user:
    return tau2.Tau2(split=options.split, prompt=options.prompt)
  user = tau2_users.EndpointUser(
    tau2_users.Endpoint(
      base_url=options.user,
      model=options.user_model,
      api_key_env=options.api_key_env,
      concurrency=options.settings.workers,
    ),
    _RETRIES,
  )
  return tau2.Tau2(
    lambda category, task: user,
    user_name=user.name,
    split=options.split,
    prompt=options.prompt,
  )


def _mcp(options: Options) -> benchmark.Benchmark:
  from envace_jax.envs.mcp import benchmark as mcp_benchmark
  from envace_jax.envs.mcp import server as mcp_server

  if not options.server:
    raise errors.UserError(
      'a task file needs --server: the command of an MCP server, or its address'
    )
  if options.server.startswith(('http://', 'https://')):
    server = mcp_server.Address(url=options.server)
  else:
    try:
      words = shlex.split(options.server)
    except ValueError as error:
      raise errors.UserError(
        f'server={options.server!r} is no command line ({error})'
      ) from error
    server = mcp_server.Command(argv=words)
  return mcp_benchmark.McpBenchmark(
    options.benchmark,
    server,
    judge=checklist.score_evaluation,
    validate=checklist.validate_task,
  )


def _groups(
  measured: benchmark.Benchmark,
  found: Iterable[results.Result],
  recorded: Sequence[benchmark.Recorded],
) -> Iterator[str]:
  """The benchmark's own groups of categories, where all of one were run."""
  outcomes: dict[str, list[benchmark.Outcome | None]] = {}
  for one in found:
    if one.prerequisite:
      continue
    outcome = benchmark.Outcome(
      reward=one.reward,
      success=one.success,
      reason=one.reason,
      parts=one.parts,
    )
    outcomes.setdefault(one.category, []).append(None if one.error else outcome)
  groups = measured.groups(outcomes, recorded)
  if groups:
    yield ''
    yield 'groups, an errored attempt counted as wrong: ' + ', '.join(
      f'{name} {share:.4f}' for name, share in groups.items()
    )


def _baselines(
  options: Options,
  measured: benchmark.Benchmark,
  tasks: Mapping[str, Sequence[str]],
) -> Iterator[str]:
  """What whoever does not think solves, beside a policy that may."""
  if options.policy not in ('oracle', 'noop'):
    yield ''
    yield from baselines.lines(options.benchmark, measured, tasks)


def _store(out: pathlib.Path, found: Iterable[results.Result]) -> None:
  """Attempts as a dataset of demonstrations."""
  kept = [
    records.from_json(json.dumps(one.demonstration))
    for one in found
    if one.demonstration is not None
  ]
  # Made of results.jsonl alone, and made anew when that has grown.
  shutil.rmtree(out / 'recorded', ignore_errors=True)
  if kept:
    dataset.write_dataset(out, 'recorded', {'demonstrations': kept})


def _recorded(found: Iterable[results.Result]) -> list[benchmark.Recorded]:
  return [
    benchmark.Recorded(
      task_id=one.task_id,
      trial=one.trial,
      started=one.started,
      seconds=one.seconds,
      value=one.record,
    )
    for one in found
    if not one.error
  ]


def redaction(name: str) -> recording.Redact | None:
  """The function that 'module:function' names; None for ''."""
  if not name:
    return None
  module, _, function = name.partition(':')
  try:
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
      raise TypeError(f'{function} is no function')
  except (ImportError, AttributeError, TypeError, ValueError) as error:
    raise errors.UserError(
      f'redact={name!r} is no module:function that can be imported ({error})'
    ) from error
  return found
