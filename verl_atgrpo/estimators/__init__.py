"""Computes advantages from rewards: specifications, row ids and the kernel. Imports no verl."""
