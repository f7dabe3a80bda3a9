"""Environments, and the team that plays them: what is needed to play an episode, without verl, models or training."""
