"""Starting models of the CPU recipes: trained once, determined by settings, with low success."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from fakes.scripted_policy import Numbered

from verl_atgrpo import Outcome, Score, cli
from verl_atgrpo.files import FileError
from verl_atgrpo.lab.tiny_models import warm_start
from verl_atgrpo.lab.tiny_models.demonstrations import DEMONSTRATORS, Demonstration, Demonstrator, sure, write
from verl_atgrpo.lab.tiny_models.warm_start import WarmStart, make

BRIEF = WarmStart(clean_steps=3, noisy_steps=2, batch_size=4, hidden=16, layers=1)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_equal_settings_give_equal_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, settings in (("a", BRIEF), ("b", BRIEF), ("c", dataclasses.replace(BRIEF, seed=1))):
        make(tmp_path / name, settings)
    first, again, other = (weights_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.slow
def test_an_existing_model_is_kept_and_one_of_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = make(tmp_path, BRIEF)
    monkeypatch.setattr(warm_start, "train", lambda *_: pytest.fail("made again"))
    assert make(tmp_path, BRIEF) == known
    other = dataclasses.replace(BRIEF, noise=0.5)
    with pytest.raises(FileError, match=rf"made with noise={BRIEF.noise}, not 0\.5; .*--force"):
        make(tmp_path, other)
    with pytest.raises(pytest.fail.Exception, match="made again"):
        make(tmp_path, other, force=True)


def test_the_command_lists_its_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["make-model", str(tmp_path / "x"), "--environment", "chess"])
    said = capsys.readouterr().err
    assert all(name in said for name in ("chess", "plan_path", "sudoku"))


class Talk(Numbered):
    """Its answers may be two tokens long, and few of them can be scored."""

    agents = ("agent",)

    async def run(self, task: int, team: Any) -> Outcome:
        said = await team.agent.act("say", score=lambda reply: Score(team=float(reply.text)), max_tokens=2)
        return Outcome(success=len(said.text) <= 2)


def demonstrator(answer: Sequence[str], **options: Any) -> Demonstrator:
    def shown(env: Any, rng: Any, noise: float) -> Demonstration:
        tokens, choices = write(sure(answer), rng)
        return Demonstration([{"role": "user", "content": "say"}], tokens, choices)

    return Demonstrator("talk", {}, shown, 4, **options)


def teach(monkeypatch: pytest.MonkeyPatch, taught: Demonstrator) -> WarmStart:
    monkeypatch.setattr(Demonstrator, "make_environment", lambda self: Talk())
    monkeypatch.setitem(DEMONSTRATORS, "talk", taught)
    return dataclasses.replace(BRIEF, environment="talk")


def test_short_answers_and_scores_that_raise_do_not_end_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert make(tmp_path, teach(monkeypatch, demonstrator("12")))["success"] == 1.0
    assert "turn 0: scoring" in caplog.text


def test_a_model_of_other_demonstrations_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, teach(monkeypatch, demonstrator("12")))
    make(tmp_path, teach(monkeypatch, demonstrator("12")))
    for name, other in (("demonstrations", demonstrator("13")), ("words", demonstrator("12", words=("yes",)))):
        with pytest.raises(FileError, match=f"made with {name}="):
            make(tmp_path, teach(monkeypatch, other))


def test_a_token_that_the_tokenizer_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"token 'yes' is not in the tokenizer: name it in Demonstrator\.words"):
        make(tmp_path, teach(monkeypatch, demonstrator(["yes"])))
    make(tmp_path, teach(monkeypatch, demonstrator(["yes"], words=("yes",))))


def test_a_demonstrators_settings_hold_and_must_be_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[WarmStart] = []
    monkeypatch.setattr(warm_start, "make", lambda _, settings, **__: made.append(settings) or sys.exit())
    teach(monkeypatch, demonstrator("12", training={"seed": 7, "tied": False}))
    for given in ([], ["--seed", "0"]):
        with pytest.raises(SystemExit):
            cli.main(["make-model", str(tmp_path), "--environment", "talk", *given])
    assert [(one.seed, one.tied) for one in made] == [(7, False), (0, False)]
    teach(monkeypatch, demonstrator("12", training={"steps": 5}))
    with pytest.raises(SystemExit):
        cli.main(["make-model", str(tmp_path), "--environment", "talk"])
    assert "talk: training has steps; the settings are seed, hidden" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.training
def test_the_starting_model_has_the_format_and_low_success(tmp_path: Path) -> None:
    # 24%; without the noisy steps 62.5%, with all of the recipe's steps 39%.
    known = make(tmp_path, WarmStart(clean_steps=60, noisy_steps=25))
    assert 0.2 <= known["success"] <= 0.4
