"""verifiers: its environments play as ours, with the rewards of its own runner; tasks, failures, refused options."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

# Where scripts/install_cpu_stack.sh puts what has other pins than the rest.
PORTS = Path(sys.prefix) / "ports"
sys.path += [str(PORTS)] if str(PORTS) not in sys.path else []
pytest.importorskip("verifiers", reason="verifiers is not installed (extra `verifiers`)")

from aiohttp import web
from fakes.scripted_episodes import here, prompt_of

from verl_atgrpo import EnvironmentConfigError, EpisodeFailed, Score, ScriptedTeam, check_environment, make, play
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.contamination import overlaps
from verl_atgrpo.play.types import EpisodeRecord, PlayMode

PLUGINS = Path(__file__).parents[1] / "fakes" / "verifiers_plugins"
SUMS: dict[str, Any] = {"taskset": {"id": "vf-sums"}}
SHIPPED = {
    "single_agent": (SUMS, ["{answer}"]),
    "best_of_n": ({**SUMS, "id": "best-of-n", "n": 3}, ["3", "{answer}", "x"]),
    "user_sim": ({**SUMS, "id": "user-sim"}, ["Add them!", "About 207.", "Exactly?", "207", "###DONE###"]),
    "of a user": ({**SUMS, "id": "vf-pair"}, ["199", "{answer}"]),
}
"""Name -> the configuration of an environment, and the replies in the order of its requests."""


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers finds tasksets and environments by the names of modules; its tool servers are processes."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [PLUGINS, *sys.path])))


def played(env: Any, task: Any, replies: Sequence[str]) -> EpisodeRecord:
    """Plays an episode with replies in the order of the requests, whoever makes them."""
    said = iter(replies)
    scripts = dict.fromkeys(env.agents, lambda prompt, k: next(said))
    return asyncio.run(play(env, task, ScriptedTeam(scripts, scheme="parallel")))


def by_their_runner(
    env: Any, task: Any, replies: Sequence[str], folder: Path, patch: pytest.MonkeyPatch
) -> tuple[Any, list[str]]:
    """Returns the episode of verifiers' own runner with its own programs, and the prompts that the server got.

    Its programs need uv, which installs what is installed here.
    """
    import verifiers.v1 as vf
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    async def without_uv(runtime: Any, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
        (folder / "program.py").write_text(script)
        return [sys.executable, str(folder / "program.py")]

    patch.setattr(SubprocessRuntime, "prepare_uv_script", without_uv)
    said, prompts = iter(replies), []

    async def complete(request: web.Request) -> web.Response:
        asked = await request.json()
        prompts.append("\n".join(str(message["content"]) for message in asked["messages"]))
        delta = {"role": "assistant", "content": next(said)}
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        events = [{"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"}]
        body = [json.dumps({**chunk, "choices": [{"index": 0, **event}]}) for event in events]
        return web.Response(
            text="".join(f"data: {one}\n\n" for one in [*body, "[DONE]"]), content_type="text/event-stream"
        )

    async def episode() -> Any:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY")
        async with env.serving():
            done = await env.run_slot(env.slots(task)[0], vf.ModelContext(model="m", client=client))
        await runner.cleanup()
        return done

    return asyncio.run(episode()), prompts


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_rewards_and_prompts_are_those_of_their_runner(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, replies = SHIPPED[name]
    env = make("verifiers", config=config)
    task = env.task("train", 3)
    said = [reply.format(answer=task.data.answer) for reply in replies]
    record = played(env, task, said)
    theirs, prompts = by_their_runner(env._env, task, said, tmp_path, monkeypatch)
    assert theirs.ok, theirs.errors or [trace.errors for trace in theirs.traces]
    assert [prompt_of(decision) for decision in record.decisions] == prompts
    trained = [trace for trace in theirs.traces if trace.agent.trainable]
    assert record.outcome.team_reward == sum(trace.reward for trace in trained) / len(trained)
    assert record.outcome.success == (record.outcome.team_reward >= 1)
    earned = {(decision.agent, decision.candidates[0].score.local) for decision in record.decisions}
    assert earned == {(trace.agent.name, trace.reward) for trace in theirs.traces}


def test_single_agent_keeps_the_contract_and_its_splits_are_disjoint() -> None:
    options = {"config": SUMS}
    check_environment(
        here("verifiers"), options, gold=lambda task: {"agent": lambda prompt, k: str(task.data.answer)}, episodes=1
    )
    env = make("verifiers", **options)
    assert env.agents == ("agent",) and env.schemes == {"agent": ("parallel", "branch", "own")}
    sizes = [env.num_tasks(split) for split in ("train", "val")]
    assert sum(sizes) == 40 and min(sizes) > 0
    assert not list(overlaps(env, *sizes))
    number = env.task("train", 0).data.answer // 2
    assert env.dedup_text(env.task("train", 0)) == f"{number} + {number}"


def test_splits_of_their_own_are_searched_for_the_same_problem() -> None:
    def parts(first: int) -> Any:
        val = {"taskset": {"first": first}, "select": {"limit": 5}}
        return make("verifiers", config=SUMS, train={"taskset": {"size": 30}}, val=val)

    assert [parts(130).num_tasks(split) for split in ("train", "val")] == [30, 5]
    assert not list(overlaps(parts(130), 30, 5))
    assert make("verifiers", config=SUMS, train={}, val={"taskset": {"first": 200}}).num_tasks("train") == 40
    assert [str(one) for one in overlaps(parts(128), 30, 5)][:1] == [
        "validation task 0 has the key of training task 28"
    ]


def test_an_infinite_taskset_is_read_as_far_as_asked() -> None:
    env = make("verifiers", config={"taskset": {"id": "vf-sums", "size": None}})
    assert env.num_tasks("train") is None and env.dedup_text(env.task("train", 0)) is None
    again = make("verifiers", config={"taskset": {"id": "vf-sums", "size": None}})
    assert again.fingerprint(again.task("val", 7)) == env.fingerprint(env.task("val", 7))


def test_every_attempt_earns_its_own_reward_and_a_simulated_user_is_not_trained() -> None:
    best = make("verifiers", config=SHIPPED["best_of_n"][0], metrics=["pass_at_n", "length"])
    task = best.task("train", 0)
    record = played(best, task, ["xx", str(task.data.answer), "no"])
    assert [decision.candidates[0].score for decision in record.decisions] == [Score(), Score(local=1), Score()]
    assert record.outcome.metrics == {
        "reward_agent": 1 / 3,
        "turns": 3,
        "pass_at_n": 1,
        "length": pytest.approx(7 / 3),
    }
    typed = make("verifiers", config=SHIPPED["best_of_n"][0], metrics=["lenght"])
    assert played(typed, task, ["1"] * 3).outcome.metrics["lenght"] == 0, "tasks of another kind may have it"
    with pytest.raises(EnvironmentConfigError, match=r"metrics: no run records 'lenght'; recorded are best.*, length"):
        for _ in range(31):
            played(typed, task, ["1"] * 3)
    talk = make("verifiers", config=SHIPPED["user_sim"][0])
    assert (talk.agents, talk.opponents(task)) == (("assistant", "user"), ("user",))
    pair = make("verifiers", config=SHIPPED["of a user"][0], reward_of="decider")
    assert played(pair, task, ["0", str(task.data.answer)]).outcome.success


def test_episodes_at_once_do_not_mix() -> None:
    env = make("verifiers", config={**SUMS, "id": "best-of-n", "n": 2, "max_concurrent_agents": 2})

    async def at_once() -> list[EpisodeRecord]:
        def team(answer: int) -> ScriptedTeam:
            return ScriptedTeam({"agent": lambda prompt, k: str(answer - k)}, scheme="parallel")

        tasks = [env.task("train", index) for index in range(4)]
        return await asyncio.gather(*(play(env, task, team(task.data.answer)) for task in tasks))

    for record in asyncio.run(at_once()):
        assert sorted(decision.candidates[0].score.local for decision in record.decisions) == [0.15, 1.0]


def test_event_loops_do_not_end_each_other_s_servers() -> None:
    env: Any = make("verifiers", config=SUMS)
    task = env.task("train", 0)

    async def around_another_loop() -> EpisodeRecord:
        async with env._served():
            await asyncio.to_thread(played, env, task, ["1"])
            return await play(env, task, ScriptedTeam({"agent": lambda prompt, k: "x"}, scheme="parallel"))

    assert asyncio.run(around_another_loop()).outcome.team_reward == 0


def test_a_branch_is_worth_its_outcome() -> None:
    from verl_atgrpo.play.scripted import ScriptedPolicy
    from verl_atgrpo.play.team import Team
    from verl_atgrpo.play.types import TeamOptions
    from verl_atgrpo.train.config.schema import BranchSettings

    env = make("verifiers", config=SHIPPED["of a user"][0], reward_of="decider")
    task = env.task("train", 0)
    drafts = iter([str(task.data.answer), "0"])
    scripts = {"drafter": lambda prompt, k: next(drafts), "decider": lambda prompt, k: prompt.rpartition("Draft: ")[2]}
    policies = {name: ScriptedPolicy(script) for name, script in scripts.items()}

    def made(mode: PlayMode) -> Team:
        return Team(policies, TeamOptions(candidates=2), mode)

    record = asyncio.run(play_branched(env, task, made, BranchSettings(at={"drafter": 0}), 0))
    assert [one.reward > 0.9 for one in record.decisions[0].candidates] == [True, False]


@pytest.mark.slow
def test_tools_are_called_until_the_turns_are_over() -> None:
    env = make("verifiers", config={"taskset": {"id": "vf-shop"}, "agent": {"max_turns": 2}})
    task = env.task("train", 0)
    thing = task.data.prompt.split()[-1].rstrip("?")
    call = json.dumps({"name": "shop_price", "arguments": {"thing": thing}})
    record = played(env, task, [f"<tool_call>{call}</tool_call>", str(task.data.price)])
    assert "tools: shop_price" in prompt_of(record.decisions[0])
    assert record.outcome.team_reward == 0.5 and record.outcome.metrics["turns"] == 2
    record = played(env, task, [f"<tool_call>{call}</tool_call>"] * 2)
    assert record.outcome.team_reward == 0 and len(record.decisions) == 2


@pytest.mark.slow
def test_their_text_game_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("textarena")
    words = ["apple", "table", "chair", "house", "plane", "water", "light"]
    of_words, of_tags = tmp_path / "corpora/words", tmp_path / "taggers/averaged_perceptron_tagger_eng"
    of_words.mkdir(parents=True)
    of_tags.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (of_words / name).write_text("\n".join(words))
    for name, content in {"weights": {}, "tagdict": dict.fromkeys(words, "NN"), "classes": ["NN"]}.items():
        (of_tags / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *names, **options: True)
    env = make("verifiers", config={"taskset": {"id": "textarena", "game": "Wordle-v0"}}, max_turns=7)
    record = played(env, env.task("train", 0), [f"[{word}]" for word in words])
    assert env.agents == ("player",) and len(record.decisions) > 1 and 0 <= record.outcome.team_reward <= 1


def test_the_documented_taskset_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    page = (Path(__file__).parents[2] / "docs" / "environments_of_others.md").read_text().partition("## verifiers")[2]
    python, recipe = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "yaml"))
    (tmp_path / "letters_v1.py").write_text(python)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = yaml.safe_load(recipe)["at_grpo"]["environment"]
    env = make(options.pop("name"), **options)
    task = env.task("train", 0)
    assert [played(env, task, [reply]).outcome.success for reply in (2 * task.data.letter, "?")] == [True, False]
    best = make("verifiers", config={**options["config"], "id": "best-of-n", "n": 4}, metrics=["pass_at_n"])
    assert played(best, task, ["1", task.data.letter, "2", "3"]).outcome.metrics["pass_at_n"] == 1


def test_what_a_reward_raises_or_is_and_what_a_decision_raises_fail_the_episode() -> None:
    env = make("verifiers", config=SUMS)
    task = env.task("train", 0)
    with pytest.raises(EpisodeFailed, match=r"TaskError.*no number") as failed:
        played(env, task, ["raise"])
    assert failed.value.reason == "taskerror"
    for reply in ("nan", "inf"):
        with pytest.raises(EpisodeFailed, match=f"the reward of 'agent' is {reply}") as failed:
            played(env, task, [reply])
        assert failed.value.reason == "not_finite"

    def fails(prompt: str, k: int) -> str:
        raise EpisodeFailed("engine", "it died")

    with pytest.raises(EpisodeFailed, match="it died"):
        asyncio.run(play(env, task, ScriptedTeam({"agent": fails}, scheme="parallel")))


@pytest.mark.parametrize(
    ("scheme", "refused"),
    [
        (["parallel", "at_grpo.episode_reward=own"], None),
        (["branch", "+at_grpo.branch={}"], None),
        (["tree"], "scheme=tree has no reward for 'agent' of 'verifiers': set it to parallel or branch, or"),
    ],
)
def test_a_recipe_needs_a_scheme_that_rewards_by_the_end(compose: Any, scheme: list[str], refused: str | None) -> None:
    from verl_atgrpo.train.config import ConfigError
    from verl_atgrpo.train.config.run_check import check_run

    game = ["~at_grpo.environment", "+at_grpo.environment={name: verifiers, config: {taskset: {id: vf-sums}}}"]
    sizes = ["at_grpo.train_tasks=32", "at_grpo.val_tasks=4", "data.val_batch_size=4"]
    with nullcontext() if refused is None else pytest.raises(ConfigError, match=refused):
        check_run(compose("plan_path_cpu", *game, *sizes, f"at_grpo.scheme={scheme[0]}", *scheme[1:]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "config=.*cannot be made, .*taskset"),
        ({"config": {"taskset": {"id": "no-such"}}}, "ModuleNotFoundError.*no-such"),
        ({"config": {**SUMS, "solver": {}}}, "cannot be made, ValidationError.*solver"),
        ({"config": SUMS, "train": {}}, r"train=\{\}, val=None: give both"),
        ({"config": SUMS, "train": {"split": "a"}, "val": {}}, "train.split is unknown: it takes taskset and select"),
        (
            {"config": SUMS, "train": {}, "val": {"select": {"skip": 99}}},
            "val: the taskset has no task for this split$",
        ),
        ({"config": {"taskset": {"id": "vf-sums", "size": 1}}}, "no task for this split; give train and val"),
        ({"config": SUMS, "train": {}, "val": {"select": {"limit": "x"}}}, r"val=\{'select.*cannot be made, Valid"),
        ({"config": SUMS, "train": {"taskset": {"frist": 1}}, "val": {}}, r"train=\{'taskset.*cannot be made, Valid"),
        ({"config": SUMS, "metrics": ["length", "turns"]}, "metrics: 'turns' is reported anyway"),
        ({"config": SUMS, "metrics": ["reward_agent"]}, "metrics: 'reward_agent' is reported anyway"),
        ({"config": SUMS, "reward_of": "judge"}, "reward_of='judge' is no seat here: use one of agent"),
        ({"config": {**SUMS, "retries": {"max_retries": 1}}}, "config.retries: remove it"),
        ({"config": {**SUMS, "agent": {"retries": {"max_retries": 1}}}}, "config.agent.retries: remove it"),
        ({"config": {**SUMS, "agent": {"model": "gpt"}}}, "agent.model='gpt': at_grpo.agents says"),
        (
            {"config": {**SUMS, "agent": {"sampling": {"temperature": 1}}}},
            "sampling.temperature: at_grpo.sampling says",
        ),
        ({"config": {**SUMS, "agent": {"runtime": {"type": "prime"}}}}, "runtime.type='prime' is elsewhere"),
        ({"config": {**SUMS, "agent": {"harness": {"id": "bash"}}}}, "'bash' executes what the model writes"),
        ({"config": {**SUMS, "agent": {"client": {"type": "eval"}}}}, "all seats have a client of their own"),
    ],
)
def test_options_are_refused_with_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message) as caught:
        make("verifiers", **options)
    assert str(caught.value).startswith("at_grpo.environment.") and "\n" not in str(caught.value)
