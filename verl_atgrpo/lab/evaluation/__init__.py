"""Evaluation of teams: episodes on a recipe's validation tasks, their figures, and paired comparisons."""
