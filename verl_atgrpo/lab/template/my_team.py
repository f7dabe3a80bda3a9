"""Two agents send a lift to a guest: a porter names the direction, a driver the number of floors.

Replace it by a task of your own: each CHANGE says what. `python -m pytest -q` then says what does not hold.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial

from verl_atgrpo import Environment, Outcome, Score, Split, Team, stable_hash

WAYS = {"up": 1, "down": -1}


@dataclass(frozen=True)
class Call:
    """CHANGE: what a task consists of, such as a question and its answer. It does not change in an episode."""

    lift: int
    guest: int


class MyTeam(Environment):
    """CHANGE: what the team does."""

    # CHANGE: your agents. Recipes give each of them a policy, a K and sampling settings by these names.
    agents = ("porter", "driver")

    def __init__(self, floors: int = 30, max_turns: int = 2, seed: int = 0) -> None:
        """CHANGE: the options that a recipe may set under `at_grpo.environment`.

        Args:
            floors: floors of the house.
            max_turns: rides at most.
            seed: tasks derive from it.
        """
        self.floors, self.max_turns, self.seed = floors, max_turns, seed

    def task(self, split: Split, index: int) -> Call:
        """CHANGE: task `index` of a split, the same in every process: drawn as here, or a row of your data.

        With data, `num_tasks(split)` returns the number of rows.
        """
        rng = random.Random(stable_hash("my_team", self.seed, split, index))
        while True:
            call = Call(*rng.sample(range(1, self.floors + 1), 2))
            # A tenth of all tasks are for validation, and none of them is trained on.
            if (stable_hash(self.fingerprint(call)) % 10 == 0) == (split == "val"):
                return call

    def fingerprint(self, task: Call) -> str:
        """CHANGE: a text that two tasks share if they are the same problem."""
        return f"{task.lift} {task.guest}"

    async def run(self, task: Call, team: Team) -> Outcome:
        """CHANGE: one episode. Each `act` samples K candidates, scores them, and returns the best one."""
        lift = task.lift
        for turn in range(self.max_turns):
            missing = task.guest - lift
            seen = f"A guest waits {abs(missing)} floors {'above' if missing > 0 else 'below'} the lift."
            way = await team.porter.act(
                f"{seen} Which way does it go? Answer with one word, up or down.", partial(score_way, missing)
            )
            number = await team.driver.act(
                f"{seen} It goes {word(way.text)}. Answer with the number of floors only.",
                partial(score_floors, missing),
            )
            lift += WAYS.get(word(way.text), 0) * floors(number.text)
            lift = min(max(lift, 1), self.floors)
            if lift == task.guest:
                return Outcome(success=True, team_reward=1.0, metrics={"turns": turn + 1.0})
        return Outcome(success=False, metrics={"turns": float(self.max_turns)})


def score_way(missing: int, reply: str) -> Score:
    """CHANGE: `local` is how well an agent does its part. The porter cannot know how far the lift will go."""
    return Score(local=float(WAYS.get(word(reply), 0) * missing > 0))


def score_floors(missing: int, reply: str) -> Score:
    """CHANGE: `team` is what a reply does for the team's goal. It follows from the state and the reply alone."""
    return Score(team=float(floors(reply) == abs(missing)))


def word(reply: str) -> str:
    """Returns a reply of one word in small letters without its punctuation, `nowhere` for any other."""
    found = re.fullmatch(r"\W*([a-z]+)\W*", reply.lower())
    return found[1] if found and found[1] in WAYS else "nowhere"


def floors(reply: str) -> int:
    """Returns the number that a reply consists of, 0 for any other."""
    found = re.fullmatch(r"\W*(\d{1,3})\W*", reply)
    return int(found[1]) if found else 0
