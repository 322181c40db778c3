"""A model's own chat template, which no content can take part in.

The Jinja source that comes with a tokenizer is rendered as `transformers`
renders it, and then encoded in one go. Before that, whatever content spells
like an added token is masked by characters of a private-use plane, and unmasked
behind the template: an added token in the text was written by the template, and
a masked one is ordinary pieces. So the template sees real contents, and may
strip or quote them, but none of them opens or ends a turn.
"""

from collections.abc import Mapping, Sequence
import datetime
import json
import re
from typing import Any

from envace_jax import types
from envace_jax.text import fast_tokenizer
from envace_jax.text import tokenizer as tokenizers

_OPEN, _CLOSE = '\U000f0000', '\U000f0001'
PROBES = tuple(chr(0xF0100 + i) for i in range(8))  # contents to look for
_MASKED = re.compile(f'{_OPEN}([0-9]+){_CLOSE}')
_VARIABLES = ('bos_token', 'eos_token', 'pad_token', 'unk_token')


class Markup:
  """Renders conversations, and encodes what was rendered."""

  def __init__(self, source: str, tokenizer: fast_tokenizer.FastTokenizer):
    """Makes one from the template's source.

    Raises:
      ValueError: the source is no Jinja template, or Jinja is missing.
    """
    self._tokenizer = tokenizer
    self._names = [*tokenizer.control, _OPEN, _CLOSE, *PROBES]
    self._data = _pattern(self._names)
    self._control = _pattern(list(tokenizer.control))
    self._variables = {
      name: spelt for name in _VARIABLES if (spelt := tokenizer.special(name))
    }
    self._template = _compile(source)

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[types.Json] = (),
    *,
    to_act: bool = False,
    thinking: bool = True,
  ) -> str:
    """The text of a conversation, contents masked.

    Args:
      messages: their contents as `mask` returns them.
      tools: likewise.
      to_act: the generation prompt is appended.
      thinking: what the template is told under `enable_thinking`.

    Raises:
      ValueError: the template refuses.
    """
    try:
      return self._template.render(
        messages=list(messages),
        tools=list(tools) or None,
        add_generation_prompt=to_act,
        enable_thinking=thinking,
        **self._variables,
      )
    except Exception as e:  # whatever a foreign program raises
      raise ValueError(
        f'the chat template refuses a conversation ({e}); use a template with '
        'system, user, assistant and tool messages'
      ) from e

  def mask(self, value: Any) -> Any:
    """A value in whose strings no added token is spelt."""
    if isinstance(value, str):
      text = tokenizers.clean_surrogates(value)
      return self._data.sub(
        lambda match: f'{_OPEN}{self._names.index(match[0])}{_CLOSE}', text
      )
    if isinstance(value, Mapping):
      return {self.mask(key): self.mask(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
      return [self.mask(v) for v in value]
    return value

  def unmask(self, text: str) -> str:
    return _MASKED.sub(lambda match: self._names[int(match[1])], text)

  def encode(self, text: str) -> list[int]:
    """Ids of a rendered text, ordinary stretches between control pieces."""
    ids = []
    for i, part in enumerate(self._control.split(text)):
      if i % 2:
        ids.append(self._tokenizer.control[part])
      elif part:
        ids += self._tokenizer.encode(self.unmask(part))
    return ids

  def controls(self, text: str) -> list[re.Match[str]]:
    """Where control pieces stand in a rendered text."""
    return list(self._control.finditer(text))


def _pattern(names: Sequence[str]) -> re.Pattern[str]:
  longest_first = sorted(names, key=len, reverse=True)
  return re.compile(f'({"|".join(map(re.escape, longest_first)) or "(?!)"})')


def _compile(source: str):
  try:
    import jinja2
    from jinja2 import sandbox
  except ImportError as e:
    raise ValueError(
      "a chat template needs Jinja; pip install 'envace_jax[hf]'"
    ) from e
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=['jinja2.ext.loopcontrols'],
  )
  environment.filters['tojson'] = _tojson
  environment.globals['raise_exception'] = _refuse
  now = datetime.datetime.now()  # one day for all the rows of a run
  environment.globals['strftime_now'] = now.strftime
  try:
    return environment.from_string(source)
  except jinja2.TemplateError as e:
    raise ValueError(
      f'the chat template is no Jinja template ({e}); repair it'
    ) from e


def _tojson(
  value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
) -> str:
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _refuse(message: str):
  raise ValueError(message)
