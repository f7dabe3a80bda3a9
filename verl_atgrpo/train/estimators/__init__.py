"""Computes advantages from rewards: a file for each paper, with the fields of `spec` and the sums of `arithmetic`.

`presets` lists those that a user names; `agentrl`, `likelihood` and `value` are options beside them. `choice` reads
what a user configured, `advantages` computes a batch; `plain_job` is what verl calls in a job without a team. Imports
no verl, and torch only where a batch is computed, since configurations are read in processes without it.
"""
