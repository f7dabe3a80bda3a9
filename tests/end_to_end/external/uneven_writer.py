"""An environment whose episodes differ in length."""

from __future__ import annotations

from verl_atgrpo import Environment, Outcome, Score, Split, Team


class UnevenWriter(Environment):
    """Is rewarded for every U, in two or twelve turns."""

    agents = ("writer",)

    def task(self, split: Split, index: int) -> tuple[Split, int]:
        return split, index

    def fingerprint(self, task: tuple[Split, int]) -> str:
        return str(task)

    async def run(self, task: tuple[Split, int], team: Team) -> Outcome:
        drafts = 2 + 10 * (task[1] % 2)
        answers = [await team.writer.act("draft", lambda reply: Score(local=reply.count("U"))) for _ in range(drafts)]
        return Outcome(success="U" in answers[-1].text)
