"""The algorithm in one file: it learns, and the files that it names exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "at_grpo_in_one_file.py"


@pytest.fixture(scope="module")
def one_file() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("roles", [False, True], ids=["one policy", "a policy for each"])
def test_the_team_learns(one_file: dict[str, Any], roles: bool, capsys: pytest.CaptureFixture[str]) -> None:
    successes = one_file["train"](steps=50, roles=roles, k=8, seed=0)
    assert successes[0] < 0.15 and successes[-1] > 0.7, successes
    assert capsys.readouterr().out.count("success") == len(successes) == 6


def test_candidates_of_a_decision_share_prompt_and_group_and_the_best_one_is_committed(
    one_file: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    team = one_file["Team"](dict.fromkeys(("scout", "pilot"), one_file["Policy"]()), k=4)
    one_file["play"]((0, 0), (4, 4), team)
    # At random letters nobody gets from one corner to the other: three turns of two decisions.
    assert len(team.groups) == len(team.said) == 6
    for said, (_, tokens, rewards) in zip(team.said, team.groups, strict=True):
        assert len(tokens[:, : one_file["PROMPT"]].unique(dim=0)) == 1
        best = tokens[rewards.argmax(), one_file["PROMPT"] :]
        assert said == "".join(one_file["VOCABULARY"][letter] for letter in best)
        assert one_file["advantages"](rewards).sum().item() == pytest.approx(0, abs=1e-5)


def test_the_files_that_it_names_exist() -> None:
    named = re.findall(r"(?:verl_atgrpo|environments)/[\w/]+\.py", EXAMPLE.read_text())
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).exists()] == []
