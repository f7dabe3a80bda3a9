"""Branching by replay: what a candidate is worth, by hand on small trees; replays that differ; bad input."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fakes.scripted_policy import Numbered, Recorder, bounded

from verl_atgrpo import EnvironmentConfigError, EpisodeFailed, Outcome, Score, Team
from verl_atgrpo.play import branching
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.types import Decision, EpisodeRecord, PlayMode, TeamOptions
from verl_atgrpo.train.config.schema import BranchSettings
from verl_atgrpo.train.rollout.episode_rows import training_rows, untrained_rows

Answer = Callable[[str, int], str]


class Chain(Numbered):
    """Generator, verifier, refiner: each is told what was said before; the outcome follows from all three replies."""

    agents = ("generator", "verifier", "refiner")

    def __init__(self, worth: Callable[[str], float]) -> None:
        self.worth = worth

    async def run(self, task: int, team: Team) -> Outcome:
        said = ""
        for agent in self.agents:
            said += (await team[agent].act(f"{agent} after {said!r}", lambda reply: Score(local=int(reply) / 10))).text
        reward = self.worth(said)
        return Outcome(reward == 1, reward)


class Teams:
    """Makes the teams of an episode; replies count up within a decision and its continuations."""

    def __init__(
        self, answer: Answer | None = None, agents: tuple[str, ...] = Chain.agents, own: Any = None, **options: Any
    ) -> None:
        async def say(decision_id: str, index: int) -> str:
            for _ in range(3 * (index % 2)):  # another order of completion than that of requests
                await asyncio.sleep(0)
            return answer(decision_id, index) if answer else str(index)

        self.recorder, self.agents, self.options = Recorder(say), agents, options
        self.made: dict[str, Team] = {}
        self.candidates, self.own = 4, own or {}

    def __call__(self, mode: PlayMode) -> Team:
        self.made[mode.path] = Team(
            dict.fromkeys(self.agents, self.recorder),
            TeamOptions(candidates=self.candidates, agent_candidates=self.own),
            mode,
            policies=dict.fromkeys(self.agents, "shared"),
            **self.options,
        )
        return self.made[mode.path]


def branched(env: Any, teams: Teams, seed: int = 0, candidates: int = 4, **options: Any) -> EpisodeRecord:
    teams.candidates = candidates
    return bounded(play_branched(env, 0, teams, BranchSettings(**options), seed))


def groups(record: EpisodeRecord) -> dict[str, list[float]]:
    return {one.name: [candidate.reward for candidate in one.candidates] for one in record.decisions if one.trained}


def as_number(said: str) -> float:
    return float(said)


def test_the_first_decision_is_worth_what_follows() -> None:
    """Replies: the K candidates are 0, 1, 2; everything in a continuation is answered with 0."""
    teams = Teams()
    record = branched(Chain(as_number), teams, at="first", candidates=3)
    assert groups(record) == {"generator.0": [0, 100, 200]}
    assert record.outcome.team_reward == 0, "the episode's own, not a branch's"
    assert [(one.name, len(one.candidates)) for one in record.decisions] == [
        ("generator.0", 3),
        ("verifier.0", 1),
        ("refiner.0", 1),
    ]
    # One sample for each decision of the episode, two more candidates, and two more decisions in each continuation.
    assert len(teams.recorder.asked) == 3 + 2 + 2 * 2
    assert sum(team.generated_tokens for team in teams.made.values()) == 9
    assert {row.group for row in training_rows("u", 0, record, "branch")} == {"u.0.generator.0"}
    assert [row.reward for row in training_rows("u", 0, record, "branch")] == [0, 100, 200]


def test_every_decision_is_a_group_and_what_was_said_before_is_kept() -> None:
    teams = Teams(lambda decision, index: str(index + 4) if "=" not in decision else "7")
    record = branched(Chain(as_number), teams, at="every", candidates=2)
    assert groups(record) == {"generator.0": [444, 577], "verifier.0": [444, 457], "refiner.0": [444, 445]}
    assert set(teams.made) == {"", "generator.0=1.0/", "verifier.0=1.0/", "refiner.0=1.0/"}


def test_agents_and_decisions_may_have_a_k_of_their_own() -> None:
    record = branched(Chain(as_number), Teams(own={"verifier": 3}), at="every", candidates=2)
    assert groups(record) == {"generator.0": [0, 100], "verifier.0": [0, 10, 20], "refiner.0": [0, 1]}

    class Four(Chain):
        async def run(self, task: int, team: Team) -> Outcome:
            return Outcome(True, float((await team.generator.act("x", candidates=4)).text))

    assert groups(branched(Four(as_number), Teams(), candidates=2)) == {"generator.0": [0, 1, 2, 3]}


def test_an_agents_turn_can_be_named() -> None:
    record = branched(Chain(as_number), Teams(), at={"verifier": 0}, candidates=3)
    assert groups(record) == {"verifier.0": [0, 10, 20]}


def test_a_random_point_has_no_part_in_the_episode_that_chose_it() -> None:
    chosen = {}
    for seed in range(20):
        teams = Teams()
        record = branched(Chain(as_number), teams, seed, at="random", candidates=2)
        ((name, rewards),) = groups(record).items()
        chosen[name] = rewards
        assert len(teams.made) == 3, "the episode itself, and a continuation of each candidate"
        assert {f"{name}={number}.0/" for number in range(2)} < set(teams.made)
        # The records show what the episode went on with, beside the candidates, as the committed one.
        group, own = (one for one in record.decisions if one.name == name)
        assert ([reply.text for reply in own.candidates], own.trained) == (["0"], False)
        assert [one.name for one in record.decisions if one.trained] == [name]
        assert len(record.decisions) == 1 + len(Chain.agents)
        rows = [*training_rows("u", 0, record, "branch"), *untrained_rows("u", 0, record, "branch")]
        shown = sorted((row.key, row.tags["committed"]) for row in rows if row.tags["agent"] == group.agent)
        assert [committed for _, committed in shown] == [False, False, True]
    # The episode's own reply was 0: the candidates are the second and third sample.
    assert chosen == {"generator.0": [100, 200], "verifier.0": [10, 20], "refiner.0": [1, 2]}


def test_the_mean_of_the_continuations_and_the_own_score() -> None:
    def answer(decision: str, index: int) -> str:
        if decision.endswith("refiner.0"):
            return {"": "0", "0.1": "4", "1.0": "6", "1.1": "8"}[decision.partition("=")[2].partition("/")[0]]
        return str(index)

    record = branched(Chain(as_number), Teams(answer), at="first", candidates=2, continuations=2)
    assert groups(record) == {"generator.0": [(0 + 4) / 2, (106 + 108) / 2]}
    scored = Teams(answer)
    record = branched(Chain(as_number), scored, at="first", candidates=2, continuations=2, score_weight=5)
    assert groups(record) == {"generator.0": [2 + 5 * 0.0, 107 + 5 * 0.1]}
    assert [candidate.score.local for candidate in record.decisions[0].candidates] == [0, 0.1]


def test_a_reply_that_cannot_be_scored_is_worth_as_little_as_the_worst() -> None:
    class Choosy(Chain):
        async def run(self, task: int, team: Team) -> Outcome:
            def score(reply: str) -> Score:
                return Score(local=[-2.0, -1.0][int(reply)])  # raises for the third reply

            return Outcome(True, float((await team.generator.act("x", score)).text))

    teams = Teams(on_score_error=lambda *_: None)
    record = branched(Choosy(as_number), teams, candidates=3, score_weight=1)
    assert groups(record) == {"generator.0": [0 - 2, 1 - 1, 2 - 2]}


def test_what_a_frozen_policy_says_is_no_branch_point() -> None:
    teams = Teams()
    teams.candidates = 2
    for at in "first", "every":
        with pytest.raises(EpisodeFailed, match="no decision to branch at"):
            bounded(play_branched(Chain(as_number), 0, teams, BranchSettings(at=at), 0, frozen={"shared"}))


def test_a_reward_that_is_settled_later_is_as_it_was_when_an_episode_is_played_again() -> None:
    class Later(Numbered):
        agents = ("left", "right")

        async def run(self, task: int, team: Team) -> Outcome:
            plan = await team.left.act("plan", lambda reply: Score(local=0.5))
            done = await team.right.act(f"the plan is worth {plan.reward}")
            settled = await team.settle(plan, lambda reply: Score(local=float(done.text)))
            return Outcome(True, settled.reward)

    record = branched(Later(), Teams(agents=("left", "right")), candidates=2, at={"right": 0}, score_weight=1)
    assert groups(record) == {"right.0": [0, 1]}


def test_a_tree_of_three_by_three_by_three_as_in_malt() -> None:
    """Leaves {110}, {100}, {000} below one generator: its value is 1/3 (MALT, Sec. 4)."""
    leaves = {"00": "110", "01": "100", "02": "000"}

    def worth(said: str) -> float:
        return float(leaves.get(said[:2], "111")[int(said[2])])

    def answer(decision: str, index: int) -> str:
        return str(index)

    teams = Teams(answer)
    record = branched(Chain(worth), teams, at="every", nested=True, candidates=3)
    made = groups(record)
    assert len(made) == 1 + 3 + 9 and len(teams.made) == 27
    assert made["generator.0"] == pytest.approx([1 / 3, 1, 1])
    assert made["verifier.0"] == pytest.approx([2 / 3, 1 / 3, 0])
    assert made["refiner.0"] == [1, 1, 0]
    assert made["verifier.0=2.0/refiner.0"] == [0, 0, 0]
    assert made["generator.0=1.0/verifier.0=2.0/refiner.0"] == [1, 1, 1]
    rows = list(training_rows("u", 0, record, "branch"))
    assert len(rows) == 39 and len({row.key for row in rows}) == 39


def test_a_tree_that_would_be_too_large_ends_the_run_before_it_is_played() -> None:
    teams = Teams()
    with pytest.raises(
        EnvironmentConfigError, match=r"^at_grpo\.branch\.nested=true: .* at 3 decisions, .* 4,913 cont"
    ):
        branched(Chain(as_number), teams, at="every", nested=True, candidates=17)
    assert len(teams.made) == 1
    assert branched(Chain(as_number), Teams(), at={"generator": 0}, nested=True, candidates=17).decisions


def test_a_tree_whose_continuations_are_too_many_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode itself is solved at once; the others go on, and branch at every turn."""

    class UntilRight(Numbered):
        agents = ("solver",)

        async def run(self, task: int, team: Team) -> Outcome:
            for _ in range(5):
                if (await team.solver.act("?")).text == "0":
                    return Outcome(True, 1.0)
            return Outcome(False, 0.0)

    def answer(decision: str, index: int) -> str:
        return str(int("=" in decision or index > 0))

    # 1 + 2 (1 + 3 + 9 + 27 + 81) episodes with three candidates.
    monkeypatch.setattr(branching, "MOST_ENDS", 243)
    whole = branched(UntilRight(), Teams(answer, UntilRight.agents), at="every", nested=True, candidates=3)
    assert len(groups(whole)) == 1 + 2 * (1 + 3 + 9 + 27)
    monkeypatch.setattr(branching, "MOST_ENDS", 162)
    teams = Teams(answer, UntilRight.agents)
    with pytest.raises(
        EnvironmentConfigError, match=r"^at_grpo\.branch\.nested=true: .* of its continuations, .* than 162"
    ):
        branched(UntilRight(), teams, at="every", nested=True, candidates=3)
    assert len(teams.made) <= 163


def test_a_tree_may_leave_out_agents() -> None:
    at = {"generator": 0, "refiner": 0}
    record = branched(Chain(as_number), Teams(), at=at, nested=True, candidates=2)
    assert groups(record) == {
        "generator.0": [0.5, 100.5],
        "refiner.0": [0, 1],
        "generator.0=1.0/refiner.0": [100, 101],
    }


@pytest.mark.parametrize(
    ("bounds", "names"),
    [({"min_tokens": 20}, ["verifier.0", "refiner.0"]), ({"max_tokens": 19}, ["generator.0"])],
)
def test_points_may_be_bounded_by_the_length_of_their_prompt(bounds: dict[str, int], names: list[str]) -> None:
    record = branched(Prompts({"generator": 19, "verifier": 20, "refiner": 30}), Teams(), candidates=2, **bounds)
    assert list(groups(record)) == names


class Prompts(Numbered):
    agents = Chain.agents

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = lengths

    async def run(self, task: int, team: Team) -> Outcome:
        for agent, length in self.lengths.items():
            await team[agent].act("x" * length)
        return Outcome(True, 1.0)


class Concurrent(Numbered):
    agents = ("left", "right")

    async def run(self, task: int, team: Team) -> Outcome:
        total = 0
        for turn in range(2):
            replies = await asyncio.gather(*(team[agent].act(f"{turn} {total}") for agent in self.agents))
            total = 10 * total + sum(int(reply.text) for reply in replies)
        return Outcome(True, float(total))


def test_agents_that_act_at_once_keep_what_had_started_before() -> None:
    teams = Teams(lambda decision, index: str(index + 5 * ("=" in decision)), agents=("left", "right"))
    record = branched(Concurrent(), teams, at="every", candidates=2)
    # left.0 = 1, then all is 5: (1 + 5) * 10 + 5 + 5. right.0 = 1 keeps left.0 = 0.
    assert groups(record) == {"left.0": [0, 70], "right.0": [0, 20], "left.1": [0, 6], "right.1": [0, 1]}
    asked = [decision for decision, _, _ in teams.recorder.asked]
    assert "episode.right.0=1.0/left.0" not in asked and "episode.left.0=1.0/right.0" in asked


def test_seeds_follow_the_path_and_repeat() -> None:
    def seeds() -> list[tuple[str, int | None]]:
        teams = Teams(seed=3)
        branched(Chain(as_number), teams, at="every", nested=True, candidates=2)
        return sorted((decision, seed) for decision, _, seed in teams.recorder.asked)

    assert seeds() == seeds()
    values = [seed for _, seed in seeds()]
    assert len(set(values)) == len(values)


# ------------------------------------------------------------------ drafts, judges


class Drafted(Numbered):
    agents = ("left", "right")

    async def run(self, task: int, team: Team) -> Outcome:
        async def by_judge(text: str) -> Score:
            await team.right.act("judge")
            return Score(local=float(text))

        draft = await team.left.act("draft", by_judge, candidates=3, train=False)
        final = await team.right.act(f"final after {draft.text}", by_judge)
        return Outcome(True, float(draft.text + final.text))


def test_drafts_are_replayed_with_their_best_and_no_judge_is_asked_again() -> None:
    teams = Teams(agents=("left", "right"))
    record = branched(Drafted(), teams, candidates=2)
    assert groups(record) == {"right.0": [20, 21]}
    judged = [decision for decision, _, _ in teams.recorder.asked if decision.endswith("/right.0")]
    assert sorted(judged) == [f"episode.left.0.{number}/right.0" for number in range(3)]
    assert not any(one.trained for one in record.decisions if one.scope), "the judge of a draft"


# ------------------------------------------------------------------ what cannot work


class Counting(Numbered):
    """Its prompts depend on what it played before."""

    agents = ("left",)

    def __init__(self, stops: bool = False) -> None:
        self.played, self.stops = 0, stops

    async def run(self, task: int, team: Team) -> Outcome:
        self.played += 1
        if not (self.stops and self.played > 1):
            try:
                await team.left.act("stop" if self.stops else f"episode {self.played}")
                await team.left.act("again")
            except RuntimeError:
                pass
        return Outcome(True)


@pytest.mark.parametrize(("stops", "why"), [(False, "has another prompt"), (True, "is not made again")])
def test_an_environment_that_differs_on_replay_is_named(stops: bool, why: str) -> None:
    with pytest.raises(
        EpisodeFailed, match=rf"Counting, played again with the same replies: .*left\.0.* {why}; run "
    ) as failed:
        branched(Counting(stops), Teams(agents=("left",)), at="first", candidates=2)
    assert failed.value.reason == "not_repeatable"


def test_an_episode_that_does_not_reach_the_point_fails() -> None:
    with pytest.raises(EpisodeFailed, match=r"at_grpo\.branch\.at=\{'verifier': 3\}") as failed:
        branched(Chain(as_number), Teams(), at={"verifier": 3})
    assert failed.value.reason == "no_branch_point"


def test_a_failed_continuation_fails_the_episode_and_ends_the_others() -> None:
    def answer(decision: str, index: int) -> str:
        if decision.startswith("episode.generator.0=2"):
            raise EpisodeFailed("engine", "server died")
        return str(index)

    with pytest.raises(EpisodeFailed, match="server died"):
        branched(Chain(as_number), Teams(answer), candidates=4)


def test_groups_hold_no_reply_of_an_untrained_decision() -> None:
    record = branched(Chain(as_number), Teams(), at="first", candidates=2)
    untrained: list[Decision] = [one for one in record.decisions if not one.trained]
    assert [one.name for one in untrained] == ["verifier.0", "refiner.0"]
    assert all(row.tags["agent"] == "generator" for row in training_rows("u", 0, record, "branch"))
