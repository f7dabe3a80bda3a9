"""Bad input: each case stops on the driver, before Ray, with one line that names the key."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes import hub_rows
from fakes.math_problems import sources

import verl_atgrpo.recipes
from verl_atgrpo import Environment, Outcome, Split, compat, platform_choice
from verl_atgrpo.train.config import check, job_rules, machine_rules, policy_rules, run_check
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.machine_rules import of_models
from verl_atgrpo.train.config.policies import expand_policies
from verl_atgrpo.train.config.policy_rules import of_context
from verl_atgrpo.train.config.run_check import check_run, check_run_or_exit, typed_command, without_secrets
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError, Section
from verl_atgrpo.train.config.section import parse_section, read_section
from verl_atgrpo.train.config.view import View

FOLDER = Path(verl_atgrpo.recipes.__file__).parent
QUICK = ("at_grpo.train_tasks=64", "at_grpo.val_tasks=8")


class Overlapping(Environment):
    """Deals the same tasks to both splits."""

    agents = ("solo",)

    def task(self, split: Split, index: int) -> int:
        return index

    def fingerprint(self, task: int) -> str:
        return str(task)

    async def run(self, task: int, team: Any) -> Outcome:
        raise NotImplementedError


@pytest.mark.parametrize(
    "recipe", ["math_qwen3_1p7b", "math_qwen3_1p7b model=qwen3_8b", "code_qwen3_1p7b", "code_qwen3_8b"]
)
def test_the_single_agent_of_a_recipe_passes_the_checks(compose: Any, recipe: str, tmp_path: Path) -> None:
    documented = (FOLDER / f"{recipe[:4]}_qwen3_1p7b.yaml").read_text().partition("\ndefaults:")[0]
    single = re.findall(r"at_grpo\.\S+=\S+", documented)
    config = compose(recipe, *single, *hub_rows.overrides(compose(recipe), tmp_path))
    check_run(config)
    settings = read_section(config)
    assert settings.make_environment().agents == ("solo",)
    assert (settings.scheme, settings.estimator) == ("parallel", "mas_grpo")


PARALLEL, BRANCH, OWN = "at_grpo.scheme=parallel", "at_grpo.scheme=branch", "at_grpo.episode_reward=own"


@pytest.mark.parametrize(
    ("name", "changes", "agent", "accepted"),
    [
        # One vote, and the reward that the solver's answer has, whatever the vote.
        ("math_judged", [PARALLEL], "judge", "tree"),
        ("math_judged", [BRANCH, "+at_grpo.branch={}"], "judge", "tree"),
        ("math_judged", [PARALLEL, OWN], "judge", None),
        # Nothing would score the verifier.
        ("math_refined", [], "verifier", "parallel or branch"),
        ("math_refined", [PARALLEL, OWN], "verifier", "parallel or branch"),
        ("math_refined", [PARALLEL], "verifier", None),
        ("math_refined", ["trainer.val_only=true", "trainer.val_before_train=true"], "verifier", None),
        (
            "math_refined",
            [
                "~at_grpo.agents",
                "+at_grpo.agents={all: learner, verifier: frozen}",
                "at_grpo.policies={learner: {}, frozen: {trainable: false}}",
            ],
            "verifier",
            None,
        ),
    ],
)
def test_a_scheme_without_a_reward_for_an_agent_that_is_trained_is_refused(
    compose: Any, name: str, changes: list[str], agent: str, accepted: str | None, tmp_path: Path
) -> None:
    data = [f"{split}: {{path: {path['path']}}}" for split, path in sources(tmp_path).items()]
    game = ["~at_grpo.environment", f"+at_grpo.environment={{name: {name}, {', '.join(data)}}}"]
    one = ["data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    config = compose("plan_path_cpu", *game, *one, *changes)
    settings = read_section(config)
    own = settings.episode_reward == "own"
    key = "episode_reward=own" if own else f"scheme={settings.scheme}"
    instead = f"outcome with scheme: {accepted}" if own else accepted
    refused = f"^at_grpo.{key} has no reward for '{agent}' of '{name}': set it to {instead}, or give {agent} a policy"
    with nullcontext() if accepted is None else pytest.raises(ConfigError, match=refused):
        check_run(config)


def check_cpu(config: Any) -> None:
    check(of_models(Job(View(config), read_section(config))))


def test_a_bucket_of_weights_fits_into_shared_memory(compose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives 64 MiB by default, and the process that writes more ends with a bus error."""
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    monkeypatch.setattr(machine_rules.shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    refused = r"update_weights_bucket_megabytes=128: .*/dev/shm, where 64 MiB are free; .*--shm-size=1g"
    with pytest.raises(ConfigError, match=refused):
        check_cpu(compose("walk_smollm2"))
    check(machine_rules.of_shared_memory("", compose("plan_path_cpu").actor_rollout_ref.rollout))  # 16 MiB


def test_a_bucket_of_weights_holds_the_largest(compose: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """verl asserts it, after everything has started."""
    from fakes.fsdp_rows import save_model

    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    save_model(tmp_path)
    rollout = compose("plan_path_cpu").actor_rollout_ref.rollout
    small, large = (SimpleNamespace(vocab_size=vocabulary, hidden_size=1024) for vocabulary in (4096, 4097))
    check(machine_rules.of_bucket("", rollout, small))  # 16 MiB
    with pytest.raises(ConfigError, match=r"update_weights_bucket_megabytes=16: .* embedding has 17 MiB, .* at least"):
        check(machine_rules.of_bucket("", rollout, large))
    rollout.dtype = "bfloat16"
    check(machine_rules.of_bucket("", rollout, large))
    monkeypatch.setattr(machine_rules, "of_bucket", lambda key, rollout, text: [f"{key}: {text.vocab_size}"])
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref: \d+$"):
        check_cpu(compose("plan_path_cpu", f"actor_rollout_ref.model.path={tmp_path}"))


@pytest.mark.parametrize(("precision", "refused"), [("fp32", True), ("bf16", False), ("fp16", False)])
def test_adapters_on_a_gpu_are_halves(
    compose: Any, monkeypatch: pytest.MonkeyPatch, precision: str, refused: bool
) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    given = ("hardware=1_gpu", f"precision={precision}")
    check_cpu(compose("plan_path_qwen3_1p7b", *given))
    config = compose("plan_path_qwen3_1p7b", *given, "actor_rollout_ref.model.lora_rank=16")
    if not refused:
        check_cpu(config)
        return
    with pytest.raises(
        ConfigError, match=r"^actor_rollout_ref\.rollout\.dtype=float32: vLLM computes adapters .*precision=fp16, or"
    ):
        check_cpu(config)


def test_what_fails_on_the_cpu_alone_is_refused_there(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    with pytest.raises(ConfigError, match=r"model.path=runs/models/plan_path_tiny: .* make-model"):
        check_cpu(compose("plan_path_cpu"))
    with pytest.raises(ConfigError, match=r"^trainer.device=cuda: .*; use hardware=cpu, or install"):
        check_cpu(compose("plan_path_cpu", "hardware=1_gpu"))
    chunks = compose("plan_path_cpu", "actor_rollout_ref.rollout.enable_chunked_prefill=true")
    with pytest.raises(
        ConfigError, match=r"^actor_rollout_ref.rollout.enable_chunked_prefill=true: .*set it to false"
    ):
        check_cpu(chunks)
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    chunks.actor_rollout_ref.model.path = "Qwen/Qwen3-1.7B"
    check_cpu(chunks)


@pytest.mark.parametrize(
    ("overrides", "installed", "accepted"),
    [
        ("", "", False),
        ("", "flash_attn", True),
        ("", "kernels", True),
        ("", "torch_npu", True),
        ("++actor_rollout_ref.model.override_config.attn_implementation=sdpa", "", True),
        ("hardware=1_gpu", "", True),
        ("hardware=cpu", "", True),
    ],
)
def test_the_package_of_verls_attention_is_missed_before_ray(
    overrides: str, installed: str, accepted: bool, compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    attention = ("flash_attn", "kernels", "torch_npu")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == installed if name in attention else find(name)
    )
    config = compose("plan_path_qwen3_1p7b", *overrides.split())
    if accepted:
        check_cpu(config)
        return
    with pytest.raises(ConfigError, match="flash_attn is not installed") as caught:
        check_cpu(config)
    # What it says helps.
    said = re.findall(r"(\S+=\S+)", str(caught.value).replace(";", "").replace(",", ""))
    assert len(said) == 3 and said[0] == "hardware=1_gpu"
    check_cpu(compose("plan_path_qwen3_1p7b", said[0]))
    check_cpu(compose("plan_path_qwen3_1p7b", *said[1:]))


def test_what_needs_no_model_is_checked_before_any_is_loaded(compose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    monkeypatch.setattr(machine_rules, "_read", lambda *_, **__: pytest.fail("a model is loaded"))
    config = compose("plan_path_cpu_roles", "+at_grpo.policies.planner.rollout={enable_chunked_prefill: true}")
    expand_policies(config, read_section(config))
    with pytest.raises(ConfigError, match=r"^at_grpo\.policies\.planner\.rollout\.enable_chunked_prefill=true"):
        check_cpu(config)


@pytest.mark.parametrize(
    "path", ["runs/models/mine", "./mine", "~/mine", "a\0b", "x" * 300, "", "own er/name", "a/../b"]
)
def test_a_model_that_is_neither_a_folder_nor_on_the_hub_is_refused(
    path: str, compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    config = compose("plan_path_qwen3_1p7b", "hardware=1_gpu")
    config.actor_rollout_ref.model.path = path
    with pytest.raises(
        ConfigError, match=r"^actor_rollout_ref\.model\.path=.*: there is no such folder, and it is no"
    ):
        check_cpu(config)
    for fine in ("gpt2", "Qwen/Qwen3-1.7B", "/data/of/the/nodes/mine", "hdfs://x/mine"):
        config.actor_rollout_ref.model.path = fine
        check_cpu(config)


def test_a_downloaded_models_template_is_read_before_ray(
    compose: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fakes.fsdp_rows import save_model
    from huggingface_hub import constants

    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    cache = tmp_path / "models--owner--name"
    save_model(cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    config = compose("plan_path_qwen3_1p7b", "hardware=1_gpu", "actor_rollout_ref.model.path=owner/name")
    check_cpu(config)  # not there: the trainer reads it
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"apply_chat_template_kwargs\.enable_thinking has no effect"):
        check_cpu(config)
    config.data.apply_chat_template_kwargs = {}
    check_cpu(config)


def test_every_rule_is_in_the_list() -> None:
    """Or it would refuse nothing. `of_context` needs the model, and `of_memory` is what other rules share."""
    modules = (job_rules, policy_rules)
    names = {f"{module.__name__.rpartition('.')[2]}.{name}" for module in modules for name in vars(module)}
    listed = set(re.findall(r"\b\w+_rules\.of_\w+", inspect.getsource(run_check)))
    unlisted = {name for name in names - listed if ".of_" in name}
    assert unlisted == {"policy_rules.of_context", "policy_rules.of_memory"}


def test_recipes_spell_out_every_key_with_its_default(compose: Any) -> None:
    section = compose("plan_path_qwen3_1p7b").at_grpo
    for name, item in AtGrpoConfig.model_fields.items():
        assert name in section, f"at_grpo.{name} could not be overridden without a +"
        if name not in ("environment", "train_tasks", "val_tasks"):
            default = item.default.model_dump() if isinstance(item.default, Section) else item.default
            assert section[name] == default, name


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("at_grpo.environment.name=plan_pth", "at_grpo.environment.name='plan_pth'", "plan_path"),
        ("+at_grpo.environment.sizes=5", "at_grpo.environment.sizes", "size"),
        ("at_grpo.environment.size=1", "at_grpo.environment.size=1", "at least 2"),
        ("+at_grpo.agents.critic=shared", "at_grpo.agents.critic", "planner"),
        ("~at_grpo.agents +at_grpo.agents={planner:shared}", "'tool_user'", "all: shared"),
        ("at_grpo.agents.all=other", "at_grpo.agents.tool_user='other'", "shared"),
        ("at_grpo.estimator=gpro", "at_grpo.estimator", "mas_grpo"),
        ("~at_grpo.estimator +at_grpo.estimator={preset:at_grpo,epsilon:1}", "epsilon", "eps"),
        ("at_grpo.estimator=mas_grpo", "at_grpo.estimator", "scheme: parallel"),
        ("at_grpo.estimator=dr_mas", "at_grpo.estimator='dr_mas': the scope agent", "scheme: parallel"),
        ("~at_grpo.estimator +at_grpo.estimator={preset:dr_mas,scale_scope:team}", "scale_scope", "agent"),
        (
            "~at_grpo.estimator +at_grpo.estimator={preset:at_grpo,agents:{plan:{scale:none}}}",
            "at_grpo.estimator.agents.plan",
            "planner",
        ),
        ("+at_grpo.candidate=8", "at_grpo.candidate ", "candidates"),
        ("at_grpo.candidates=1", "at_grpo.candidates=1", "at least 2"),
        ("at_grpo.scheme=forest", "at_grpo.scheme='forest'", "parallel"),
        ("at_grpo.prefix_tree=5", "at_grpo.prefix_tree=5: ", "auto or true or false"),
        ("at_grpo.selection=best", "at_grpo.selection='best'", "greedy"),
        ("at_grpo.selection=softmax", "at_grpo.selection='softmax'", "random"),
        ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name=sglang", "vllm"),
        ("trainer.resume_mode=latest", "trainer.resume_mode=latest", "auto"),
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path=None", "global_step_<n>"),
        (
            "trainer.resume_mode=resume_path trainer.resume_from_path=/",
            "trainer.resume_from_path=/",
            "global_step_<n>",
        ),
        ("data.train_max_samples=8", "data.train_max_samples=8", "at_grpo.train_tasks"),
        ("data.val_max_samples=0", "data.val_max_samples=0", "at_grpo.val_tasks"),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
            "enable_rollout_routing_replay=true",
            "false",
        ),
        ("+actor_rollout_ref.actor.router_replay.mode=R3", "actor.router_replay.mode=R3", "R2"),
        ("critic.enable=true", "critic.enable=true", "false"),
        ("trainer.critic_warmup=5", "trainer.critic_warmup=5", "0"),
        ("actor_rollout_ref.actor.checkpoint.async_save=true", "async_save=true", "false"),
        ("at_grpo.val_tasks=0", "at_grpo.val_tasks=0", "at least 1"),
        ("at_grpo.train_tasks=4", "at_grpo.train_tasks=4", "data.train_batch_size"),
        ("trainer.total_epochs=1 trainer.total_training_steps=99", "total_training_steps=99", "are 2 steps; raise"),
        ("trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=sync", "at_grpo"),
        ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.trainer_mode=colocate_async", "at_grpo.mode"),
        ("trainer.v1.trainer_mode=separate_async", "trainer.v1.trainer_mode=separate_async", "at_grpo.mode"),
        ("at_grpo.mode=async", "at_grpo.mode='async'", "colocate_async"),
        ("at_grpo.mode=colocate_async", "trainer.v1.sampler.max_off_policy_strategy=drop", "wait"),
        ("actor_rollout_ref.actor.use_prefix_grouper=true", "actor.use_prefix_grouper=true", "false"),
        ("trainer.use_v1=false", "trainer.use_v1", "true"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo", "at_grpo.estimator"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.enable", "at_grpo.group_filter"),
        ("at_grpo.group_filter={min_groups:8}", "at_grpo.group_filter.min_groups=8", "max_tasks"),
        ("at_grpo.group_filter={min_groups:8,max_tasks:32}", "at_grpo.group_filter.max_tasks=32", "train_batch_size"),
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n=4", "at_grpo.candidates"),
        ("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_p=0.9", "1.0"),
        ("actor_rollout_ref.rollout.top_k=20", "actor_rollout_ref.rollout.top_k=20", "-1"),
        ("+actor_rollout_ref.rollout.repetition_penalty=1.2", "repetition_penalty=1.2", "1.0"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=5", "ppo_mini_batch_size=5", "train_batch_size"),
        ("actor_rollout_ref.rollout.multi_turn.format=hermez", "rollout.multi_turn.format='hermez'", "qwen3_coder"),
        ("actor_rollout_ref.actor.shuffle=true", "actor_rollout_ref.actor.shuffle", "false"),
        ("actor_rollout_ref.actor.use_dynamic_bsz=false", "use_dynamic_bsz", "true"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable", "false"),
        ("actor_rollout_ref.rollout.moe_load_balance_metrics_interval=5", "moe_load_balance_metrics_interval=5", "0"),
        (
            "transfer_queue.backend.SimpleStorage.total_storage_size=60 at_grpo.candidates=4 data.train_batch_size=16",
            "SimpleStorage.total_storage_size=60: a step makes at least 64 rows",
            "null for no limit",
        ),
        (
            "transfer_queue.backend.SimpleStorage.total_storage_size=127 at_grpo.candidates=4 "
            "at_grpo.group_filter={min_groups:8,max_tasks:32} data.train_batch_size=16",
            "total_storage_size=127: a step makes at least 128 rows, 32 tasks",
            "null for no limit",
        ),
        ("actor_rollout_ref.rollout.calculate_log_probs=false", "calculate_log_probs", "true"),
        ("actor_rollout_ref.rollout.do_sample=false", "actor_rollout_ref.rollout.do_sample=false", "true"),
        ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.temperature=0", "above 0"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=-1", "val_kwargs.temperature=-1", "at least 0"),
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=false", "val_kwargs.do_sample=false", "temperature to 0"),
        (
            "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs actor_rollout_ref.rollout.temperature=0.7",
            "logprobs_mode=raw_logprobs",
            "processed_logprobs",
        ),
        ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward", "use_kl_loss"),
        ("at_grpo.alpha=-1", "at_grpo.alpha=-1", "at least 0"),
        ("at_grpo.request_retries=-1", "at_grpo.request_retries=-1", "at least 0"),
        ("at_grpo.request_retries=true", "at_grpo.request_retries=True", "a whole number"),
        ("+algorithm.at_grpo_estimator=rloo", "algorithm.at_grpo_estimator=rloo", "at_grpo.estimator"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.norm_adv_by_std_in_grpo=false", "dr_grpo"),
        ("at_grpo.local_weight=none", "at_grpo.local_weight='none'", "at least 0"),
        ("at_grpo.alpha=0 at_grpo.local_weight=0", "at_grpo.local_weight=0", "above 0"),
    ],
)
def test_refused_with_one_line(compose: Any, override: str, key: str, remedy: str) -> None:
    quick = (item for item in QUICK if item.partition("=")[0] not in override)
    with pytest.raises(ConfigError) as caught:
        check_run(compose("plan_path_cpu", *quick, *override.split()))
    message = str(caught.value)
    assert key in message
    assert remedy in message
    assert "\n" not in message


def test_greedy_validation_is_accepted(compose: Any) -> None:
    greedy = "actor_rollout_ref.rollout.val_kwargs.temperature=0"
    check_run(compose("plan_path_cpu", *QUICK, greedy))
    check_run(compose("plan_path_cpu", *QUICK, greedy, "actor_rollout_ref.rollout.val_kwargs.do_sample=false"))


def test_the_models_positions_are_known_before_the_workers_are(compose: Any) -> None:
    config = compose("plan_path_cpu")
    rollout, data = config.actor_rollout_ref.rollout, config.data
    row = data.max_prompt_length + data.max_response_length
    check(of_context("actor_rollout_ref", rollout, data, longest=max(row, rollout.max_model_len)))
    with pytest.raises(ConfigError, match=f"model.path: the model has {row - 1} positions.* up to {row} tokens"):
        check(of_context("actor_rollout_ref", rollout, data, longest=row - 1))
    rollout.max_model_len = row + 1
    with pytest.raises(ConfigError, match=rf"rollout\.max_model_len={row + 1}: the model has {row} positions"):
        check(of_context("actor_rollout_ref", rollout, data, longest=row))


def test_a_queue_without_a_limit_or_with_room_is_accepted(compose: Any) -> None:
    for room in ("null", "64"):
        size = f"transfer_queue.backend.SimpleStorage.total_storage_size={room}"
        check_run(compose("plan_path_cpu", *QUICK, size, "at_grpo.candidates=4", "data.train_batch_size=16"))


def test_options_without_effect_in_the_parallel_scheme_are_refused(compose: Any) -> None:
    for override in ("alpha=0.5", "local_weight=0", "selection=first"):
        key = override.partition("=")[0]
        with pytest.raises(ConfigError, match=f"at_grpo.{key}.*no effect with scheme: parallel"):
            check_run(compose("plan_path_cpu_single", *QUICK, f"at_grpo.{override}"))
    check_run(compose("plan_path_cpu_single", *QUICK, "at_grpo.episode_reward=scores", "at_grpo.alpha=0.5"))
    with pytest.raises(ConfigError, match=r"episode_reward='scores' has no effect with scheme: tree"):
        check_run(compose("plan_path_cpu", *QUICK, "at_grpo.episode_reward=scores"))


@pytest.mark.parametrize(
    ("estimator", "accepted"),
    [
        ("dr_mas", True),
        ("mas_grpo", True),
        ({"preset": "dr_mas", "scale": "none", "scale_scope": "group"}, True),
        ({"preset": "dr_mas", "center_scope": "group"}, False),
        ({"preset": "dr_mas", "scale_scope": "group"}, False),
        ({"preset": "dr_mas", "center_scope": "group", "scale_scope": "group"}, False),
        ("grpo", False),
    ],
)
def test_statistics_over_all_agents_need_one_policy(estimator: Any, accepted: bool) -> None:
    parallel = {"environment": {"name": "plan_path"}, "scheme": "parallel", "estimator": estimator}
    parse_section(parallel)
    parse_section({**parallel, "policies": {"shared": None}})
    # All rows of the update are one policy's.
    parse_section({**parallel, "policies": {"coder": None, "planner": {"trainable": False}}})
    several = {**parallel, "policies": {"coder": None, "planner": None}}
    if accepted:
        parse_section(several)
        return
    message = r"^at_grpo.estimator='(grpo|dr_mas)' .* several policies \(coder, planner\) .* use estimator: dr_mas.*$"
    with pytest.raises(ConfigError, match=message) as caught:
        parse_section(several)
    assert "\n" not in str(caught.value)
    if estimator == "grpo":
        # In the tree scheme a group is one decision of one agent, so no policy lacks rows.
        parse_section({**several, "scheme": "tree"})


def test_overlap_of_validation_and_training_is_refused_unless_accepted(compose: Any) -> None:
    name = f"{__name__}:Overlapping"
    overrides = ("~at_grpo.environment", f"+at_grpo.environment={{name:'{name}'}}", *QUICK)
    with pytest.raises(ConfigError, match=r"validation task 0 has the key of training task 0.*allow_overlap"):
        check_run(compose("plan_path_cpu", *overrides))
    check_run(compose("plan_path_cpu", *overrides, "at_grpo.allow_overlap=true"))


def test_the_section_is_required(compose: Any) -> None:
    with pytest.raises(ConfigError, match="at_grpo: the section is missing"):
        check_run(compose("plan_path_cpu", "~at_grpo"))


def test_a_job_of_somebody_else_is_left_alone(compose: Any) -> None:
    check_run(compose("ppo_trainer"))


def test_plain_job_needs_groups(compose: Any) -> None:
    plain = ("algorithm.adv_estimator=at_grpo", "actor_rollout_ref.rollout.name=vllm")
    with pytest.raises(ConfigError, match=re.escape("actor_rollout_ref.rollout.n=1")):
        check_run(compose("ppo_trainer", *plain))
    check_run(compose("ppo_trainer", *plain, "actor_rollout_ref.rollout.n=4"))
    several = (*plain, "actor_rollout_ref.rollout.n=4")
    check_run(compose("ppo_trainer", *several, "+algorithm.at_grpo_estimator=rloo"))
    with pytest.raises(ConfigError, match=r"norm_adv_by_std_in_grpo=false: .*algorithm\.at_grpo_estimator=dr_grpo"):
        check_run(compose("ppo_trainer", *several, "algorithm.norm_adv_by_std_in_grpo=false"))
    for estimator, message in (
        (
            "mas_grpo",
            "algorithm.at_grpo_estimator='mas_grpo' compares episodes, .*trainer_mode=at_grpo, or use one of",
        ),
        ("{preset:grpo,agents:{solo:{ddof:0}}}", "algorithm.at_grpo_estimator='grpo' compares episodes, agents"),
        ("rlo", "algorithm.at_grpo_estimator: at_grpo.estimator: unknown preset 'rlo'"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            check_run(compose("ppo_trainer", *several, f"+algorithm.at_grpo_estimator={estimator}"))


def test_driver_ends_with_one_line(compose: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        check_run_or_exit(compose("plan_path_cpu", *QUICK, "at_grpo.candidates=1"))
    assert str(caught.value).startswith("verl-atgrpo: at_grpo.candidates=1")


def test_other_verl_names_the_symbol_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.0" if name == "verl" else version(name))
    gone = compat.Symbol("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._balance_rows")
    moved = compat.Symbol("verl.trainer.ppo.v1.trainer_base", "PPOTrainer._update_actor", ("rows",))
    monkeypatch.setattr(compat, "SYMBOLS", (gone, moved))
    with pytest.raises(compat.CompatError) as caught:
        compat.check_distributions()
    assert "verl 0.11.0 is not supported (needs <0.10,>=0.9.1)" in str(caught.value)
    assert "PPOTrainer._balance_rows is gone" in str(caught.value)
    assert "PPOTrainer._update_actor no longer takes rows" in str(caught.value)


def test_a_function_of_verl_with_another_body_is_listed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == compat.__name__]

    with caplog.at_level("WARNING", logger="verl_atgrpo"):
        compat.check_symbols(compat.SYMBOLS + compat.CPU_SYMBOLS)
        compat.check_symbols(compat.EVALUATION_SYMBOLS)
    assert not warnings(), "run scripts/compat_sources.py if the tests pass with this verl"

    def on_step_end(self: Any) -> None:
        """A function with another body than verl's."""

    trainer_base = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    monkeypatch.setattr(trainer_base.PPOTrainer, "on_step_end", on_step_end)
    with caplog.at_level("WARNING", logger="verl_atgrpo"):
        compat.check_symbols(compat.SYMBOLS)
    (warning,) = warnings()
    assert warning.endswith("differ: verl.trainer.ppo.v1.trainer_base.PPOTrainer.on_step_end")


@pytest.mark.parametrize(
    ("module", "remedy"), [("transfer_queue", "pip install 'TransferQueue"), ("vllm", "vLLM is missing")]
)
def test_missing_distribution(monkeypatch: pytest.MonkeyPatch, module: str, remedy: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    with pytest.raises(compat.CompatError, match=remedy):
        compat.check_distributions()


def test_every_private_symbol_is_as_we_need_it() -> None:
    compat.check_symbols(compat.SYMBOLS + compat.CPU_SYMBOLS)


def test_the_command_is_kept_without_secrets() -> None:
    words = ["/usr/bin/python3", "-m", "verl.trainer.main_ppo", "b={x: [1, 2]}", "c.api_key=abc=d", "+t.token=e"]
    assert typed_command(words) == "python -m verl.trainer.main_ppo 'b={x: [1, 2]}' c.api_key=... +t.token=..."
    plain = "python a.max_token_len_per_gpu=9 b.stop_token_ids=1 c.tokenizer=d e.task_key=f:g h=any@http://i/v1"
    assert typed_command(plain.split()) == plain
    said = "python a.rollout_is=token a.loss_agg_mode=token-mean b.preset=secret-mean"
    assert typed_command(said.split()) == said
    for secret in (
        "a={b: {OPENAI_API_KEY: s}}",
        "variables={A: s}",
        "+AWS_SECRET_ACCESS_KEY=s",
        "a.b=http://c:s@d/v1",
        "a={api_key : s}",
        "a=[{name: OPENAI_API_KEY, value: s}]",
        "a.args=[--token,s]",
        "a.cmd=curl -H Authorization:token s",
    ):
        assert typed_command(["python", secret]) == f"python {secret.partition('=')[0]}=..."


def test_records_have_no_secrets_of_the_section() -> None:
    shown = {
        "task_key": "a:b",
        "max_tokens": 3,
        "source": "any@http://i/v1#OPENAI_API_KEY",
        "names": ["a"],
        "seed": None,
    }
    hidden = {"variables": {"A": "s"}, "env_vars": {"B": "s"}, "HF_TOKEN": "s", "client": {"api_key": "s"}}
    urls = ["http://u:s@h/v1"]
    assert without_secrets({"name": "x", "options": [{**shown, **hidden}], "urls": urls}) == {
        "name": "x",
        "options": [
            {**shown, **dict.fromkeys(("variables", "env_vars", "HF_TOKEN"), "..."), "client": {"api_key": "..."}}
        ],
        "urls": ["..."],
    }


_ROLES = "at_grpo.policies.tool_user"
_ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("recipe", "overrides", "named"),
    [
        ("plan_path_cpu", ["at_grpo.placement=split"], "at_grpo.policies is missing: placement: split needs it"),
        ("plan_path_cpu_roles", [f"{_ACTOR}.optim.optimizer=Nope"], f"{_ROLES}.optim.optimizer=Nope: "),
        (
            "plan_path_cpu_roles",
            ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=10"],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=10: ",
        ),
        (
            "plan_path_cpu_roles",
            ["actor_rollout_ref.hybrid_engine=false"],
            "actor_rollout_ref.hybrid_engine=false has",
        ),
        ("plan_path_cpu_roles", [f"{_ACTOR}.ppo_mini_batch_size=7"], f"{_ROLES}.actor.ppo_mini_batch_size=7 does not"),
    ],
)
def test_a_policys_message_names_a_key_that_can_be_set(
    compose: Any, recipe: str, overrides: list[str], named: str
) -> None:
    """A block of `at_grpo.policies` has model, actor, optim and rollout; what else a policy has is the job's."""
    with pytest.raises(ConfigError) as caught:
        check_run(compose(recipe, *QUICK, *overrides))
    assert str(caught.value).startswith(named)


_LORA = "actor_rollout_ref.model.lora_rank=4"
_DISABLED = "trainer.resume_mode=disable"
_NAMED = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=global_step_5")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["save_contents=[hf_model]"],
            "save_contents=.*hf_model.* leaves out model, optimizer, extra, which",
        ),
        (["save_contents=[model,hf_model]"], "leaves out optimizer, extra, which .* needs; add them"),
        (
            ["load_contents=[model,extra]"],
            "load_contents=.* leaves out optimizer, which .* needs; add it",
        ),
        (["save_contents=[hf_model]", _DISABLED], None),
        (["save_contents=[hf_model]", _DISABLED, _LORA], "leaves out model, which"),
        (["save_contents=[model]", "load_contents=[model]", _DISABLED, _LORA], None),
        # Moments begin anew on purpose, or are not needed.
        (["load_contents=[model]", *_NAMED], None),
        (["load_contents=[model]", "trainer.val_only=true"], None),
        (["load_contents=[hf_model]", *_NAMED], "leaves out model, which"),
        (["save_contents=[]", "load_contents=[model]", "trainer.save_freq=-1"], None),
    ],
)
def test_a_checkpoint_has_what_a_resumed_run_needs(
    compose: Any, overrides: list[str], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl loads what it is told to load, and goes on with the initial weights without a word."""
    whole = [f"{_ACTOR}.checkpoint.{one}" if "contents" in one else one for one in overrides]
    (tmp_path / "global_step_5").mkdir()
    monkeypatch.chdir(tmp_path)
    config = compose("plan_path_cpu", *QUICK, *whole)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        check_run(config)


@pytest.mark.parametrize(
    ("loss", "override", "refused"),
    [
        ("gpg", "clip_ratio_low=0.1", True),
        ("dro", "clip_ratio_high=0.3", True),
        ("gspo", "clip_ratio_high=0.3", False),
        ("gspo", "clip_ratio_c=5", True),
        ("cispo", "clip_ratio_c=5", True),
        ("vanilla", "clip_ratio_c=5", False),
        ("gpg", "clip_ratio_low=null", False),
        ("bypass_mode", "clip_ratio_low=0.1", False),
    ],
)
def test_bounds_that_a_loss_does_not_read_are_refused(compose: Any, loss: str, override: str, refused: bool) -> None:
    given = [f"{_ACTOR}.policy_loss.loss_mode={loss}", f"{_ACTOR}.{override}"]
    given += [f"{_ACTOR}.policy_loss.dro_beta=0.1"] if loss == "dro" else []
    with pytest.raises(ConfigError, match=f"{override} has no effect with") if refused else nullcontext():
        check_run(compose("plan_path_cpu", *QUICK, *given))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+mode=async", "trainer.v1.sampler.max_off_policy_threshold=3.0"],
            r"^trainer\.v1\.sampler\.max_off_policy_threshold=3\.0: a whole number",
        ),
        (
            [f"{_ACTOR}.policy_loss.loss_mode=bypass_mode", "algorithm.rollout_correction.rollout_is=token"],
            r"policy_loss\.loss_mode=bypass_mode ignores algorithm\.rollout_correction\.rollout_is=token: ",
        ),
        (
            [f"{_ACTOR}.optim.lr_warmup_steps=5", f"{_ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
            r"lr_warmup_steps_ratio=0\.1 has no effect beside actor_rollout_ref\.actor\.optim\.lr_warmup_steps=5",
        ),
    ],
)
def test_values_that_would_fail_later_or_do_nothing(compose: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(compose("plan_path_cpu", *QUICK, *overrides))
