"""Private rehearsal in full, by a policy that can assess its own attempts.

  envace train    --config experiments/private_rehearsal.py --workdir runs/pr
  envace evaluate --workdir runs/pr --private

The quick start, in which a fifth of the recorded attempts end in an honest word
about themselves. The second command sets everything against everything: who
rehearses (before or after RL) for whom, in parallel or one after another, with
notes by rule or self-written, against placebo, scrambled, blank and oracle
notes, and rehearsal before each action; a quarter of an hour on an idle core,
more with self-written notes. It works on any run with a joint view, there
without those.
"""

from experiments import quickstart


def get_config():
  c = quickstart.get_config()
  c.data.reflections = 0.2
  c.private.memory = 'written'
  return c


def sweep(add):
  """Five seeds, and fewer or more rehearsals."""
  for seed in range(5):
    add({'seed': seed})
  for attempts in (1, 2, 8):
    add({'private.attempts': attempts})
