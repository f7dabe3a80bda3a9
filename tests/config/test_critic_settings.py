"""What a recipe says of a critic: each value that cannot work is one line before Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)
from fakes.in_process_workers import save_model_folder

from verl_atgrpo import platform_choice
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.machine_rules import of_models
from verl_atgrpo.train.config.policies import ADAPTERS, config_of_host, expand_policies
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.config.view import View

ONE = "{base: tiny, lora: {rank: 4}}"
BOTH = f"{{player: {ONE}, critic: {ONE}}}"


def composed(compose: Any, *overrides: str, policies: str = BOTH, agents: str = "{all: player}") -> Any:
    team = (f"at_grpo.policies={policies}", "~at_grpo.agents", f"+at_grpo.agents={agents}")
    critic = "at_grpo.critic={kind: likelihood, policy: critic}"
    episodes = ("at_grpo.scheme=parallel", "at_grpo.estimator=dr_mas", critic)
    return compose("plan_path_cpu", *team, *episodes, *overrides)


def checked(compose: Any, *overrides: str, **team: str) -> AtGrpoConfig:
    job = check_run(composed(compose, *overrides, **team))
    assert job is not None
    return job.settings


def test_no_server_has_the_critics_adapter(compose: Any) -> None:
    config = composed(compose)
    settings = read_section(config)
    expand_policies(config, settings)
    adapters = config_of_host(config, settings, "player").actor_rollout_ref.model.lora[ADAPTERS]
    assert {name: one.served for name, one in adapters.items()} == {"player": True, "critic": False}


def test_hindsight_without_room_is_refused_before_ray(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    save_model_folder(tmp_path)
    config = composed(compose, f"actor_rollout_ref.model.path={tmp_path}")
    settings = read_section(config)
    expand_policies(config, settings)
    check(of_models(Job(View(config), settings)))
    monkeypatch.setattr(PlanPath, "hindsight", lambda self, task: "U" * 10_000)
    with pytest.raises(ConfigError, match=r"^at_grpo\.critic: Environment\.hindsight says 10\d+ tokens of a task"):
        check(of_models(Job(View(config), settings)))


def test_a_critic_shares_the_workers_of_the_team(compose: Any) -> None:
    settings = checked(compose)
    assert settings.bases() == {"player": ["player", "critic"]}
    first = checked(compose, policies=f"{{critic: {ONE}, player: {ONE}}}")
    assert first.bases() == {"player": ["critic", "player"]}, "its workers are the team's"
    assert checked(compose, "at_grpo.estimator=grpo").learners == ["player"], "one policy has the rows of all agents"
    never_learns = f"{{player: {ONE}, critic: {{base: tiny, lora: {{rank: 4}}, optim: {{lr: 0}}}}}}"
    assert checked(compose, policies=never_learns).critic is not None


def test_parts_of_a_mixture_that_are_not_scored_are_played_and_compared_as_they_like(compose: Any) -> None:
    parts = "+at_grpo.environment={name: mixture, parts: {walk: {}, hard: {name: walk_walls}}}"
    scored = "+at_grpo.critic.agents=[walk.navigator, walk.pacer]"
    mixture = ("~at_grpo.environment", parts, scored, "at_grpo.val_tasks=200", "at_grpo.estimator=dr_mas")
    checked(compose, *mixture, "at_grpo.parts={hard: {scheme: tree, estimator: at_grpo}}")
    tree = ("at_grpo.scheme=tree", "at_grpo.estimator=at_grpo", "at_grpo.parts={walk: {scheme: parallel}}")
    with pytest.raises(
        ConfigError, match=r"^at_grpo\.parts\.hard\.scheme='tree': a critic learns from whole episodes"
    ):
        checked(compose, *mixture[:2], *mixture[3:], "at_grpo.parts={hard: {scheme: tree, estimator: at_grpo}}")
    checked(compose, *mixture[:4], *tree)
    # Rows that are scored are compared with one another alone, whatever the estimator.
    checked(compose, "+at_grpo.critic.agents=[planner]", "at_grpo.estimator=grpo")


def with_values(compose: Any, *overrides: str) -> AtGrpoConfig:
    """A team of one policy, an adapter, and a critic of values."""
    adapter = ("actor_rollout_ref.model.lora_rank=4", "at_grpo.scheme=parallel", "at_grpo.estimator=dr_mas")
    job = check_run(compose("plan_path_cpu", *adapter, "at_grpo.critic={}", *overrides))
    assert job is not None
    return job.settings


def test_a_critic_of_values_needs_no_policy_of_its_own(compose: Any) -> None:
    settings = with_values(compose)
    assert settings.critic is not None and settings.critic.kind == "value"
    assert settings.critic_reads_as == settings.learners == ["shared"]
    # There is no loss that its terms would be added to.
    assert with_values(compose, "actor_rollout_ref.actor.entropy_coeff=0.01") is not None
    every = ("~at_grpo.agents", "+at_grpo.agents={planner: one, tool_user: two}")
    bases = "at_grpo.policies={one: {lora: {rank: 4}}, two: {lora: {rank: 8}}}"
    assert with_values(compose, *every, bases) is not None, "each prompt is read by its own agent's base"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor_rollout_ref.model.lora_rank=0"],
            r"^at_grpo\.critic: policy 'shared' is trained as a whole, and a critic of kind value reads a base that",
        ),
        (
            ["+at_grpo.critic.policy=shared"],
            r"^at_grpo\.critic\.policy='shared' has no effect with kind: value; remove it",
        ),
        (["+at_grpo.critic.epochs=4"], r"^at_grpo\.critic\.epochs=4 has no effect with kind: value; remove it"),
        (["+at_grpo.critic.decay=1"], r"^at_grpo\.critic\.decay=1: "),
        (["+at_grpo.critic.warmup=0"], r"^at_grpo\.critic\.warmup=0: "),
        (
            ["+at_grpo.critic.kind=likelihood"],
            r"^at_grpo\.critic\.policy=None is not a policy of this job: it has shared",
        ),
        (["at_grpo.prefix_tree=false"], r"^at_grpo\.prefix_tree=False: verl's engine shows a critic no hidden states"),
        (
            ["actor_rollout_ref.model.use_fused_kernels=true"],
            r"^actor_rollout_ref\.model\.use_fused_kernels=True: a critic of kind value gets no hidden states then",
        ),
        (
            [
                "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
                "actor_rollout_ref.model.use_remove_padding=true",
            ],
            r"^actor_rollout_ref\.actor\.fsdp_config\.ulysses_sequence_parallel_size=2: a critic of kind value gets",
        ),
        (
            ["at_grpo.estimator={preset: dr_mas, discount: 0.9}"],
            r"^at_grpo\.estimator\.discount: beside critic, scores would be discounted; lower critic\.lam, or",
        ),
        (
            ["transfer_queue.backend.SimpleStorage.total_storage_size=500"],
            r"size=500: a step makes at least 512 rows, 32 tasks x 8 candidates x decisions of an episode x 2 with",
        ),
    ],
)
def test_what_values_cannot_be_read_from_is_refused(compose: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_values(compose, *overrides)


IS_AN_ADAPTER = r"^at_grpo\.critic\.policy='critic': a critic is an adapter on the base of a policy that is trained as"


@pytest.mark.parametrize(
    ("policies", "agents", "overrides", "message"),
    [
        (f"{{player: {ONE}, critic: {{}}}}", "{all: player}", [], IS_AN_ADAPTER),
        (f"{{player: {{}}, critic: {ONE}, other: {{base: tiny}}}}", "{all: player}", [], IS_AN_ADAPTER),
        (BOTH, "{planner: critic, tool_user: player}", [], r"^at_grpo\.agents: 'critic' is the critic, which answers"),
        (
            f"{{player: {ONE}, critic: {ONE}, fixed: {{base: tiny, trainable: false}}}}",
            "{planner: player, tool_user: fixed}",
            ["+at_grpo.critic.agents=[tool_user]"],
            r"^at_grpo\.critic\.agents: tool_user has a policy that is not trained, so a score has no effect",
        ),
        (
            f"{{player: {ONE}, critic: {ONE}, other: {{}}}}",
            "{planner: player, tool_user: other}",
            [],
            r"^at_grpo\.critic\.agents: tool_user has a policy on another base than the critic's, tiny, which",
        ),
    ],
)
def test_policies_that_do_not_fit_are_refused(
    compose: Any, policies: str, agents: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(compose, *overrides, policies=policies, agents=agents)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["at_grpo.critic.policy=judge"], r"^at_grpo\.critic\.policy='judge' is not a policy of this job: it has"),
        (["at_grpo.val_agents={planner: critic}"], r"^at_grpo\.val_agents: 'critic' is the critic, which answers for"),
        (["+at_grpo.critic.agents=[judge]"], r"^at_grpo\.critic\.agents: judge is not an agent of 'plan_path'"),
        (["+at_grpo.critic.weight=0"], r"^at_grpo\.critic\.weight=0: "),
        (
            ["at_grpo.scheme=tree", "at_grpo.estimator=at_grpo"],
            r"^at_grpo\.scheme='tree': a critic learns from whole episodes, of which here are parts; use",
        ),
        (
            ["+at_grpo.critic.lam=0.9"],
            r"^at_grpo\.critic\.lam=0\.9 has no effect with kind: likelihood; remove it",
        ),
        (
            ["at_grpo.estimator=mas_grpo"],
            r"^at_grpo\.estimator='mas_grpo' has one reward for an episode, but a critic scores every row; use",
        ),
        (
            ["at_grpo.estimator={preset: m_grpo, main_agent: planner, sub_calls: 2}"],
            r"^at_grpo\.estimator='m_grpo' has one reward for an episode, but a critic scores every row; use",
        ),
        (
            ["at_grpo.estimator={preset: grpo, agents: {planner: {unit: trajectory}}}"],
            r"^at_grpo\.estimator='grpo' has one reward for an episode, but a critic scores every row; use",
        ),
        (
            ["at_grpo.estimator={preset: gigpo, unit: row}"],
            r"^at_grpo\.estimator='gigpo' discounts an outcome in its step term, but a critic scores every row; use",
        ),
        (
            ["at_grpo.estimator=rae"],
            r"^at_grpo\.estimator\.decay: beside critic, scores are compared with what rewards",
        ),
        (["+at_grpo.critic.agents=[]"], r"^at_grpo\.critic\.agents=\[\]: "),
        (
            ["+at_grpo.critic.warmup=7", "trainer.total_training_steps=7"],
            r"^at_grpo\.critic\.warmup=7: the run has 7 steps, so it never scores; lower it",
        ),
        (
            ["at_grpo.episode_reward=own"],
            r"^at_grpo\.episode_reward='own' has no effect with critic\.weight=1; lower that",
        ),
        (
            ["~at_grpo.environment", "+at_grpo.environment={name: tic_tac_toe}", "at_grpo.opponents={policy: critic}"],
            r"^at_grpo\.opponents\.policy='critic': name the policy whose past selves play, one that is trained",
        ),
        (
            ["~at_grpo.environment", "+at_grpo.environment={name: sokoban}", "+at_grpo.critic.hindsight=false"],
            r"^at_grpo\.critic\.hindsight=False has no effect: 'sokoban' says nothing in hindsight; remove it",
        ),
        (["at_grpo.group_filter={}"], r"^at_grpo\.group_filter: beside critic, groups are filtered before it has"),
        (
            ["actor_rollout_ref.actor.entropy_coeff=0.01"],
            r"^actor_rollout_ref\.actor\.entropy_coeff=0\.01: adapters of one base share the loss, and a critic has",
        ),
        (["actor_rollout_ref.actor.use_kl_loss=true"], r"^actor_rollout_ref\.actor\.use_kl_loss=True: adapters of"),
    ],
)
def test_what_cannot_work_is_refused(compose: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(compose, *overrides)
