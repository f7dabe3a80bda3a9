"""What a recipe says of opponents: each value that cannot work is one line before Ray."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)

from verl_atgrpo import Environment, Outcome, Team
from verl_atgrpo.train.config.policies import ADAPTERS, PAST, config_of_host, expand_policies
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import ConfigError

FROZEN = "+at_grpo.policies.judge={base: tiny, trainable: false}"
HERE = "at_grpo.environment.name=test_opponent_settings"


class Sides(Environment):
    """A game whose opponents are those of the class."""

    agents = ("x", "o")
    others: tuple[str, ...] = ("o",)

    def task(self, split: str, index: int) -> str:
        return f"{split} {index}"

    def fingerprint(self, task: str) -> str:
        return task

    def opponents(self, task: str) -> tuple[str, ...]:
        return self.others

    async def run(self, task: str, team: Team) -> Outcome:
        return Outcome(True)


class BothSides(Sides):
    """A game with nobody in training."""

    others = ("x", "o")


class NoAgent(Sides):
    """A game with an opponent that is no agent."""

    others = ("z",)


def checked(compose: Any, *overrides: str) -> Any:
    config = compose("tic_tac_toe_cpu", *overrides)
    job = check_run(config)
    assert job is not None
    return config, job.settings


def test_the_servers_have_room_for_the_adapters_and_the_pool(compose: Any) -> None:
    config, settings = checked(compose, FROZEN, "+at_grpo.opponents.others={judge: 1}", "at_grpo.opponents.size=3")
    expand_policies(config, settings)
    lora = config_of_host(config, settings, "player").actor_rollout_ref.model.lora
    assert (list(lora[ADAPTERS]), lora[PAST]) == (["player", "judge"], 3)
    assert [settings.adapter_number(name) for name in ("player", "judge")] == [1, 2]
    assert [settings.past_number(slot) for slot in (1, 3)] == [3, 5]


def test_a_policy_without_a_pool_needs_no_room(compose: Any) -> None:
    without = "+at_grpo.opponents={past: 0, others: {judge: 1}}"
    with pytest.raises(ConfigError, match=r"base='tiny' has no effect: no other policy has it"):
        checked(compose, "~at_grpo.opponents", "+at_grpo.opponents={past: 0}")
    config, settings = checked(compose, FROZEN, "~at_grpo.opponents", without)
    assert settings.self_played is None
    expand_policies(config, settings)
    assert config_of_host(config, settings, "player").actor_rollout_ref.model.lora[PAST] == 0


def only(section: str) -> list[str]:
    """Overrides that replace the recipe's opponents."""
    return ["~at_grpo.opponents", f"+at_grpo.opponents={section}"]


OTHER = "+at_grpo.policies.other={model: {path: ${actor_rollout_ref.model.path}}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["at_grpo.opponents.size=0"], r"^at_grpo\.opponents\.size=0: "),
        (["at_grpo.opponents.every=0"], r"^at_grpo\.opponents\.every=0: "),
        (["at_grpo.opponents.past=-1"], r"^at_grpo\.opponents\.past=-1: "),
        (["+at_grpo.opponents.choose=best"], r"^at_grpo\.opponents\.choose='best': "),
        (only("{current: 0, past: 0}"), r"^at_grpo\.opponents: all weights are 0; give current, past"),
        (only("{past: 0, size: 2}"), r"^at_grpo\.opponents\.size=2 has no effect with past: 0"),
        (only("{past: 0, policy: player}"), r"^at_grpo\.opponents\.policy='player' has no effect with"),
        (["+at_grpo.opponents.policy=me"], r"^at_grpo\.opponents\.policy='me': name the policy .* \(player\)"),
        (["+at_grpo.opponents.others={me: 1}"], r"^at_grpo\.opponents\.others\.me is not a policy of this job"),
        (
            [FROZEN, "+at_grpo.opponents.others={judge: 0}"],
            r"^at_grpo\.opponents\.others\.judge: a weight of 0",
        ),
        (["+at_grpo.opponents.others={player: 1}"], r"^at_grpo\.opponents\.others\.player: a policy that is trained"),
        (
            ["~at_grpo.policies.player", "+at_grpo.policies.player={}"],
            r"^at_grpo\.opponents\.past=1\.0: past selves are adapters; set policies\.player to \{base: <a name>, ",
        ),
        (
            [OTHER, "~at_grpo.agents", "+at_grpo.agents={x: player, o: other}"],
            r"^at_grpo\.opponents\.policy=None: name the policy .* \(player, other\)",
        ),
        (
            [OTHER, "~at_grpo.agents", "+at_grpo.agents={x: player, o: other}", "+at_grpo.opponents.policy=player"],
            r"^at_grpo\.opponents\.past: in task \('train', 0\) \['o'\] answer with the policy other, whose role past",
        ),
        (
            [FROZEN, "~at_grpo.agents", "+at_grpo.agents={x: player, o: judge}", *only("{past: 0}")],
            r"^at_grpo\.agents: nothing is trained on task \('train', 1\), in which \['x'\] play against \['o'\]: ",
        ),
        (
            ["~at_grpo.environment", "+at_grpo.environment={name: walk}"],
            r"^at_grpo\.opponents has no effect: ",
        ),
        (
            [f"{HERE}:BothSides", "~at_grpo.environment.style", "~at_grpo.environment.against"],
            r"opponents of task \('train', 0\) are \['o', 'x'\]: ",
        ),
        (
            [f"{HERE}:NoAgent", "~at_grpo.environment.style", "~at_grpo.environment.against"],
            r"opponents of task \('train', 0\) are \['z'\]: some of",
        ),
        (["at_grpo.scheme=tree", "at_grpo.branch=null"], r"^at_grpo\.scheme=tree has no reward for 'x' of "),
    ],
)
def test_refusals(compose: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(compose, *overrides)


def test_an_order_of_tasks_is_refused_where_the_environment_has_its_own(compose: Any) -> None:
    order = "at_grpo.task_order=half_solved"
    with pytest.raises(ConfigError, match=r"^data\.shuffle=false has no effect with at_grpo\.task_order=half_solved"):
        check_run(compose("plan_path_cpu", order, "data.shuffle=false"))
    assert checked(compose, order)[1].task_order == "half_solved"
    mixture = "+at_grpo.environment={name: mixture, parts: {tic_tac_toe: {style: compact}}}"
    with pytest.raises(ConfigError, match=r"^at_grpo\.task_order=half_solved has no effect: 'mixture' orders its own"):
        checked(compose, "~at_grpo.environment", mixture, order)


DUEL = "duel: {name: tic_tac_toe, style: compact}"


def in_a_mixture(*parts: str) -> tuple[str, str]:
    return "~at_grpo.environment", f"+at_grpo.environment={{name: mixture, parts: {{{', '.join(parts)}}}}}"


def test_sides_of_a_part_are_told_from_other_parts_agents(compose: Any) -> None:
    """Where no side of the duel is trained, the walk's agents are none of it."""
    walk = in_a_mixture("walk: {}", DUEL)
    played = "+at_grpo.parts={walk: {scheme: parallel, estimator: dr_mas, branch: null}}"
    checked(compose, *walk, played)
    frozen = (FROZEN, "~at_grpo.agents", "+at_grpo.agents={walk: player, duel.x: player, duel.o: judge}")
    with pytest.raises(ConfigError, match=r"in which \['duel\.x'\] play against \['duel\.o'\]: give all agents"):
        checked(compose, *walk, played, *frozen, *only("{past: 0}"))
    both = in_a_mixture("walk: {}", "duel: {name: 'test_opponent_settings:BothSides'}")
    with pytest.raises(ConfigError, match=r"are \['duel\.o', 'duel\.x'\]: some of duel\.o, duel\.x, and not all"):
        checked(compose, *both, played)


def test_a_part_that_is_only_validated_needs_no_reward_and_no_number(compose: Any) -> None:
    of_walk = ("at_grpo.scheme=tree", "at_grpo.branch=null", "at_grpo.candidates={walk: 4}", "~at_grpo.opponents")
    whole = ("~at_grpo.policies.player", "+at_grpo.policies.player={}")
    with pytest.raises(ConfigError, match=r"^at_grpo\.candidates has no number for 'duel\.x'"):
        checked(compose, *in_a_mixture("walk: {}", DUEL), *of_walk, *whole)
    checked(compose, *in_a_mixture("walk: {}", DUEL.replace("}", ", weight: 0}")), *of_walk, *whole)
