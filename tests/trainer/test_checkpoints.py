"""All policies are saved together, and an incomplete step is never resumed from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from verl_atgrpo.train.serving.health import PolicyFailed
from verl_atgrpo.train.trainer import checkpoints


class Unit:
    """A policy whose weights are a number in a file."""

    def __init__(self, name: str, trainable: bool = True, broken: bool = False) -> None:
        self.name, self.folder, self.trainable, self.broken = name, f"policies/{name}", trainable, broken
        self.weights = 0

    def save(self, step_folder: str, global_steps: int) -> None:
        if self.broken:
            raise OSError("disk full")
        folder = Path(step_folder) / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(str(global_steps))

    def load(self, step_folder: str) -> None:
        self.weights = int((Path(step_folder) / self.folder / "weights").read_text())


def trainer(root: Path, **changes: Any) -> Any:
    return OmegaConf.create(
        {
            "default_local_dir": str(root),
            "resume_mode": "auto",
            "resume_from_path": None,
            "max_actor_ckpt_to_keep": None,
            **changes,
        }
    )


def test_all_policies_resume_from_the_same_step_with_the_same_tasks(tmp_path: Path) -> None:
    units = [Unit("coder"), Unit("planner")]
    for step in (1, 2):
        checkpoints.save(trainer(tmp_path), units, step, {"next": step})
    resumed = [Unit("coder"), Unit("planner")]
    assert checkpoints.load(trainer(tmp_path), resumed)[:3] == (2, {"next": 2}, [])
    assert [unit.weights for unit in resumed] == [2, 2]


def test_an_incomplete_step_is_not_resumed_from(tmp_path: Path) -> None:
    checkpoints.save(trainer(tmp_path, max_actor_ckpt_to_keep=1), [Unit("coder"), Unit("planner")], 1, {})
    with pytest.raises(checkpoints.SaveFailed, match="disk full"):
        checkpoints.save(
            trainer(tmp_path, max_actor_ckpt_to_keep=1), [Unit("coder"), Unit("planner", broken=True)], 2, {}
        )
    resumed = [Unit("coder"), Unit("planner")]
    assert checkpoints.load(trainer(tmp_path), resumed)[0] == 1
    assert [unit.weights for unit in resumed] == [1, 1]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        PolicyFailed("policy 'coder': its checkpoint failed: RayTaskError(RuntimeError): unexpected pos 64 vs 0"),
        PermissionError(13, "Permission denied"),
        RuntimeError("Parent directory does not exist"),
    ],
)
def test_what_cannot_be_saved_is_named_with_the_folder_and_the_space(error: Exception, tmp_path: Path) -> None:
    class Full(Unit):
        def save(self, step_folder: str, global_steps: int) -> None:
            raise error

    root = tmp_path / "not" / "there"
    with pytest.raises(checkpoints.SaveFailed) as caught:
        checkpoints.save(trainer(root), [Full("coder")], 3, {})
    said = str(caught.value)
    assert said.startswith(f"{root}/global_step_3 could not be saved; ") and " MiB are free there: " in said
    assert str(error) in said and "\n" not in said and caught.value.__cause__ is error


def test_the_last_words_name_the_checkpoint_of_this_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(**changes: Any) -> str:
        checkpoints.announce(trainer(tmp_path, **changes), 10.0, 9)
        return capsys.readouterr().err

    assert said() == "verl-atgrpo: there is no complete checkpoint yet: the same command begins where this one did\n"
    checkpoints.save(trainer(tmp_path), [Unit("coder")], 4, {})
    folder = tmp_path / "global_step_4"
    assert said() == f"verl-atgrpo: the last complete checkpoint is {folder}: the same command goes on from it\n"
    assert f"trainer.resume_from_path={folder}" in said(resume_mode="disable")
    os.utime(tmp_path / "latest_checkpointed_iteration.txt", (5.0, 5.0))  # an earlier run's
    assert "no complete checkpoint" in said(resume_mode="disable") and str(folder) in said()


def test_the_last_words_of_a_complete_training_ask_for_no_other_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(total: int, **changes: Any) -> str:
        checkpoints.announce(trainer(tmp_path, **changes), 10.0, total)
        return capsys.readouterr().err

    checkpoints.save(trainer(tmp_path), [Unit("coder")], 4, {})
    folder = tmp_path / "global_step_4"
    for changes in ({}, {"resume_mode": "disable"}):
        assert said(4, **changes) == f"verl-atgrpo: the training is complete; its last checkpoint is {folder}\n"
    assert said(5).endswith("the same command goes on from it\n")
    os.utime(tmp_path / "latest_checkpointed_iteration.txt", (5.0, 5.0))  # an earlier run's
    for total in (3, 4):
        assert f"nothing was trained, as {folder} of an earlier run has all {total} steps: raise " in said(total)
    assert said(5).endswith("the same command goes on from it\n")
    assert "no complete checkpoint" in said(4, resume_mode="disable")


def test_the_last_words_go_on_from_the_checkpoint_that_was_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not from a later one of the run that it leaves."""
    for step in (5, 20):
        checkpoints.save(trainer(tmp_path), [Unit("coder")], step, {})
    tracker, five = tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "global_step_5"
    os.utime(tracker, (5.0, 5.0))
    named = {"resume_mode": "resume_path", "resume_from_path": str(five)}

    def said(root: Path, total: int) -> str:
        checkpoints.announce(trainer(root, **named), 10.0, total)
        return capsys.readouterr().err

    for root, total in ((tmp_path, 20), (tmp_path, 40), (tmp_path / "another", 40)):
        assert f"the last complete checkpoint is {five}: the same command goes on" in said(root, total)
    assert f"nothing was trained, as {five} of an earlier run has all 5 steps" in said(tmp_path, 5)
    os.utime(tracker, (15.0, 15.0))
    assert said(tmp_path, 20).endswith(
        "the training is complete; its last checkpoint is " + f"{tmp_path}/global_step_20\n"
    )


def test_a_run_goes_on_from_what_is_left(tmp_path: Path) -> None:
    """Whoever removes the newest step, which collapsed, goes back to the one before it."""
    for step in (5, 10, 15):
        checkpoints.save(trainer(tmp_path), [Unit("coder")], step, {})
    shutil.rmtree(tmp_path / "global_step_15")
    (tmp_path / "global_step_10" / "policies.json").unlink()  # incomplete
    (tmp_path / "global_step_12").mkdir()
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).global_steps == 5
    shutil.rmtree(tmp_path / "global_step_5")
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).global_steps == 0


def test_no_run_goes_on_from_a_later_step_of_one_that_was_left(tmp_path: Path) -> None:
    for step in (5, 20, 10):  # 10 after a return to 5
        checkpoints.save(trainer(tmp_path), [Unit("coder")], step, {})
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).global_steps == 10
    shutil.rmtree(tmp_path / "global_step_10")
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).global_steps == 5


def test_the_state_of_the_data_loader_may_hold_any_object(tmp_path: Path) -> None:
    state = {"drawn": frozenset({3, 5}), "folder": tmp_path}
    checkpoints.save(trainer(tmp_path), [Unit("coder")], 1, state)
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).tasks == state


def test_a_team_without_trained_policies_saves_the_order_of_tasks(tmp_path: Path) -> None:
    class Frozen(Unit):
        def save(self, step_folder: str, global_steps: int) -> None: ...

        def load(self, step_folder: str) -> None: ...

    frozen = Frozen("judge", trainable=False)
    checkpoints.save(trainer(tmp_path / "not" / "there"), [frozen], 2, {"next": 4})
    assert checkpoints.load(trainer(tmp_path / "not" / "there"), [frozen])[:3] == (2, {"next": 4}, [])


def test_tasks_that_were_submitted_and_not_trained_on_are_saved(tmp_path: Path) -> None:
    checkpoints.save(trainer(tmp_path), [Unit("coder")], 1, {}, [7, 3, 3])
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).unfinished == [7, 3, 3]
    # A checkpoint of a version without unfinished tasks.
    (tmp_path / "global_step_1" / "pending.json").unlink()
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).unfinished == []


def test_old_steps_are_removed_after_the_new_one_is_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoints.save(trainer(tmp_path, max_actor_ckpt_to_keep=2), [Unit("coder")], step, {})
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_3"]


def test_a_step_that_was_not_completed_is_none_of_those_to_keep(tmp_path: Path) -> None:
    for step in (1, 5):
        checkpoints.save(trainer(tmp_path), [Unit("coder")], step, {})
    (tmp_path / "global_step_3/policies").mkdir(parents=True)
    checkpoints.save(trainer(tmp_path, max_actor_ckpt_to_keep=2), [Unit("coder")], 6, {})
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_5", "global_step_6"]


def test_a_run_resumed_from_an_earlier_step_keeps_what_it_saves(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoints.save(trainer(tmp_path), [Unit("coder")], step, {})
    (tmp_path / "global_step_of_mine").mkdir()
    # Resumed from step 1: later steps are of an earlier run, and are not counted.
    folder = checkpoints.save(trainer(tmp_path, max_actor_ckpt_to_keep=1), [Unit("coder")], 2, {})
    assert folder == tmp_path / "global_step_2"
    left = {path.name.removeprefix("global_step_") for path in tmp_path.glob("global_step_*")}
    assert left == {"2", "3", "10", "of_mine"}
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]).global_steps == 2


@pytest.mark.parametrize(
    "others", [[Unit("coder")], [Unit("coder"), Unit("planner"), Unit("judge")], [Unit("coder"), Unit("reviewer")]]
)
def test_a_checkpoint_of_other_policies_is_refused(others: list[Unit], tmp_path: Path) -> None:
    checkpoints.save(trainer(tmp_path), [Unit("coder"), Unit("planner")], 1, {})
    with pytest.raises(ValueError, match="holds the policies coder, planner, this job trains coder"):
        checkpoints.load(trainer(tmp_path), others)


def test_a_checkpoint_whose_policies_have_other_folders_is_refused(tmp_path: Path) -> None:
    checkpoints.save(trainer(tmp_path), [Unit("coder")], 1, {})
    moved = Unit("coder")
    moved.folder = "actor"
    with pytest.raises(ValueError, match="holds the policies coder, this job trains coder"):
        checkpoints.load(trainer(tmp_path), [moved])


def test_a_folder_without_a_teams_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_5"
    (folder / "actor").mkdir(parents=True)
    named = trainer(tmp_path, resume_mode="resume_path", resume_from_path=str(folder))
    with pytest.raises(ValueError, match=r"global_step_5 has no policies\.json.*resume_mode=disable"):
        checkpoints.load(named, [Unit("coder")])


def test_the_next_run_resumes_from_the_last_complete_step(tmp_path: Path) -> None:
    assert checkpoints.last_complete(trainer(tmp_path)) is None
    checkpoints.save(trainer(tmp_path), [Unit("coder")], 3, {})
    with pytest.raises(checkpoints.SaveFailed, match="disk full"):
        checkpoints.save(trainer(tmp_path), [Unit("coder", broken=True)], 4, {})
    assert checkpoints.last_complete(trainer(tmp_path)) == tmp_path / "global_step_3"


def test_a_frozen_policy_may_be_added_or_removed(tmp_path: Path) -> None:
    checkpoints.save(trainer(tmp_path), [Unit("coder"), Unit("judge", trainable=False)], 1, {})
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")])[0] == 1


def test_without_a_checkpoint_training_starts_from_scratch(tmp_path: Path) -> None:
    assert checkpoints.load(trainer(tmp_path), [Unit("coder")]) == (0, None, (), None, {})
    checkpoints.save(trainer(tmp_path), [Unit("coder")], 1, {})
    assert checkpoints.load(trainer(tmp_path, resume_mode="disable"), [Unit("coder")]) == (0, None, (), None, {})


def test_a_named_step_is_resumed_from(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoints.save(trainer(tmp_path), [Unit("coder")], step, {})
    named = trainer(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_1"))
    assert checkpoints.load(named, [Unit("coder")])[0] == 1


def test_a_step_that_is_saved_again_is_not_complete_meanwhile(tmp_path: Path) -> None:
    checkpoints.save(trainer(tmp_path), [Unit("coder"), Unit("planner")], 1, {})
    with pytest.raises(checkpoints.SaveFailed, match="disk full"):
        checkpoints.save(trainer(tmp_path), [Unit("coder"), Unit("planner", broken=True)], 1, {})
    # One policy's weights are the new run's, the other's the old one's.
    with pytest.raises(ValueError, match=r"global_step_1 has no policies\.json"):
        checkpoints.load(trainer(tmp_path), [Unit("coder"), Unit("planner")])


def test_an_old_step_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(folder: Path) -> None:
        raise OSError(f"{folder}: device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    for step in (1, 2):
        checkpoints.save(trainer(tmp_path, max_actor_ckpt_to_keep=1), [Unit("coder")], step, {})
    assert checkpoints.last_complete(trainer(tmp_path)) == tmp_path / "global_step_2"
    assert "global_step_1: device or resource busy" in caplog.text
    # Who knows what of it is left.
    named = trainer(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_1"))
    with pytest.raises(ValueError, match=r"global_step_1 has no policies\.json"):
        checkpoints.load(named, [Unit("coder")])


def test_a_failed_run_says_where_the_next_one_resumes(tmp_path: Path) -> None:
    named = {"resume_mode": "resume_path", "resume_from_path": str(tmp_path / "global_step_1")}
    for changes in ({}, {"resume_mode": "disable"}, named):
        assert "begins where this one did" in checkpoints.resume_hint(trainer(tmp_path, **changes), None)
    folder = checkpoints.save(trainer(tmp_path), [Unit("coder")], 4, {})
    assert checkpoints.resume_hint(trainer(tmp_path), folder).endswith(f"{folder}: the same command goes on from it")
    # The same command would start from scratch, or from the step that it names.
    for changes in ({"resume_mode": "disable"}, named):
        assert checkpoints.resume_hint(trainer(tmp_path, **changes), folder).endswith(
            f"go on with trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )
    # Before it has saved one of its own, a run that was set back does not name the one that it left.
    begun = checkpoints.save(trainer(tmp_path), [Unit("coder")], 1, {})
    resumed = checkpoints.load(trainer(tmp_path, **named), [Unit("coder")])
    assert resumed.folder == begun
    assert checkpoints.resume_hint(trainer(tmp_path, **named), begun).endswith(
        f"{begun}: the same command goes on from it"
    )
