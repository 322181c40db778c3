"""The one exception that a person is meant to read."""


class UserError(Exception):
  """A wrong option, file or directory: one sentence that says the remedy."""
