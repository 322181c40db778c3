"""How REHEARSE's own row opens under split views.

  [<|system|> instructions <|end|>] [<|tools|> schemas <|end|>]
  <|user|> instruction <|end|> [<|notes|> records <|end|>] <|act|>

Records are real exchanges of the task, or of others, as few-shot grounding. At
test time there are none of this very task, so some are dropped in training
(`keep`), and a record that does not fit is left out whole.
"""

from collections.abc import Sequence
import dataclasses
import random

from envace_jax import types
from envace_jax.text import notes
from envace_jax.text import template as templates

RECORDS = ('none', 'own', 'others')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsePrompt:
  """Opens rows; a function of the task and `salt` alone."""

  template: templates.Template  # says of the tools what REHEARSE may know
  instructions: str  # '' for none
  records: str  # one of RECORDS: the task's own, or those of `others`
  max_records: int
  keep: float  # probability of each record to be shown
  max_tokens: int
  salt: int  # the train step: each draws its own records
  others: Sequence[types.Record] = ()

  def __post_init__(self):
    if self.records not in RECORDS:
      raise ValueError(
        f'prompt.rehearse.records={self.records!r}; use one of {RECORDS}'
      )
    if not 0 <= self.keep <= 1:
      raise ValueError(f'prompt.rehearse.keep={self.keep} is not in [0, 1]')

  def __call__(self, task: types.Task) -> templates.Span:
    """The prompt of `task`; too long only if it is so without records."""
    shown: list[str] = []
    span = self._span(task, shown)
    for record in self.records_for(task):
      note = notes.format_note(record.call, record.observation_text)
      longer = self._span(task, [*shown, note])
      if len(longer[0]) <= self.max_tokens:
        shown, span = [*shown, note], longer
    return span

  def records_for(self, task: types.Task) -> list[types.Record]:
    """The exchanges drawn for `task`, as many as there may be."""
    draw = random.Random(f'{self.salt} {task.id}')
    own = list(task.records)
    if self.records == 'others':
      foreign = [record for record in self.others if record not in own]
      candidates = draw.sample(foreign, min(len(foreign), self.max_records))
    else:
      candidates = own if self.records == 'own' else []
    kept = [record for record in candidates if draw.random() < self.keep]
    return kept[: self.max_records]

  def _span(self, task: types.Task, shown: Sequence[str]) -> templates.Span:
    return self.template.prompt(
      task.instruction, notes.join_notes(shown), task.tools, self.instructions
    )
