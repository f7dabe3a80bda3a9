"""Number search, told in words: a guesser looks for a secret number, a judge compares."""

from verl_atgrpo.environments.number_search.environment import NumberSearch, SingleNumberSearch

__all__ = ["NumberSearch", "SingleNumberSearch"]
