"""Runs programs written by models, isolated and with limits."""
