"""Shows coding, as far as functions of one line go: the function, and a call of it with its result."""

from __future__ import annotations

import itertools
import json
import random

from verl_atgrpo.environment import Split
from verl_atgrpo.environments.code.environment import Code, State
from verl_atgrpo.environments.code.programs import Call, Problem, Verdict
from verl_atgrpo.environments.common.records import Record
from verl_atgrpo.environments.common.splits import split_of
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
    """Returns what a function returns that does what `statement` says: of `add 2, multiply 3` it is `(x+2)*3`."""
    first, second = (SIGNS[word] + digit for word, digit in map(str.split, statement.split(", ")))
    return f"(x{first}){second}"


def value(statement: str, x: int) -> int:
    """Returns what such a function returns for `x`."""
    for word, digit in map(str.split, statement.split(", ")):
        x = {"add": x + int(digit), "subtract": x - int(digit), "multiply": x * int(digit)}[word]
    return x


def functions(split: Split) -> list[Record]:
    """Returns functions of two steps as APPS has them; those with equal results belong to one split."""
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
    """Returns the choices of a coder, who mistakes every sign and every number with chance `noise`."""
    body = unsure(expression(problem.statement), noise, "".join(SIGNS.values()), DIGITS)
    return [*sure(("```python", "\n", *"def f(x): return ")), *body, *sure(_CLOSE)]


def test(problem: Problem, x: int, noise: float) -> list[Choice]:
    """Returns the choices of a tester for a call with `x`, who mistakes digits of the result with chance `noise`."""
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
    """A test and what some program came to on it; one of them is right, half of the time it is the test."""
    x = rng.choice(_INPUTS)
    right = value(problem.statement, x)
    wrong = right + rng.choice((-1, 1)) * rng.randint(1, 9)
    expected, came = (right, wrong) if rng.random() < 0.5 else (wrong, right)
    return State(problem, "", Call((x,), expected), Verdict(True, True, (False,), (str(came),)))


CODE = Demonstrator(
    "code",
    {"train": {"format": "apps"}, "val": {"format": "apps"}, "max_turns": 2, "style": "compact"},
    demonstrate,
    response_length=32,
    words=("code", "test", "none", *SIGNS, "```python", "```", "Input:", "Output:"),
    training={"clean_steps": 300, "noise": 0.25},
    rows=functions,
)
