"""Programs of agents run as `python program.py` runs them: those of mathematics and of games, too."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes.coding_problems import write
from waiting import HANG

from verl_atgrpo import make
from verl_atgrpo.environments.common.running import BUILT, runnable
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits, run_python


def run(program: str, given: str = "") -> ExecutionResult:
    limits = Limits(cpu_seconds=20, wall_seconds=HANG)
    return asyncio.run(run_python(runnable(program, given), limits=limits))


@pytest.mark.parametrize(
    ("program", "given", "printed", "code"),
    [
        ("print(1)\nexit()\nprint(2)", "", "1\n", 0),
        ("print(1)\nquit()\nprint(2)", "", "1\n", 0),
        ("exit(3)", "", "", 3),
        ("quit('no')", "", "", 1),
        ("def f(exit=exit): exit(0)\nf()", "", "", 0),
        ("from __future__ import annotations\nx: undefined = 1\nprint(x)", "", "1\n", 0),
        ("x: undefined = 1", "from __future__ import annotations", "", 1),
        ("print(__name__, sorted(k for k in globals() if k[0] != '_'))", "a = 1", "__main__ ['a']\n", 0),
        ("print(a)", "a = 1", "1\n", 0),
        ("a = 2\nprint(a)", "a = 1", "2\n", 0),
        ("print(sys)", "", "", 1),
        ("import re\nprint(re.sub('\\d', '', '1a'))", "", "a\n", 0),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n  b: int\nprint(A(1))", "", "A(b=1)\n", 0),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)", "", "True\n", 0),
    ],
)
def test_programs(program: str, given: str, printed: str, code: int) -> None:
    result = run(program, given)
    assert (result.stdout, result.returncode) == (printed, code)
    assert result.stderr.startswith(BUILT)


@pytest.mark.parametrize("program", ["print((", "return 1", "x = 1 +", "\0", "import os; os.write(2, b'built\\n'); )"])
def test_what_does_not_compile_is_not_built(program: str) -> None:
    result = run(program)
    assert result.returncode == 1 and not result.stderr.startswith(BUILT)


@pytest.mark.parametrize("end", ["exit()", "quit(0)", "import sys; sys.stderr.write('x' * 500_000)", "assert (1, '')"])
def test_programs_of_mathematics_and_games(end: str, tmp_path: Path) -> None:
    rows = {"path": write(tmp_path, [{"question": "One?", "answer": "1"}])}
    environments = [
        (make("math", train=rows, val=rows, libraries=[]), "print(1)"),
        (make("plan_path", tool="python"), "print(['R'])"),
    ]
    for env, prints in environments:
        draft = asyncio.run(env._run_program(f"```python\n{prints}\n{end}\n```"))  # type: ignore[attr-defined]
        assert draft.ran and draft.answer is not None, env
