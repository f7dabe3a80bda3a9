"""Search: questions over a corpus, for a planner with a worker, a routed team, and a single agent."""

from verl_atgrpo.environments.search.environment import RoutedSearch, Search, SingleSearch

__all__ = ["RoutedSearch", "Search", "SingleSearch"]
