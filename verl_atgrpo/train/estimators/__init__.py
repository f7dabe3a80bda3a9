"""Computes advantages from rewards: a file for each paper, with the fields of `spec` and the sums of `arithmetic`.

`presets` lists the papers, `choice` reads what a user configured, `advantages` computes a batch. Imports no verl; only
`advantages`, `labels` and `plain_job` import torch, since configurations are read in processes without it.
"""
