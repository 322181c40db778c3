"""A run's newest checkpoint as a benchmark's policy, served in this process."""

from collections.abc import Sequence
import dataclasses

from envace_jax import policy_service, types
from envace_jax.benchmarks import endpoint, policies
from envace_jax.envs import benchmark
from envace_jax.serving import chat, jobs, private


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How a run is asked."""

  service: policy_service.Options
  temperature: float
  max_tokens: int  # of one reply
  seed: int
  rehearsal: private.Settings = private.Settings()


class RunPolicy:
  """The policy. It says nothing more once its row is full."""

  def __init__(self, workdir: str, options: Options):
    """Restores and compiles; raises UserError."""
    opened = policy_service.open_run(
      workdir,
      dataclasses.replace(options.service, rehearsal=options.rehearsal),
    )
    self._service, self._options = opened.service, options
    self.name = (
      f'{workdir} ({opened.phase} step {opened.step}), temperature '
      f'{options.temperature:g}, {options.max_tokens} tokens, seed '
      f'{options.seed}, tools in prompts: {opened.tools}'
      f'{policies.rehearsals(options.rehearsal.as_request())}'
    )

  def begin(self, task_id: str, trial: int) -> policies.Speaker:
    key = f'{self._options.seed}/{task_id}/{trial}'
    return _Speaker(self._service, self._options, key)

  def close(self) -> None:
    self._service.engine.close()


class _Speaker:
  """One attempt's conversation with the service."""

  def __init__(self, service: chat.Service, options: Options, key: str):
    self._service, self._options, self._key = service, options, key
    self._step = 0

  def ask(
    self, messages: Sequence[types.Json], tools: Sequence[types.Json]
  ) -> policies.Answer:
    sampling = jobs.Sampling(
      temperature=self._options.temperature,
      max_tokens=self._options.max_tokens,
      seed=endpoint.request_seed(self._key, self._step),
    )
    self._step += 1
    # Without tools there is nothing to rehearse.
    attempts = self._options.rehearsal.attempts if tools else 0
    rehearsal = dataclasses.replace(
      self._options.rehearsal, attempts=attempts, conversation=self._key
    )
    try:
      completion = self._service.chat(
        messages, tools, chat.Settings(sampling=sampling, rehearsal=rehearsal)
      )
    except jobs.Refused as refusal:
      if refusal.code == 'context_length_exceeded':
        return policies.Answer(reply=benchmark.Reply(text=''))
      raise policies.PolicyFailed(refusal.code) from refusal
    said = completion.choices[0].reply
    calls = tuple(said.calls) if said.malformed is None else (said.malformed,)
    return policies.Answer(
      # A malformed call is content as well, so that it is said again as it was.
      reply=benchmark.Reply(text=said.content, calls=calls),
      tokens_in=len(completion.prompt_ids),
      tokens_out=completion.completion_tokens - completion.rehearsal_tokens,
      rehearsal_tokens=completion.rehearsal_tokens,
    )
