"""Mutation testing: changes single expressions of a module, runs its tests, and lists the mutants that survive.

    .venv/bin/python scripts/mutation_test.py rows/step_rows.py estimators/arithmetic.py
    .venv/bin/python scripts/mutation_test.py --sample 40 train/trainer/policy_unit.py
    .venv/bin/python scripts/mutation_test.py --line 63 rows/step_rows.py

Why not a library (read, not run): mutmut (3.8) skips decorated functions, such as `DecisionClient.serving` and all
that verl registers, changes every text, including error messages, and finds a mutant's tests by first running all of
them; cosmic-ray (8.7) edits the working tree and starts Python for every mutant, where importing verl alone takes 15
seconds. This script copies the tree, imports third-party modules once, and forks for every mutant.

Not changed: texts, annotations, log calls, `assert`s and `strict=`, colors of verl's profiler, error messages, and a
module's top level.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import importlib
import os
import py_compile
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "verl_atgrpo"
TESTS = {
    "environments/code/environment.py": "coding coding_formats single_agent hostile_replies",
    "environments/math/answers.py": "math_answers math_team replies bought_rewards",
    "train/estimators/spec.py": "estimator_spec advantage agent_estimators gigpo m_grpo scopes row_ids "
    "estimator_config",
    "train/estimators/choice.py": "estimator_spec agent_estimators estimator_config",
    "train/estimators/arithmetic.py": "advantage scopes gigpo m_grpo agent_estimators row_ids rows_and_metrics",
    "train/estimators/advantages.py": "advantage estimator_spec scopes gigpo m_grpo agent_estimators",
    "train/estimators/agentrl.py": "by_task",
    "train/estimators/likelihood.py": "likelihood",
    "train/estimators/value.py": "value exact_gradient",
    "train/estimators/rae.py": "rae",
    "train/estimators/m_grpo.py": "m_grpo advantage_properties",
    "lab/evaluation/figures.py": "evaluation_figures",
    "train/serving/client.py": "attempts attempts_failures group_calls group_calls_change_nothing trace",
    "train/rollout/episode_rows.py": "rows_and_metrics row_ids row_fields critic_rows group_filter team_failures",
    "sandbox/runner.py": "sandbox programs sandbox_kills isolation cgroup",
    "play/curriculum.py": "curriculum curriculum_tasks",
    "play/mixture.py": "mixture mixture_settings",
    "play/opponents.py": "opponents",
    "play/task_order.py": "task_order",
    "play/ratings.py": "opponents versus",
    "environments/in_a_row.py": "in_a_row",
    "play/scoring.py": "team team_failures team_nested",
    "play/decision.py": "team team_nested team_failures tools quoting",
    "play/team.py": "team team_failures team_nested tools quoting group_calls scopes evaluation_episodes",
    "train/trainer/checkpoints.py": "checkpoints",
    "train/trainer/policy_unit.py": "policy_unit sharing standalone staleness placement schedule device_memory",
    "train/trainer/metrics.py": "staleness rows_and_metrics row_parts",
    "train/trainer/update_inputs.py": "row_parts deal row_advantages policy_unit staleness",
    "train/rows/batch.py": "row_parts policy_unit staleness group_filter recorder",
    "train/rows/step_rows.py": "group_filter row_parts",
}
"""Module -> names of its test files, in the order in which they run."""
HEAVY = ("torch", "ray", "transformers", "tensordict", "hydra", "hypothesis", "pytest")
VERL = ("verl", "transfer_queue", "verl.workers.engine_workers")
"""Imports that load our plugin, and with it some of our modules: only for mutants of the others."""

_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_CALLS = {
    "any": "all", "all": "any", "min": "max", "max": "min", "sorted": "list", "reversed": "list",
    "removeprefix": "removesuffix", "partition": "rpartition", "rpartition": "partition", "append": "count",
    "extend": "index", "startswith": "endswith", "endswith": "startswith", "find": "rfind", "rfind": "find",
}  # fmt: skip
_UNCHANGED = ("strict", "repr", "color")


@dataclass(frozen=True)
class Mutant:
    """A change of a module: index of the place, and of the change there."""

    place: int
    choice: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"line {self.line}: {_short(self.before)}  ->  {_short(self.after)}"

    def of(self, source: str) -> str:
        """Returns the module with this change."""
        tree = ast.parse(source)
        node = list(_places(tree))[self.place]
        new = list(_changes(node))[self.choice]
        return ast.unparse(ast.fix_missing_locations(_Changed(node, new).visit(tree)))


def _short(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= 90 else f"{one[:43]} ... {one[-42:]}"


# ---------------------------------------------------------------- the changes


class _Changed(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def mutants(source: str) -> list[Mutant]:
    """Returns every change of a module."""
    return [
        Mutant(place, choice, node.lineno, ast.unparse(node), ast.unparse(ast.fix_missing_locations(new)))
        for place, node in enumerate(_places(ast.parse(source)))
        for choice, new in enumerate(_changes(node))
    ]


def _places(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """Yields the nodes that may change, in a fixed order."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _within(statement)


def _within(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    if isinstance(node, ast.Assert | ast.JoinedStr) or _is_text(node) or _logs(node):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    # Error messages and `strict=` are like `assert`.
    if isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg in _UNCHANGED):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _within(child)


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.Constant) and isinstance(value.value, str | bytes)


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def _with(node: ast.AST, **fields: object) -> ast.AST:
    return type(node)(**{**{name: value for name, value in ast.iter_fields(node)}, **fields})


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    nothing, none = ast.Pass(), ast.Constant(None)
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                if type(operator) in _SWAPS:
                    ops = [*node.ops[:place], _SWAPS[type(operator)](), *node.ops[place + 1 :]]
                    yield _with(node, ops=ops)
        case ast.BoolOp():
            yield _with(node, op=_SWAPS[type(node.op)]())
            for place in range(len(node.values)):
                rest = [*node.values[:place], *node.values[place + 1 :]]
                yield rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.BinOp() if type(node.op) in _SWAPS:
            yield _with(node, op=_SWAPS[type(node.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.Constant(value=float()):
            yield ast.Constant(node.value * 2 + 1)
        case ast.IfExp():
            yield from (node.body, node.orelse)
        case ast.Call(func=ast.Attribute(attr="abs" | "strip" | "rstrip" | "lower"), args=[]):
            yield node.func.value
        case ast.Call():
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _CALLS:
                func = _with(node.func, **{"attr" if isinstance(node.func, ast.Attribute) else "id": _CALLS[name]})
                keywords = [] if name in ("sorted", "reversed") else node.keywords
                yield _with(node, func=func, keywords=keywords)
            for place, keyword in enumerate(node.keywords):
                if keyword.arg not in _UNCHANGED:
                    yield _with(node, keywords=[*node.keywords[:place], *node.keywords[place + 1 :]])
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for place, loop in enumerate(node.generators):
                if loop.ifs:
                    loops = [*node.generators[:place], _with(loop, ifs=[]), *node.generators[place + 1 :]]
                    yield _with(node, generators=loops)
        case ast.Dict():
            for place in range(len(node.keys)):
                keys, values = list(node.keys), list(node.values)
                del keys[place], values[place]
                yield _with(node, keys=keys, values=values)
        case ast.Slice():
            for side in ("lower", "upper", "step"):
                if getattr(node, side) is not None:
                    yield _with(node, **{side: None})
        case ast.If() | ast.While():
            if not isinstance(node.test, ast.Compare | ast.UnaryOp):  # mutated themselves
                yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
            if isinstance(node, ast.If) and not _only_logs(node.body):
                yield _with(node, test=ast.Constant(False))
        case ast.Return() if node.value is not None and not (
            isinstance(node.value, ast.Constant) and node.value.value is None
        ):
            yield _with(node, value=none)
        case ast.Assign() | ast.AnnAssign():
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            # Without its only assignment a name would be undefined.
            if node.value is not None and isinstance(target, ast.Attribute | ast.Subscript):
                yield nothing
        case ast.AugAssign() | ast.Expr() | ast.Raise() | ast.Delete():
            yield nothing
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _only_logs(body: list[ast.stmt]) -> bool:
    return all(_logs(statement) for statement in body)


# ---------------------------------------------------------------- running the tests


def _copied_tree(folder: Path) -> None:
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    # By hash, not by time stamp: a module may change several times in a second.
    hashed = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / PACKAGE, quiet=1, invalidation_mode=hashed)


def _forked(act: Callable[[], int], limit: float, output: Path) -> int | None:
    """Returns what `act` returns in a child process, or None if it took longer than `limit` seconds."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setsid()
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = act()
        finally:
            os._exit(status)
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _imported(names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _loads(target: str, output: Path) -> bool:
    """Returns whether importing verl loads the module; then every mutant imports verl itself."""

    def check() -> int:
        _imported(VERL)
        return int(target in sys.modules)

    return _forked(check, 600, output) != 0


def run(module: str, sample: int | None, seed: int, lines: Sequence[int]) -> None:
    """Tests the mutants of a module. Runs in the copied tree, before any import of our modules."""
    import pytest

    path, output = Path(PACKAGE) / module, Path("output.txt")
    source = path.read_text()
    chosen = [mutant for mutant in mutants(source) if not lines or mutant.line in lines]
    if sample is not None and sample < len(chosen):
        chosen = sorted(random.Random(seed).sample(chosen, sample), key=lambda mutant: mutant.line)
    tests = [str(file) for name in TESTS[module].split() for file in Path("tests").rglob(f"test_{name}.py")]
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-W", "ignore", *tests]
    _imported(HEAVY)
    if not _loads(".".join(path.with_suffix("").parts), output):
        _imported(VERL)

    def test() -> int:
        return int(pytest.main(arguments))

    began = time.monotonic()
    if _forked(test, 3600, output) != 0:
        raise SystemExit(f"{module}: its tests fail without a change:\n{output.read_text()[-4000:]}")
    took = time.monotonic() - began
    print(f"{module}: {len(chosen)} mutants, tests of {took:.0f} s", flush=True)
    killed = 0
    for mutant in chosen:
        path.write_text(mutant.of(source))
        status = _forked(test, 60 + 3 * took, output)
        killed += status != 0  # None, for a mutant that never ends, counts as killed
        if status == 0:
            print(f"  survives: {mutant}", flush=True)
        if status is None:
            print(f"  never ends: {mutant}", flush=True)
    path.write_text(source)
    print(f"{module}: {killed} of {len(chosen)} killed, {killed / max(1, len(chosen)):.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lists changes of a module that its tests do not detect.")
    parser.add_argument(
        "modules", nargs="*", default=list(TESTS), help="paths inside the package (default: all of TESTS)"
    )
    parser.add_argument("--sample", type=int, help="number of mutants of a module, sampled with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--line", type=int, action="append", default=[], help="only mutants of this line; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in the copied tree
    options = parser.parse_args()
    for module in options.modules:
        if module not in TESTS:
            parser.error(f"{module} is not in TESTS of {__file__}: add it with its tests")
    if options.list:
        for module in options.modules:
            for mutant in mutants((ROOT / PACKAGE / module).read_text()):
                print(f"{module}: {mutant}")
        return
    if options.here:
        for module in options.modules:
            run(module, options.sample, options.seed, options.line)
        return
    flags = [argument for argument in sys.argv[1:] if argument not in options.modules]
    for module in options.modules:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            _copied_tree(Path(folder))
            environment = {**os.environ, "PYTHONPATH": folder}
            command = [sys.executable, "-W", "ignore", __file__, "--here", module, *flags]
            if subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
