"""Policies in the recipe: what a block changes, what follows from it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

from verl_atgrpo import platform_choice
from verl_atgrpo.train.config import policy_rules
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.policies import config_of_host, config_of_policy, expand_policies
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import EXPANDED, ConfigError
from verl_atgrpo.train.config.section import parse_section, read_section
from verl_atgrpo.train.config.view import View

ROLES = "plan_path_qwen3_1p7b +roles=tool_user_planner +placement=colocated"


def expanded(compose: Any, *overrides: str) -> Any:
    config = compose("plan_path_qwen3_1p7b", "+at_grpo.agents.tool_user=coder", *overrides)
    expand_policies(config, read_section(config))
    return config


def test_a_block_is_laid_over_the_jobs_section_and_leaves_the_others_alone(compose: Any) -> None:
    config = expanded(
        compose,
        "at_grpo.policies={coder: {model: {path: a}, optim: {lr: 3e-6}}, planner: {actor: {clip_ratio_low: 0.1}}}",
    )
    coder, planner = (config_of_policy(config, name).actor_rollout_ref for name in ("coder", "planner"))
    assert (coder.model.path, coder.actor.optim.lr, coder.actor.clip_ratio_low) == ("a", 3e-6, 0.2)
    assert (planner.model.path, planner.actor.optim.lr, planner.actor.clip_ratio_low) == ("Qwen/Qwen3-1.7B", 1e-6, 0.1)
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-1.7B"


def test_a_block_may_add_keys_to_an_open_section_that_has_some(compose: Any) -> None:
    config = expanded(
        compose,
        "at_grpo.policies={coder: {rollout: {engine_kwargs: {vllm: {swap_space: 1}}}}, planner: {}}",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=16",
    )
    own = [config[EXPANDED][name].rollout.engine_kwargs.vllm for name in ("coder", "planner")]
    assert own == [{"block_size": 16, "swap_space": 1}, {"block_size": 16}]


def test_keys_that_verl_derives_follow_the_policys_own(compose: Any) -> None:
    config = expanded(
        compose,
        "at_grpo.policies={coder: {model: {path: a, use_remove_padding: false},"
        " actor: {ppo_max_token_len_per_gpu: 1234}}, planner: {}}",
    )
    coder, planner = (config[EXPANDED][name] for name in ("coder", "planner"))
    assert coder.rollout.prometheus.served_model_name == "a"
    assert coder.actor.use_remove_padding is False
    assert coder.ref.log_prob_max_token_len_per_gpu == 1234
    assert planner.rollout.prometheus.served_model_name == "Qwen/Qwen3-1.7B"
    assert planner.actor.use_remove_padding is True


def test_an_adapter_is_an_option_of_the_policys_model(compose: Any) -> None:
    config = expanded(compose, "at_grpo.policies={coder: {lora: {rank: 16, alpha: 32}}, planner: {}}")
    coder, planner = (config[EXPANDED][name].model for name in ("coder", "planner"))
    assert (coder.lora_rank, coder.lora_alpha) == (16, 32)
    assert planner.lora_rank == 0


def test_an_adapters_checkpoint_holds_no_whole_model(compose: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = expanded(compose, "at_grpo.policies={coder: {lora: {rank: 16}}, planner: {}}")
    coder, planner = (config[EXPANDED][name].actor.checkpoint for name in ("coder", "planner"))
    assert list(coder.save_contents) == list(coder.load_contents) == ["model", "optimizer", "extra"]
    assert "hf_model" in planner.save_contents
    assert "verl-atgrpo export" in caplog.text


QUICK = ("at_grpo.train_tasks=128", "at_grpo.val_tasks=8")
AGENTS = ("~at_grpo.agents", "+at_grpo.agents={tool_user: tool_user, planner: planner}")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("actor: {ppo_mini_batch_size: 60}", "actor.ppo_mini_batch_size=60 does not divide data.train_batch_size=128"),
        ("actor: {shuffle: true}", "actor.shuffle=true has no effect"),
        ("actor: {use_dynamic_bsz: false}", "actor.use_dynamic_bsz=false"),
        ("actor: {checkpoint: {async_save: true}}", "actor.checkpoint.async_save=true"),
        ("rollout: {calculate_log_probs: false}", "rollout.calculate_log_probs=false"),
        ("actor: {clip_ratio: 0.1}", "actor.clip_ratio=0.1 has no effect beside clip_ratio_low=0.2"),
        ("actor: {grad_clip: 0.5}", "actor.grad_clip=0.5 has no effect"),
        ("actor: {loss_agg_mode: seq-mean-token-sum-norm}", "actor.loss_agg_mode=seq-mean-token-sum-norm"),
        ("actor: {loss_scale_factor: 64}", "actor.loss_scale_factor=64 has no effect"),
        ("actor: {policy_loss: {loss_mode: geo_mean}}", "actor.policy_loss.loss_mode=geo_mean"),
        ("actor: {fsdp_config: {model_dtype: bf16}}", "actor.fsdp_config.model_dtype=bf16: .* lose small updates"),
        ("actor: {policy_loss: {loss_mode: kl_cov}}", "actor.policy_loss.loss_mode=kl_cov"),
        ("actor: {policy_loss: {loss_mode: clip_cov}}", "actor.policy_loss.loss_mode=clip_cov"),
        ("optim: {lr: -1}", "optim.lr=-1"),
        ("actor: {policy_loss: {loss_mode: sapo}}", "actor.loss_agg_mode=token-mean has no effect"),
        ("actor: {policy_loss: {loss_mode: dro}}", "actor.policy_loss.dro_beta=null"),
        ("actor: {policy_loss: {loss_mode: gpso}}", "actor.policy_loss.loss_mode=gpso is no policy loss"),
        ("rollout: {max_model_len: 6143}", "rollout.max_model_len=6143: .* rows of up to 6144 tokens"),
        ("actor: {ppo_max_token_len_per_gpu: 6143}", "actor.ppo_max_token_len_per_gpu=6143: .* at least 6144"),
        ("rollout: {log_prob_max_token_len_per_gpu: 6143}", "rollout.log_prob_max_token_len_per_gpu=6143"),
        ("rollout: {tensor_model_parallel_size: 3}", "rollout.tensor_model_parallel_size=3: .* has 8 devices"),
        ("rollout: {tensor_model_parallel_size: 16}", "rollout.tensor_model_parallel_size=16: .* has 8 devices"),
        ("rollout: {n_gpus_per_node: 4}", "rollout.n_gpus_per_node=4: .* 8 devices of a node"),
        ("rollout: {response_length: 64}", "rollout.response_length=64 has no effect"),
        ("actor: {optim: {lr: 1e-6}}", "actor.optim: set at_grpo.policies.planner.optim"),
        (
            "lora: {rank: 8}, model: {lora_rank: 16}",
            "model.lora_rank has no effect beside .*planner.lora: set it there",
        ),
        ("model: {lora_alpha: 8}", "model.lora_alpha=8 has no effect beside .*lora_rank=0"),
        ("rollout: {expert_parallel_size: 2}", "rollout.expert_parallel_size=2: set it to 1, or to 1"),
        ("model: {lora_adapter_path: adapter}", "model.lora_adapter_path=adapter has no effect beside .*lora_rank=0"),
    ],
)
def test_what_holds_for_the_job_holds_for_every_policy(compose: Any, block: str, message: str) -> None:
    config = compose(ROLES, *QUICK, f"+at_grpo.policies.planner={{{block}}}")
    with pytest.raises(ConfigError, match=f"at_grpo.policies.planner.{message}"):
        check_run(config)


@pytest.mark.parametrize(("size", "nodes", "fits"), [(12, 3, False), (6, 3, False), (16, 2, True), (4, 3, True)])
def test_a_server_is_on_whole_nodes_or_on_a_part_of_one(compose: Any, size: int, nodes: int, fits: bool) -> None:
    given = (f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}", f"trainer.nnodes={nodes}")
    config = compose(
        "plan_path_qwen3_1p7b", "data.train_batch_size=48", "actor_rollout_ref.actor.ppo_mini_batch_size=48", *given
    )
    found = list(policy_rules.of_servers(*Job(View(config), read_section(config)).policies.values()))
    assert found == [] if fits else found[0].startswith(f"{given[0]}: a server of {size} devices (")


def test_an_adapter_of_the_only_policy_leaves_the_whole_model_out_as_well(compose: Any) -> None:
    config = compose("plan_path_qwen3_1p7b", "actor_rollout_ref.model.lora_rank=16")
    expand_policies(config, read_section(config))
    saved = config.actor_rollout_ref.actor.checkpoint
    assert list(saved.save_contents) == list(saved.load_contents) == ["model", "optimizer", "extra"]
    whole = compose("plan_path_qwen3_1p7b")
    expand_policies(whole, read_section(whole))
    assert "hf_model" in whole.actor_rollout_ref.actor.checkpoint.save_contents


def test_keys_that_count_together_are_accepted_where_they_agree(compose: Any) -> None:
    for changes in (
        "clip_ratio=0.1 clip_ratio_low=0.1 clip_ratio_high=0.1",
        "clip_ratio_high=0.28",
        "clip_ratio=0.1 clip_ratio_low=null",
        "grad_clip=0.5 optim.clip_grad=0.5",
        "optim.clip_grad=0.5",
        "loss_agg_mode=seq-mean-token-sum-norm loss_scale_factor=2048",
        "policy_loss.loss_mode=sapo loss_agg_mode=seq-mean-token-mean",
        "ppo_max_token_len_per_gpu=3072 ulysses_sequence_parallel_size=2",
        "fsdp_config.model_dtype=float32",
    ):
        overrides = [f"actor_rollout_ref.actor.{change}" for change in changes.split()]
        check_run(compose("plan_path_qwen3_1p7b", *QUICK, *overrides))


@pytest.mark.parametrize(
    "changes",
    [
        (
            "plan_path_qwen3_1p7b",
            "actor_rollout_ref.model.lora_rank=16",
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
        ),
        (
            ROLES,
            "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
            "+at_grpo.policies.tool_user.actor={fsdp_config: {model_dtype: fp32}}",
            "+at_grpo.policies.planner.trainable=false",
        ),
    ],
)
def test_weights_that_no_optimizer_moves_may_be_rounded(compose: Any, changes: tuple[str, ...]) -> None:
    check_run(compose(*changes, *QUICK))


def test_servers_that_share_a_gpu_must_fit_in_its_memory(compose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(
        ROLES,
        "at_grpo.train_tasks=128",
        "at_grpo.val_tasks=8",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    )
    check_run(config)  # in CPU mode the servers' memory is given in bytes
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    with pytest.raises(ConfigError, match=r"add up to 1\.20"):
        check_run(config)


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"models": {}}, "at_grpo.policies.coder.models"),
        ({"model": "a"}, "at_grpo.policies.coder.model='a'"),
        ({"trainable": "no"}, "at_grpo.policies.coder.trainable='no'"),
        ({"lora": {"rang": 8}}, "at_grpo.policies.coder.lora.rang"),
        ({"lora": {"rank": 0}}, "at_grpo.policies.coder.lora.rank=0"),
        ({"rollout": {"temperature": 0.5}}, "at_grpo.policies.coder.rollout.temperature"),
        ({"trainable": False, "lora": {"rank": 8}}, "at_grpo.policies.coder.lora"),
        ({"trainable": False, "optim": {"lr": 1.0}}, "at_grpo.policies.coder.optim"),
    ],
)
def test_a_block_that_cannot_work_is_refused(block: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_section({"environment": {"name": "plan_path"}, "policies": {"coder": block, "other": {}}})
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_policy_inherits_is_named_by_its_own_key(compose: Any) -> None:
    config = compose("plan_path_cpu_roles", "actor_rollout_ref.rollout.n=4")
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.n=4"):
        check_run(config)


def test_what_excludes_trees_is_refused_beside_them(compose: Any) -> None:
    fused = "actor_rollout_ref.model.use_fused_kernels=true"
    with pytest.raises(ConfigError, match=r"prefix_tree=true: .*model\.use_fused_kernels excludes"):
        check_run(compose("plan_path_cpu", "at_grpo.prefix_tree=true", fused))


def test_an_empty_adapter_is_none() -> None:
    section = {"environment": {"name": "plan_path"}, "policies": {"coder": {"lora": {}}}}
    assert parse_section(section).policy_settings()["coder"].lora is None


def test_a_key_that_verl_does_not_have_is_refused(compose: Any) -> None:
    with pytest.raises(ConfigError, match=r"at_grpo\.policies\.coder\.model\.pth"):
        expanded(compose, "at_grpo.policies={coder: {model: {pth: a}}, planner: {}}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("at_grpo.policies={coder: {}}",), r"at_grpo\.agents\.tool_user='shared' is not a policy"),
        (("at_grpo.agents.all=coder", "at_grpo.policies={coder: {}, judge: {}}"), r"policies\.judge has no agent"),
        (("at_grpo.agents.all=coder", "at_grpo.policies={coder: {trainable: false}}"), "no trainable policy"),
        (
            (
                *AGENTS,
                "at_grpo.policies={planner: {}, tool_user: {trainable: false, actor: {use_kl_loss: true}}}",
            ),
            r"policies\.tool_user\.actor has no effect on a frozen policy",
        ),
        (
            (
                *AGENTS,
                "at_grpo.policies={planner: {}, tool_user: {trainable: false}}",
                "~at_grpo.estimator",
                "+at_grpo.estimator={preset: at_grpo, agents: {tool_user: {scale: none}}}",
            ),
            r"estimator\.agents\.tool_user has no effect: its policy 'tool_user' is frozen",
        ),
        (
            (
                "at_grpo.scheme=branch",
                "+at_grpo.branch={at: {planner: 0}}",
                "~at_grpo.candidates",
                "+at_grpo.candidates={all: 4, tool_user: 8}",
            ),
            r"candidates\.tool_user has no effect: episodes do not branch at its decisions",
        ),
        (("at_grpo.val_agents={planner: judge}",), r"at_grpo\.val_agents\.planner='judge' is not a policy"),
        (("at_grpo.val_agents={judge: shared}",), r"at_grpo\.val_agents\.judge is not an agent"),
    ],
)
def test_agents_and_policies_must_match(compose: Any, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(compose("plan_path_cpu", "at_grpo.train_tasks=64", "at_grpo.val_tasks=8", *overrides))


def test_roles_can_be_swapped_in_validation(compose: Any) -> None:
    config = compose("plan_path_cpu_roles", "at_grpo.val_agents={tool_user: planner, planner: tool_user}")
    settings = read_section(config)
    env = settings.make_environment()
    assert settings.policies_of(env) == {"tool_user": "tool_user", "planner": "planner"}
    assert settings.validation_policies_of(env) == {"tool_user": "planner", "planner": "tool_user"}


def test_one_role_may_be_filled_otherwise_in_validation(compose: Any) -> None:
    settings = read_section(compose("plan_path_cpu_roles", "at_grpo.val_agents={planner: tool_user}"))
    env = settings.make_environment()
    assert settings.validation_policies_of(env) == {"tool_user": "tool_user", "planner": "tool_user"}


ADAPTER = "lora: {rank: 16}"


@pytest.mark.parametrize(
    ("tool_user", "planner", "message"),
    [
        (f"base: one, {ADAPTER}", "", "tool_user.base='one' has no effect: no other policy has it"),
        (f"base: one, {ADAPTER}", f"base: two, {ADAPTER}", "tool_user.base='one' has no effect"),
        (f"base: one, {ADAPTER}", "base: one", "planner.base='one': .* differ by their adapters; set lora"),
        (
            "base: one, trainable: false",
            "base: one, trainable: false",
            "no trainable policy",
        ),
        (
            f"base: one, {ADAPTER}, model: {{path: a}}",
            f"base: one, {ADAPTER}, model: {{path: b}}",
            "planner.model=.*'b'.*: other than that of tool_user, with which it shares the base 'one'",
        ),
        (
            f"base: one, {ADAPTER}",
            f"base: one, {ADAPTER}, actor: {{clip_ratio_high: 0.3}}",
            "planner.actor=.*other than that of tool_user",
        ),
        (f"base: one, {ADAPTER}", f"base: one, {ADAPTER}, rollout: {{max_num_seqs: 9}}", "planner.rollout=.*other"),
        (
            f"base: one, {ADAPTER}",
            "base: one, lora: {rank: 8, target_modules: [q_proj, lm_head]}",
            "planner.model.target_modules=.*servers have no adapter on lm_head",
        ),
        (f"base: one, {ADAPTER}", "base: one, lora: {rank: 513}", "planner.lora.rank=513: .*at most 512"),
        (f"base: a-b, {ADAPTER}", f"base: a-b, {ADAPTER}", "tool_user.base: use letters, digits and underscores"),
        (
            f"base: one, {ADAPTER}, actor: {{strategy: fsdp}}",
            f"base: one, {ADAPTER}, actor: {{strategy: fsdp}}",
            "tool_user.actor.strategy=fsdp: adapters that share a base need fsdp2",
        ),
        (
            f"base: one, {ADAPTER}, actor: {{fsdp_config: {{reshard_after_forward: false}}}}",
            f"base: one, {ADAPTER}, actor: {{fsdp_config: {{reshard_after_forward: false}}}}",
            "tool_user.actor.fsdp_config.reshard_after_forward=False: adapters that share a base need True",
        ),
        (
            f"base: one, {ADAPTER}, model: {{lora: {{merge: true}}}}",
            f"base: one, {ADAPTER}, model: {{lora: {{merge: true}}}}",
            "tool_user.model.lora.merge=true: verl rounds merged weights to bfloat16",
        ),
        (
            f"base: one, {ADAPTER}, actor: {{checkpoint: {{load_contents: [model]}}}}",
            f"base: one, {ADAPTER}, actor: {{checkpoint: {{load_contents: [model]}}}}",
            "tool_user.actor.checkpoint.load_contents=.*has no effect on adapters that share a base",
        ),
    ],
)
def test_bases_that_cannot_be_shared(compose: Any, tool_user: str, planner: str, message: str) -> None:
    config = compose(
        "plan_path_qwen3_1p7b",
        "at_grpo.train_tasks=128",
        "at_grpo.val_tasks=8",
        *AGENTS,
        f"at_grpo.policies={{tool_user: {{{tool_user}}}, planner: {{{planner}}}}}",
    )
    with pytest.raises(ConfigError, match=message):
        check_run(config)


def test_what_the_workers_of_a_shared_base_are_given(compose: Any) -> None:
    config = compose(
        "plan_path_qwen3_1p7b",
        *AGENTS,
        "at_grpo.policies={tool_user: {base: one, trainable: false}, planner: {base: one, lora: {rank: 16}, "
        "optim: {lr: 3e-5}}}",
    )
    settings = read_section(config)
    expand_policies(config, settings)
    # The first that is trained has the workers; numbers are in the order of the policies.
    assert settings.bases() == {"planner": ["tool_user", "planner"]}
    assert [settings.adapter_number(name) for name in ("tool_user", "planner")] == [1, 2]
    model = config_of_host(config, settings, "planner").actor_rollout_ref.model
    assert model.lora_rank == 16
    frozen, trained = model.lora.adapters.tool_user, model.lora.adapters.planner
    assert not frozen.trainable and trained.trainable
    assert (trained.rank, trained.alpha, trained.target_modules) == (16, model.lora_alpha, "all-linear")
    assert trained.optim.lr == 3e-5
    # Not of other jobs.
    plain = compose(ROLES)
    settings = read_section(plain)
    assert settings.bases() == {name: [name] for name in ("tool_user", "planner")}
    assert settings.adapter_number("planner") is None
    assert "adapters" not in config_of_host(plain, settings, "planner").actor_rollout_ref.model.lora
