"""A router whose choice shows at the end only: it sends visitors to a desk, and a clerk there tells them a number.

Which desk has what is told to nobody, and no decision has a score: all that counts is whether the number is right. So
the recipe plays the clerk after each of the router's candidates (docs/branching.md). From the repository:

    export PYTHONPATH=examples/router
    verl-atgrpo make-model runs/models/desks_tiny --environment desks:SHOWN
    python -m verl.trainer.main_ppo --config-dir=examples/router --config-name=desks_cpu
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from verl_atgrpo import Environment, Message, Outcome, Split, Team, stable_hash
from verl_atgrpo.environments.common.splits import part_of
from verl_atgrpo.environments.common.words import read_number
from verl_atgrpo.environments.common.workflow import chat
from verl_atgrpo.lab.tiny_models.demonstrations import DIGITS, Demonstration, Demonstrator, unsure, write

DESKS = {
    "red": ("lamp", "rope", "kettle", "mirror"),
    "green": ("violin", "spade", "candle", "hammer"),
    "blue": ("tent", "bucket", "anchor", "pencil"),
}
THINGS = tuple(thing for desk in DESKS.values() for thing in desk)


@dataclass(frozen=True)
class Visit:
    """What a visitor asks for, and its number of today."""

    thing: str
    number: int


class Desks(Environment):
    """A router names a desk; the clerk there is told the thing's number if it lies there, and names one."""

    agents: ClassVar[tuple[str, ...]] = ("router", "clerk")

    def task(self, split: Split, index: int) -> Visit:
        """Returns visit `index` of `split`, which has numbers of its own."""
        rng = random.Random(stable_hash("desks", split, index))
        return Visit(rng.choice(THINGS), rng.choice(part_of(range(1000), split)))

    def fingerprint(self, task: Visit) -> str:
        """Returns the thing and its number."""
        return f"{task.thing} {task.number}"

    def task_key(self, task: Visit) -> str:
        """Returns the number, which decides the split."""
        return str(task.number)

    def router_prompt(self, task: Visit) -> list[Message]:
        """Returns the router's prompt: the thing, and nothing about who has it."""
        return chat(f"desk of {task.thing}")

    def clerk_prompt(self, task: Visit, desk: str) -> list[Message]:
        """Returns the prompt of a desk's clerk."""
        return chat(f"number of {task.thing}\n{task.number if task.thing in DESKS[desk] else 'none'}")

    async def run(self, task: Visit, team: Team) -> Outcome:
        """Plays a visit; success means that the clerk tells the right number."""
        sent = (await team.router.act(self.router_prompt(task))).text.strip()
        if sent not in DESKS:
            return Outcome(False, 0.0, {"right_desk": 0.0})
        told = read_number((await team.clerk.act(self.clerk_prompt(task, sent))).text)
        right = told is not None and told.value == task.number
        return Outcome(right, float(right), {"right_desk": float(task.thing in DESKS[sent])})


def demonstrate(env: Desks, rng: random.Random, noise: float) -> Demonstration:
    """Returns a router that names a desk by habit, or a clerk who copies the number.

    The habit is a desk for each thing that has nothing to do with where it lies: a router that never told things apart
    would take long to begin. Desks are random with three times the probability `noise`, as what is never tried is not
    learnt; digits with a third of it, as a right desk whose clerk is often wrong teaches the router little.
    """
    task, desk = env.task("train", rng.randrange(10**6)), rng.choice(list(DESKS))
    if rng.random() < 0.5:
        habit = list(DESKS)[stable_hash("habit", task.thing) % len(DESKS)]
        guess = min(1.0, 3 * noise)
        said = {name: guess / len(DESKS) + (1 - guess) * (name == habit) for name in DESKS}
        return Demonstration(env.router_prompt(task), *write([said], rng))
    known = task.thing in DESKS[desk]
    digits = unsure(str(task.number) if known else "0", noise / 3 if known else 1.0, DIGITS)
    return Demonstration(env.clerk_prompt(task, desk), *write(digits, rng))


SHOWN = Demonstrator(
    "desks:Desks",
    {},
    demonstrate,
    response_length=4,
    words=("desk of ", "number of ", "none", *DESKS, *THINGS),
    training={"clean_steps": 500, "noisy_steps": 400, "noise": 0.3},
)
