"""What the policy expects a call to meet, rehearsed without a trace.

Rows that end in REHEARSE's header are answered by the policy several times; the
answers are read and cut off again. The joint view only: under split views the
policy rehearses in rows of its own.
"""

from collections.abc import Sequence

from envace_jax import types
from envace_jax.sampling import generator
from envace_jax.text import template as templates


def expect(
  session: generator.Session,
  template: templates.Template,
  rows: Sequence[int],
  answers: int,
) -> dict[int, list[str]]:
  """`answers` expected observations per row.

  One that was not finished within its limit reads as it stands.
  """
  before = {row: int(session.lengths[row]) for row in rows}
  expected = {row: [] for row in rows}
  for _ in range(answers if rows else 0):
    for row, said in session.generate(types.Role.REHEARSE, rows).items():
      expected[row].append(template.observation_text(said.ids))
    session.rewind(before)
  return expected
