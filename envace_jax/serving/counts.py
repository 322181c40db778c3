"""What an engine has done, for /metrics."""

import dataclasses


@dataclasses.dataclass
class Counts:
  """Sums since the start."""

  admitted: int = 0
  finished: int = 0
  cancelled: int = 0
  expired: int = 0
  failed: int = 0
  rejected: int = 0  # the queue was full
  prompt_tokens: int = 0
  reused_tokens: int = 0
  sampled_tokens: int = 0
  device_failures: int = 0
