"""What a batch of episodes looked like, as flat deterministic numbers."""

import collections
from collections.abc import Mapping, Sequence
import json

import numpy as np

from envace_jax import types
from envace_jax.text import template as templates


def summarise(
  episodes: Sequence[types.Episode], scores: Sequence[types.Score]
) -> Mapping[str, float]:
  """Rewards, lengths, errors and stop reasons of one train step.

  Shares are of episodes unless the name says otherwise; `errors` is the share
  of observations that report a tool error, and `malformed` that of actions
  which were calls but did not parse.
  """
  rewards = [score.reward for score in scores if score.reward is not None]
  successes = [score.success for score in scores if score.success is not None]
  steps = [step for episode in episodes for step in episode.steps]
  stops = collections.Counter(episode.stop_reason for episode in episodes)
  authors = collections.Counter(
    author
    for episode in episodes
    for author, start, stop in templates.runs(episode.authors)
    for _ in range(stop - start)
  )
  share = lambda values: float(np.mean(values)) if values else 0.0
  return {
    'reward': share(rewards),
    'success': share(successes),
    'unscored': len(scores) - len(rewards),
    'steps': share([len(episode.steps) for episode in episodes]),
    'row_tokens': share([len(episode.tokens) for episode in episodes]),
    'act_tokens': authors[types.Author.ACT] / len(episodes),
    'rehearse_tokens': authors[types.Author.REHEARSE] / len(episodes),
    'errors': share([is_error(step.observation_text) for step in steps]),
    'malformed': share(
      [isinstance(step.action, types.ParseError) for step in steps]
    ),
    **{
      f'stop/{reason.value}': stops[reason] / len(episodes)
      for reason in types.StopReason
    },
  }


def is_error(observation_text: str) -> bool:
  """Whether an observation reports a tool error; other text does not."""
  try:
    value = json.loads(observation_text)
  except (ValueError, RecursionError):
    return False
  return isinstance(value, dict) and 'error' in value
