"""A game of TextArena whose steps do what a reply says; registered when this module is imported."""

from __future__ import annotations

import re
import sys
from typing import Any

import textarena
from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv


class CarelessGame(GuessTheNumberEnv):  # type: ignore[misc]
    """The number to guess, with moves that no game should have."""

    def step(self, action: str) -> Any:
        kind, _, rest = action.strip("[]").partition(":")  # a wrapper adds brackets
        match kind:
            case "count":
                sum(1 for _ in iter(int, 1))
            case "copies":
                len(rest * 10**11)
            case "power":
                eval("9**9**9")  # noqa: S307
            case "match":
                re.fullmatch(r"(a|aa|a+)+b", rest)
            case "raise":
                raise ValueError("no such move")
            case "deep":
                return self.step(action)
            case "leave":
                sys.exit(2)
        return super().step(action)


_KNOWN = textarena.envs.registration.ENV_REGISTRY
if "Careless-v0" not in _KNOWN:
    textarena.register(
        id="Careless-v0",
        entry_point="fakes.careless_game:CarelessGame",
        default_wrappers=_KNOWN["GuessTheNumber-v0"].default_wrappers,
    )
