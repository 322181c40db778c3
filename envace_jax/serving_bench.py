"""`envace bench --serve`: what continuous batching and kept rows are worth.

  throughput    sessions of several turns at a time, against one after another
  first token   of a second turn, behind a short and behind a long first one

Both through `serving.chat`, in one process, in one run; the network is of the
config's sizes, its weights are random, and every answer is as long as it may
be: no stop token ends it.
"""

from collections.abc import Sequence
import concurrent.futures
import dataclasses
import json
import pathlib
import statistics
import sys
import time

import jax
import ml_collections
import numpy as np

from envace_jax import components, errors, pretrained, progress, refusals
from envace_jax.model import transformer
from envace_jax.serving import capacities, engine, jobs

SESSIONS, TURNS, NEW, ASKED = 32, 4, 32, 24
SHORT, REPEATS = 32, 9
THROUGHPUT_PROMISE, FIRST_TOKEN_PROMISE = 5.0, 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """Seconds, and the two ratios that are promised."""

  params: int
  tokens: int  # sampled by all sessions
  sequential_s: float
  concurrent_s: float
  throughput_ratio: float
  short_history: int  # tokens before the second turn
  long_history: int
  short_first_token_s: float  # median
  long_first_token_s: float
  first_token_ratio: float
  unread_first_token_s: float  # of the long history, where no row holds it


def run(config: ml_collections.ConfigDict, json_path: str | None) -> int:
  """Measures, prints a record, writes it; 1 where a promise is broken."""
  published = pretrained.architecture(config)
  refusals.validate(config, published)
  if json_path and not pathlib.Path(json_path).absolute().parent.is_dir():
    raise errors.UserError(f'--json={json_path} has no directory; create it')
  record = measure(
    components.model(config, config.data.vocab_size, published),
    context=config.rollout.max_row_tokens,
  )
  text = json.dumps(dataclasses.asdict(record), indent=1) + '\n'
  sys.stdout.write(text)
  if json_path:
    pathlib.Path(json_path).write_text(text)
  kept = (
    record.throughput_ratio >= THROUGHPUT_PROMISE
    and record.first_token_ratio <= FIRST_TOKEN_PROMISE
  )
  return 0 if kept else 1


def measure(model: transformer.Transformer, *, context: int) -> Record:
  """One record; rows of `context` tokens must hold the sessions.

  Raises:
    UserError: they do not.
  """
  longest = TURNS * (ASKED + NEW)
  if context < longest:
    raise errors.UserError(
      f'sessions of {longest} tokens do not fit in rollout.max_row_tokens='
      f'{context}; raise it'
    )
  params = transformer.init_params(model, jax.random.key(0))
  limits = capacities.fitting(rows=SESSIONS, context=context, queue=SESSIONS)
  motor = engine.Engine(model, params, limits)
  with progress.bar('bench --serve', 5, unit='part') as bar:
    motor.warm_up()
    motor.start()
    bar.advance()
    try:
      draw = np.random.default_rng(0)
      turns = draw.integers(
        0, model.config.vocab_size, (2, SESSIONS, TURNS, ASKED)
      )
      start = time.perf_counter()
      for session in turns[0]:
        _session(motor, session)
      sequential = time.perf_counter() - start
      bar.advance()
      start = time.perf_counter()
      with concurrent.futures.ThreadPoolExecutor(SESSIONS) as pool:
        list(pool.map(lambda session: _session(motor, session), turns[1]))
      together = time.perf_counter() - start
      bar.advance()
      long = context - 2 * (ASKED + NEW)
      short_s, long_s, unread_s = _first_tokens(motor, draw, (SHORT, long))
      bar.advance(2)
    finally:
      motor.close()
  return Record(
    params=transformer.num_params(params),
    tokens=SESSIONS * TURNS * NEW,
    sequential_s=sequential,
    concurrent_s=together,
    throughput_ratio=sequential / together,
    short_history=SHORT,
    long_history=long,
    short_first_token_s=short_s,
    long_first_token_s=long_s,
    first_token_ratio=long_s / short_s,
    unread_first_token_s=unread_s,
  )


def _session(motor: engine.Engine, turns: Sequence[np.ndarray]) -> None:
  """A conversation, each turn asked once the one before is answered."""
  row = np.zeros((0,), np.int32)
  for asked in turns:
    prompt = np.concatenate([row, asked]).astype(np.int32)
    said = _ask(motor, prompt, NEW).done.result()
    row = np.concatenate([prompt, said.tokens.ids])


def _first_tokens(motor, draw, histories) -> tuple[float, float, float]:
  """Medians behind a short and a long history; and of the long one, unread."""
  vocab = motor.vocab_size
  spent, unread = {size: [] for size in histories}, []
  for _ in range(REPEATS):
    for size in histories:
      prompt = draw.integers(0, vocab, size).astype(np.int32)
      start = time.perf_counter()
      first = _ask(motor, prompt, 4).done.result()
      if size == histories[-1]:
        unread.append(time.perf_counter() - start)
      asked = draw.integers(0, vocab, ASKED)
      second = np.concatenate([prompt, first.tokens.ids, asked])
      spent[size].append(_time_to_first(motor, second.astype(np.int32)))
  medians = [statistics.median(spent[size]) for size in histories]
  return medians[0], medians[1], statistics.median(unread)


def _time_to_first(motor: engine.Engine, prompt: np.ndarray) -> float:
  seen = []
  start = time.perf_counter()

  def listen(tokens: jobs.Tokens) -> bool:
    seen.append(time.perf_counter() - start)
    return True

  _ask(motor, prompt, NEW, listen).done.result()
  return seen[0]


def _ask(motor, prompt, new, listen=lambda tokens: False) -> jobs.Job:
  job = jobs.Job(
    prompt=prompt,
    sampling=jobs.Sampling(seed=1, max_tokens=new),
    stop_ids=(),
    listen=listen,
  )
  motor.submit([job])
  return job
