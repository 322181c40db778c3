"""What a tool returned, as the text that a policy reads.

Text is handed on; what is not text is named with its type and size, for a
model that reads text would otherwise be told nothing, or be shown base64.

  [image: image/png, 2048 bytes]
  [resource link: file:///a.txt, text/plain, 17 bytes]

Structured content is shown where no text came with it (servers send the same
thing twice for old clients). What is longer than the limit is cut, and says so.
"""

import json
from typing import Any

from envace_jax.envs import base


def observation(result: Any, limit: int) -> base.Observation:
  """An observation of a `CallToolResult`; `isError` is the error tool_error."""
  text = cut(_text(result), limit)
  if result.is_error:
    return base.failure('tool_error', text)
  if _is_json_object(text):
    return base.Observation(text=text)
  return base.success({'result': text})


def cut(text: str, limit: int) -> str:
  """At most `limit` characters, and a sentence if there were more."""
  # A lone surrogate, which JSON can spell, has no place in a file or a prompt.
  text = text.encode('utf-8', 'replace').decode('utf-8')
  if len(text) <= limit:
    return text
  return f'{text[:limit]}\n[cut: {limit} of {len(text)} characters are shown]'


def _text(result: Any) -> str:
  parts = [_block(block) for block in result.content]
  structured = result.structured_content
  has_text = any(block.type == 'text' for block in result.content)
  if structured is not None and not has_text:
    parts.append(json.dumps(structured, ensure_ascii=False))
  return '\n'.join(parts)


def _block(block: Any) -> str:
  if block.type == 'text':
    return block.text
  if block.type in ('image', 'audio'):
    return f'[{block.type}: {block.mime_type}, {_size(block.data)} bytes]'
  if block.type == 'resource_link':
    return _named('resource link', block.uri, block.mime_type, block.size)
  if block.type == 'resource':
    resource = block.resource
    text = getattr(resource, 'text', None)
    if text is not None:
      return f'{_named("resource", resource.uri, resource.mime_type)}\n{text}'
    size = _size(resource.blob)
    return _named('resource', resource.uri, resource.mime_type, size)
  return f'[{block.type}: not shown]'


def _named(what: str, uri: Any, kind: str | None, size: int | None = None):
  facts = [str(uri), kind, None if size is None else f'{size} bytes']
  return f'[{what}: {", ".join(fact for fact in facts if fact)}]'


def _size(data: str) -> int:
  """Bytes of base64 text, without decoding it."""
  return len(data) * 3 // 4 - data.count('=', -2)


def _is_json_object(text: str) -> bool:
  try:
    return isinstance(json.loads(text), dict)
  except (ValueError, RecursionError):
    return False
