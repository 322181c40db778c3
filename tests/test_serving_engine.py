"""The engine: the same answers in company as alone, and rows used again."""

import time

import jax
import numpy as np
import pytest
import serving
import talkative

from envace_jax.model import logprobs
from envace_jax.serving import capacities, jobs, slots

TEXTS = ('ab', 'a longer instruction', 'x')


@pytest.fixture(scope='module')
def motor(policy):
  with serving.running(*policy) as motor:
    yield motor


def answer(motor, *group):
  motor.submit(group)
  return [job.done.result(60) for job in group]


def test_an_answer_does_not_depend_on_company(motor):
  asked = [(text, seed) for text in TEXTS for seed in range(3)]
  alone = [answer(motor, serving.job(*one))[0] for one in asked]
  together = answer(motor, *(serving.job(*one) for one in asked))
  for one, other in zip(alone, together, strict=True):
    assert serving.same(one.tokens.ids, other.tokens.ids)
    np.testing.assert_allclose(
      one.tokens.logprobs, other.tokens.logprobs, atol=1e-5
    )
  said = {tuple(one.tokens.ids) for one in alone}
  assert len(said) > 3, 'all the same: this test sees nothing'
  assert {one.ended for one in alone} >= {jobs.Ended.STOPPED}


def test_logprobs_are_the_models(motor, policy):
  group = [serving.job(text, 5, temperature=1.7) for text in TEXTS]
  rows = [
    np.concatenate([job.prompt, one.tokens.ids])
    for job, one in zip(group, answer(motor, *group), strict=True)
  ]
  tokens_BT = np.zeros((len(rows), serving.CAPACITY.context), np.int32)
  for i, row in enumerate(rows):
    tokens_BT[i, : len(row)] = row
  expected_BT = jax.jit(
    logprobs.token_logprobs, static_argnums=0, static_argnames='chunk'
  )(*policy, tokens_BT, chunk=40).logprob
  for job, row, expected_T in zip(group, rows, expected_BT, strict=True):
    said = job.done.result().tokens.logprobs
    np.testing.assert_allclose(
      said, expected_T[len(job.prompt) : len(row)], atol=1e-4
    )
    scored = motor.score(row, top=3)
    np.testing.assert_allclose(
      scored.logprobs[1:], expected_T[1 : len(row)], atol=1e-4
    )
    assert (scored.top_logprobs[1:, 0] >= scored.logprobs[1:] - 1e-6).all()


def test_settings_are_per_row(motor):
  greedy, other, filtered, short = answer(
    motor,
    serving.job('ab', 1, temperature=0.0),
    serving.job('ab', 2, temperature=0.0),
    serving.job('ab', 3, top_k=1, top=2),
    serving.job('ab', 4, max_tokens=2, temperature=2.0),
  )
  assert serving.same(greedy.tokens.ids, other.tokens.ids)
  assert serving.same(greedy.tokens.ids, filtered.tokens.ids)
  assert filtered.tokens.top_ids.shape == (len(filtered.tokens.ids), 2)
  assert serving.same(filtered.tokens.top_ids[:, 0], filtered.tokens.ids)
  assert len(short.tokens.ids) <= 2


def test_a_conversation_goes_on_in_its_row(motor):
  first = serving.job('tell me', 1)
  (said,) = answer(motor, first)
  row = np.concatenate([first.prompt, said.tokens.ids])
  more = talkative.TEMPLATE.user_turn('more')
  prompt = np.concatenate([row, more, first.prompt[-1:]])
  again = jobs.Job(
    prompt=prompt, sampling=jobs.Sampling(seed=2, max_tokens=8),
    stop_ids=talkative.END,
  )  # fmt: skip
  (reused,) = answer(motor, again)
  assert reused.reused >= len(row) - 1
  # The same prompt, once its row is taken by others, says the same.
  answer(motor, *(serving.job(f'other {i}', i) for i in range(8)))
  fresh = jobs.Job(
    prompt=prompt, sampling=again.sampling, stop_ids=talkative.END
  )
  (anew,) = answer(motor, fresh)
  assert anew.reused < reused.reused
  assert serving.same(anew.tokens.ids, reused.tokens.ids)


def test_several_answers_read_a_prompt_once(motor):
  before = motor.counts.reused_tokens
  leader = serving.job('a prompt of some length', 9)
  others = [
    serving.job('a prompt of some length', 9, choice=i, leader=leader)
    for i in (1, 2, 3)
  ]
  said = answer(motor, leader, *others)
  assert len({tuple(one.tokens.ids) for one in said}) > 1
  assert motor.counts.reused_tokens - before >= 3 * len(leader.prompt)


def test_whoever_leaves_frees_a_row(motor):
  endless = [
    jobs.Job(
      prompt=serving.job('ab', i).prompt,
      sampling=jobs.Sampling(seed=i),
      stop_ids=(),
      listen=lambda tokens: time.sleep(0.05),
    )
    for i in range(4)
  ]
  motor.submit(endless)
  late = serving.job('ab', 1)
  late.deadline = time.monotonic() + 0.05
  motor.submit([late])
  with pytest.raises(jobs.Refused) as refused:
    late.done.result(60)
  assert refused.value.status == 504
  for job in endless:
    job.cancel()
  serving.until(lambda: not motor.running)
  assert answer(motor, serving.job('ab', 1))[0].tokens.ids.size


def test_a_full_queue_refuses_all_of_a_group(motor):
  group = [serving.job('ab', i) for i in range(serving.CAPACITY.queue + 5)]
  with pytest.raises(jobs.Refused) as refused:
    motor.submit(group)
  assert refused.value.status == 429
  assert answer(motor, *group[:3])


def test_a_failure_is_not_the_next_ones(motor):
  def fail(*_, **__):
    raise RuntimeError('no device')

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(motor._rows, 'decode', fail)
    with pytest.raises(jobs.Refused) as refused:
      answer(motor, serving.job('ab', 1))
  assert refused.value.status == 500
  expected = answer(motor, serving.job('ab', 2))[0]
  assert serving.same(
    answer(motor, serving.job('ab', 2))[0].tokens.ids, expected.tokens.ids
  )
  assert motor.counts.device_failures == 1


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_nobody_waits_for_an_engine_that_is_gone(policy, monkeypatch):
  def fail(*_, **__):
    raise RuntimeError('no device')

  with serving.running(*policy) as motor:
    broken = [serving.job('ab', i) for i in range(motor.capacity.rows + 2)]
    monkeypatch.setattr(motor._rows, 'decode', fail)
    monkeypatch.setattr(motor._rows, 'reset', fail)
    motor.submit(broken)
    for job in broken:
      with pytest.raises(jobs.Refused):
        job.done.result(timeout=60)
    motor._thread.join(timeout=60)
    assert not motor.is_alive
    with pytest.raises(jobs.Refused) as refused:
      motor.submit([serving.job('ab', 1)])
  assert refused.value.status == 503


def test_a_network_without_numbers_is_said(policy):
  model, params = policy
  broken = jax.tree.map(lambda x: x * np.nan, params)
  with serving.running(model, broken) as motor:
    with pytest.raises(jobs.Refused) as refused:
      answer(motor, serving.job('ab', 1))
  assert refused.value.code == 'no_distribution'


def test_rows_are_taken_by_what_they_hold():
  rows = slots.Slots(3, 32)

  def put(ids, said=()):
    place = rows.place(np.asarray(ids))
    rows.append(place.target, np.asarray(ids)[place.keep :])
    rows.append(place.target, np.asarray(said, np.int32))
    rows.release(place.target)
    return place

  one, two = put([1, 2, 3], [4]), put([1, 2, 9])
  assert two.keep == 2 and two.target is not one.target
  assert two.source is one.target
  goes_on = put([1, 2, 3, 4, 5])
  assert goes_on.target is one.target and goes_on.keep == 4
  third = put([7, 7])
  assert third.target not in (one.target, two.target) and third.keep == 0
  assert put([8]).target is two.target  # the one used longest ago
  for _ in range(3):
    assert rows.place(np.asarray([5])) is not None
  assert rows.place(np.asarray([5])) is None


def test_a_capacity_that_cannot_be_is_refused():
  with pytest.raises(ValueError, match='ladder'):
    capacities.Capacity(
      rows=4, context=100, queue=1, sizes=(1, 4), widths=(8,), ladder=(50,)
    )
  made = capacities.fitting(rows=8, context=2048, queue=4)
  assert made.rung(1025) == 2048 and made.size(2) == 8
  assert made.rows_in_window(128) * 128 <= made.window_tokens


def test_no_window_is_read_more_than_half_empty():
  made = capacities.fitting(rows=8, context=2048, queue=4)
  widths = [made.width(tokens) for tokens in (1, 16, 17, 64, 65, 128, 999)]
  assert widths == [8, 8, 32, 32, 128, 128, 128]
