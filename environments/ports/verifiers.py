"""Environments of the package verifiers (https://github.com/PrimeIntellect-ai/verifiers), played by its own runner.

The seats of such an environment are our agents: the model of a seat is the endpoint of the agent of its name. The
rewards of a finished episode are the outcome, the reward of each run the score of its decisions.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any
from weakref import WeakKeyDictionary

from annotated_types import Gt, Le

from verl_atgrpo import Environment, EnvironmentConfigError, Outcome, Score, Split, Team, stable_hash
from verl_atgrpo.environments.common.options import Turns, check_installed, option_error, with_options
from verl_atgrpo.environments.common.splits import split_of
from verl_atgrpo.environments.ports.foreign import FAULTS, line
from verl_atgrpo.kinds import Finite
from verl_atgrpo.play.types import EpisodeFailed

if TYPE_CHECKING:
    from verl_atgrpo.environments.ports.verifiers_seats import Names

_MODEL = "policy"
"""What requests call the model; each agent's endpoint knows its own."""
_MOST_COMPLETIONS = 1_000_000
"""Of an agent in an episode: its runs have `max_turns` each, and how many there are is the environment's program."""
_NAMES = {"idx", "id", "name", "description"}
"""Fields of a task's data that do not change the problem."""
_KINDS = 32
"""Episodes of tasks of several kinds, after which a metric that none has recorded is taken for a typo."""
_BARREN = 100_000
"""Tasks of a stream without one of the split after which the stream counts as unsuitable."""


@dataclass
class _Serving:
    """What the episodes of one event loop share of an environment: tool servers, the interception of model calls."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    env: Any = None
    """Its own copy: an environment of verifiers has only one set of them."""
    users: int = 0
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


@with_options
class VerifiersEnvironment(Environment):
    """An environment of verifiers 0.4 with its taskset, harnesses, tools and rewards.

    Refused is one that cannot be made, has no tasks for a split, samples by itself, or would execute what a model
    writes on this machine.
    """

    config: Mapping[str, Any] | None = None
    """verifiers' own `[env]` block: `taskset` with its id, the environment's `id`, a section for each seat."""
    train: Mapping[str, Any] | None = None
    """`taskset`, what differs there from that of `config`, and `select` (verifiers' `SelectConfig`); null for both
    splits: one in eight tasks is for validation."""
    val: Mapping[str, Any] | None = None
    """The same for validation."""
    reward_of: str | None = None
    """The seat whose reward is the episode's; null: the mean over all trained seats."""
    success_reward: Finite = 1.0
    """Least reward of a success."""
    metrics: Sequence[str] | None = None
    """Metrics of the environment to report."""
    max_turns: Turns = 64
    """Most turns of a seat, unless its section says otherwise."""
    timeout: Annotated[float, Gt(0), Le(1_000_000)] = 3600.0
    """Seconds of an episode."""

    def __post_init__(self) -> None:
        check_installed("verifiers", "verifiers", "verifiers")
        config, train, val, reward_of = self.config, self.train, self.val, self.reward_of
        if (train is None) != (val is None):
            raise option_error(f"train={train!r:.80}, val={val!r:.80}: give both, or neither to split one taskset")
        where = f"config={config!r:.200}"
        self._read: dict[Split, _Tasks] = {}
        given: dict[Split, Mapping[str, Any] | None] = {"train": train, "val": val}
        try:
            import verifiers.v1 as vf

            self._raw = _with_defaults(vf, config or {}, self.max_turns)
            self._env = vf.load_environment(vf.resolve_env_config(copy.deepcopy(self._raw)))
            seats = {name: value for name, value in self._env.config if isinstance(value, vf.AgentConfig)}
            self.agents = tuple(  # type: ignore[misc]  # depend on the options
                name for name, spec in seats.items() if spec.client is None
            )
            _check_seats(vf, self._env.config, seats, self.agents)
            self._fixed = self._untrained(vf)
            for split, section in given.items():
                where = where if section is None else f"{split}={section!r:.200}"
                self._read[split] = self._tasks_of(vf, split, section)
            self._common = self._common_words()
        except (*FAULTS, ImportError, OSError) as error:
            if isinstance(error, EnvironmentConfigError):
                raise
            raise option_error(f"{where}: cannot be made, {line(error)}") from error
        self.schemes = dict.fromkeys(self.agents, ("parallel", "branch", "own"))  # type: ignore[misc]
        if reward_of is not None and reward_of not in seats:
            raise option_error(f"reward_of={reward_of!r} is no seat here: use one of {', '.join(seats)}")
        if own := {"turns", *(f"reward_{name}" for name in self.agents)} & {*(self.metrics or ())}:
            raise option_error(f"metrics: {min(own)!r} is reported anyway, by this name; remove it")
        self._recorded: set[str] = set()
        self._measured = 0
        self._serving: WeakKeyDictionary[asyncio.AbstractEventLoop, _Serving] = WeakKeyDictionary()

    def _untrained(self, vf: Any) -> tuple[str, ...]:
        """Returns our agents that the environment never trains, such as a simulated user."""
        made = vf.Agents(
            self._env.config, lambda name, spec: vf.make_agent(spec.model_copy(update={"model": spec.model or _MODEL}))
        )
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
            thread.submit(asyncio.run, self._env.setup(made)).result()
        return tuple(name for name in self.agents if not getattr(made, name).trainable)

    # ------------------------------------------------------------------ tasks

    def _tasks_of(self, vf: Any, split: Split, given: Mapping[str, Any] | None) -> _Tasks:
        if unknown := {*(given or {})} - {"taskset", "select"}:
            raise option_error(f"{split}.{min(unknown)} is unknown: it takes taskset and select")
        own = given or {}
        merged = {**self._raw, "taskset": {**self._raw.get("taskset", {}), **own.get("taskset", {})}}
        taskset = vf.load_taskset(vf.resolve_env_config(copy.deepcopy(merged)).taskset)
        selected = taskset.select(vf.SelectConfig.model_validate(copy.deepcopy(dict(own.get("select", {})))))
        tasks = _Tasks(selected, split if given is None else None)
        if not tasks.has(0):
            remedy = "; give train and val, each with its tasks" if given is None else ""
            raise option_error(f"{split}: the taskset has no task for this split{remedy}")
        return tasks

    def _common_words(self) -> tuple[int, int] | None:
        """Returns with how many words all prompts begin and end; None if a taskset is infinite."""
        if any(tasks.size is None for tasks in self._read.values()):
            return None
        words = [task.data.prompt_text.split() for tasks in self._read.values() for task in tasks.made]
        return _equal(words), _equal([one[::-1] for one in words])

    def task(self, split: Split, index: int) -> Any:
        """Returns task `index` of `split`, a task of verifiers."""
        tasks = self._read[split]
        if not tasks.has(index):
            raise option_error(f"{split}: the taskset has no task {index} of this split")
        return tasks.made[index]

    def num_tasks(self, split: Split) -> int | None:
        """Returns the number of tasks, or None if the taskset is infinite."""
        return self._read[split].size

    def fingerprint(self, task: Any) -> str:
        """Returns a hash of the task's data without its index and names."""
        return _fingerprint(task)

    def dedup_text(self, task: Any) -> str | None:
        """Returns the prompt without the words with which all begin and end; None if a taskset is infinite."""
        if self._common is None:
            return None
        words = task.data.prompt_text.split()
        return " ".join(words[self._common[0] : len(words) - self._common[1]])

    def opponents(self, task: Any) -> Sequence[str]:
        """Returns the seats that the environment never trains."""
        return self._fixed

    # ------------------------------------------------------------------ episodes

    async def run(self, task: Any, team: Team) -> Outcome:
        """Plays an episode by verifiers' runner; success is a reward of at least `success_reward`.

        Raises EpisodeFailed, named after the error's class, if the runner reports an error: it gives no reward then.
        """
        import verifiers.v1 as vf

        from verl_atgrpo.environments.ports import verifiers_seats

        names: Names = {}
        async with self._served() as env:
            served = team.serve(agents=self.agents, max_turns=_MOST_COMPLETIONS, timeout=self.timeout)
            async with served as urls:
                playing = copy.copy(env)

                async def setup(agents: Any) -> None:
                    await env.setup(agents)
                    for name, url in urls.items():
                        verifiers_seats.take(getattr(agents, name), url, names)

                playing.setup = setup
                client = vf.EvalClientConfig(base_url="http://127.0.0.1:9", api_key_var="VERL_ATGRPO_UNUSED")
                episode = await playing.run_episode(task, vf.ModelContext(model=_MODEL, client=client))
                if not env.complete(episode):
                    raise _failed(episode)  # within `serve`, which knows whether a limit was the cause
        for one in episode.traces:
            if not math.isfinite(one.reward):
                raise EpisodeFailed("not_finite", f"verifiers: the reward of {one.agent.name!r} is {one.reward}")
        await _settle(team, episode, names)
        return self._outcome(episode)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        """Returns the environment, with its servers up while an episode of this event loop needs them."""
        serving = self._serving.setdefault(asyncio.get_running_loop(), _Serving())
        async with serving.lock:
            if not serving.users:
                serving.env = copy.copy(self._env)
                await serving.stack.enter_async_context(serving.env.serving())
            serving.users += 1
        try:
            yield serving.env
        finally:
            async with serving.lock:
                serving.users -= 1
                if not serving.users:
                    await serving.stack.aclose()

    def _outcome(self, episode: Any) -> Outcome:
        runs = [one for one in episode.traces if one.agent.name in self.agents and one.agent.trainable]
        if self.reward_of is not None:
            runs = episode.by_agent.get(self.reward_of, [])
        reward = _mean(one.reward for one in runs)
        metrics = {
            f"reward_{name}": _mean(one.reward for one in episode.by_agent.get(name, [])) for name in self.agents
        }
        metrics["turns"] = float(episode.num_turns)
        self._recorded.update(*(one.metrics for one in episode.traces))
        self._measured += episode.ok  # what fails is not measured
        for name in self.metrics or ():
            if name not in self._recorded and self._measured >= _KINDS:
                known = ", ".join(sorted(self._recorded)) or "none"
                raise option_error(f"metrics: no run records {name!r}; recorded are {known}")
            metrics[name] = _mean(one.metrics[name] for one in episode.traces if one.metrics.get(name) is not None)
        return Outcome(reward >= self.success_reward, reward, metrics)


class _Tasks:
    """The tasks of a split, read as far as they were asked for."""

    def __init__(self, taskset: Any, split: Split | None) -> None:
        """Reads a finite taskset whole; `split` is None if all of its tasks are of one split."""
        self._rest: Iterator[Any] = iter(taskset)
        self._split = split
        self.made: list[Any] = []
        self.size: int | None = None
        if taskset.bounded:
            self.made += filter(self._belongs, self._rest)
            self.size = len(self.made)

    def _belongs(self, task: Any) -> bool:
        return self._split is None or split_of(_fingerprint(task)) == self._split

    def has(self, index: int) -> bool:
        """Returns whether there is a task `index`, and reads up to it."""
        while len(self.made) <= index and self.size is None:
            found = next(filter(self._belongs, islice(self._rest, _BARREN)), None)
            if found is None:
                break
            self.made.append(found)
        return index < len(self.made)


def _equal(texts: Sequence[list[str]]) -> int:
    """Returns how many words are equal from the start, in all of several texts."""
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))


def _fingerprint(task: Any) -> str:
    data = task.data.model_dump(mode="json", exclude_none=True, exclude=_NAMES)
    return f"{stable_hash(json.dumps(data, sort_keys=True)):016x}"


def _with_defaults(vf: Any, config: Mapping[str, Any], max_turns: int) -> dict[str, Any]:
    """Returns a configuration in which seats have a harness and a runtime that train, where it and theirs say none.

    By default verifiers plays a seat with a shell in a sandbox of its company's.
    """
    raw = copy.deepcopy(dict(config))
    taskset = str(dict(raw.get("taskset", {})).get("id", ""))
    for name, own in vf.env_config_type(taskset, str(raw.get("id", ""))).model_fields.items():
        if not isinstance(default := own.default, vf.AgentConfig):
            continue
        given: dict[str, Any] = {"runtime": {"type": "subprocess"}}
        if vf.default_harness_id(taskset) == "bash":  # the taskset brings none
            given["harness"] = {"id": "null"}
        if default.max_turns is None:
            given["max_turns"] = max_turns
        given = {key: value for key, value in given.items() if key not in default.model_fields_set}
        raw[name] = {**given, **dict(raw.get(name, {}))}
    return raw


def _check_seats(vf: Any, config: Any, seats: Mapping[str, Any], ours: Sequence[str]) -> None:
    """Raises EnvironmentConfigError for what would be ignored, sample otherwise than the recipe, or run code here."""
    from verifiers.v1.runtimes import runtime_is_local

    if not ours:
        raise option_error("config: all seats have a client of their own; remove one to train it")
    for where, retries in [("", config.retries), *((f".{name}", seats[name].retries) for name in ours)]:
        if retries.max_retries or retries.rules:
            raise option_error(
                f"config{where}.retries: remove it; a failed episode is replaced by one of another task"
            )
    for name, spec in seats.items():
        where = f"config.{name}"
        if name in ours and spec.model is not None:
            raise option_error(
                f"{where}.model={spec.model!r}: at_grpo.agents says which policy answers; remove it, or add a client"
            )
        sampling = {} if spec.sampling is None else spec.sampling.model_dump(exclude_unset=True)
        if name in ours and (sampled := sorted({*sampling} - {"max_tokens"})):
            raise option_error(f"{where}.sampling.{sampled[0]}: at_grpo.sampling says how it samples; remove it")
        if not runtime_is_local(spec.runtime):
            raise option_error(
                f"{where}.runtime.type={spec.runtime.type!r} is elsewhere and cannot reach our endpoints: use "
                "subprocess, docker, podman or apptainer"
            )
        harness = vf.load_harness(config.agent_harnesses()[name])
        if harness.EXECUTES_CODE and isinstance(spec.runtime, vf.SubprocessConfig):
            raise option_error(
                f"{where}.harness.id={harness.config.id!r} executes what the model writes, on this machine: give it a "
                "runtime of type docker, podman or apptainer, or the harness null"
            )


def _failed(episode: Any) -> EpisodeFailed:
    """Returns the failure of an episode for which verifiers has no valid result."""
    errors = [*(error for one in episode.traces if not one.ok for error in one.errors), *episode.errors]
    if not errors:
        return EpisodeFailed("incomplete", "verifiers: the environment says that the episode is no valid result")
    return EpisodeFailed(errors[0].type.lower(), f"verifiers: {errors[0].type}: {errors[0].message}"[:1000])


async def _settle(team: Team, episode: Any, names: Names) -> None:
    """Scores the decisions of each run by the run's own reward."""
    made = {decision.name: decision.candidates[decision.committed] for decision in team.decisions}
    for run in episode.traces:
        score = Score(local=run.reward)
        for name in names.get(run.id, ()):
            await team.settle(made[name], lambda reply, score=score: score)  # type: ignore[misc]


def _mean(values: Iterator[float]) -> float:
    """Returns the mean, exactly the value of a single one; 0 of none."""
    found = list(values)
    return statistics.fmean(found) if found else 0.0
