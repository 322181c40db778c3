"""What a run leaves for a person: evaluations, summary, transcripts, report."""

from collections.abc import Mapping
import json
import pathlib

from absl import logging
import jax

from envace_jax import build, progress, types, workdirs
from envace_jax import metrics as metric_files
from envace_jax.evaluation import evaluator as evaluators
from envace_jax.evaluation import private, private_study, replay
from envace_jax.report import page, transcripts
from envace_jax.report import summary as summaries
from envace_jax.text import template as templates

_SHOWN = ('real_success', 'rehearsed_success', 'gap', 'fidelity')


def measure(setup: build.Setup, params, path: pathlib.Path, name: str) -> dict:
  """The held-out numbers of some parameters; read back if already there.

  `name` is 'warm_start' or 'after'. Private rehearsal is measured after.
  """
  file = path / 'evaluations' / f'{name}.json'
  if file.exists():
    return json.loads(file.read_text())
  borrowed = _borrowed(setup, name)
  if borrowed is not None:
    return borrowed
  made_private = (
    setup.private.rule.attempts > 0 and setup.runner.environment is not None
  )
  setup.evaluator.real_calls = 0
  with progress.bar(f'measuring {name.replace("_", " ")}', 2) as bar:
    measured = setup.evaluator.held_out(params)
    bar.advance()
    if made_private:
      measured |= private.compare(
        setup.evaluator, setup.runner, setup.data.tasks, params, setup.private
      )
    else:
      unmeasured = {arm: evaluators.leaf(None) for arm in private.ARMS}
      measured |= {
        'private_rehearsal': unmeasured,
        'private_rehearsal_by_cap': [],
      }
    bar.advance()
  measured['real_calls'] = setup.evaluator.real_calls
  if name == 'after':
    write_transcripts(setup, params, path)
  if jax.process_index() == 0:
    workdirs.write_json(file, measured)
  return measured


def study_private_rehearsal(
  setup: build.Setup, policies: Mapping, path: pathlib.Path
) -> dict:
  """Private rehearsal in full; read back if already there.

  `policies` maps names to parameters: rehearsers and executors both.
  """
  file = path / workdirs.PRIVATE_STUDY_FILE
  if file.exists():
    return json.loads(file.read_text())
  setup.evaluator.real_calls = 0
  study = private_study.Study(
    setup.evaluator,
    setup.runner,
    setup.data.tasks,
    policies,
    setup.private,
    log=lambda line: logging.info('private rehearsal: %s', line),
  )
  measured = {
    'lines': study.lines(),
    'self_evaluations': study.self_evaluations(),
    'real_calls': setup.evaluator.real_calls,
  }
  if jax.process_index() == 0:
    workdirs.write_json(file, measured)
  return measured


def _borrowed(setup: build.Setup, name: str) -> dict | None:
  """The same warm start's numbers, where another run has measured them."""
  options = setup.config.warm_start
  if name != 'warm_start' or not options.workdir:
    return None
  source = pathlib.Path(options.workdir)
  file = source / 'evaluations' / 'warm_start.json'
  mine, theirs = (
    workdirs.flat(workdirs.to_json(config))
    for config in (setup.config, workdirs.load_config(str(source)))
  )
  if not file.exists() or any(
    mine[key] != theirs.get(key)  # which an older run may lack
    for key in mine
    if key.startswith(('seed', 'data.', 'prompt.', 'model.'))
    or key == 'evaluation.samples'
  ):
    return None
  return json.loads(file.read_text())


def write(
  setup: build.Setup,
  path: pathlib.Path,
  before: dict,
  after: dict,
  *,
  seconds: dict[str, float],
  compiles: dict[str, int],
) -> dict:
  """Writes summary.json and report.html; returns the summary."""
  phases = {'warm_start': before, 'after': after}
  summary = {
    **{key: {phase: phases[phase][key] for phase in phases} for key in _SHOWN},
    'error_recall': after['error_recall'],
    'optimism_index': after['optimism_index'],
    'error_recall_warm_start': before['error_recall'],
    'optimism_index_warm_start': before['optimism_index'],
    'private_rehearsal': after['private_rehearsal'],
    'private_rehearsal_by_cap': after['private_rehearsal_by_cap'],
    'real_calls': before['real_calls'] + after['real_calls'],
    'seconds': {
      stage: round(seconds.get(stage, 0.0), 1) for stage in summaries.STAGES
    },
    'compiles': compiles,
    'seed': setup.config.seed,
    'config': workdirs.to_json(setup.config),
  }
  if jax.process_index() == 0:
    summaries.write(path / 'summary.json', summary)
    page.write_report(
      path,
      summary,
      metric_files.read(path / metric_files.METRICS_FILE),
      transcripts.read_records(path / 'transcripts.jsonl'),
    )
  return summary


def write_transcripts(setup: build.Setup, params, path: pathlib.Path) -> None:
  """Six rehearsals, one of each family where there are six, beside reality."""
  by_family: dict[str, types.Task] = {}
  for task in setup.data.tasks['test_iid']:
    by_family.setdefault(task.family, task)
  tasks = list(by_family.values())
  episodes = setup.runner.rehearsed(params, tasks, stream=5, samples=1)
  scores = setup.score(tasks, episodes)
  replays = [None] * len(tasks)
  if setup.data.make_environment is not None:
    replays = replay.replay(episodes, tasks, setup.data.make_environment)
  transcripts.write_records(
    path / 'transcripts.jsonl',
    [
      record(setup.data.template, *one)
      for one in zip(tasks, episodes, scores, replays, strict=True)
    ],
  )


def record(
  template: templates.Template,
  task: types.Task,
  episode: types.Episode,
  score: types.Score,
  replayed: replay.Replay | None,
) -> dict:
  """One rehearsed episode as `report.transcripts` reads it."""
  row = episode.rows[0]
  steps = [] if replayed is None else replayed.real.steps
  return {
    'task_id': task.id,
    'family': task.family,
    'instruction': task.instruction,
    'notes': episode.notes,
    'stop_reason': episode.stop_reason.value,
    'reward': score.reward,
    'success': score.success,
    'spans': [
      {
        'author': types.Author(author).name,
        'text': template.literal(row.tokens[start:stop]),
      }
      for author, start, stop in templates.runs(row.authors)
    ],
    'real_spans': None,
    'real_observations': [step.observation_text for step in steps],
  }
