"""Mathematics with refinement, drafts and a judge that learns: prompts, rewards by hand, what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs the extra `math`")

from fakes.math_problems import GOLD, box, episode, sources
from fakes.scripted_episodes import of, prompt_of
from fakes.scripted_policy import bounded, team_of

from verl_atgrpo import ScriptedTeam, Team, play
from verl_atgrpo.environments.math import MathDrafts, MathJudged, MathRefined
from verl_atgrpo.environments.math.refinement import vote
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.types import PlayMode
from verl_atgrpo.train.config.schema import BranchSettings
from verl_atgrpo.train.rollout.episode_rows import training_rows

RIGHT, WRONG = box(GOLD), box("7")


def test_the_refiner_sees_answer_and_criticism(tmp_path: Path) -> None:
    env = MathRefined(**sources(tmp_path))
    scripts = {
        "generator": lambda prompt, k: WRONG,
        "verifier": lambda prompt, k: "It is larger than 7.",
        "refiner": lambda prompt, k: RIGHT if "larger than 7" in prompt and box("7") in prompt else WRONG,
    }
    record = episode(env, scripts)
    assert record.outcome.success and record.outcome.metrics == {"turns": 1, "first_correct": 0}
    assert [one.agent for one in record.decisions] == ["generator", "verifier", "refiner"]
    assert box("7") in prompt_of(record.decisions[1])
    single = {**scripts, "generator": lambda prompt, k: RIGHT, "refiner": lambda prompt, k: "?"}
    assert episode(env, single).outcome.metrics["first_correct"] == 1


def test_nodes_of_the_tree_have_the_mean_of_their_children(tmp_path: Path) -> None:
    """MALT: below one generator's answer the leaves 110, 100, 000 make 2/3, 1/3, 0, and so 1/3 for the answer."""
    env = MathRefined(**sources(tmp_path))
    leaves = {
        ("0", "0"): "110",
        ("0", "1"): "100",
        ("0", "2"): "000",
    }

    def said(decision_id: str, index: int) -> str:
        """Generator and verifier say their number; the path tells what a refiner comes after."""
        if "refiner" not in decision_id:
            return str(index)
        numbers = {agent: "0" for agent in ("generator", "verifier")}
        for agent in numbers:
            if f"{agent}.0=" in decision_id:
                numbers[agent] = decision_id.rpartition(f"{agent}.0=")[2][0]
        leaf = leaves.get((numbers["generator"], numbers["verifier"]), "000")
        number = int(decision_id.rpartition("refiner.0=")[2][0]) if "refiner.0=" in decision_id else index
        return RIGHT if leaf[number] == "1" else WRONG

    async def say(decision_id: str, index: int) -> str:
        return said(decision_id, index)

    def make(mode: PlayMode) -> Team:
        return team_of(say, env.agents, candidates=3, mode=mode)[0]

    where = BranchSettings(at=dict.fromkeys(env.agents, 0), nested=True)
    record = bounded(play_branched(env, env.task("train", 0), make, where, 0))
    rewards = {one.name: [candidate.reward for candidate in one.candidates] for one in record.decisions}
    assert rewards["refiner.0"] == [1, 1, 0]
    assert rewards["verifier.0"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert rewards["generator.0"] == pytest.approx([1 / 3, 0, 0])
    assert sum(len(one.candidates) for one in record.decisions if one.agent == "refiner") == 27


def test_the_best_draft_is_refined_and_drafts_are_not_trained(tmp_path: Path) -> None:
    env = MathDrafts(**sources(tmp_path), drafts=3)
    drafts = ["?", WRONG, RIGHT]
    scripts = {
        "drafter": lambda prompt, k: drafts[k % 3],
        "refiner": lambda prompt, k: RIGHT if GOLD in prompt else WRONG,
    }
    record = episode(env, scripts, candidates=2)
    assert record.outcome.success and record.outcome.metrics["draft_correct"] == 1
    assert [(one.agent, len(one.candidates), one.trained) for one in record.decisions] == [
        ("drafter", 3, False),
        ("refiner", 2, True),
    ]
    assert {row.tags["agent"] for row in training_rows("u", 0, record, "tree")} == {"refiner"}
    alone = bounded(play(env, env.task("val", 0), ScriptedTeam(scripts, scheme="evaluate")))
    assert [len(one.candidates) for one in alone.decisions] == [1, 1] and not alone.outcome.success


@pytest.mark.parametrize(
    ("answer", "total", "votes"),
    [
        # O = 1, mean S = (1 - 1 + 0 + 1) / 4
        (RIGHT, 1.25, [1.25, -1.25, -2, 1.25]),
        # O = -1
        (WRONG, -0.75, [-0.75, 0.75, -2, -0.75]),
        ("?", -0.75, [-0.75, 0.75, -2, -0.75]),
    ],
)
def test_votes_count_for_the_solver_and_are_worth_agreement(
    answer: str, total: float, votes: list[float], tmp_path: Path
) -> None:
    env = MathJudged(**sources(tmp_path), votes=4)
    verdicts = ["right", "Wrong.", "perhaps", "It is right.", "wrong"]
    scripts = {"solver": lambda prompt, k: answer, "judge": lambda prompt, k: verdicts[k]}
    record = episode(env, scripts)
    (solved,) = of("solver", record)
    assert solved.candidates[0].reward == total
    voted, last = of("judge", record)
    assert [candidate.reward for candidate in voted.candidates] == votes
    assert voted.trained and not last.trained
    assert record.outcome.success == (answer == RIGHT)
    assert record.outcome.metrics["judge_right"] == (answer != RIGHT), "the last vote is 'wrong'"
    in_evaluation = bounded(play(env, env.task("val", 0), ScriptedTeam(scripts, scheme="evaluate")))
    assert [one.agent for one in in_evaluation.decisions] == ["solver", "judge"]


@pytest.mark.parametrize(("right", "trained"), [(0, False), (1, True), (3, True), (4, False)])
def test_the_judge_is_trained_where_candidates_differ(right: int, trained: bool, tmp_path: Path) -> None:
    """With 1 of 5 (20%) to 4 of 5 it is; here of 4, with votes that are always right."""
    env = MathJudged(**sources(tmp_path), votes=2)
    scripts = {
        "solver": lambda prompt, k: RIGHT if k < right else box(str(k)),
        "judge": lambda prompt, k: "right" if GOLD in prompt else "wrong",
    }
    record = episode(env, scripts, candidates=4)
    (solved,) = of("solver", record)
    assert [one.reward for one in solved.candidates] == [2.0] * right + [-2.0] * (4 - right)
    voted = [one for one in of("judge", record) if one.scope]
    (last,) = [one for one in of("judge", record) if not one.scope]
    assert [one.name for one in voted] == [f"solver.0.all/judge.{number}" for number in range(4)]
    assert {one.trained for one in voted} == {trained} and not last.trained
    asked = ["".join(map(chr, one.prompt_ids)) for one in voted]
    assert [GOLD in prompt for prompt in asked] == [True] * right + [False] * (4 - right), "in the candidates' order"


def test_a_vote_is_one_word_of_two() -> None:
    assert [vote(said) for said in ("right", "Wrong!", "right or wrong", "", "yes")] == [1, -1, None, None, None]
