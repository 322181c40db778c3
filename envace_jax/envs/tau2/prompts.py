"""What an agent is told in τ²-Bench: the benchmark's prompt, or a short one.

The benchmark's own prompts are its package's, the domain's policy in them, of
up to 23,000 characters. The short ones are for models that could not read so
much. What is measured under them is not comparable with published numbers.
"""

from typing import Any, Literal

from envace_jax.envs.tau2 import data as tau2_data
from envace_jax.envs.tau2 import package as tau2_package

Prompt = Literal['policy', 'short']

SHORT_SOLO = (
  'You solve customer service tickets by calling tools. Look at the account '
  'and the device before you change anything, mend what is wrong, and look '
  'again. Hand over to a human agent what no tool can mend. Say when you are '
  'done.'
)
SHORT = (
  'You help the customer of a service by calling tools. Look before you '
  'change anything, and tell the customer what was asked for.'
)


def system(category: str, policy: str, task: Any, prompt: Prompt) -> str:
  """The system prompt of an attempt.

  Args:
    category: of the task.
    policy: of the domain, as its environment has it.
    task: the package's task; solo mode shows its ticket.
    prompt: which one.
  """
  solo = tau2_data.CATEGORIES[category].solo
  if prompt == 'short':
    return SHORT_SOLO if solo else SHORT
  agent = tau2_package.load().agent
  if not solo:
    return agent.SYSTEM_PROMPT.format(
      agent_instruction=agent.AGENT_INSTRUCTION, domain_policy=policy
    )
  instruction = agent.AGENT_SOLO_INSTRUCTION.format(
    stop_function_name=agent.LLMSoloAgent.STOP_FUNCTION_NAME,
    stop_token=agent.LLMSoloAgent.STOP_TOKEN,
  )
  return agent.SYSTEM_PROMPT_SOLO.format(
    agent_instruction=instruction, domain_policy=policy, ticket=task.ticket
  )
