"""The parts of gpu_check.py: what is run, when, what is measured, and how it is told."""
