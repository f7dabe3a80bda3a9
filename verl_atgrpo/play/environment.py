"""Environments: a source of tasks, and an async function in which a team of agents solves one task.

A new environment subclasses `Environment`, names its agents, makes tasks from (split, index) and plays one task in
`run`. Nothing here depends on verl, models or training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from verl_atgrpo.play.team import Team
from verl_atgrpo.play.types import EpisodeRecord, Outcome, OutcomeError, Split
from verl_atgrpo.play.user_code import contained

RowDefect = Literal[
    "its own solution fails", "the empty reply passes", "its answer cannot be verified", "it has no solution to check"
]
"""What may be wrong with a row of data; the last one says that there is nothing to grade."""


class Environment(ABC):
    """A family of tasks and the workflow in which a team of agents solves one of them."""

    agents: ClassVar[tuple[str, ...]]
    """Names of the agents, for `team.<agent>.act(...)` and `at_grpo.agents`."""
    schemes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Agent -> values of `at_grpo.scheme` that give it a reward of its own; any, for agents that are not named. `own`:
    it is settled with one that is for `parallel` with `episode_reward: own` only."""

    ordered: ClassVar[bool] = False
    """Whether training tasks are played in the order of their index, as in a mixture, and are not shuffled."""

    @abstractmethod
    def task(self, split: Split, index: int) -> Any:
        """Returns task `index` of `split`: the same task for the same arguments in every process."""

    @abstractmethod
    def fingerprint(self, task: Any) -> str:
        """Returns a text that two tasks share exactly if they are the same problem."""

    def task_key(self, task: Any) -> str:
        """Returns the part of a task that no move changes, such as a grid's walls but not the position.

        No key may be in both splits. The default is the fingerprint, which suffices only if no episode can reach the
        start of another task.
        """
        return self.fingerprint(task)

    @abstractmethod
    async def run(self, task: Any, team: Team) -> Outcome:
        """Plays one episode of `task` with `team` and returns its outcome."""

    def dedup_text(self, task: Any) -> str | None:
        """Returns the problem's text without the parts that all tasks share, or None if it has no such text.

        Validation tasks that are near duplicates of a training task by this text are refused (`contamination`).
        Generated puzzles return None: all of them look alike, and their keys suffice.
        """
        return None

    async def row_defect(self, task: Any) -> RowDefect | None:
        """Returns what is wrong with a task that comes from data, or None.

        Grades the row's own solution or answer, and the empty reply, as replies are graded. Generated tasks have no
        rows to check (`data_check`).
        """
        return None

    def opponents(self, task: Any) -> Sequence[str]:
        """Returns the agents that play against the others in a task, some of `agents`; none in most environments.

        They are not trained on this task, whose outcome is that of the others, and at_grpo.opponents may have others
        answer for them, such as past selves. In training some agent that is none must act.
        """
        return ()

    def hindsight(self, task: Any) -> str:
        """Returns what a critic may know of a task and the team may not, such as its solution (`at_grpo.critic`)."""
        return ""

    def num_tasks(self, split: Split) -> int | None:
        """Returns the number of tasks of `split`, or None if they are generated without end."""
        return None

    def data_sets(self, split: Split) -> Mapping[str, int]:
        """Returns the data sets of `split`, in the order of tasks: name -> number of tasks.

        Validation reports each under its name, and all further tasks under the environment's.
        """
        return {}


async def play(environment: Environment, task: object, team: Team) -> EpisodeRecord:
    """Plays one episode and returns its outcome with all decisions.

    Raises:
        EpisodeFailed: a decision failed, even if the environment wrapped the exception (as task groups do), or
            caught it.
        OutcomeError: the environment returned no valid outcome.
        ValueError: a score began a decision and did not await it.
        Ended: the environment raised what would end the process, such as `SystemExit`.
    """
    try:
        with contained(f"{type(environment).__name__}.run"):
            outcome = await environment.run(task, team)
    except Exception as error:
        if team.failure is None or error is team.failure:
            raise
        raise team.failure from error
    finally:
        await team.close()
    if team.failure is not None:
        raise team.failure
    if left := team.left_over:
        raise ValueError(
            f"{type(environment).__name__}: a score ended before the decision {left[0]} that it had begun: nothing "
            "would train on it; await it in the score"
        )
    if not isinstance(outcome, Outcome):
        raise OutcomeError(f"{type(environment).__name__}.run returned {outcome!r:.200}: it is no Outcome")
    return EpisodeRecord(team.decisions, outcome)
