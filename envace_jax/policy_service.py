"""A run's newest policy behind `serving.chat`, for a server and in-process."""

import dataclasses
import pathlib

from absl import logging

from envace_jax import build, errors, restore, types, workdirs
from envace_jax.model import per_role, transformer
from envace_jax.serving import capacities, chat, engine, private, rehearsal
from envace_jax.text import formats
from envace_jax.text import template as templates
from envace_jax.text import tokenizer as tokenizers
from envace_jax.weights import pretrained as checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How much a policy serves, and how."""

  rows: int = 8  # answers at a time
  context: int = 0  # tokens in a row; 0: rollout.max_row_tokens
  queue: int = 64  # answers that may wait for a row
  deadline_s: float = 600.0
  tools: str = ''  # what prompts say of the tools; '': prompt.tools
  # Of conversations with tools whose requests say nothing of it.
  rehearsal: private.Settings = private.Settings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
  """A service that runs; `service.engine.close()` ends it."""

  service: chat.Service
  tokenizer: tokenizers.Tokenizer
  phase: str  # 'rl' or 'warm_start'
  step: int
  programs: int  # that were compiled
  tools: str  # what prompts say of them


def open_run(workdir: str, options: Options) -> Opened:
  """Restores a run's newest policy, compiles what it needs, and starts it.

  Raises:
    UserError: no run, no checkpoint, or the options do not fit it.
  """
  config = workdirs.load_config(workdir)
  setup = build.Setup(config, pathlib.Path(workdir))
  phase, step, trained = restore.newest(workdir, setup)
  tools = options.tools or config.prompt.tools
  template = _template(setup, tools)
  context = options.context or config.rollout.max_row_tokens
  network = setup.network(trained)
  ability = _ability(setup, network)
  if options.rehearsal.attempts and ability.refusal:
    raise errors.UserError(f'{workdir}: {ability.refusal}')
  try:
    motor = engine.Engine(
      _model(setup, context),
      per_role.of(network, types.Role.ACT),
      capacities.fitting(
        rows=options.rows, context=context, queue=options.queue
      ),
    )
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  compiled = motor.warm_up()
  logging.info('%s step %d, %d programs compiled', phase, step, compiled)
  motor.start()
  return Opened(
    service=chat.Service(
      motor,
      template,
      deadline_s=options.deadline_s,
      ability=ability,
      rehearsal=options.rehearsal,
    ),
    tokenizer=setup.data.words.tokenizer,
    phase=phase,
    step=step,
    programs=compiled,
    tools=tools,
  )


def _template(setup: build.Setup, tools: str) -> templates.Template:
  words = setup.data.words
  return templates.Template(
    words.tokenizer,
    tools,
    parallel=formats.Joint.AGAIN in words.row_format.joints,
    row_format=words.row_format,
  )


def _ability(setup: build.Setup, network: build.Network) -> private.Ability:
  """How this run's policy rehearses."""
  own_row, prompt = None, setup.config.prompt.rehearse
  if setup.config.rollout.view == 'split':
    own_row = rehearsal.OwnRow(
      template=_template(setup, prompt.tools), instructions=prompt.instructions
    )
  refusal = ''
  if isinstance(network, per_role.PerRole):
    refusal = (
      'its REHEARSE is a network of its own, and one is served; rehearse with '
      'a run that has rl.share_roles=True, or ask for 0 rehearsals'
    )
  return private.Ability(
    refusal=refusal, own_row=own_row, is_write=setup.data.is_write
  )


def _model(setup: build.Setup, context: int) -> transformer.Transformer:
  """The network for rows of another length than in training.

  Raises:
    ValueError: a published network was not made for such rows.
  """
  shape = setup.model.config
  if context == shape.max_len:
    return setup.model
  if setup.config.pretrained.path:
    folder = setup.path / 'pretrained'
    most = checkpoints.open_checkpoint(folder).config.max_len
    if context > most:
      raise ValueError(
        f'--context={context} exceeds the {most} positions of the published '
        'network; lower it'
      )
  return transformer.Transformer(dataclasses.replace(shape, max_len=context))
