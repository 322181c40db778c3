"""Measures a policy on a benchmark: every task, several trials, in parallel.

An attempt is a loop of replies until the benchmark says that it is over, the
limit of steps is reached, or a reply calls more than is left of the cap on real
calls, none of which is then made: it is scored as it stands. What broke an
attempt and was not the policy's doing makes it errored, which is not wrong:
`benchmark: ...` for the benchmark's machinery, `policy: ...` for an endpoint
that gave no reply, `internal: ...` for a fault of the harness, and
`prerequisite: ...` where an attempt that this one goes on from is errored.

Attempts that go on from others (`benchmark.Chained`) wait for them; all else
runs in parallel. A prerequisite's result stands among the others, in the
category that needs it: its cost is that category's, and it is in no rate.
"""

from collections.abc import Mapping, Sequence
import concurrent.futures
import dataclasses
import datetime
import json
import os
import queue
import threading
import time

from absl import logging

from envace_jax import errors, progress, types
from envace_jax.benchmarks import policies, results
from envace_jax.envs import benchmark, recording
from envace_jax.tasks import records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How much is measured, and how fast."""

  trials: int = 1  # attempts at each task
  max_steps: int = 50  # replies in one attempt
  max_calls: int | None = None  # real calls in one attempt; None: no cap
  workers: int = 1  # attempts at a time
  retry_errored: bool = False  # those of an earlier run
  # What was called and answered is kept with each result, redacted.
  demonstrations: bool = False
  redact: recording.Redact | None = None

  def __post_init__(self):
    for name in ('trials', 'max_steps', 'workers'):
      if getattr(self, name) < 1:
        raise errors.UserError(f'{name}={getattr(self, name)}; use at least 1')
    if self.max_calls is not None and self.max_calls < 0:
      raise errors.UserError(f'max_calls={self.max_calls}; use at least 0')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """One attempt to make."""

  category: str
  task_id: str
  trial: int
  after: Sequence[str] = ()  # tasks attempted before it, in this trial
  prerequisite: bool = False  # of other tasks, and not scored

  @property
  def key(self) -> results.Key:
    return self.task_id, self.trial

  @property
  def waits_for(self) -> Sequence[results.Key]:
    return [(task_id, self.trial) for task_id in self.after]


def measure(
  measured: benchmark.Benchmark,
  policy: policies.Policy,
  tasks: Mapping[str, Sequence[str]],
  path: str | os.PathLike,
  settings: Settings,
) -> list[results.Result]:
  """Results in the order of tasks and trials; what the file has is not rerun.

  Prerequisites stand before the first task that needs them.

  Args:
    measured: the benchmark.
    policy: who is measured; not closed here.
    tasks: task ids by category, see `select`.
    path: of the results' file.
    settings: how much and how fast.
  """
  what = {
    'benchmark': measured.name,
    'version': measured.version,
    'policy': policy.name,
    'max_steps': settings.max_steps,
    'demonstrations': settings.demonstrations,
  }
  if settings.max_calls is not None:
    what['max_calls'] = settings.max_calls
  file = results.File(path, what)
  jobs = _jobs(measured, tasks, settings.trials)
  try:
    left = [job for job in jobs if _is_missing(file, job, settings)]
    if left:
      _run(measured, policy, left, file, settings)
    return [file.results[job.key] for job in jobs]
  finally:
    file.close()


def select(
  measured: benchmark.Benchmark,
  categories: Sequence[str] = (),
  task_ids: Sequence[str] = (),
) -> dict[str, list[str]]:
  """Task ids by category: all, or those asked for; raises UserError."""
  known = list(measured.categories())
  if odd := [c for c in categories if c not in known]:
    measured.task_ids(odd[0])  # the benchmark may know why, and raise
    raise errors.UserError(
      f'{measured.name} has no category {odd[0]!r}; it has {", ".join(known)}'
    )
  chosen = {
    category: list(measured.task_ids(category))
    for category in (categories or known)
  }
  there = {task_id for ids in chosen.values() for task_id in ids}
  if odd := [i for i in task_ids if i not in there]:
    raise errors.UserError(
      f'{measured.name} has no task {odd[0]!r} in {", ".join(chosen)}'
    )
  if task_ids:
    chosen = {c: [i for i in ids if i in task_ids] for c, ids in chosen.items()}
  return {category: ids for category, ids in chosen.items() if ids}


def attempt(
  measured: benchmark.Benchmark,
  policy: policies.Policy,
  job: Job,
  before: Sequence[results.Result],
  settings: Settings,
  stopped: threading.Event,
) -> results.Result | None:
  """One attempt; whatever happens is in its result. None once stopped.

  Args:
    measured: the benchmark.
    policy: who is measured.
    job: the task and trial.
    before: results of the job's prerequisites, in order.
    settings: its limits, and what is kept of it.
    stopped: set when nobody wants it any more.
  """
  start, spent = time.monotonic(), dict.fromkeys(_SPENT, 0)
  started = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
  result = {}
  try:
    opened = _open(measured, job, before)
    try:
      recorder = recording.Recorder(job.task_id, opened, settings.redact)
      speaker = policy.begin(job.task_id, job.trial)
      over = _talk(opened, speaker, recorder, settings, spent, stopped)
      if stopped.is_set() and not over:
        return None
      scored = {} if job.prerequisite else dataclasses.asdict(opened.score())
      result = {**scored, 'capped': not over, 'record': opened.record()}
      if settings.demonstrations:
        kept = recorder.demonstration(policy.name)
        result['demonstration'] = json.loads(records.to_json(kept))
    finally:
      opened.close()
  except _PrerequisiteFailed as error:
    result = {'error': f'prerequisite: {error}'}
  except benchmark.AttemptFailed as error:
    result = {'error': f'benchmark: {error}'}
  except policies.PolicyFailed as error:
    result = {'error': f'policy: {error.kind}'}
  except Exception as error:  # one attempt's bug does not cost the others
    logging.exception('attempt %d at %s', job.trial, job.task_id)
    result = {'error': f'internal: {error!r}'}
  return results.Result(
    task_id=job.task_id,
    category=job.category,
    trial=job.trial,
    prerequisite=job.prerequisite,
    started=started,
    seconds=round(time.monotonic() - start, 3),
    **spent,
    **result,
  )


class _PrerequisiteFailed(Exception):
  """An attempt has nothing to go on from."""


_SPENT = (
  'steps',
  'calls',
  'call_errors',
  'tokens_in',
  'tokens_out',
  'rehearsal_tokens',
)


def _talk(
  opened: benchmark.Attempt,
  speaker: policies.Speaker,
  recorder: recording.Recorder,
  settings: Settings,
  spent: dict[str, int],
  stopped: threading.Event,
) -> bool:
  """Speaks until the attempt is over; False if the limit ended it."""
  dialogue = policies.Dialogue(opened.system, opened.instruction)
  for _ in range(settings.max_steps):
    if stopped.is_set():
      return False
    answer = speaker.ask(dialogue.messages, opened.tools)
    spent['steps'] += 1
    for name in ('tokens_in', 'tokens_out', 'rehearsal_tokens'):
      spent[name] += getattr(answer, name)
    calls = spent['calls'] + len(answer.reply.calls)
    if settings.max_calls is not None and calls > settings.max_calls:
      return False
    spent['calls'] = calls
    heard = opened.respond(answer.reply)
    recorder.hear(answer.reply, heard)
    spent['call_errors'] += sum(
      message.role == 'tool' and message.error is not None for message in heard
    )
    if not heard:
      return True
    dialogue.add(answer.reply, heard)
  return False


def _open(
  measured: benchmark.Benchmark, job: Job, before: Sequence[results.Result]
) -> benchmark.Attempt:
  if not before:
    return measured.open(job.task_id)
  for one in before:
    if one.error:
      raise _PrerequisiteFailed(one.task_id)
  return measured.open_after(job.task_id, [one.record for one in before])


def _jobs(
  measured: benchmark.Benchmark,
  tasks: Mapping[str, Sequence[str]],
  trials: int,
) -> list[Job]:
  """Attempts at tasks, and before them at what they go on from."""
  jobs: dict[results.Key, Job] = {}
  chained = isinstance(measured, benchmark.Chained)
  before = measured.prerequisites if chained else lambda task_id: ()
  for category, task_ids in tasks.items():
    for task_id in task_ids:
      after = before(task_id)
      for trial in range(trials):
        for other in after:
          job = Job(
            category=category,
            task_id=other,
            trial=trial,
            after=before(other),
            prerequisite=True,
          )
          jobs.setdefault(job.key, job)
        job = Job(category=category, task_id=task_id, trial=trial, after=after)
        jobs[job.key] = job
  return list(jobs.values())


def _is_missing(file: results.File, job: Job, settings: Settings) -> bool:
  known = file.results.get(job.key)
  return known is None or (settings.retry_errored and bool(known.error))


def _run(
  measured: benchmark.Benchmark,
  policy: policies.Policy,
  left: Sequence[Job],
  file: results.File,
  settings: Settings,
) -> None:
  """Makes the attempts that are left; this thread alone writes the file."""
  stopped = threading.Event()
  pool = concurrent.futures.ThreadPoolExecutor(settings.workers)
  counts: types.Json = {'success': 0, 'errored': 0}
  undone = {job.key for job in left}
  waiting, over = list(left), queue.SimpleQueue()
  try:
    with progress.bar(measured.name, len(left), unit='attempt') as bar:
      while undone:
        held = []
        for job in waiting:
          if not undone.isdisjoint(job.waits_for):
            held.append(job)
            continue
          before = [file.results[key] for key in job.waits_for]
          future = pool.submit(
            attempt, measured, policy, job, before, settings, stopped
          )
          future.add_done_callback(over.put)
        waiting = held
        result = over.get().result()
        file.add(result)
        undone.remove(result.key)
        counts['success'] += result.success
        counts['errored'] += bool(result.error)
        bar.advance(1, **counts)
  finally:
    stopped.set()
    pool.shutdown(cancel_futures=True)
