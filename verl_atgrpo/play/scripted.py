"""Policies and teams that answer from scripts, for tests and benchmarks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from verl_atgrpo.play.messages import Message, Reply, ToolCall, text_of
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import Generation, PlayMode, ReplyLimits, Scheme, Selection, TeamOptions


@dataclass
class ScriptedPolicy:
    """A policy that answers from a script instead of a model, for tests and benchmarks.

    Token ids are Unicode code points, so that decoding is exact.
    """

    script: Callable[[str, int], str]
    """(prompt text, index of the call for this prompt) -> answer."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each prompt text."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the code points of the names of tools, if there are any, and of the messages, one in a line each."""
        names = [f"tools: {', '.join(tool.name for tool in tools)}"] if tools else []
        return [ord(char) for char in "\n".join([*names, *map(text_of, messages)])]

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        """Returns the calls of an answer of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
        calls, unparsed = [], 0
        thought, said = generation.parts
        for text in re.findall("<tool_call>(.*?)(?:</tool_call>|$)", said, re.DOTALL):
            try:
                call = json.loads(text)
                calls.append(ToolCall(call["name"], json.dumps(call["arguments"])))
            except (ValueError, KeyError, TypeError, RecursionError):
                unparsed += 1
        text = said.partition("<tool_call>")[0]
        return Reply(text, thought, tuple(calls), unparsed=unparsed, raw=generation.text)

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: ReplyLimits | None = None
    ) -> Generation:
        """Returns the script's next answer to this prompt, with log-probs of 0."""
        prompt = "".join(map(chr, prompt_ids))
        whole = self.script(prompt, self.calls[prompt])
        self.calls[prompt] += 1
        text = whole if limits is None else limits.cut(whole[: limits.max_tokens])
        truncated = limits is not None and limits.max_tokens is not None and len(whole) > limits.max_tokens
        return Generation([ord(char) for char in text], [0.0] * len(text), text, truncated)


class ScriptedTeam(Team):
    """A team whose agents answer from scripts: `ScriptedTeam({"planner": lambda prompt, k: "R"})`."""

    def __init__(
        self,
        scripts: Mapping[str, Callable[[str, int], str]],
        *,
        candidates: int = 1,
        alpha: float = 1.0,
        selection: Selection = "greedy",
        scheme: Scheme = "tree",
        seed: int | None = 0,
    ) -> None:
        self.policies = {name: ScriptedPolicy(script) for name, script in scripts.items()}
        super().__init__(
            self.policies,
            TeamOptions(candidates=candidates, alpha=alpha, selection=selection),
            PlayMode(scheme),
            seed=seed,
        )
