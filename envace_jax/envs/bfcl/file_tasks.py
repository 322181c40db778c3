"""Training tasks over BFCL's file system, generated with their solutions.

A task is a random tree, an instruction and a plan that is right by
construction: it is written from the tree, then executed, and a call that fails
is an error of this file. Families: create, move, copy, grep, append, chain.

The splits share no tree: the name of the root is of the split's own, and none
is a name of the official tasks, which are a test set. `checklist` sees a
transcript alone; `evaluation` compares the final tree with the plan's. The
checks are decided by `rewards.verifiers`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import random

from envace_jax import types
from envace_jax.envs.bfcl import calls as bfcl_calls
from envace_jax.envs.bfcl import files as bfcl_files

FAMILIES = ('create', 'move', 'copy', 'grep', 'append', 'chain')
ROOTS = {
  'train': ('atelier', 'boathouse', 'creamery', 'dovecote'),
  'dev': ('foundry', 'glasshouse'),
  'test': ('icehouse', 'kiln'),
}
SPLITS = tuple(ROOTS)

_DIRECTORIES = (
  'anchors', 'bellows', 'chisels', 'dowels', 'easels', 'ferrules', 'gimlets',
  'hinges', 'jigs', 'lathes', 'mallets', 'planers',
)  # fmt: skip
_FILES = (
  'almanac.txt', 'brief.md', 'census.csv', 'diary.txt', 'errands.md',
  'freight.csv', 'guests.txt', 'harvest.md', 'itinerary.csv', 'jottings.txt',
  'kitchen.md', 'levies.csv', 'minutes_7.txt', 'nursery.md', 'orchard.csv',
)  # fmt: skip
_WORDS = (
  'amber', 'basalt', 'cobalt', 'drizzle', 'ember', 'flint', 'gravel', 'hazel',
  'indigo', 'jasper', 'kelp', 'lichen', 'marble', 'nectar', 'ochre', 'pewter',
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tree:
  """What a task starts from: one level of directories below the root."""

  root: str
  files: Mapping[str, str]  # in the root: name -> text
  directories: Mapping[str, Mapping[str, str]]

  def config(self) -> types.Json:
    """The tree as the package loads it."""
    contents = {name: _file(text) for name, text in self.files.items()}
    for name, files in self.directories.items():
      inside = {inner: _file(text) for inner, text in files.items()}
      contents[name] = {'type': 'directory', 'contents': inside}
    root = {'type': 'directory', 'contents': contents}
    return {bfcl_files.BACKEND: {'root': {self.root: root}}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Goal:
  instruction: str
  plan: Sequence[types.ToolCall]
  reply: str
  facts: Sequence[str] = ()  # that the reply must name, seen in an observation


def make_tasks(counts: Mapping[str, int], seed: int) -> dict[str, list]:
  """Tasks per split, families in turn.

  Raises:
    ValueError: a split is unknown.
  """
  if unknown := sorted(set(counts) - set(SPLITS)):
    raise ValueError(f'splits {unknown} are unknown; use {list(SPLITS)}')
  environment = bfcl_files.Files()
  return {
    split: [_task(environment, split, seed, i) for i in range(count)]
    for split, count in counts.items()
  }


def official_form(task: types.Task) -> tuple[types.Json, list[list[str]]]:
  """A task as an entry of the package, and its plan as ground truth."""
  entry = {
    'id': task.id,
    'question': [[{'role': 'user', 'content': task.instruction}]],
    'initial_config': task.environment['initial_config'],
    'involved_classes': [bfcl_files.BACKEND],
    'function': [tool['function'] for tool in task.tools],
  }
  return entry, [[bfcl_calls.render(call) for call in task.plan]]


def _task(
  environment: bfcl_files.Files, split: str, seed: int, index: int
) -> types.Task:
  rng = random.Random(f'bfcl_files/{split}/{seed}/{index}')
  family = FAMILIES[index % len(FAMILIES)]
  tree = _tree(rng, split)
  goal = _GOALS[family](rng, tree)
  bare = types.Task(
    id=f'bfcl_files_{split}_{seed}_{index}',
    instruction=goal.instruction,
    tools=environment.tools,
    checklist=(),
    environment={'initial_config': tree.config()},
    family=family,
    plan=tuple(goal.plan),
    plan_reply=goal.reply,
  )
  environment.reset(bare)
  for call in goal.plan:
    observation = environment.call(call)
    if observation.error is not None:
      raise AssertionError(f'{bare.id}: {call} -> {observation.text}')
  state = {'kind': 'state', 'state_hash': environment.state_hash()}
  replied = {'kind': 'replied', 'contains': list(goal.facts)}
  return dataclasses.replace(
    bare,
    checklist=_checklist(goal, replied),
    evaluation=(
      _criterion('state', 'Is every file as it should be?', state, 'state'),
      _criterion('reply', 'Does the reply say what was asked?', replied),
    ),
  )


def _checklist(goal: _Goal, replied: types.Json) -> tuple:
  writes = [call for call in goal.plan if call.name in bfcl_files.WRITES]
  allowed = [
    {'name': call.name, 'arguments': dict(call.arguments)} for call in writes
  ]
  criteria = [
    _criterion(
      f'write_{i}',
      f'Did {call["name"]} succeed with the right arguments?',
      {'kind': 'acknowledged', **call},
      'tool_calls',
    )
    for i, call in enumerate(allowed)
  ]
  if goal.facts:
    seen = {'kind': 'observed', 'contains': list(goal.facts)}
    question = 'Was it looked up what the reply says?'
    criteria.append(_criterion('seen', question, seen, 'tool.content'))
  restraint = {
    'kind': 'no_other_writes',
    'writes': list(bfcl_files.WRITES),
    'allowed': allowed,
  }
  question = 'Was nothing else changed?'
  criteria += [
    _criterion('restraint', question, restraint, 'tool_calls'),
    _criterion('reply', 'Does the reply say what was asked?', replied),
  ]
  return tuple(criteria)


def _criterion(id, question, check, focus_on='reply') -> types.Criterion:
  return types.Criterion(
    id=id, question=question, check=check, focus_on=focus_on
  )


# Trees and goals.


def _tree(rng: random.Random, split: str) -> _Tree:
  names = rng.sample(_FILES, 7)
  directories = rng.sample(_DIRECTORIES, rng.randint(2, 3))
  inner = iter(names[3:])
  return _Tree(
    root=rng.choice(ROOTS[split]),
    files={name: _text(rng) for name in names[:3]},
    directories={name: {next(inner): _text(rng)} for name in directories},
  )


def _text(rng: random.Random) -> str:
  """Lines whose first words differ, each with a code of its own."""
  words = rng.sample(_WORDS, rng.randint(2, 4))
  codes = rng.sample(range(1000, 10000), len(words))
  return '\n'.join(f'{w} {code}' for w, code in zip(words, codes, strict=True))


def _file(text: str) -> types.Json:
  return {'type': 'file', 'content': text}


def _call(name: str, *values: str) -> types.ToolCall:
  arguments = zip(_ARGUMENTS[name], values, strict=True)
  return types.ToolCall(name=name, arguments=dict(arguments))


_ARGUMENTS = {
  'cat': ('file_name',),
  'cd': ('folder',),
  'cp': ('source', 'destination'),
  'echo': ('content', 'file_name'),
  'grep': ('file_name', 'pattern'),
  'mkdir': ('dir_name',),
  'mv': ('source', 'destination'),
  'touch': ('file_name',),
}


def _create(rng: random.Random, tree: _Tree) -> _Goal:
  folder, name = rng.choice(list(tree.directories)), _unused(rng, tree)
  text = f'{rng.choice(_WORDS)} {rng.randrange(1000, 10000)}'
  asked = rng.choice(
    (
      f"Create the file {name} inside {folder} with the text '{text}'.",
      f"I need a new file {name} in {folder}. It should say '{text}'.",
    )
  )
  plan = [_call('cd', folder), _call('touch', name), _call('echo', text, name)]
  return _Goal(
    instruction=asked, plan=plan, reply=f'{name} is in {folder} now.'
  )


def _move(rng: random.Random, tree: _Tree) -> _Goal:
  name, folder = rng.choice(list(tree.files)), _folder(rng, tree)
  asked = rng.choice(
    (f'Move {name} into {folder}.', f'{name} belongs in {folder}: move it.')
  )
  return _Goal(
    instruction=asked,
    plan=[_call('mv', name, folder)],
    reply=f'{name} has been moved.',
  )


def _copy(rng: random.Random, tree: _Tree) -> _Goal:
  name, folder = rng.choice(list(tree.files)), _folder(rng, tree)
  asked = rng.choice(
    (
      f'Put a copy of {name} into {folder} and keep the original.',
      f'Copy {name} to the directory {folder}.',
    )
  )
  return _Goal(
    instruction=asked,
    plan=[_call('cp', name, folder)],
    reply=f'{folder} has a copy of {name}.',
  )


def _grep(rng: random.Random, tree: _Tree) -> _Goal:
  folder = _folder(rng, tree)
  ((name, text),) = tree.directories[folder].items()
  word, code = rng.choice(text.split('\n')).split()
  asked = rng.choice(
    (
      f'Which number stands beside {word} in {name}, in the directory'
      f' {folder}?',
      f'Look into {folder}: what number does {name} give for {word}?',
    )
  )
  return _Goal(
    instruction=asked,
    plan=[_call('cd', folder), _call('grep', name, word)],
    reply=f'It is {code}.',
    facts=(code,),
  )


def _append(rng: random.Random, tree: _Tree) -> _Goal:
  name = rng.choice(list(tree.files))
  line = f'{rng.choice(_WORDS)} {rng.randrange(1000, 10000)}'
  asked = rng.choice(
    (
      f"Add the line '{line}' at the end of {name} and keep what it says now.",
      f"{name} lacks a last line: '{line}'. Append it.",
    )
  )
  text = f'{tree.files[name]}\n{line}'
  return _Goal(
    instruction=asked,
    plan=[_call('cat', name), _call('echo', text, name)],
    reply=f'{name} ends with that line now.',
  )


def _chain(rng: random.Random, tree: _Tree) -> _Goal:
  name, renamed = rng.choice(list(tree.files)), _unused(rng, tree)
  folder = rng.choice([d for d in _DIRECTORIES if d not in tree.directories])
  if rng.random() < 0.5:
    asked = (
      f'Make a directory {folder}, move {name} into it and rename it there to'
      f' {renamed}.'
    )
    plan = [
      _call('mkdir', folder),
      _call('mv', name, folder),
      _call('cd', folder),
      _call('mv', name, renamed),
    ]
    return _Goal(instruction=asked, plan=plan, reply=f'{renamed} is there.')
  line = rng.choice(tree.files[name].split('\n'))
  word, code = line.split()
  asked = (
    f'Find the line about {word} in {name} and write that line into a new file'
    f' {renamed}. Which number is in it?'
  )
  plan = [
    _call('grep', name, word),
    _call('touch', renamed),
    _call('echo', line, renamed),
  ]
  return _Goal(
    instruction=asked, plan=plan, reply=f'It is {code}.', facts=(code,)
  )


def _folder(rng: random.Random, tree: _Tree) -> str:
  return rng.choice(list(tree.directories))


def _unused(rng: random.Random, tree: _Tree) -> str:
  """A file name that stands nowhere in the tree."""
  taken = {
    *tree.files,
    *(f for files in tree.directories.values() for f in files),
  }
  return rng.choice([name for name in _FILES if name not in taken])


_GOALS: Mapping[str, Callable[[random.Random, _Tree], _Goal]] = {
  'create': _create,
  'move': _move,
  'copy': _copy,
  'grep': _grep,
  'append': _append,
  'chain': _chain,
}
