"""TextArena's games (https://github.com/LeonGuertler/TextArena), with an agent for every player.

In some games the first prompt is the same for all tasks, in both splits, because what differs is hidden (the number
to guess, the code to break). Splits are disjoint by the game's state, not by its prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from verl_atgrpo import EnvironmentConfigError
from verl_atgrpo.environments.common.limited import LimitedProcess
from verl_atgrpo.environments.common.options import Players, check_installed, option_error, with_options
from verl_atgrpo.environments.common.replies import ECHO, without_echo
from verl_atgrpo.environments.ports.foreign import FAULTS, canonical, line, seeded, unseeded
from verl_atgrpo.environments.ports.replayed_game import Move, Position, ReplayedGame, logger
from verl_atgrpo.play.quoting import READ

_PLAYER = LimitedProcess("verl_atgrpo.environments.ports.player")
"""Of all games of this process."""
_READ = 1000
"""Characters of a reply, from its end, that a game gets: the patterns of some take quadratic time."""


@with_options
class TextArenaGame(ReplayedGame):
    """A game of TextArena that plays offline; the game's own prompt says what an answer looks like."""

    game: str = ""
    """Its name for `textarena.make`, without "-raw"."""
    players: Players = 1
    """The number of agents: player_0, player_1, ..."""
    options: Mapping[str, Any] | None = None
    """Keyword arguments of the game."""

    def __post_init__(self) -> None:
        check_installed("textarena", "TextArena", "textarena")
        self.where = f"at_grpo.environment.game={self.game!r}"
        self._options = dict(self.options or {})
        self.set_agents([f"player_{number}" for number in range(self.players)])
        self._check_game()
        self.check_deterministic()

    def begin(self, seed: int) -> _Running:
        """Returns the game after reset(num_players=players, seed=seed)."""
        import textarena

        game = textarena.make(self.game, **self._options)
        game.reset(num_players=self.players, seed=seed)
        return _Running(game, self, seed)

    async def after(self, seed: int, replies: Sequence[str], position: Position, reply: str) -> Position | None:
        """Returns the position after `reply`, played in a process under limits (`player`); None beyond them."""
        import textarena

        entry = textarena.envs.registration.ENV_REGISTRY[self.game].entry_point
        module = entry.partition(":")[0] if isinstance(entry, str) else entry.__module__
        request: dict[str, object] = {
            "module": module,
            "state": vars(self),
            "seed": seed,
            "replies": replies,
            "asked": position.asked,
            "reply": reply,
        }
        played = await asyncio.to_thread(_PLAYER.ask, request)
        if played is None:
            logger.warning("%s takes too much time or memory for a reply, which counts as illegal", self.where)
            return None
        if "fault" in played:
            raise EnvironmentConfigError(played["fault"])
        for message in played["warnings"]:
            logger.warning("%s", message)
        if (found := played["after"]) is None:
            return None
        return Position(found["asked"] and tuple(found["asked"]), Move(**found["move"]))

    def _check_game(self) -> None:
        import textarena

        if self.game not in textarena.envs.registration.ENV_REGISTRY:
            raise EnvironmentConfigError(f"{self.where}: TextArena has no such game; its names look like Chess-v0")
        try:
            with seeded(0):
                self.begin(0)
        except (*FAULTS, OSError, ImportError) as error:
            raise EnvironmentConfigError(
                f"{self.where}, players={self.players}, options={self._options}: cannot be made, {line(error)}"
            ) from error


class _Running:
    """One game in progress."""

    def __init__(self, game: Any, form: TextArenaGame, seed: int) -> None:
        self._game, self._form, self._seed = game, form, seed
        self._over = False
        self._said: list[str] = []
        """What players have played, which the game quotes."""
        self._asked: tuple[str, str] | None = None

    def asked(self) -> tuple[str, str] | None:
        if self._over:
            return None
        if self._asked is None:  # the game allows one call per turn
            player, text = self._game.get_observation()
            if not isinstance(text, str):
                raise EnvironmentConfigError(
                    f"{self._form.where}: its observations are no texts; use its name without -raw"
                )
            self._asked = self._named(player), text.strip()
        return self._asked

    def play(self, reply: str) -> Move:
        state = self._game.state
        player = state.current_player_id
        errors, barred = getattr(state, "error_count", 0), self._barred(player)
        asked = self.asked()
        told = "" if asked is None else asked[1]
        for earlier in self._said:  # a player may say again what was played
            told = told.replace(earlier, "\n")
        said = without_echo(reply[-READ:], told).strip()[-_READ:]
        if len(said.split()) >= ECHO:  # less is no run, and would tear those of the game's text
            self._said.append(said)
        self._over, _ = self._game.step(action=said)
        given = (self._game.close()[0] or {}) if self._over else {}
        rewards = {self._named(number): float(reward) for number, reward in given.items()}
        self._asked = None
        legal = getattr(state, "error_count", 0) <= errors and self._barred(player) == barred
        return Move(rewards, legal)

    def _named(self, player: int) -> str:
        if player >= (players := len(self._form.agents)):
            raise option_error(f"players={players}: {self._form.game} has a player_{player}; raise it")
        return f"player_{player}"

    def _barred(self, player: int) -> bool:
        return bool(getattr(self._game.state, "game_info", {}).get(player, {}).get("invalid_move"))

    def opening(self) -> str:
        game = self._game
        while hasattr(game, "env"):  # wrappers hold only observations
            game = game.env
        return canonical({**unseeded(game, self._seed), "state": unseeded(game.state, self._seed)})

    def close(self) -> None:
        """Does nothing: the game holds no resources."""
