"""A game whose decisions wait for one another, with prompts of a fixed length."""

from __future__ import annotations

from typing import Any

from bench_against_grpo import prompt

from verl_atgrpo import Environment, Outcome, Score


class Chain(Environment):
    """Two agents answer in turns; nothing is shared between two prompts, or between a prompt and an answer."""

    agents = ("first", "second")

    def __init__(self, letters: int, decisions: int) -> None:
        self.letters, self.decisions = letters, decisions

    def task(self, split: str, index: int) -> tuple[str, int]:
        """Returns split and index."""
        return split, index

    def fingerprint(self, task: tuple[str, int]) -> str:
        """Returns the task as text."""
        return f"{task[0]} {task[1]}"

    async def run(self, task: tuple[str, int], team: Any) -> Outcome:
        """Plays the decisions one after the other."""
        total = 0.0
        for number in range(self.decisions):
            agent = getattr(team, self.agents[number % 2])
            asked = prompt(task[1] * self.decisions + number, self.letters)
            answer = await agent.act(asked, score=lambda reply: Score(float(reply.count("U"))))
            total += answer.score.team
        return Outcome(success=False, team_reward=total)
