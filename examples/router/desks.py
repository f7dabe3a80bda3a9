"""A router whose choice shows at the end only: it sends visitors to a desk, and a clerk there tells them a price.

    PYTHONPATH=examples/router python -m verl.trainer.main_ppo --config-dir=examples/router --config-name=desks_smollm2

Which desk knows what is told to nobody, and there is no score for the router's word: a price that the clerk gives
right is the only reward. So `at_grpo.scheme=branch` plays the clerk after each of the router's candidates
(docs/branching.md).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from verl_atgrpo import Environment, Outcome, Split, Team
from verl_atgrpo.environment import stable_hash

DESKS = {
    "red": ("lamp", "rope", "kettle"),
    "green": ("violin", "spade", "candle"),
    "blue": ("tent", "mirror", "bucket"),
}
NAMES = (
    *(
        "Anna",
        "Ben",
        "Clara",
        "David",
        "Emma",
        "Felix",
        "Grace",
        "Henry",
        "Ida",
        "Jack",
        "Kate",
        "Leo",
        "Maria",
        "Noah",
    ),
    *("Olga", "Paul", "Rosa", "Simon", "Tina", "Victor", "Wanda", "Yara", "Adam", "Bella", "Carl", "Diana", "Eric"),
    *(
        "Fiona",
        "George",
        "Helen",
        "Ivan",
        "Julia",
        "Karl",
        "Lena",
        "Martin",
        "Nina",
        "Oscar",
        "Petra",
        "Robert",
        "Sara",
    ),
)
"""The first 30 in training, the others in validation."""


@dataclass(frozen=True)
class Visit:
    """A visitor, what they ask for, and today's prices."""

    name: str
    thing: str
    prices: dict[str, int]


class Desks(Environment):
    """A router names a desk, the clerk of that desk a price."""

    agents: ClassVar[tuple[str, ...]] = ("router", "clerk")

    def task(self, split: Split, index: int) -> Visit:
        """Returns visit `index` of `split`; no two things have the same price."""
        rng = random.Random(stable_hash("desks", split, index))
        things = [thing for desk in DESKS.values() for thing in desk]
        names = NAMES[:30] if split == "train" else NAMES[30:]
        prices = dict(zip(things, rng.sample(range(2, 100), len(things)), strict=True))
        return Visit(rng.choice(names), rng.choice(things), prices)

    def fingerprint(self, task: Visit) -> str:
        """Returns all that prompts tell."""
        return f"{task.name} {task.thing} {task.prices}"

    def task_key(self, task: Visit) -> str:
        """Returns the visitor, whom the first prompt names."""
        return task.name

    async def run(self, task: Visit, team: Team) -> Outcome:
        """Plays a visit; success means that the clerk tells the right price."""
        ask = f"{task.name} asks for the price of a {task.thing}."
        sent = await team.router.act(
            f"{ask} To which desk do you send them: red, green or blue? Answer with one word."
        )
        named = [desk for desk in DESKS if desk in re.findall("[a-z]+", sent.text.lower())]
        if len(named) != 1:
            return Outcome(False, 0.0, {"right_desk": 0.0})
        (desk,) = named
        known = ", ".join(f"{thing} {task.prices[thing]}" for thing in DESKS[desk])
        told = await team.clerk.act(
            f"Prices at the {desk} desk: {known}. {ask} What is it? Answer with the number only."
        )
        right = re.findall("[0-9]+", told.text) == [str(task.prices[task.thing])]
        return Outcome(right, float(right), {"right_desk": float(task.thing in DESKS[desk])})
