"""The process in which TextArena's games play replies, under limits."""

from __future__ import annotations

import functools
import importlib
import json
import logging.handlers
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from verl_atgrpo import EnvironmentConfigError
from verl_atgrpo.environments.common.limited import serve
from verl_atgrpo.environments.ports.replayed_game import Position
from verl_atgrpo.environments.ports.replayed_game import logger as warnings_logger
from verl_atgrpo.environments.ports.textarena import TextArenaGame

CPU_SECONDS = 2.0
"""CPU time of a move; a usual one takes less than a hundredth."""
MEMORY_BYTES = 4 << 30


def main() -> None:
    """Reads {module, state, seed, replies, asked, reply}; writes {after, warnings} or {fault}.

    `state` holds a checked environment's attributes, `after` is a `Position` as a mapping, or null.
    """
    heard = logging.handlers.BufferingHandler(1 << 20)
    warnings_logger.addHandler(heard)

    @functools.lru_cache(maxsize=8)
    def made(module: str, state: str) -> TextArenaGame:
        importlib.import_module(module)  # may register the game
        env = TextArenaGame.__new__(TextArenaGame)  # it was checked where it was made
        vars(env).update(json.loads(state))
        env.begin(0).close()  # imports the game
        return env

    def game(request: Mapping[str, Any]) -> TextArenaGame:
        return made(request["module"], json.dumps(request["state"]))

    def answer(request: Mapping[str, Any]) -> object:
        heard.flush()
        env, asked = game(request), request["asked"]
        position = Position((asked[0], asked[1]))
        try:
            after = env.follow(request["seed"], request["replies"], position, request["reply"])
        except EnvironmentConfigError as error:
            return {"fault": str(error)}
        return {"after": after and asdict(after), "warnings": [record.getMessage() for record in heard.buffer]}

    serve(
        answer,
        # The replies before were played within their own time.
        lambda request: CPU_SECONDS * (1 + len(request["replies"])),
        MEMORY_BYTES,
        prepare=game,
    )


if __name__ == "__main__":
    main()
