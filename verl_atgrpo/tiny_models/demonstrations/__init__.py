"""Demonstrations for the supervised fine-tuning of tiny models, one demonstrator per environment. No torch here."""

from verl_atgrpo.tiny_models.demonstrations.arithmetic import MATH
from verl_atgrpo.tiny_models.demonstrations.plan_path import PLAN_PATH
from verl_atgrpo.tiny_models.demonstrations.small_programs import CODE
from verl_atgrpo.tiny_models.demonstrations.sokoban import SOKOBAN
from verl_atgrpo.tiny_models.demonstrations.sudoku import SUDOKU

DEMONSTRATORS = {demonstrator.environment: demonstrator for demonstrator in (PLAN_PATH, SOKOBAN, SUDOKU, MATH, CODE)}
"""Environment -> its demonstrator."""
