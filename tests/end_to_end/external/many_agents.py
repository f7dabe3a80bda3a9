"""An environment with as many agents as wanted, which answer one question each, for measuring adapters."""

from __future__ import annotations

from verl_atgrpo import Environment, Outcome, Score, Split, Team, stable_hash


class ManyAgents(Environment):
    """Every agent names a town in a few words; scores are arbitrary, so that every group has a signal."""

    def __init__(self, number: int) -> None:
        self.agents = tuple(f"agent_{index}" for index in range(number))

    def task(self, split: Split, index: int) -> tuple[Split, int]:
        return split, index

    def fingerprint(self, task: tuple[Split, int]) -> str:
        return str(task)

    async def run(self, task: tuple[Split, int], team: Team) -> Outcome:
        for name in self.agents:
            # Agents share nothing of their prompts, so that one policy has no longer prefixes than several.
            question = f"{name}, you are one of {len(self.agents)} travellers. This is trip {task[1]}. " * 4
            await team[name].act(f"{question}Where do you go?", lambda reply: Score(stable_hash(reply) % 997 / 997))
        return Outcome(success=True)


class Duel(ManyAgents):
    """The last agent is an opponent."""

    def opponents(self, task: tuple[Split, int]) -> tuple[str, ...]:
        return self.agents[-1:]
