r"""Demonstrations for mathematics on sums: a program that adds, a sum in \boxed{}, a verdict on one, a better one."""

from __future__ import annotations

import random

from verl_atgrpo.environments.common.records import Record
from verl_atgrpo.environments.common.splits import split_of
from verl_atgrpo.environments.math.refinement import VERDICTS, MathDrafts, MathJudged, MathRefined
from verl_atgrpo.environments.math.team import Attempt, Math, MathTask, Turn
from verl_atgrpo.play.types import Split
from verl_atgrpo.tiny_models.demonstrations.demonstrator import (
    DIGITS,
    Choice,
    Demonstration,
    Demonstrator,
    sure,
    unsure,
    write,
)

SIZE: dict[Split, int] = {"train": 2000, "val": 200}


def sums(split: Split) -> list[Record]:
    """Returns sums of two numbers below 100, each in one order; the numbers decide the split."""
    pairs = [(a, b) for a in range(100) for b in range(a, 100) if split_of(f"{a}+{b}") == split]
    rng = random.Random(0)
    terms = [rng.sample(pair, 2) for pair in rng.sample(pairs, SIZE[split])]
    return [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in terms]


def program(task: MathTask, noise: float) -> list[Choice]:
    """Returns a tool user's distributions; every digit is random with probability `noise`."""
    terms = unsure(task.question.removesuffix("=?"), noise, DIGITS)
    return [*sure(("```python", "\n", "print", "(")), *terms, *sure((")", "\n", "```"))]


def boxed(task: MathTask, noise: float) -> list[Choice]:
    """Returns a reasoner's distributions; every digit is random with probability `noise`."""
    return [*sure(("\\boxed", "{")), *unsure(task.answer, noise, DIGITS), *sure("}")]


def demonstrate(env: Math, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent, in the first turn or after one without agreement."""
    task = env.task("train", rng.randrange(env.num_tasks("train")))
    turns = [turn for turn in [_turn(task, rng)] if turn[0].answer != turn[1].answer]
    if rng.random() < 0.5:
        return Demonstration(env.tool_prompt(task, turns), *write(program(task, noise), rng))
    return Demonstration(env.reasoner_prompt(task, turns), *write(boxed(task, noise), rng))


def demonstrate_judged(env: MathJudged, rng: random.Random, noise: float) -> Demonstration:
    """Returns a solver's answer, or a judge's verdict, which is random with twice the probability of a digit."""
    task = env.task("train", rng.randrange(env.num_tasks("train")))
    if rng.random() < 0.5:
        return Demonstration(env.solver_prompt(task), *write(boxed(task, noise), rng))
    answer = _answer(task, rng)
    return Demonstration(env.judge_prompt(task, f"\\boxed{{{answer}}}"), *write([_verdict(task, answer, noise)], rng))


def demonstrate_refined(env: MathRefined, rng: random.Random, noise: float) -> Demonstration:
    """Returns a generator's answer, a verifier's verdict, or a refiner's answer.

    A refiner repeats what the verifier calls right, and adds itself what it calls wrong.
    """
    task = env.task("train", rng.randrange(env.num_tasks("train")))
    role, answer = rng.choice(env.agents), _answer(task, rng)
    first = Attempt("", answer)
    if role == "generator":
        return Demonstration(env.generator_prompt(task), *write(boxed(task, noise), rng))
    if role == "verifier":
        return Demonstration(env.verifier_prompt(task, first), *write([_verdict(task, answer, noise)], rng))
    ((said, *_), _) = write([_verdict(task, answer, 0.2)], rng)
    repeated = MathTask(task.question, answer) if said == VERDICTS[0] else task
    return Demonstration(env.refiner_prompt(task, first, said), *write(boxed(repeated, noise), rng))


def demonstrate_drafts(env: MathDrafts, rng: random.Random, noise: float) -> Demonstration:
    """Returns a drafter's answer, or a refiner's: the sum, or in a quarter of the cases what the draft says."""
    task = env.task("train", rng.randrange(env.num_tasks("train")))
    if rng.random() < 0.5:
        return Demonstration(env.drafter_prompt(task), *write(boxed(task, noise), rng))
    answer = _answer(task, rng)
    meant = task if rng.random() < 0.75 else MathTask(task.question, answer)
    return Demonstration(env.refiner_prompt(task, Attempt("", answer)), *write(boxed(meant, noise), rng))


def _answer(task: MathTask, rng: random.Random) -> str:
    """Returns an answer that is correct at least half of the time."""
    return "".join(write(unsure(task.answer, 0.5, DIGITS), rng)[0]) if rng.random() < 0.5 else task.answer


def _verdict(task: MathTask, answer: str, noise: float) -> Choice:
    """Returns a distribution over verdicts, random with twice the probability of a digit."""
    true = VERDICTS[answer != task.answer]
    unsure_of = min(1.0, 2 * noise) / 2
    return {word: unsure_of + (word == true) * (1 - 2 * unsure_of) for word in VERDICTS}


def _turn(task: MathTask, rng: random.Random) -> Turn:
    """Returns two answers, each correct with probability at least 1/2."""

    def attempt() -> Attempt:
        wrong, _ = write(unsure(task.answer, 0.5, DIGITS), rng)
        return Attempt("", task.answer if rng.random() < 0.5 else "".join(wrong))

    return attempt(), attempt()


MATH = Demonstrator(
    "math",
    {"max_turns": 3, "style": "compact"},
    demonstrate,
    response_length=14,
    words=("tool", "reason", "none", "```python", "```", "print", "\\boxed"),
    training={"clean_steps": 500, "noise": 0.1},
    rows=sums,
)

MATH_JUDGED = Demonstrator(
    "math_judged",
    {"votes": 4, "style": "compact"},
    demonstrate_judged,
    response_length=7,
    words=("solve", "judge", "none", "\\boxed", *VERDICTS),
    training={"clean_steps": 900, "noise": 0.35},
    rows=sums,
)

MATH_REFINED = Demonstrator(
    "math_refined",
    {"style": "compact"},
    demonstrate_refined,
    response_length=7,
    words=("generate", "verify", "refine", "none", "\\boxed", *VERDICTS),
    training={"clean_steps": 900, "noise": 0.25},
    rows=sums,
)

MATH_DRAFTS = Demonstrator(
    "math_drafts",
    {"drafts": 4, "style": "compact"},
    demonstrate_drafts,
    response_length=7,
    words=("draft", "refine", "none", "\\boxed"),
    training={"clean_steps": 900, "noise": 0.25},
    rows=sums,
)
