"""Plays episodes on verl's servers: manager, worker, sampler, rows and trace."""
