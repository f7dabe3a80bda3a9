"""Demonstrations for coding on one-line functions: the function, and a call with its result."""

from __future__ import annotations

import itertools
import json
import random

from verl_atgrpo.environments.code.environment import Code, State
from verl_atgrpo.environments.code.programs import Call, Problem, Verdict
from verl_atgrpo.environments.common.records import Record
from verl_atgrpo.environments.common.splits import split_of
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

SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}
_INPUTS = (0, 1, 2, 3, 5, 9)
_OPEN, _CLOSE = ("\n", "```", "\n"), ("\n", "```")


def expression(statement: str) -> str:
    """Returns the expression for a statement: `(x+2)*3` for `add 2, multiply 3`."""
    first, second = (SIGNS[word] + digit for word, digit in map(str.split, statement.split(", ")))
    return f"(x{first}){second}"


def value(statement: str, x: int) -> int:
    """Returns the value of a statement's function for `x`."""
    for word, digit in map(str.split, statement.split(", ")):
        x = {"add": x + int(digit), "subtract": x - int(digit), "multiply": x * int(digit)}[word]
    return x


def functions(split: Split) -> list[Record]:
    """Returns rows in the format of APPS, functions of two steps; equal functions are in the same split."""
    steps = [f"{word} {digit}" for word in SIGNS for digit in range(1, 10)]
    rows = []
    for statement in map(", ".join, itertools.product(steps, repeat=2)):
        results = [value(statement, x) for x in _INPUTS]
        if split_of(str(results)) == split:
            tests = {"fn_name": "f", "inputs": [[x] for x in _INPUTS], "outputs": results}
            solution = f"def f(x): return {expression(statement)}"
            row = {"question": statement, "input_output": json.dumps(tests), "solutions": json.dumps([solution])}
            rows.append(row)
    random.Random(0).shuffle(rows)
    return rows


def program(problem: Problem, noise: float) -> list[Choice]:
    """Returns a coder's distributions; every operator and digit is random with probability `noise`."""
    body = unsure(expression(problem.statement), noise, "".join(SIGNS.values()), DIGITS)
    return [*sure(("```python", "\n", *"def f(x): return ")), *body, *sure(_CLOSE)]


def test(problem: Problem, x: int, noise: float) -> list[Choice]:
    """Returns a tester's distributions for a call with `x`; the result's digits are random with chance `noise`."""
    result = unsure(str(value(problem.statement, x)), noise, DIGITS)
    call = ("Input:", *_OPEN, str(x), *_CLOSE, "\n", "Output:", *_OPEN)
    return [*sure(call), *result, *sure(_CLOSE)]


def demonstrate(env: Code, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent, in the first turn or after one without agreement."""
    problem = env.task("train", rng.randrange(env.num_tasks("train")))
    state = State(problem) if rng.random() < 0.5 else _disagreement(problem, rng)
    if rng.random() < 0.5:
        return Demonstration(env.coder_prompt(state), *write(program(problem, noise), rng))
    return Demonstration(env.tester_prompt(state), *write(test(problem, rng.choice(_INPUTS), noise), rng))


def _disagreement(problem: Problem, rng: random.Random) -> State:
    """Returns a test and a program's result that disagree; either of them is correct with probability 1/2."""
    x = rng.choice(_INPUTS)
    right = value(problem.statement, x)
    wrong = right + rng.choice((-1, 1)) * rng.randint(1, 9)
    expected, output = (right, wrong) if rng.random() < 0.5 else (wrong, right)
    return State(problem, "", Call((x,), expected), Verdict(True, True, (False,), (str(output),)))


CODE = Demonstrator(
    "code",
    {"train": {"format": "apps"}, "val": {"format": "apps"}, "max_turns": 2, "style": "compact"},
    demonstrate,
    response_length=32,
    words=("code", "test", "none", *SIGNS, "```python", "```", "Input:", "Output:"),
    training={"clean_steps": 300, "noise": 0.25},
    rows=functions,
)
