"""Runs the study: every variant on every environment with every seed, one training after the other.

    python examples/study/study.py [--games plan_path ...] [--seeds 0 1 2] [--variants ...] [--out runs/study]

The curve of a finished training is stored in `curves/<game>.jsonl` beside this file. Trainings with a stored curve are
skipped, unless others need their models. A training is stopped at the first validation after its token budget.
`results.py` makes tables and figures.

    # Every variant at each of these learning rates with the seed that chooses one, then each at its best.
    python examples/study/study.py --games walk --seeds 0 --learning-rates 3e-6 1e-5 3e-5 1e-4
    python examples/study/study.py --games walk --seeds 0 1 2 --chosen
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from curves import CURVES, Curve, Curves, append, best, kept
from variants import ALL, GAMES, Game, Variant

from verl_atgrpo.lab.report.learning_curve import read
from verl_atgrpo.lab.tiny_models.warm_start import WarmStart, make
from verl_atgrpo.play.registry import make as make_environment
from verl_atgrpo.train.config.policies import POLICIES_FILE

logger = logging.getLogger("study")
_POLLING_INTERVAL = 2.0
"""Seconds between two reads of a training's metrics."""
_STOP_TIMEOUT = 120.0
"""Seconds that a training has to stop after SIGTERM."""


def main() -> None:
    """Runs the missing trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="+", choices=GAMES, default=["plan_path", "sudoku"])
    parser.add_argument("--variants", nargs="+", choices=ALL, metavar="VARIANT", help="default: all of the game")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--learning-rates", nargs="+", type=float, metavar="RATE", help="default: the game's")
    rate.add_argument("--chosen", action="store_true", help="for each variant the best of the rates tried so far")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    # Raises SystemExit, so that the running training is stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # Seed by seed: an interrupted study is a complete one with fewer seeds.
    for seed in options.seeds:
        for game in options.games:
            file = CURVES / f"{game}.jsonl"
            names = options.variants or list(GAMES[game].variants)
            if options.chosen:
                names = [chosen(kept(file), GAMES[game], name) for name in names]
            elif options.learning_rates:
                names = [GAMES[game].at_rate(name, rate) for rate in options.learning_rates for name in names]
            for name in missing(names, kept(file), seed):
                model = GAMES[game].model
                if model is None:
                    model = options.out / game / f"model_{seed}"
                    make(model, WarmStart.of(GAMES[game].start or game, seed=seed))
                run(options.out / game, GAMES[game], name, seed, model)
                if seed not in kept(file).get(name, {}):
                    append(file, name, seed, Curve.of(read(options.out / game / f"{name}_{seed}" / "metrics.jsonl")))


def chosen(curves: Curves, game: Game, name: str) -> str:
    """Returns a variant's name with the learning rate that has the largest mean success over the budget.

    Raises ValueError if it did not run with the seed that selects rates.
    """
    if (found := best(curves, game, name)) is None:
        raise ValueError(f"--chosen: {name} did not run with seed {game.selection_seed}, which chooses the rate")
    return found


def missing(names: Sequence[str], curves: Curves, seed: int) -> list[str]:
    """Returns the variants without a curve for this seed, after those whose models they need."""
    found: dict[str, None] = {}
    for name in names:
        if seed not in curves.get(name, {}):
            found |= dict.fromkeys([*(need.partition(":")[0] for need in ALL[name.partition("@")[0]].needs), name])
    return list(found)


def run(folder: Path, game: Game, name: str, seed: int, model: Path, target: float = math.inf) -> None:
    """Runs one variant with one seed unless it is done; writes `metrics.jsonl`, `train.log` and `done`.

    Args:
        folder: the game's folder.
        game: the environment.
        name: name of the variant.
        seed: seed of tasks and sampling.
        model: the starting model.
        target: validation success at which to stop before the end of the token budget.
    """
    variant, here = game.variant(name), folder / f"{name}_{seed}"
    if (here / "done").exists():
        return
    here.mkdir(parents=True, exist_ok=True)
    metrics = here / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    models = [_trained(folder, need, seed) for need in variant.needs]
    overrides = overrides_of(game, variant, seed, here, model, models)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-name={game.recipe}", *overrides]
    logger.info("%s: %s, seed %d", folder.name, name, seed)
    started = time.monotonic()
    (here / "command").write_text(" ".join(command) + "\n")
    # Rollout workers import `planner_alone`, too.
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONPATH": paths}
    if variant.modules:
        environment["VERL_USE_EXTERNAL_MODULES"] = variant.modules
    with (here / "train.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            budget = math.inf if variant.needs else variant.share * game.budget
            succeeded = _watch(process, metrics, budget, target)
        finally:
            _end(process)
    if not succeeded:
        raise RuntimeError(f"{name}, seed {seed}: the training failed with {process.returncode}; see {here}/train.log")
    last = read(metrics)[-1]
    logger.info("%s: %s, seed %d: %.1f%% after %.0f tokens", folder.name, name, seed, 100 * last.success, last.tokens)
    (here / "done").write_text(json.dumps({"seconds": round(time.monotonic() - started, 1)}) + "\n")


def overrides_of(
    game: Game, variant: Variant, seed: int, here: Path, model: Path, trained: Sequence[Path]
) -> list[str]:
    """Returns a variant's overrides of its game's recipe.

    Args:
        game: the environment.
        variant: the variant.
        seed: seed of tasks and sampling.
        here: the run's folder.
        model: the starting model.
        trained: the models that `variant.needs` names.
    """
    overrides = [*game.overrides, *variant.overrides, f"actor_rollout_ref.model.path={model}"]
    overrides += [f"actor_rollout_ref.actor.optim.lr={game.learning_rate * variant.rate:g}"]
    overrides += [f"at_grpo.seed={seed}", f"data.seed={seed}", "trainer.resume_mode=disable"]
    overrides += [f"trainer.default_local_dir={here / 'checkpoints'}", "trainer.max_actor_ckpt_to_keep=1"]
    if variant.needs:
        overrides.append("trainer.val_only=true")
    else:
        test_every = variant.test_every or game.test_every
        overrides += [f"trainer.test_freq={test_every}", f"trainer.total_training_steps={variant.steps}"]
        overrides += [f"trainer.save_freq={test_every if variant.keep else -1}"]
    names = dict(zip(("first", "second"), trained, strict=False))
    # A group of roles is named by its agents, in the order of the environment.
    agents = () if game.model is None else make_environment(game.recipe.removesuffix("_smollm2")).agents
    known = {"model": model, "single": game.single, "planner": game.planner, "roles": "_".join(agents), **names}
    known |= {f"agent_{number}": agent for number, agent in enumerate(agents)}
    for key, value in known.items():
        overrides = [override.replace(f"{{{key}}}", str(value)) for override in overrides]
    return overrides


def _watch(process: subprocess.Popen[bytes], metrics: Path, budget: float, target: float) -> bool:
    """Waits until the training ends, exceeds its token budget or reaches the target; returns False if it failed."""
    while process.poll() is None:
        time.sleep(_POLLING_INTERVAL)
        try:
            last = read(metrics)[-1]
        except (OSError, ValueError):  # no file or validation yet, or an incomplete line
            continue
        if last.tokens >= budget or last.success >= target:
            return True
    return process.returncode == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _trained(folder: Path, need: str, seed: int) -> Path:
    """Returns the model that another variant trained."""
    name, _, policy = need.partition(":")
    checkpoints = folder / f"{name}_{seed}" / "checkpoints"
    step = (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip()
    saved = checkpoints / f"global_step_{step}"
    policies: dict[str, str] = json.loads((saved / POLICIES_FILE).read_text())
    return saved / policies[policy] / "huggingface"


if __name__ == "__main__":
    main()
