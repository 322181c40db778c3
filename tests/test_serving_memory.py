"""What a server holds on to over thousands of requests: nothing."""

import gc
import pathlib

import pytest
import serving

httpx = pytest.importorskip('httpx', reason='no httpx: nobody to ask')

REQUESTS, MIB = 2000, 24


def resident() -> float:
  """MiB of this process."""
  gc.collect()
  pages = pathlib.Path('/proc/self/statm').read_text().split()[1]
  return int(pages) * 4096 / 2**20


@pytest.mark.nightly
def test_memory_does_not_grow(policy):
  """Answered, refused, streamed and given up, 2,000 times."""
  with serving.running(*policy) as motor:
    with serving.listening(motor) as (url, _):
      headers = {'Authorization': f'Bearer {serving.KEY}'}
      with httpx.Client(headers=headers, timeout=60) as session:
        held = []
        for i in range(REQUESTS + 200):
          body = {
            'model': serving.MODEL,
            'messages': [{'role': 'user', 'content': f'{i}' * (1 + i % 3)}],
            'max_tokens': 12,
            'seed': i,
            'stream': i % 4 == 1,
          }
          if i % 4 == 2:
            body['nonsense'] = 'x' * 1000
          session.post(url + '/v1/chat/completions', json=body)
          if i % 200 == 199:
            held.append(resident())
  growth = held[-1] - held[0]
  print(f'resident MiB every 200 requests: {[round(x) for x in held]}')
  assert growth < MIB, held
