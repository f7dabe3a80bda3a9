"""Plan of an evaluation: sources, swapped policies, checkpoints, and errors before a model is loaded."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import small_model as model_at

from verl_atgrpo import platform_choice
from verl_atgrpo.lab.evaluation import sources
from verl_atgrpo.lab.evaluation.episodes import _task
from verl_atgrpo.lab.evaluation.sources import assignments, of_checkpoint, parse, weights_digest
from verl_atgrpo.play.remote import RemoteModel


def checkpoint(root: Path, *names: str) -> Path:
    step = root / "global_step_2"
    folders = {name: f"policies/{name}" for name in names}
    for folder in folders.values():
        model_at(step / folder / "huggingface")
    (step / "policies.json").write_text(json.dumps(folders))
    return step


# ------------------------------------------------------------ sources


def test_sources(tmp_path: Path) -> None:
    assert parse(str(model_at(tmp_path / "a/b"))) == str(tmp_path / "a/b")
    assert parse("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B"
    assert parse("Qwen/Qwen3-32B@http://localhost:8000/v1/") == RemoteModel(
        "Qwen/Qwen3-32B", "http://localhost:8000/v1"
    )
    assert parse("m@https://host/v1#MY_KEY") == RemoteModel("m", "https://host/v1", "MY_KEY")
    assert str(parse("m@https://host/v1#MY_KEY")) == "m@https://host/v1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plannr", "not a source of answers"),
        ("runs/models/missing", "not a source of answers"),
        ("/nowhere", "not a source of answers"),
        ("http://host/v1", "names no model"),
        ("m@https://user:secret@host/v1", "takes no user"),
        ("m@https://host/v1?api_key=secret", "takes no user"),
        ("m@https://host/v1#sk-secret", "environment variable"),
    ],
)
def test_an_invalid_source_is_refused_without_repeating_a_secret(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(text)
    assert "secret" not in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        parse(str(tmp_path))


def test_a_variable_that_is_named_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "MINE"):
        monkeypatch.delenv(name, raising=False)
    assert RemoteModel("m", "http://h").key() is None
    with pytest.raises(ValueError, match="MINE is not set"):
        RemoteModel("m", "http://h", "MINE").key()


def test_equal_weights_have_equal_digests_and_others_have_not(tmp_path: Path) -> None:
    first, same = model_at(tmp_path / "a"), model_at(tmp_path / "b")
    other = model_at(tmp_path / "c", weights=b"0124")
    assert weights_digest(str(first)) == weights_digest(str(same)) != weights_digest(str(other))
    assert weights_digest("Qwen/Qwen3-1.7B") is None


def test_a_digest_has_some_of_every_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_WHOLE", 1 << 20)
    folders = [model_at(tmp_path / name, weights=bytes(8 << 20)) for name in "ab"]
    assert len({weights_digest(str(folder)) for folder in folders}) == 1
    file = next(folders[1].glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[3 << 20 : 5 << 20] = bytes([1]) * (2 << 20)
    file.write_bytes(content)
    assert len({weights_digest(str(folder)) for folder in folders}) == 2


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["planner"], "write --agent AGENT="),
        (["planner="], "write --agent AGENT="),
        (["ghost=a"], "no agent 'ghost', the recipe has planner"),
        (["planner=a", "planner=b"], "given twice"),
    ],
)
def test_invalid_assignments(texts: Sequence[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assignments(texts, "--agent", ["planner"], "agent")
    assert assignments(["planner=a=b"], "--agent", ["planner"], "agent") == {"planner": "a=b"}


def test_checkpoints(tmp_path: Path) -> None:
    step = checkpoint(tmp_path, "coder", "planner")
    trained = {"coder": True, "planner": True, "judge": False}
    assert of_checkpoint(step, trained) == {
        name: str(step / f"policies/{name}/huggingface") for name in ("coder", "planner")
    }
    with pytest.raises(ValueError, match="holds the policies coder, planner, the recipe trains shared"):
        of_checkpoint(step, {"shared": True})
    with pytest.raises(ValueError, match=r"has no policies\.json"):
        of_checkpoint(tmp_path, trained)
    (step / "policies/coder/huggingface/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"export .*global_step_2 OUT, .* --policy coder=OUT/coder --policy planner="):
        of_checkpoint(step, trained)


# ------------------------------------------------------------ recipes


@functools.cache
def composed(recipe: str, overrides: tuple[str, ...]) -> Any:
    from verl_atgrpo.recipes import compose

    return compose(recipe, overrides)


def plan(recipe: str = "plan_path_cpu", *overrides: str, **options: Any) -> Any:
    pytest.importorskip("verl")
    from verl_atgrpo.lab.evaluation import plan as plans

    with pytest.MonkeyPatch.context() as patch:  # Hydra takes half a second
        patch.setattr(plans, "compose", lambda name, given, _: copy.deepcopy(composed(name, tuple(given))))
        return plans.make(plans.Options(recipe, overrides, **options))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(model_at(tmp_path / "model"))


def test_by_default_the_recipes_own_validation_is_played(model: str) -> None:
    overrides = f"actor_rollout_ref.model.path={model}", "at_grpo.seed=3", "at_grpo.val_tasks=50"
    made = plan("plan_path_cpu", *overrides)
    assert (made.tasks, made.seeds, made.episodes) == (50, [3], 1)
    assert made.agents == {"tool_user": "shared", "planner": "shared"}
    assert made.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert (made.max_prompt_length, made.max_response_length) == (64, 16)
    engine = made.players["shared"].engine
    assert engine["model"] == made.players["shared"].model.path == model
    assert (engine["dtype"], engine["max_model_len"], engine["tensor_parallel_size"]) == ("float32", 80, 1)
    assert engine["kv_cache_memory_bytes"] == 268435456
    assert "load_format" not in engine  # verl's servers start with dummy weights
    assert made.header["players"]["shared"]["weights"] == weights_digest(model)


@pytest.mark.parametrize(
    "override", ["+candidates=9", "+AT_GRPO.seed=1", "+val_tasks=3", "+environment.size=5", "+mine=1"]
)
def test_a_key_that_nothing_reads_is_refused(override: str, model: str) -> None:
    with pytest.raises(ValueError, match=rf"^{override[1:].partition('=')[0].partition('.')[0]}=.* would be ignored"):
        plan("plan_path_cpu", f"actor_rollout_ref.model.path={model}", override)


def test_the_header_has_what_figures_depend_on_and_not_memory(model: str) -> None:
    headers = [
        plan("plan_path_cpu", *more, policies=[f"shared={model}"]).header
        for more in (
            (),
            (
                "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
                "trainer.experiment_name=x",
                "at_grpo.val_tasks=9",
            ),
            ("actor_rollout_ref.rollout.val_kwargs.temperature=0.5",),
            ("actor_rollout_ref.rollout.ignore_eos=true",),
            ("actor_rollout_ref.rollout.multi_turn.format=qwen3_coder",),
            ("actor_rollout_ref.model.custom_chat_template='{{ messages[0].content }}'",),
            ("+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides={rope_theta: 1}",),
        )
    ]
    assert headers[0] == headers[1]
    assert all(header != headers[0] for header in headers[2:])


def test_another_tokenizer_is_another_evaluation(model: str, tmp_path: Path) -> None:
    own = model_at(tmp_path / "own")
    path = f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.model.tokenizer_path={own}"
    headers = [plan("plan_path_cpu", path[0]).header, plan("plan_path_cpu", *path).header]
    (own / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[-1].content }}"}')
    headers.append(plan("plan_path_cpu", *path).header)
    assert headers[0] != headers[1] != headers[2] != headers[0]


def test_an_engine_without_room_for_whole_answers_is_refused(model: str) -> None:
    """It would cut answers off, and say that none was."""
    with pytest.raises(ValueError, match=r"rollout\.max_model_len=70: .* rows of up to 80 tokens"):
        plan("plan_path_cpu", "actor_rollout_ref.rollout.max_model_len=70", policies=[f"shared={model}"])


@pytest.mark.slow
def test_swaps_checkpoints_and_other_models(tmp_path: Path, model: str) -> None:
    step = checkpoint(tmp_path, "tool_user", "planner")
    own = {name: str(step / f"policies/{name}/huggingface") for name in ("tool_user", "planner")}

    def sources(**options: Any) -> dict[str, str]:
        made = plan("plan_path_cpu_roles", **options)
        return {agent: str(made.players[player].source) for agent, player in made.agents.items()}

    swap = ["tool_user=planner", "planner=tool_user"]
    assert sources(checkpoint=step, agents=swap) == {"tool_user": own["planner"], "planner": own["tool_user"]}
    assert sources(checkpoint=step, policies=[f"planner={model}"]) == {**own, "planner": model}
    assert sources(checkpoint=step, agents=["planner=big@http://h/v1"]) == {**own, "planner": "big@http://h/v1"}


def test_endpoints_need_no_engine_and_the_header_has_no_key_variable() -> None:
    made = plan(policies=["shared=big@http://h/v1#MY_KEY"])
    assert made.players["shared"].engine is None
    assert "MY_KEY" not in json.dumps(made.header)
    assert "MY_KEY" not in json.dumps(plan(agents=["planner=big@http://h/v1#MY_KEY"], policies=["shared=a/b"]).header)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ((), {"policies": ["shared=a/b"], "tasks": 0}, "--tasks 0: at least 1"),
        ((), {"policies": ["shared=a/b"], "episodes": 0}, "--episodes 0: at least 1"),
        ((), {"policies": ["shared=a/b"], "seeds": [1, 1]}, "twice"),
        ((), {"policies": ["ghost=a/b"]}, "no policy 'ghost', the recipe has shared"),
        ((), {"agents": ["ghost=a/b"]}, "no agent 'ghost', the recipe has tool_user, planner"),
        ((), {"agents": ["planner=plannr"]}, "not a source of answers"),
        (
            (),
            {"agents": ["planner=a/b", "tool_user=a/b"], "policies": ["shared=c/d"]},
            "no agent has the policy 'shared'",
        ),
        ((), {"policies": ["shared=a/b"], "checkpoint": "made"}, "--checkpoint .*global_step_2 has no effect"),
        ((), {"agents": ["planner=a/b", "tool_user=a/b"], "checkpoint": "made"}, "--checkpoint .* has no effect"),
        (("actor_rollout_ref.rollout.quantization=fp8",), {"policies": ["shared=a/b"]}, "rollout.quantization=fp8"),
        (("+actor_rollout_ref.model.lora_adapter_path=x",), {}, "lora_adapter_path=x"),
        (("at_grpo.environment.colour=red",), {}, "environment.colour"),
        (
            ("+actor_rollout_ref.rollout.val_kwarg.n=4",),
            {},
            r"rollout.val_kwarg.n=4: .*did you mean .*val_kwargs\.n\?",
        ),
        (("+data.max_respons_length=4",), {}, r"data.max_respons_length=4: .*did you mean data.max_response_length"),
        (("actor_rollout_ref.rollout.val_kwargs.do_sample=false",), {}, "val_kwargs.do_sample=false"),
    ],
)
def test_invalid_options_are_refused(
    overrides: Sequence[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "checkpoint" in options:
        options = {**options, "checkpoint": checkpoint(tmp_path, "shared")}
    with pytest.raises(ValueError, match=message):
        plan("plan_path_cpu", *overrides, **options)


def test_prompts_in_chunks_are_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with pytest.raises(ValueError, match="enable_chunked_prefill=true"):
        plan("plan_path_qwen3_1p7b")


def test_engines_that_want_too_much_memory_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    for_one = ["planner=a/b", "tool_user=a/b"]
    roomy = "actor_rollout_ref.rollout.gpu_memory_utilization=0.6"
    assert len(plan("plan_path_qwen3_1p7b", roomy, agents=for_one).players) == 2  # one model, one engine
    with pytest.raises(ValueError, match=r"gpu_memory_utilization add up to 1\.20"):
        plan("plan_path_qwen3_1p7b", roomy, agents=["planner=a/b", "tool_user=c/d"])


def test_more_tasks_than_there_are_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n' * 3)
    files = [f"at_grpo.environment.train={{path: {tmp_path}/train.jsonl, split: null}}"]
    files += [
        "~at_grpo.environment.val",
        f"+at_grpo.environment.val={{path: {tmp_path}/val.jsonl, columns: {{question: problem}}}}",
    ]
    with pytest.raises(ValueError, match="--tasks 4: the environment has 3"):
        plan("math_qwen3_1p7b", *files, tasks=4, policies=["shared=big@http://h/v1"])


@pytest.mark.parametrize(
    ("options", "overrides", "total"),
    [
        ({"tasks": 1_000_000_000}, (), "1,000,000,000"),
        ({"episodes": 1_000_000_000}, (), "200,000,000,000"),
        ({"tasks": 500, "episodes": 500, "seeds": [4, 5, 6]}, (), "750,000"),
        ({"tasks": 500_001}, (), "500,001"),
        ({}, ("at_grpo.val_tasks=10000000",), "10,000,000"),
        ({}, ("actor_rollout_ref.rollout.val_kwargs.n=1024", "at_grpo.val_tasks=500"), "512,000"),
    ],
)
def test_more_episodes_than_a_file_holds_are_refused(
    options: dict[str, Any], overrides: tuple[str, ...], total: str
) -> None:
    with pytest.raises(ValueError, match=f"--tasks .*: {total} episodes, .* at most 500,000; lower --tasks"):
        plan("plan_path_cpu", *overrides, **options, policies=["shared=big@http://h/v1"])


def test_as_many_episodes_as_a_file_holds_are_planned() -> None:
    made = plan("plan_path_cpu", tasks=250_000, seeds=[1, 2], policies=["shared=big@http://h/v1"])
    assert made.tasks * len(made.seeds) * made.episodes == 500_000


# ------------------------------------------------------------ the command


@pytest.mark.parametrize("overrides_last", [False, True])
def test_the_command_passes_its_options(monkeypatch: pytest.MonkeyPatch, overrides_last: bool) -> None:
    from verl_atgrpo import cli
    from verl_atgrpo.lab.evaluation import command
    from verl_atgrpo.lab.evaluation import plan as plans

    seen: list[Any] = []
    monkeypatch.setattr(command, "evaluate", lambda *given, **named: seen.append((*given, named)) or "figures")
    options = ["--seeds", "0", "1", "--policy", "a=x/y", "--policy", "b=m@http://h/v1", "--agent", "p=a"]
    options += ["--episodes", "4", "--k", "1", "4", "--checkpoint", "global_step_3", "--out", "o.jsonl"]
    options += ["--config-dir", "mine", "--tasks", "9"]
    overrides = ["at_grpo.val_tasks=5", "trainer.experiment_name=x"]
    arguments = [*options, *overrides] if overrides_last else [*overrides, *options]
    assert cli.main(["eval", "--config-name", "sums", *arguments]) == 0
    asked, out, named = seen[0]
    assert asked == plans.Options(
        "sums",
        overrides,
        config_dir=Path("mine"),
        episodes=4,
        tasks=9,
        seeds=[0, 1],
        policies=["a=x/y", "b=m@http://h/v1"],
        agents=["p=a"],
        checkpoint=Path("global_step_3"),
    )
    assert (str(out), named) == ("o.jsonl", {"ks": [1, 4], "in_flight": 128})


def test_figures_of_a_complete_file_need_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the whole command with an endpoint that does not exist, which gets no request."""
    pytest.importorskip("verl")
    from verl_atgrpo.lab.evaluation import command
    from verl_atgrpo.lab.evaluation import plan as plans
    from verl_atgrpo.lab.evaluation.results import AgentUsage, EpisodeRow, ResultFile

    monkeypatch.setattr(plans, "compose", lambda name, given, _: copy.deepcopy(composed(name, tuple(given))))
    options = plans.Options("plan_path_cpu", tasks=2, policies=["shared=big@http://h/v1"])
    plan = plans.make(options)
    for name, second in (("a.jsonl", False), ("b.jsonl", True), ("c.jsonl", None)):
        with ResultFile(tmp_path / name, plan.header, {"data_sets": {"easy": 1, "hard": 1}}) as results:
            for task, success in enumerate((True, second)):
                usage = {"planner": AgentUsage("shared", 1, 50, 10, 0)}
                found = "other" if success is None else _task(plan.environment, task)[2]
                results.add(EpisodeRow(task, found, 0, 0, bool(success), 1.0, {}, 1, 1, usage, None, 0.1))
    assert "avg@1                                50.0%" in command.evaluate(options, tmp_path / "a.jsonl")
    compared = command.compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert "+50.0 points" in compared and "0.0%, 100.0%: +100.0 points" in compared
    with pytest.raises(ValueError, match="pass@2 needs"):
        command.evaluate(options, tmp_path / "a.jsonl", ks=[2])
    with pytest.raises(ValueError, match=r"c\.jsonl: task 1 has changed since its episodes were played: name another"):
        command.evaluate(options, tmp_path / "c.jsonl")


def adapter(folder: Path, base: str | None, rank: int) -> str:
    """Writes an empty adapter in peft's format."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": rank}))
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return str(folder)


def test_adapters_of_one_base_are_played_by_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tmp_path / "global_step_2"
    own = {
        name: adapter(step / f"policies/{name}/lora_adapter", "a/b", rank)
        for name, rank in (("tool_user", 4), ("planner", 12))
    }
    (step / "policies.json").write_text(json.dumps({name: f"policies/{name}" for name in own}))
    made = plan("plan_path_cpu_adapters", "actor_rollout_ref.model.path=a/b", checkpoint=step)
    tool_user, planner = made.players["tool_user"], made.players["planner"]
    assert tool_user.engine == planner.engine
    assert (
        tool_user.engine.items() >= {"model": "a/b", "enable_lora": True, "max_loras": 2, "max_lora_rank": 12}.items()
    )
    assert {tool_user.adapter["lora_int_id"], planner.adapter["lora_int_id"]} == {1, 2}
    assert (tool_user.adapter["lora_path"], planner.adapter["lora_path"]) == (own["tool_user"], own["planner"])
    with pytest.raises(ValueError, match=r"was trained on a/b, and .*model\.path=c/d; set that to its base"):
        plan("plan_path_cpu_adapters", "actor_rollout_ref.model.path=c/d", checkpoint=step)
    # A base that has moved is what the recipe says.
    moved = adapter(tmp_path / "moved", "/gone/model", 4)
    given = ["plan_path_cpu_adapters", "actor_rollout_ref.model.path=c/d"]
    mixed = plan(*given, policies=[f"planner={moved}"])
    # On the CPU the base has an engine of its own: a request without an adapter comes out as another adapter's.
    assert mixed.players["tool_user"].engine != mixed.players["planner"].engine
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    mixed = plan(*given, policies=[f"planner={moved}"])
    assert mixed.players["tool_user"].engine == mixed.players["planner"].engine
    assert mixed.players["tool_user"].adapter is None


def test_an_adapter_on_the_recipes_model_is_played_by_any_of_its_names(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(model)
    bases = [None, model, "model", "link"]
    for number, base in enumerate(bases):
        given = adapter(tmp_path / f"adapter_{number}", base, 4)
        for path in (model, "model", "link"):
            made = plan("plan_path_cpu", f"actor_rollout_ref.model.path={path}", policies=[f"shared={given}"])
            assert made.players["shared"].adapter["lora_path"] == given
    with pytest.raises(ValueError, match="was trained on link, and"):
        plan("plan_path_cpu", f"actor_rollout_ref.model.path={tmp_path}", policies=[f"shared={given}"])
