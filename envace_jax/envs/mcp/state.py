"""A directory that holds an episode's state: compared, copied, brought back.

Content counts, not history: names, bytes, links and who may execute; not dates.
Links are not followed, and what is no file, link or directory (a socket, a
pipe) is neither compared nor copied.
"""

import hashlib
import io
import os
import pathlib
import shutil
import stat
import tarfile
import tempfile


class Directory:
  """A fresh directory of one environment, at one path until `close`."""

  def __init__(self):
    self._outer = pathlib.Path(tempfile.mkdtemp(prefix='mcp.')).resolve()
    self.path = self._outer / 'state'
    self.empty()

  def empty(self) -> None:
    _remove(self.path)
    self.path.mkdir()

  def hash(self) -> str:
    """Equal for equal content, whatever the path."""
    total = hashlib.sha256()
    for path in _entries(self.path):
      name = os.fsencode(path.relative_to(self.path))
      mode = path.lstat().st_mode
      if stat.S_ISLNK(mode):
        kind, content = b'link', os.fsencode(os.readlink(path))
      elif stat.S_ISDIR(mode):
        kind, content = b'directory', b''
      else:
        kind = b'program' if mode & stat.S_IXUSR else b'file'
        content = path.read_bytes()
      for part in (kind, name, content):
        total.update(len(part).to_bytes(8, 'big') + part)
    return total.hexdigest()

  def pack(self) -> bytes:
    """The whole content; `unpack` brings it back."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as archive:
      for path in _entries(self.path):
        archive.add(path, path.relative_to(self.path), recursive=False)
    return buffer.getvalue()

  def unpack(self, packed: bytes) -> None:
    self.empty()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
      # 'tar' refuses to write outside, and keeps links as they are.
      archive.extractall(self.path, filter='tar')

  def close(self) -> None:
    _remove(self._outer)


def _entries(root: pathlib.Path) -> list[pathlib.Path]:
  """What is in a directory, parents first, in one order everywhere."""
  found = []
  for folder, directories, files in os.walk(root):
    for name in (*directories, *files):
      path = pathlib.Path(folder, name)
      mode = path.lstat().st_mode
      if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
        found.append(path)
  return sorted(found, key=lambda path: os.fsencode(path))


def _remove(path: pathlib.Path) -> None:
  """Removes a tree, also one whose directories were made read-only."""
  if not path.exists():
    return
  for folder, directories, _ in os.walk(path):
    for name in directories:
      inner = pathlib.Path(folder, name)
      if not inner.is_symlink():
        inner.chmod(0o700)
  shutil.rmtree(path)
