"""`envace serve`: a run's newest policy behind OpenAI's interface.

The port opens when everything is compiled. SIGTERM and SIGINT close it, let
what was accepted be answered, and end the process.
"""

import os
import pathlib
import socket
import sys

from envace_jax import errors, policy_service
from envace_jax.serving import server


def run(
  workdir: str,
  options: policy_service.Options,
  *,
  host: str,
  port: int,
  model: str | None,
  api_key_env: str,
) -> int:
  """Serves until it is told to stop; returns the exit code.

  Raises:
    UserError: nothing can be served, or not there.
  """
  try:
    import uvicorn
  except ImportError as e:
    raise errors.UserError(
      "a server needs FastAPI and uvicorn; pip install 'envace_jax[serve]'"
    ) from e
  key = ''
  if api_key_env:
    key = os.environ.get(api_key_env, '')
    if not key:
      raise errors.UserError(
        f'--api_key_env={api_key_env} is not set; put the key there'
      )
  listening = _listen(host, port)
  name = model or pathlib.Path(workdir).resolve().name
  with listening:
    opened = policy_service.open_run(workdir, options)
    app = server.app(
      opened.service,
      opened.tokenizer,
      server.Options(model=name, api_key=key),
    )
    listening.listen(1024)
    sys.stdout.write(
      f'{name}: {opened.phase} step {opened.step} at '
      f'http://{host}:{listening.getsockname()[1]}/v1\n'
    )
    sys.stdout.flush()
    config = uvicorn.Config(app, log_level='warning', lifespan='on')
    uvicorn.Server(config).run(sockets=[listening])
  return 0


def _listen(host: str, port: int) -> socket.socket:
  """A bound socket; who else has the port is known before a compile."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  bound = socket.socket(family, socket.SOCK_STREAM)
  bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    bound.bind((host, port))
  except OSError as e:
    bound.close()
    raise errors.UserError(
      f'cannot listen at {host}:{port} ({e.strerror}); use another --port'
    ) from e
  return bound
