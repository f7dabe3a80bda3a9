"""The source of a team's candidates: verl's servers, a local model or a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verl_atgrpo.play.messages import Message, Reply
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import Generation, ReplyLimits


class Sampler(Protocol):
    """The source of a team's candidates: verl's servers, a local model or a script."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the token ids of a prompt, with the chat template applied, in which the tools are described.

        Raises:
            EpisodeFailed: the prompt is too long for the policy.
            ToolError: its chat template knows no tools.
        """
        ...

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: ReplyLimits | None = None
    ) -> Generation:
        """Samples one answer. Candidates of a decision have the same `decision_id`, so that they share a prefix cache.

        Raises EpisodeFailed if sampling failed.
        """
        ...

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        """Returns the calls and the rest of an answer; an unreadable answer is one without calls."""
        ...
