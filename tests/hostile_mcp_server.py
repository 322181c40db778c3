"""An MCP server that misbehaves on request: raw JSON-RPC over stdio.

Its argument says how it starts; each of its tools is one fault.
"""

import base64
import json
import os
import subprocess
import sys
import time

START = sys.argv[1] if len(sys.argv) > 1 else 'well'
STATE = sys.argv[2] if len(sys.argv) > 2 else ''
NAMES = [
  'echo',
  'count',
  'die',
  'hang',
  'noise',
  'bad_result',
  'bad_list',
  'bad_answer',
  'huge',
  'long_line',
  'flood',
  'media',
  'fail',
  'refuse',
  'change',
  'talk',
  'orphan',
  'late',
  'surrogate',
  'deep',
]
count = 0


def send(message):
  sys.stdout.write(json.dumps({'jsonrpc': '2.0', **message}) + '\n')
  sys.stdout.flush()


def raw(content):
  sys.stdout.flush()
  sys.stdout.buffer.write(content)
  sys.stdout.buffer.flush()


def text(value):
  return {'content': [{'type': 'text', 'text': value}]}


def media():
  data = base64.b64encode(b'x' * 100).decode()
  link = {'uri': 'file:///a.txt', 'name': 'a', 'mimeType': 'text/plain'}
  blob = {'uri': 'file:///b', 'mimeType': 'application/zip', 'blob': data}
  note = {'uri': 'file:///c', 'text': 'inside'}
  return {
    'content': [
      {'type': 'text', 'text': 'before'},
      {'type': 'image', 'data': data, 'mimeType': 'image/png'},
      {'type': 'audio', 'data': data, 'mimeType': 'audio/wav'},
      {'type': 'resource_link', 'size': 17, **link},
      {'type': 'resource', 'resource': blob},
      {'type': 'resource', 'resource': note},
    ]
  }


def notify(method, params=None):
  send({'method': method, **({'params': params} if params else {})})


def call(name, arguments):
  """A result, or None for no answer."""
  global count
  if name == 'count':
    count += 1
    return {'content': [], 'structuredContent': {'count': count}}
  if name == 'die':
    print('about to die', file=sys.stderr, flush=True)
    os._exit(3)
  if name == 'hang':
    time.sleep(600)
  if name == 'noise':
    raw(b'Listening...\n{"a": 1}\n42\n\xff\xfe\x00binary\n\n')
  if name == 'bad_result':
    return {'content': 7}
  if name == 'huge':
    return text('y' * 300_000)
  if name == 'long_line':
    raw(b'z' * (3 << 20))
    time.sleep(600)
  if name == 'flood':
    while True:
      raw(b'tick\n' * 1000)
  if name == 'media':
    return media()
  if name == 'fail':
    return {**text('no such file'), 'isError': True}
  if name == 'change':
    NAMES.append('added')
    NAMES.remove('echo')
    notify('notifications/tools/list_changed')
  if name == 'bad_list':
    NAMES.insert(0, None)
    notify('notifications/tools/list_changed')
  if name == 'talk':
    print('x' * 5000, 'on stderr', file=sys.stderr, flush=True)
    notify('notifications/message', {'level': 'info', 'data': {'said': 1}})
  if name == 'orphan':
    child = subprocess.Popen(['sleep', '600'])
    with open(os.path.join(STATE, 'orphan'), 'w') as file:
      file.write(str(child.pid))
  if name == 'late':
    time.sleep(0.8)
  if name == 'surrogate':
    return text('a\ud800b')
  if name == 'deep':
    deep = json.loads('[' * 90 + ']' * 90)
    return {'content': [], 'structuredContent': {'a': deep}}
  return text(json.dumps(arguments))


def listed(params):
  if START == 'endless':
    return {'tools': [], 'nextCursor': 'more'}
  if START == 'odd':
    names = ['a b', 'a/b', 'a_b', 'x' * 80, 'x' * 80, 'n\u00f6', '']
  else:
    names = list(NAMES)
  schema = {
    'type': 'object',
    'properties': {'text': {'type': 'string'}, 'key': {'type': 'string'}},
  }
  return {'tools': [{'name': n, 'inputSchema': schema} for n in names]}


def main():
  if START == 'exit':
    print('no configuration', file=sys.stderr)
    sys.exit(2)
  if START == 'silent':
    time.sleep(600)
  if START == 'garbage':
    raw(os.urandom(50_000))
    sys.exit(1)
  if START == 'second':  # only its second start succeeds
    path = os.path.join(STATE, 'started')
    if not os.path.exists(path):
      open(path, 'w').close()
      sys.exit(1)
  if START == 'stubborn':
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
  while line := sys.stdin.readline():
    message = json.loads(line)
    if 'id' not in message:
      continue
    method, params = message['method'], message.get('params', {})
    answer = {'id': message['id'], 'result': {}}
    if method == 'initialize':
      answer['result'] = {
        'protocolVersion': params['protocolVersion'],
        'capabilities': {'tools': {'listChanged': True}, 'logging': {}},
        'serverInfo': {'name': 'hostile', 'version': '1'},
      }
    elif method == 'tools/list':
      answer['result'] = listed(params)
    elif params.get('name') == 'refuse':
      error = {'code': -32602, 'message': 'text: missing'}
      answer = {'id': message['id'], 'error': error}
    else:
      answer['result'] = call(params.get('name'), params.get('arguments'))
    if params.get('name') == 'bad_answer':
      answer['result'] = 7
    send(answer)
  if START == 'stubborn':
    time.sleep(600)


main()
