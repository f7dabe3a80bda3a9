"""Environments in which a judge's decision is a candidate's score.

A module of its own: the check of an environment imports it in a fresh process, where pytest and verl take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_atgrpo import Environment, Outcome, Score, Team


class Judged(Environment):
    """A solver names a number, a judge scores it."""

    agents = ("solver", "judge")

    def __init__(self, leaks: bool = False) -> None:
        self.leaks = leaks

    def task(self, split: str, index: int) -> str:
        return f"{split} {index}"

    def fingerprint(self, task: str) -> str:
        return task

    async def run(self, task: str, team: Team) -> Outcome:
        told: list[str] = []

        async def by_judge(text: str) -> Score:
            verdict = await team.judge.act(f"{task}: is {text} good? {told if self.leaks else ''}")
            told.append(verdict.text)
            return Score(local=float(verdict.text == "yes"))

        answer = await team.solver.act(task, by_judge)
        return Outcome(answer.text == "42", float(answer.text == "42"))


class Ranked(Judged):
    """The judge sees all candidates at once."""

    async def run(self, task: str, team: Team) -> Outcome:
        async def by_judge(replies: Sequence[str]) -> list[Score]:
            verdict = await team.judge.act(f"{task}: which is good? {' '.join(replies)}")
            return [Score(local=float(verdict.text == reply == "42")) for reply in replies][: 1 - self.leaks]

        answer = await team.solver.act(task, score_all=by_judge)
        return Outcome(answer.text == "42", float(answer.text == "42"))
