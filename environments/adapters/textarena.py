"""TextArena's games (https://github.com/LeonGuertler/TextArena) by their names: one agent for every player."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verl_atgrpo.environment import EnvironmentConfigError
from verl_atgrpo.environments.adapters.foreign import FAULTS, canonical, line, own_dice
from verl_atgrpo.environments.adapters.replayed_game import Move, OnIllegal, Refused, ReplayedGame
from verl_atgrpo.environments.common.options import check_installed, check_mapping, check_whole_numbers

logger = logging.getLogger(__name__)


class TextArenaGame(ReplayedGame):
    """Any game of TextArena that plays offline; the game says what an answer looks like."""

    def __init__(
        self,
        game: str = "",
        players: int = 1,
        options: Mapping[str, Any] | None = None,
        team: Sequence[str] | None = None,
        max_steps: int = 50,
        success_return: float = 1.0,
        illegal_reward: float = -1.0,
        on_illegal: OnIllegal = "end",
        shared_openings: bool = False,
        seed: int = 0,
    ) -> None:
        """Makes the game a few times to see that it is repeatable.

        Args:
            game: its name, as `textarena.make` takes it; not a "-raw" one.
            players: how many play; the agents are player_0, player_1 and so on.
            options: what the game is made with.
            team, max_steps, success_return, illegal_reward, on_illegal, shared_openings, seed: as in `ReplayedGame`.

        Raises EnvironmentConfigError for a value that does not make sense, and for a game that cannot be made or is
        not repeatable.
        """
        check_installed("textarena", "TextArena", "textarena")
        self.where = f"at_grpo.environment.game={game!r}"
        check_whole_numbers(players=(players, 1))
        check_mapping("options", options or {})
        self._game, self._players, self._options = game, players, dict(options or {})
        agents = [f"player_{number}" for number in range(players)]
        self.set_rules(agents, team, max_steps, success_return, illegal_reward, on_illegal, shared_openings, seed)
        self._check_game()
        self.check_steady()

    def begin(self, seed: int) -> _Running:
        """Returns the game after reset(num_players=players, seed=seed)."""
        import textarena

        game = textarena.make(self._game, **self._options)
        game.reset(num_players=self._players, seed=seed)
        return _Running(game, self.where)

    def _check_game(self) -> None:
        import textarena

        if self._game not in textarena.envs.registration.ENV_REGISTRY:
            raise EnvironmentConfigError(f"{self.where}: TextArena has no such game; its names look like Chess-v0")
        try:
            with own_dice(0):
                self.begin(0)
        except (*FAULTS, OSError, ImportError) as error:
            raise EnvironmentConfigError(
                f"{self.where}, players={self._players}, options={self._options}: cannot be made, {line(error)}"
            ) from error


class _Running:
    """One game that was reset."""

    def __init__(self, game: Any, where: str) -> None:
        self._game, self._where = game, where
        self._over = False
        self._asked: tuple[str, str] | None = None

    def asked(self) -> tuple[str, str] | None:
        if self._over:
            return None
        if self._asked is None:  # observations may be taken once a turn
            player, text = self._game.get_observation()
            if not isinstance(text, str):
                raise EnvironmentConfigError(
                    f"{self._where}: its observations are no texts; use its name without -raw"
                )
            self._asked = f"player_{player}", text.strip()
        return self._asked

    def play(self, reply: str) -> Move:
        state = self._game.state
        player = state.current_player_id
        errors, barred = getattr(state, "error_count", 0), self._barred(player)
        try:
            self._over, _ = self._game.step(action=reply.strip())
            given = (self._game.close()[0] or {}) if self._over else {}
            rewards = {f"player_{number}": float(reward) for number, reward in given.items()}
        except FAULTS as error:
            # A defect of the game; a run must not end for what a model wrote.
            logger.warning("%s raises on a reply, which is taken for an illegal one: %s", self._where, line(error))
            raise Refused from error
        self._asked = None
        legal = getattr(state, "error_count", 0) <= errors and self._barred(player) == barred
        return Move(rewards, legal)

    def _barred(self, player: int) -> bool:
        return bool(getattr(self._game.state, "game_info", {}).get(player, {}).get("invalid_move"))

    def opening(self) -> str:
        game = self._game
        while hasattr(game, "env"):  # wrappers keep observations, the game the rest
            game = game.env
        return canonical({**vars(game), "state": vars(game.state)})

    def close(self) -> None:
        """Ends the game; it holds nothing."""
