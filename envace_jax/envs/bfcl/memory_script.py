"""A script for the memory categories: proof that the plumbing holds water.

The package has accepted answers to its questions, and no plan: nobody recorded
what an agent should note, or how it should look it up. So what stands in for an
oracle writes each question with an accepted answer in one of the sessions, in
turns, looks it up when it is asked, and says the answer, whatever it has found.
`seen` in an outcome's parts tells whether it found it. That stores go from
session to question is what full marks show, and nothing about agents.
"""

from collections.abc import Mapping, Sequence

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.bfcl import memory as bfcl_memory

NOTE = (
  'memory has no recorded plan: this oracle is a script that writes accepted '
  'answers into the store and says them, and proves the plumbing alone'
)

Facts = Mapping[str, tuple[str, str]]  # question's id -> its text and answer


def session(
  entry: types.Json, sessions: Sequence[str], facts: Facts
) -> list[benchmark.Reply]:
  """Writes this session's share of the facts, and lets the user talk."""
  category = bfcl_memory.category_of(entry['id'])
  share = list(facts)[sessions.index(entry['id']) :: len(sessions)]
  calls = [_write(category, task_id, facts[task_id]) for task_id in share]
  noted = benchmark.Reply(text='Noted.')
  return [
    *([benchmark.Reply(text='', calls=calls)] if calls else []),
    *[noted] * len(entry['question']),
  ]


def question(task_id: str, fact: tuple[str, str]) -> list[benchmark.Reply]:
  """Looks the question up, and answers in the form that the prompt wants."""
  category = bfcl_memory.category_of(task_id)
  said = {'answer': fact[1], 'context': 'scripted: an accepted answer'}
  return [
    benchmark.Reply(text='', calls=[_look_up(category, task_id, fact)]),
    benchmark.Reply(text=str(said)),
  ]


def _write(
  category: str, task_id: str, fact: tuple[str, str]
) -> types.ToolCall:
  text = ' '.join(fact)
  if category == bfcl_memory.REC_SUM:
    return types.ToolCall(name='memory_append', arguments={'text': f'{text}\n'})
  arguments = {'key': _key(task_id), 'value': text}
  if category == bfcl_memory.VECTOR:
    arguments = {'text': text}
  return types.ToolCall(name='archival_memory_add', arguments=arguments)


def _look_up(
  category: str, task_id: str, fact: tuple[str, str]
) -> types.ToolCall:
  if category == bfcl_memory.REC_SUM:
    return types.ToolCall(name='memory_retrieve', arguments={})
  arguments = {'key': _key(task_id)}
  if category == bfcl_memory.VECTOR:
    arguments = {'query': fact[0]}
  return types.ToolCall(name='archival_memory_retrieve', arguments=arguments)


def _key(task_id: str) -> str:
  """'question_7' for 'memory_kv_7-customer-7': keys are in snake case."""
  return f'question_{task_id.rpartition("_")[2].partition("-")[0]}'
