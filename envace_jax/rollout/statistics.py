"""What a batch of episodes looked like, as flat deterministic numbers."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from envace_jax import types
from envace_jax.text import tool_calls


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
  share = lambda values: float(np.mean(values)) if values else 0.0
  tokens = lambda author: sum(
    int((row.authors == author).sum())
    for episode in episodes
    for row in episode.rows
  )
  return {
    'reward': share(rewards),
    'success': share(successes),
    'unscored': len(scores) - len(rewards),
    'steps': share([len(episode.steps) for episode in episodes]),
    'breaks': share([episode.breaks for episode in episodes]),
    'row_tokens': share([len(r.tokens) for e in episodes for r in e.rows]),
    'act_tokens': tokens(types.Author.ACT) / len(episodes),
    'rehearse_tokens': tokens(types.Author.REHEARSE) / len(episodes),
    'errors': share(
      [tool_calls.reports_error(step.observation_text) for step in steps]
    ),
    'malformed': share(
      [isinstance(step.action, types.ParseError) for step in steps]
    ),
    **{
      f'stop/{reason.value}': stops[reason] / len(episodes)
      for reason in types.StopReason
    },
  }


def by_source(
  episodes: Sequence[types.Episode], scores: Sequence[types.Score]
) -> Mapping[str, float]:
  """Real calls of one train step, and what each world's episodes earned.

  `real_calls` counts every call that was executed, also those whose answer
  nobody was shown.
  """
  found = {'real_calls': sum(episode.real_calls for episode in episodes)}
  for source in {episode.source for episode in episodes}:
    rewards = [
      score.reward
      for episode, score in zip(episodes, scores, strict=True)
      if episode.source is source and score.reward is not None
    ]
    name = f'source/{source.value}'
    found[f'{name}/scored'] = len(rewards)
    found[f'{name}/reward'] = float(np.mean(rewards)) if rewards else 0.0
  return found
