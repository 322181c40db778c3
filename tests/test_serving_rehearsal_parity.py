"""The same rehearsals through the server as in the rollout, token by token."""

import dataclasses

import numpy as np
import pytest
import serving
import talkative

from envace_jax import types
from envace_jax.rollout import alternation, episodes
from envace_jax.rollout import private_rehearsal as rehearsing
from envace_jax.sampling import keys, samplers
from envace_jax.serving import chat, engine, jobs, private
from envace_jax.worlds import answers, rehearsal

ATTEMPTS, ACTIONS = 3, 4
RULE = rehearsing.Rule(
  attempts=ATTEMPTS,
  mode=rehearsing.Mode.SEQUENTIAL,
  memory=rehearsing.Memory.AGREED,
  max_notes=4,
)


def in_the_rollout(model, params):
  """Sequential rehearsals as training and evaluation make them."""
  greedy = samplers.SamplerConfig(temperature=0.0)
  decoder = talkative.decoder_for(
    model, max_row_tokens=240, max_actions=ACTIONS, max_steps=20
  )
  decoder = dataclasses.replace(
    decoder, act=greedy, rehearse=greedy, prompt_tokens=100
  )
  anything = answers.Answers(template=serving.TEMPLATE, max_resamples=None)

  def run(tasks, notes, samples, number):
    attempts = episodes.attempts_of(tasks, samples, notes=notes)
    finished = alternation.run_episodes(
      decoder,
      serving.TEMPLATE,
      params,
      rehearsal.RehearsedWorld(anything),
      attempts,
      [
        serving.TEMPLATE.prompt(
          one.task.instruction, one.notes, one.task.tools, one.task.system
        )
        for one in attempts
      ],
      keys.rows(keys.stream(0, 'rollout', number), range(len(attempts))),
      talkative.NO_RULES,
    )
    return [
      episodes.episode_of(attempt, one, serving.TEMPLATE)
      for attempt, one in zip(attempts, finished, strict=True)
    ]

  task = types.Task(
    id='t', instruction='ab', tools=[serving.TOOL], checklist=(), system='s'
  )
  context = rehearsing.Context(
    is_write=lambda name: False, fits=lambda task, notes: True
  )
  return rehearsing.rehearse([task], RULE, context, run)


def through_the_server(model, params):
  caught, real = [], private.Rehearsals.run

  def run(self, *args, **options):
    caught.append(self)
    return real(self, *args, **options)

  motor = engine.Engine(model, params, serving.REHEARSING)
  motor.start()
  try:
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(private.Rehearsals, 'run', run)
      done = chat.Service(motor, serving.TEMPLATE, deadline_s=300).chat(
        [
          {'role': 'system', 'content': 's'},
          {'role': 'user', 'content': 'ab'},
        ],
        [serving.TOOL],
        chat.Settings(
          sampling=jobs.Sampling(temperature=0.0),
          rehearsal=private.Settings(
            attempts=ATTEMPTS,
            mode=RULE.mode,
            max_actions=ACTIONS,
            temperature=0.0,
          ),
        ),
      )
  finally:
    motor.close(drain=False)
  return caught[0].rehearsed, done


@pytest.mark.nightly  # two engines to compile
def test_a_rehearsal_is_the_same_in_the_server_and_in_the_rollout():
  model, params = serving.rehearser()
  here = in_the_rollout(model, params)
  there, done = through_the_server(model, params)
  assert there.notes() == here.notes() and here.notes()[0]
  assert there.sampled_tokens == here.sampled_tokens == done.rehearsal_tokens
  for one, other in zip(there.attempts[0], here.attempts[0], strict=True):
    row = other.rows[0]
    begun = int((row.authors == types.Author.PROMPT).sum()) + 1
    np.testing.assert_array_equal(one.rows[0].tokens, row.tokens[begun:])
    np.testing.assert_array_equal(one.rows[0].authors, row.authors[begun:])
    assert one.stop_reason == other.stop_reason
    assert one.steps == other.steps and one.notes == other.notes
  prompt, _ = serving.TEMPLATE.prompt(
    'ab', here.notes()[0], [serving.TOOL], 's'
  )
  assert serving.same(done.prompt_ids, prompt)
