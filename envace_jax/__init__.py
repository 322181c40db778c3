"""EnvACE in JAX: a policy that acts, rehearses its environment, and learns."""

__version__ = '0.1.0'
