"""Impossible calls are refused, impossible answers drawn again."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import talkative
from talkative import TEMPLATE, decoder_for, task

from envace_jax import types
from envace_jax.sampling import samplers
from envace_jax.text import template as templates
from envace_jax.worlds import (
  answers,
  base,
  checked,
  own_row,
  real,
  rehearsal,
  validation,
)

A = types.Author
CALM = samplers.SamplerConfig(temperature=0.6)  # finishes its answers
TOOL = {
  'type': 'function',
  'function': {
    'name': 'get',
    'parameters': {
      'type': 'object',
      'properties': {'id': {'type': 'string'}},
      'required': ['id'],
      'additionalProperties': False,
    },
    'returns': {
      'type': 'object',
      'properties': {'status': {'enum': ['sent', 'open']}},
      'required': ['status'],
    },
  },
}
BARE = {'type': 'function', 'function': {'name': 'bare'}}


def call(name, **arguments):
  return types.ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
  'action, code',
  [
    (call('get', id='O1'), None),
    (call('bare', anything=[1]), None),
    (call('take', id='O1'), 'TOOL_NOT_AVAILABLE'),
    (call('get'), 'INVALID_PARAMETERS'),
    (call('get', id=1), 'INVALID_PARAMETERS'),
    (call('get', id='O1', more=2), 'INVALID_PARAMETERS'),
    (types.ParseError(kind='bad_json', detail='{'), 'INVALID_TOOL_CALL_FORMAT'),
  ],
  ids=str,
)
def test_calls_are_refused_in_the_published_codes(action, code):
  fault = validation.call_fault(action, [BARE, TOOL])
  assert (fault and fault[0]) == code
  if fault:
    text = validation.render((code, fault[1] + '\ud800\x00"' * 200))
    shown = json.loads(text)['error_tool_call']
    assert shown['code'] == code and len(shown['message']) <= 120
    text.encode()


@pytest.mark.parametrize(
  'text, code',
  [
    ('{"status": "sent"}', None),
    ('{"error": "order_not_found"}', None),
    ('{"error_tool_call": {"code": "X"}}', None),
    ('{"status": "lost"}', 'SCHEMA_VALIDATION_FAILED'),
    ('{"state": "sent"}', 'SCHEMA_VALIDATION_FAILED'),
    ('[]', 'SCHEMA_VALIDATION_FAILED'),
    ('{}', 'INVALID_EXECUTION_RESULT_TYPE'),
    ('"sent"', 'INVALID_EXECUTION_RESULT_TYPE'),
    ('sent', 'SIMULATOR_JSON_DECODE_ERROR'),
    ('', 'SIMULATOR_JSON_DECODE_ERROR'),
    ('{"status": "sent"} and more', 'SIMULATOR_JSON_DECODE_ERROR'),
  ],
)
def test_answers_no_tool_could_give(text, code):
  fault = validation.answer_fault(text, call('get', id='O1'), [TOOL])
  assert (fault and fault[0]) == code
  free = validation.answer_fault(text, call('bare'), [BARE])
  assert bool(free) == (code not in (None, 'SCHEMA_VALIDATION_FAILED'))


class Recorder:
  """Answers everything and keeps what it was asked."""

  def __init__(self):
    self.requests = []

  def open(self, batch):
    pass

  def respond(self, session, requests):
    self.requests += requests
    return [base.Response(text='{"status": "sent"}') for _ in requests]

  def interventions(self):
    return {'rejected/X': 4}


def span(*ids):
  return np.array(ids, np.int32), np.full(len(ids), A.ACT, np.int8)


def test_a_refused_call_is_heard_of_with_the_next_one():
  inner = Recorder()
  world = checked.CheckedWorld(inner, TEMPLATE)
  tasks = [dataclasses.replace(task(n), tools=(TOOL,)) for n in 'ab']
  world.open(base.Batch(tasks=tasks, prompts=[()] * 2, row_keys=None))
  ask = lambda row, action, *ids: base.Request(
    row=row, action=action, heard=(span(*ids),)
  )
  bad, good = world.respond(
    None, [ask(0, call('take'), 1, 2), ask(1, call('get', id='O1'), 3)]
  )
  assert 'TOOL_NOT_AVAILABLE' in bad.text and 'sent' in good.text
  assert [r.row for r in inner.requests] == [1]
  world.respond(None, [ask(0, call('get', id='O2'), 9)])
  ids, authors = templates.join(inner.requests[-1].heard)
  refusal = TEMPLATE.observation(bad.text)
  np.testing.assert_array_equal(ids, [1, 2, *refusal, 9])
  assert (authors[2 : 2 + len(refusal)] == A.WORLD).all()
  assert world.interventions() == {
    'refused/INVALID_TOOL_CALL_FORMAT': 0,
    'refused/TOOL_NOT_AVAILABLE': 1,
    'refused/INVALID_PARAMETERS': 0,
    'rejected/X': 4,  # the inner world's
  }


@pytest.mark.parametrize('split', [False, True])
def test_rejections_are_counted_by_code_where_somebody_watches(policy, split):
  for watching in (False, True):
    drawn = answers.Answers(
      template=TEMPLATE, max_resamples=2 if watching else None
    )
    drawn.rejected['SCHEMA_VALIDATION_FAILED'] += 3
    model, _ = policy
    world = world_of(policy, drawn, split)(decoder_for(model))
    counts = world.interventions()
    assert sorted(counts.values()) == ([0, 0, 3] if watching else [])
    assert set(counts) <= {f'rejected/{c}' for c in validation.ANSWER_CODES}
  assert not real.NullWorld().interventions()
  assert not real.RealWorld(None).interventions()


def episodes_of(policy, world, seed=0):
  model, params = policy
  decoder = dataclasses.replace(
    decoder_for(model, max_row_tokens=128), rehearse=CALM
  )
  return talkative.play(
    decoder, params, world(decoder), [task('a'), task('mid')], 3, seed=seed
  )


def rejecting(monkeypatch, is_bad, max_resamples):
  """Answers that reject by their text alone, whatever the call was."""
  drawn = answers.Answers(template=TEMPLATE, max_resamples=max_resamples)

  def fault(self, said, request, tasks):
    del request, tasks
    text = self.template.observation_text(said.ids)
    return ('BAD', '') if said.finished and is_bad(text) else None

  monkeypatch.setattr(answers.Answers, '_fault', fault)
  return drawn


def world_of(policy, drawn, split):
  if not split:
    return lambda _: rehearsal.RehearsedWorld(drawn)
  return lambda decoder: own_row.OwnRowWorld(
    decoder,
    TEMPLATE,
    policy[1],
    lambda one: TEMPLATE.prompt(one.instruction),
    drawn,
    trained=True,
  )


@pytest.mark.parametrize('split', [False, True])
def test_rejected_answers_leave_no_trace(policy, monkeypatch, split):
  drawn = rejecting(monkeypatch, lambda text: len(text) % 2 == 0, 40)
  seen = [
    e
    for seed in range(2)
    for e in episodes_of(policy, world_of(policy, drawn, split), seed)
  ]
  steps = [step for episode in seen for step in episode.steps]
  assert len(steps) > 3 and drawn.rejected['BAD'] > 3
  assert all(len(step.observation_text) % 2 for step in steps)
  model, params = policy
  for episode in seen:
    for row in episode.rows:  # the caches have forgotten as well
      hidden, _ = model.apply(
        {'params': params}, jax.numpy.asarray(row.tokens)[None]
      )
      logits = model.apply({'params': params}, hidden, method='unembed')[0]
      for t in np.flatnonzero(row.logprobs):
        temperature = 0.9 if row.authors[t] == A.ACT else 0.6
        expected = jax.nn.log_softmax(logits[t - 1] / temperature)
        np.testing.assert_allclose(
          row.logprobs[t], expected[row.tokens[t]], atol=2e-4
        )


@pytest.mark.parametrize('split', [False, True])
def test_a_hopeless_answer_becomes_a_refusal(policy, monkeypatch, split):
  drawn = rejecting(monkeypatch, lambda text: True, 2)
  seen = episodes_of(policy, world_of(policy, drawn, split))
  steps = [step for episode in seen for step in episode.steps]
  refused = [s for s in steps if '"BAD"' in s.observation_text]
  assert refused and all(s.author is A.WORLD for s in refused)
  assert drawn.rejected['BAD'] >= 3 * len(
    refused
  )  # the first draw and two more
  if split:
    for episode in seen:
      act, own = (
        row.tokens[int((row.authors == A.PROMPT).sum()) :]
        for row in episode.rows
      )
      np.testing.assert_array_equal(own, act[: len(own)])
      assert (episode.rows[1].authors == A.WORLD).any() or not episode.steps
