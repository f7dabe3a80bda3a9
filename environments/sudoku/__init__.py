"""Sudoku: fill a grid with digits."""

from verl_atgrpo.environments.sudoku.environment import SingleSudoku, Sudoku

__all__ = ["SingleSudoku", "Sudoku"]
