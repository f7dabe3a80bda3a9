"""Evaluating teams: episodes of a recipe's validation tasks, their figures, and paired comparisons."""
