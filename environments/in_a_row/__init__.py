"""Two players take turns to get a number of stones in a row: tic-tac-toe and Connect Four."""

from verl_atgrpo.environments.in_a_row.environment import ConnectFour, TicTacToe

__all__ = ["ConnectFour", "TicTacToe"]
