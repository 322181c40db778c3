"""Both rollouts say the same in a chat format: long joints, a spelt marker."""

import jax
import numpy as np
import pretrained
import talkative

from envace_jax import types
from envace_jax.model import transformer
from envace_jax.rollout import alternation, episodes, on_device
from envace_jax.sampling import keys, samplers, scripted
from envace_jax.text import chat_format, fast_tokenizer
from envace_jax.text import template as templates
from envace_jax.worlds import answers, rehearsal


def test_host_and_device_give_identical_tokens():
  directory = pretrained.smollm2_tokenizer()
  tokenizer = fast_tokenizer.load(directory)
  chat = chat_format.from_directory(directory, tokenizer)
  template = templates.Template(tokenizer, row_format=chat)
  assert len(template.marker.ids) > 1
  end, (call, *rest) = tokenizer.control['<|im_end|>'], template.marker.ids
  line, word = tokenizer.encode('\n')[0], tokenizer.encode('x')[0]
  # Joints end in a line end; what follows it is a call, and a call ends.
  successor = dict(zip([line, call, *rest], [call, *rest, word], strict=True))
  successor |= {word: end}
  config = talkative.policy()[0].config
  model = transformer.Transformer(
    config.__class__(**{**config.__dict__, 'vocab_size': tokenizer.vocab_size})
  )
  params = scripted.params(model, successor)
  decoder = talkative.decoder_for(model)
  decoder = decoder.__class__(**{
    **decoder.__dict__,
    'act': samplers.SamplerConfig(temperature=0.3),
    'rehearse': samplers.SamplerConfig(temperature=0.3),
    'act_stop_ids': template.stop_ids[types.Role.ACT],
    'rehearse_stop_ids': template.stop_ids[types.Role.REHEARSE],
    'prompt_tokens': 60,
    'ladder': (80, 120),
  })  # fmt: skip
  tasks = [talkative.task(t) for t in ('a', 'a longer one', 'mid')]
  prompts = [template.prompt(t.instruction) for t in tasks]
  attempts = episodes.attempts_of(tasks, 2)
  row_keys = keys.rows(keys.stream(0, 'rollout', 0), range(len(attempts)))
  anything = answers.Answers(template=template, max_resamples=None)
  host = alternation.run_episodes(
    decoder, template, params, rehearsal.RehearsedWorld(anything), attempts,
    prompts, row_keys, alternation.Rules(),
  )  # fmt: skip
  device = on_device.rehearse_episodes(
    decoder, template, params, prompts, 2, row_keys
  )
  turned = 0
  for left, right in zip(host, device, strict=True):
    assert left.stop_reason is right.stop_reason
    np.testing.assert_array_equal(left.rows[0].tokens, right.rows[0].tokens)
    np.testing.assert_array_equal(left.rows[0].authors, right.rows[0].authors)
    turned += int((left.rows[0].authors == types.Author.REHEARSE).any())
  assert turned, 'nobody called: this test sees nothing'
  jax.clear_caches()
