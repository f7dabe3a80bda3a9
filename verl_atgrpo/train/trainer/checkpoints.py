"""Saves and resumes all policies of a team together: an incomplete step is never resumed from."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from omegaconf import DictConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename
from verl.utils.dataset.rl_dataset import collate_fn

from verl_atgrpo.files import write_text
from verl_atgrpo.train.config.policies import POLICIES_FILE
from verl_atgrpo.train.serving.health import last_line

if TYPE_CHECKING:
    from verl_atgrpo.train.trainer.policy_unit import PolicyUnit

logger = logging.getLogger(__name__)

_STEP = "global_step_"
_TASKS = "data.pt"
_UNFINISHED = "pending.json"
_STATES = "trainer.pt"


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the message has its folder, the space there and the cause."""


def save(
    trainer: DictConfig,
    units: Sequence[PolicyUnit],
    global_steps: int,
    tasks: dict[str, Any],
    unfinished: Sequence[int] = (),
    states: Mapping[str, Any] | None = None,
) -> Path:
    """Saves every trainable policy and the trainer's state, then marks the step complete, then removes old steps.

    The state is that of the training data loader, the tasks that were submitted and not trained on, and what else the
    trainer has, by name. Returns the step's folder; raises SaveFailed.
    """
    root = Path(trainer.default_local_dir)
    folder = root / f"{_STEP}{global_steps}"
    try:
        # If an earlier run saved this step here, it is no longer complete.
        (folder / POLICIES_FILE).unlink(missing_ok=True)
        for unit in units:
            unit.save(str(folder), global_steps)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(tasks, folder / _TASKS)
        torch.save(dict(states or {}), folder / _STATES)
        (folder / _UNFINISHED).write_text(json.dumps({"tasks": list(unfinished)}))
        (folder / POLICIES_FILE).write_text(json.dumps(_trainable(units)))
        write_text(Path(get_checkpoint_tracker_filename(str(root))), str(global_steps))
    except (OSError, RuntimeError) as error:  # torch and Ray have errors of their own for a full disk
        free = shutil.disk_usage(next(part for part in (root, *root.absolute().parents) if part.is_dir())).free
        raise SaveFailed(
            f"{folder} could not be saved; {free >> 20:,} MiB are free there: {last_line(error)}"
        ) from error
    if trainer.get("max_actor_ckpt_to_keep"):
        _remove_old(root, int(trainer.max_actor_ckpt_to_keep), global_steps)
    return folder


def _trainable(units: Sequence[PolicyUnit]) -> dict[str, str]:
    return {unit.name: unit.folder for unit in units if unit.trainable}


def _folders(root: Path, last: int) -> list[Path]:
    """Returns the folders of steps up to the last one, ascending."""
    numbers = [path.name.removeprefix(_STEP) for path in root.glob(f"{_STEP}*")]
    steps = sorted(int(number) for number in numbers if number.isdigit())
    return [root / f"{_STEP}{step}" for step in steps if step <= last]


def _complete(folders: Sequence[Path]) -> list[Path]:
    return [folder for folder in folders if (folder / POLICIES_FILE).is_file()]


def _remove_old(root: Path, keep: int, global_steps: int) -> None:
    folders = _folders(root, global_steps)
    kept = _complete(folders)[-keep:]
    for folder in [one for one in folders if one not in kept]:
        try:
            (folder / POLICIES_FILE).unlink(missing_ok=True)  # first, so that what may be left is not complete
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)


class Resumed(NamedTuple):
    """Where a run resumes."""

    global_steps: int = 0
    tasks: dict[str, Any] | None = None
    """The state of the training data loader; None where training starts from scratch."""
    unfinished: Sequence[int] = ()
    """Tasks that were submitted and not trained on."""
    folder: Path | None = None
    states: Mapping[str, Any] = MappingProxyType({})
    """Further state of the trainer, by name; what the run that was saved did not have is missing."""


def load(trainer: DictConfig, units: Sequence[PolicyUnit]) -> Resumed:
    """Loads the checkpoint of `trainer.resume_mode`; raises ValueError if it has not this job's trained policies."""
    if trainer.resume_mode == "disable":
        return Resumed()
    folder = _named(trainer) or last_complete(trainer)
    if folder is None:
        return Resumed()
    if not (folder / POLICIES_FILE).is_file():
        raise ValueError(
            f"{folder} has no {POLICIES_FILE}: it is no complete checkpoint of a team; name another with "
            "trainer.resume_from_path, or set trainer.resume_mode=disable"
        )
    saved = json.loads((folder / POLICIES_FILE).read_text())
    if saved != _trainable(units):
        raise ValueError(
            f"{folder} holds the policies {', '.join(saved)}, this job trains {', '.join(_trainable(units))}: "
            "resume with the policies it was saved with, or set trainer.resume_mode=disable"
        )
    for unit in units:
        unit.load(str(folder))
    tasks: dict[str, Any] = torch.load(folder / _TASKS, weights_only=False)
    logger.info("resuming from %s", folder)
    file = folder / _UNFINISHED
    # Checkpoints from before they were saved have none.
    unfinished = map(int, json.loads(file.read_text())["tasks"]) if file.is_file() else ()
    states = torch.load(folder / _STATES, weights_only=False) if (folder / _STATES).is_file() else {}
    return Resumed(int(folder.name.removeprefix(_STEP)), tasks, list(unfinished), folder, states)


def _named(trainer: DictConfig) -> Path | None:
    """Returns the checkpoint that `resume_mode: resume_path` names."""
    return Path(os.path.abspath(trainer.resume_from_path)) if trainer.resume_mode == "resume_path" else None


def last_complete(trainer: DictConfig) -> Path | None:
    """Returns the folder of the last complete step, or None.

    It is the one that was saved last, or the one before it if that is gone; not a later one of a run that was left.
    """
    root = Path(os.path.abspath(trainer.default_local_dir))
    tracker = Path(get_checkpoint_tracker_filename(str(root)))
    last = int(tracker.read_text()) if tracker.is_file() else -1
    complete = _complete(_folders(root, last))
    found = find_latest_ckpt_path(str(root))  # not of a team, perhaps
    return complete[-1] if complete else None if found is None else Path(found)


def resume_hint(trainer: DictConfig, checkpoint: Path | None) -> str:
    """Returns the end of a failed run's error message: where the next run can resume.

    `checkpoint` is the run's last one, or that from which it began; the folder may have others.
    """
    if checkpoint is None:
        return "there is no complete checkpoint yet: the same command begins where this one did"
    complete = f"the last complete checkpoint is {checkpoint}"
    if trainer.resume_mode == "auto" or _named(trainer) == checkpoint:
        return f"{complete}: the same command goes on from it"
    return f"{complete}: go on with trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint}"


def announce(trainer: DictConfig, began: float, total: int) -> None:
    """Writes to stderr what the command has trained and where the next run can resume, as its last words.

    `began` is when the command began, in seconds since the epoch; older checkpoints are an earlier run's, of which
    `resume_mode: disable` continues none and `resume_path` the one that it names. `total` are the run's steps.
    """
    found = last_complete(trainer)
    earlier = found is not None and Path(get_checkpoint_tracker_filename(str(found.parent))).stat().st_mtime < began
    if earlier or found is None:
        found = None if trainer.resume_mode == "disable" else _named(trainer) or found
    if found is None or int(found.name.removeprefix(_STEP)) < total:
        said = resume_hint(trainer, found)
    elif earlier:
        said = (
            f"nothing was trained, as {found} of an earlier run has all {total} steps: raise "
            "trainer.total_training_steps to go on from there, or begin anew with another trainer.experiment_name or "
            "default_local_dir"
        )
    else:
        said = f"the training is complete; its last checkpoint is {found}"
    sys.stderr.write(f"verl-atgrpo: {said}\n")


def replay_unfinished(dataset: Any, tasks: deque[int]) -> Iterator[dict[str, Any]]:
    """Yields tasks as verl's data loader does and removes them; raises ValueError if the data set has shrunk."""
    while tasks:
        if tasks[0] >= len(dataset):
            raise ValueError(
                f"{_UNFINISHED} of the checkpoint names task {tasks[0]}, but there are {len(dataset)} training tasks: "
                "resume with as many as it was saved with, or set trainer.resume_mode=disable"
            )
        yield collate_fn([dataset[tasks.popleft()]])
