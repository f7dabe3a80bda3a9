"""Prefix trees: tokens that rows share go through the model once."""
