"""What pages show works as it stands: environments, workflows, recipes, estimators."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import random
import re
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from verl_atgrpo import ScriptedTeam, check_environment, platform_choice, play
from verl_atgrpo.lab.tiny_models.demonstrations import demonstrator_of
from verl_atgrpo.play import registry
from verl_atgrpo.play.curriculum import Curriculum
from verl_atgrpo.recipes import compose
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.job_rules import of_agents, of_assignments
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.section import parse_section, read_section
from verl_atgrpo.train.config.view import View
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.estimators.spec import EstimatorSpec

DOCS = Path(__file__).parents[2] / "docs"


def block(language: str, number: int = 0) -> str:
    return blocks("environments", language)[number]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", (DOCS / f"{page}.md").read_text())


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the documentation's files, from which modules are imported."""
    (tmp_path / "sums.py").write_text(block("python"))
    (tmp_path / "test_sums.py").write_text(block("python", 1))
    (tmp_path / "sums.yaml").write_text(block("yaml"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sums", raising=False)
    return tmp_path


def test_the_documented_environment_is_short_and_keeps_the_contract(documented: Path) -> None:
    assert len(block("python").splitlines()) <= 42
    importlib.import_module("test_sums").test_sums()


def test_the_environment_of_the_readme_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```$", (DOCS.parent / "README.md").read_text())
    (tmp_path / "first.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "first", raising=False)

    def gold(task: tuple[int, int]) -> dict[str, object]:
        return dict.fromkeys(("drafter", "decider"), lambda prompt, k: str(sum(task)))

    sevens = [lambda task: dict.fromkeys(gold(task), lambda prompt, k: "7")]
    check_environment("first:Sums", gold=gold, exploits=sevens)


def test_the_documented_demonstrations_are_of_the_documented_prompts(
    documented: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (documented / "shown_sums.py").write_text(blocks("cpu", "python")[0])
    monkeypatch.delitem(sys.modules, "shown_sums", raising=False)
    (command,) = [line for line in "".join(blocks("cpu", "sh")).splitlines() if "shown_sums" in line]
    shown = demonstrator_of(shlex.split(command, comments=True)[-1])
    env = shown.make_environment()
    rng = random.Random(0)
    demonstrations = [shown.demonstrate(env, rng, 0.0) for _ in range(50)]
    answers = {one.prompt[0]["content"].partition("Draft")[0].strip(): "".join(one.answer) for one in demonstrations}
    asked: set[str] = set()

    def answer(prompt: str, k: int) -> str:
        asked.add(prompt.partition("Draft")[0].strip())
        return "?"

    for index in range(20):
        scripts = dict.fromkeys(env.agents, answer)
        asyncio.run(play(env, env.task("train", index), ScriptedTeam(scripts)))
    form = re.compile(r"([0-9]+)\+([0-9]+)=\? Not:")
    for question, said in answers.items():
        found = form.fullmatch(question)
        assert found and sum(map(int, found.groups())) == int(said)
    assert any(form.fullmatch(question) for question in asked), "these are the environment's prompts"
    assert all(len(one.answer) < shown.response_length for one in demonstrations)


def test_the_documented_recipe_would_start(documented: Path) -> None:
    pytest.importorskip("verl")

    config = compose("sums", folder=documented)
    check_run(config)
    assert config.at_grpo.environment.name == "sums:Sums"
    (documented / "on_a_gpu.yaml").write_text(block("yaml", 1))
    config = compose("on_a_gpu", folder=documented)
    check_run(config)
    assert (config.trainer.device, config.trainer.default_local_dir) == ("cuda", "checkpoints/verl-atgrpo/sums")


def test_the_documented_data_sets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    pytest.importorskip("math_verify")
    pandas = pytest.importorskip("pandas")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "own.yaml").write_text(block("yaml", 4))
    train = [{"statement": f"Add {number} and 1.", "solution": f"#### {number + 1}"} for number in range(128)]
    pandas.DataFrame(train).to_json("mine/train.jsonl", orient="records", lines=True)
    pandas.DataFrame([{"problem": "Take 1 from 3.", "answer": "2"}]).to_parquet("mine/val.parquet")
    job = check_run(compose("own", folder=tmp_path))
    assert job is not None
    environment = job.env
    assert (environment.num_tasks("train"), environment.num_tasks("val")) == (128, 1)
    assert environment.task("train", 1).answer == "2"


def test_the_documented_workflows_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(blocks("workflows", "python")) == 7
    (tmp_path / "workflows_of_the_docs.py").write_text("\n".join(blocks("workflows", "python")))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("workflows_of_the_docs")  # the assertions are in the blocks
    for name in ("Loop", "Debate", "Router", "Judged", "Refined", "Parts"):
        # A partial is made in this process alone, which saves five starts of Python. A checker who always says no may
        # be right: floor is 1.
        check_environment(functools.partial(getattr(module, name)), tasks=1, episodes=1, floor=1.0)


@pytest.mark.parametrize(("page", "number"), [("configuration", 0), ("migrating", 0)])
def test_a_documented_recipe_is_accepted(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    from fakes.jobs import check_policies

    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)  # the memory of GPUs is shared out
    (tmp_path / "mine.yaml").write_text(blocks(page, "yaml")[number])
    config = compose("mine", folder=tmp_path)
    job = Job(View(config), read_section(config))
    # The class will do: its options may name data that are not here.
    job.env = registry.load(job.name)  # type: ignore[assignment]
    check(of_assignments(job))
    check_policies(job)


def test_the_documented_mixture_is_accepted(tmp_path: Path) -> None:
    pytest.importorskip("verl")

    # Its agents are not those of the recipe below it.
    (tmp_path / "mine.yaml").write_text("defaults: [walk_smollm2, _self_]\n" + block("yaml", 2))
    job = check_run(compose("mine", ["~at_grpo.agents.all", "+at_grpo.agents.all=shared"], folder=tmp_path))
    assert job is not None
    assert job.agents == {
        "walk.navigator": "shared",
        "walk.pacer": "counter",
        "hard.navigator": "shared",
        "hard.checker": "shared",
    }


def test_the_documented_curriculum_is_accepted(tmp_path: Path) -> None:
    pytest.importorskip("verl")

    (tmp_path / "mine.yaml").write_text(
        "defaults: [at_grpo_trainer, hardware: cpu, model: tiny, _self_]\n" + block("yaml", 3)
    )
    job = check_run(compose("mine", folder=tmp_path))
    assert job is not None
    made = job.env
    assert isinstance(made, Curriculum)
    assert [made.task("train", index).level for index in range(4)] == [0, 1, 2, 0]


def test_the_documented_overrides_for_a_running_cluster_leave_ray_no_sizes() -> None:
    pytest.importorskip("verl")

    shown = next(text for text in blocks("cluster", "sh") if "plan_path_cpu" in text)
    overrides = [word for word in shown.split() if re.match(r"[a-z_.]+=", word)]
    ray_init = compose("plan_path_cpu", overrides).ray_kwargs.ray_init
    assert [ray_init[key] for key in ("num_cpus", "num_gpus", "object_store_memory")] == [None] * 3


def test_the_documented_branching_of_a_refining_team_is_accepted() -> None:
    pytest.importorskip("verl")

    shown = blocks("workflows", "sh")[0]
    words = shlex.split(shown.replace("\\\n", ""))
    config = compose(words[3].partition("=")[2], words[4:])
    settings = read_section(config)
    made = registry.load(settings.environment["name"])
    assert settings.branch is not None and set(settings.branch.at) == set(made.agents)  # type: ignore[arg-type]
    options = set(settings.environment) - {"name"}
    assert options <= set(inspect.signature(made).parameters)


def test_the_documented_agent_uses_its_tool_and_the_documented_team_is_short(tmp_path: Path) -> None:
    served, tools = blocks("frameworks", "python")
    (tmp_path / "tools_page.py").write_text(tools)
    runpy.run_path(str(tmp_path / "tools_page.py"))
    assert len([line for line in served.partition("class")[2].splitlines() if line.strip()]) <= 12


def test_every_preset_and_every_field_of_estimators_is_documented() -> None:
    def first_cells(heading: str) -> set[str]:
        section = (DOCS / "estimators.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        return {name for row in re.findall(r"(?m)^\| (`[^|]*) \|", section) for name in re.findall(r"`(\w+)`", row)}

    assert first_cells("Presets") == set(PRESETS)
    assert first_cells("Fields") == {field.name for field in fields(EstimatorSpec)} - {"name", "parts"}


def test_the_documented_formula_is_the_side_of_the_mean(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from verl_atgrpo.train.estimators.advantages import group_advantages

    (text,) = blocks("estimators", "python")
    (tmp_path / "sign.py").write_text(text)
    spec = runpy.run_path(str(tmp_path / "sign.py"))["SIGN"]
    # Two groups, of which one has a single answer.
    signs = group_advantages(torch.tensor([9.0, 1.0, 3.0, 2.0, 6.0]), torch.tensor([3, 5, 5, 5, 5]), spec)
    assert signs.tolist() == [0.0, -1.0, 0.0, -1.0, 1.0]


@pytest.mark.parametrize("example", blocks("estimators", "yaml"))
def test_the_documented_estimators_are_accepted(example: str) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    from fakes.jobs import asked

    section = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(example))["at_grpo"]
    settings = parse_section({"environment": {"name": "plan_path"}, **section})
    asked(of_agents, settings)
