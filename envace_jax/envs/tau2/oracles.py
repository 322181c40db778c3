"""Replies that earn full marks in τ²-Bench: its gold actions, played.

Under dual control the gold actions of the user are asked for, one by one, and
done by a user that does what it is asked (`tau2_users.ScriptedUser`). What must
be communicated is said at the end. So an oracle proves the machinery, tools and
checkers, and says nothing about a real user.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from envace_jax import types
from envace_jax.envs import benchmark
from envace_jax.envs.tau2 import data as tau2_data
from envace_jax.envs.tau2 import users as tau2_users

DONE = benchmark.Reply(
  text='', calls=(types.ToolCall(name='done', arguments={}),)
)
GOODBYE = 'That is all done.'


def replies(category: str, task: Any) -> Sequence[benchmark.Reply] | None:
  """One reply per gold action, and a last one; None where none is recorded."""
  criteria = task.evaluation_criteria
  if criteria.actions is None and criteria.env_assertions is not None:
    return None
  solo = tau2_data.CATEGORIES[category].solo
  said = []
  for call, by_user in gold_calls(task):
    if by_user and not solo:
      said.append(benchmark.Reply(text=tau2_users.please(call)))
    else:
      said.append(benchmark.Reply(text='', calls=(call,)))
  told = '\n'.join(criteria.communicate_info or ())
  if not solo:
    return (*said, benchmark.Reply(text=f'{told}\n{GOODBYE}'))
  if said:  # a text of its own would end the attempt
    said[0] = dataclasses.replace(said[0], text=told)
  return (*said, DONE)


def gold_calls(task: Any) -> list[tuple[types.ToolCall, bool]]:
  """The gold actions, each with whether it is the user's."""
  return [
    (
      types.ToolCall(name=action.name, arguments=dict(action.arguments)),
      action.requestor == 'user',
    )
    for action in task.evaluation_criteria.actions or ()
  ]


def nothing(category: str) -> benchmark.Reply:
  """The reply that ends an attempt: the baseline of doing nothing."""
  if tau2_data.CATEGORIES[category].solo:
    return DONE
  return benchmark.Reply(text=GOODBYE)


def user(category: str, task: Any) -> tau2_users.ScriptedUser:
  """The user that an oracle needs; says its reason for calling first."""
  del category
  told = task.user_scenario.instructions
  return tau2_users.ScriptedUser(getattr(told, 'reason_for_call', told))
