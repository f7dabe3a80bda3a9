"""`check_environment`: a contract test for users' environments."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_atgrpo.play import registry
from verl_atgrpo.play.decision import Ask, ScoreFunction
from verl_atgrpo.play.environment import Environment, play
from verl_atgrpo.play.environment_check import check_declared
from verl_atgrpo.play.messages import as_messages
from verl_atgrpo.play.scripted import ScriptedPolicy, ScriptedTeam
from verl_atgrpo.play.types import (
    Candidate,
    EnvironmentConfigError,
    EpisodeRecord,
    Generation,
    Outcome,
    OutcomeError,
    ReplyLimits,
    Score,
    Split,
)
from verl_atgrpo.play.user_code import contained

__all__ = ["HOSTILE", "EnvironmentContractError", "Script", "ScriptError", "Scripts", "check_environment"]

Script = Callable[[str, int], str]
"""(prompt text, index of the call for this prompt) -> reply. A pure function: it is also called out of order."""
Scripts = Callable[[Any], Mapping[str, Script]]
"""Task -> agent -> script."""
ROUNDING = 1e-9
"""Tolerance of sums of scores."""


class EnvironmentContractError(AssertionError):
    """An environment breaks the contract. The message is one line: the check, the task and what happened."""


class ScriptError(ValueError):
    """A script passed to the check raises, is missing, or returns no text; the environment is not at fault."""


Marks = tuple[str, str]
"""A task's fingerprint and key."""
_Prompts = dict[str, tuple[int, ...]]
"""An episode's decisions -> their prompts, as token ids."""
_CONTROL = "\x00\x07\x1b[31m\r\u202e\u2028\ufeff\ufffd ٣½ \U0001f9e9 Ⅷ {}%s \\n ```python\n"
_SCHEMES = {"tree", "parallel", "branch", "own"}
_SPLITS: tuple[Split, ...] = ("train", "val")

HOSTILE: dict[str, Script] = {
    "empty": lambda prompt, k: "",
    "garbage": lambda prompt, k: "the quick brown fox; 0 1 -1 1e999 nan [](){} None",
    "huge": lambda prompt, k: "0 1 " * 25_000,
    "control characters": lambda prompt, k: _CONTROL,
    "echo": lambda prompt, k: prompt,
    "echo in other case": lambda prompt, k: prompt.swapcase(),
    "last line's echo": lambda prompt, k: prompt.rstrip().rpartition("\n")[2],
}
"""Replies that must earn nearly nothing and must not raise; a team that mixes them is played as well."""


def check_environment(
    make: str | Callable[..., Environment],
    options: Mapping[str, Any] | None = None,
    *,
    gold: Scripts | None = None,
    exploits: Sequence[Scripts] = (),
    legal: Scripts | None = None,
    plays: int = 1000,
    tasks: int = 20,
    episodes: int = 2,
    bounds: tuple[float, float] = (-1.0, 1.0),
    alpha: float = 1.0,
    floor: float = 0.2,
    max_decisions: int = 100,
) -> None:
    """Checks an environment against the contract that training relies on.

    Args:
        make: a registered name or "module:Class" as in a recipe, or a class or function that makes the environment.
            Its tasks and prompts are also made in a fresh process if that can import it, which it cannot with a lambda
            or a local class.
        options: the environment's options, as in a recipe.
        gold: task -> scripts with a good answer of every agent at every decision. Their episodes must succeed; at
            their decisions no reply of another script may score more; and no other episode may have a larger sum of
            team parts, or a larger mean of mixed scores.
        exploits: further scripts (task -> scripts) for these comparisons, which try to score without solving the task.
        legal: task -> scripts that play at random, by the rules. No prompt that they reach on a training task may be
            the first prompt of a validation task; otherwise `task_key` includes something that moves change.
        plays: number of training tasks that `legal` plays, and of validation tasks for this comparison.
        tasks: number of tasks of each split that are made, several times.
        episodes: number of these tasks of each split that are played, by every team.
        bounds: of the team part and of the local part.
        alpha: weight of the team part in the mixed score.
        floor: largest mixed score of a hostile reply (`HOSTILE`); the paper pays .2 for the format of an answer.
        max_decisions: an episode with more decisions counts as endless.

    Raises:
        EnvironmentContractError: the environment breaks the contract.
        ScriptError: one of the caller's scripts raises, is missing, or returns no text.
    """
    if exploits and gold is None:
        raise ValueError("exploits are compared with gold scripts: give gold as well")
    factory = functools.partial(registry.make, make) if isinstance(make, str) else make
    options = dict(options or {})
    env, again = factory(**options), factory(**options)
    _check_agents(env)
    known = {split: _check_tasks(env, again, split, tasks) for split in _SPLITS}
    _check_disjoint(known)
    for split in _SPLITS:
        trials = [
            Trial(env, split, index, bounds, alpha, floor, max_decisions)
            for index in range(min(episodes, len(known[split])))
        ]
        names = [data_set for data_set, number in env.data_sets(split).items() for _ in range(number)]
        kinds: dict[str, set[tuple[str, ...]]] = {}
        for trial in trials:
            of = kinds.setdefault(names[trial.index] if trial.index < len(names) else split, set())
            of |= {tuple(sorted(outcome.metrics)) for outcome in _check_episodes(trial, gold, exploits)}
        # Validation averages metrics over the episodes of a data set, which must all have the same ones.
        for where, found in kinds.items() if split == "val" else ():
            if len(found) > 1:
                raise EnvironmentContractError(f"metrics: the episodes of {where!r} have {sorted(found)}")
    played = {split: _prompts(env, split, min(episodes, len(marks))) for split, marks in known.items()}
    _check_other_process(make, options, known, played)
    if legal is not None:
        _check_first_prompts(env, legal, plays)


# ---------------------------------------------------------------------- tasks


def _check_agents(env: Environment) -> None:
    try:
        check_declared(env, type(env).__name__)
    except EnvironmentConfigError as error:
        raise EnvironmentContractError(f"declared: {error}") from error
    for agent, schemes in env.schemes.items():
        if agent not in env.agents or not isinstance(schemes, tuple) or not {*schemes} <= _SCHEMES:
            raise EnvironmentContractError(
                f"schemes: {agent!r} -> {schemes!r} is not an agent and a tuple of {', '.join(sorted(_SCHEMES))}"
            )


def _check_tasks(env: Environment, again: Environment, split: Split, tasks: int) -> list[Marks]:
    """Returns the fingerprints and keys of the first tasks; both instances must make the same tasks."""
    size = env.num_tasks(split)
    if size == 0:
        raise EnvironmentContractError(f"num_tasks: split {split!r} has {size!r} tasks; None, or 1 and more")
    count = min(tasks, size or tasks)
    known: list[Marks] = []
    for index in sorted({*range(count), (size or count) - 1}):
        where = f"task: task ({split}, {index})"
        try:
            made = [
                (maker.fingerprint(task), maker.task_key(task), maker.dedup_text(task))
                for maker in (env, env, again)
                for task in [maker.task(split, index)]
            ]
        except Exception as error:
            raise EnvironmentContractError(f"{where} cannot be made: {in_a_line(error)}") from error
        fingerprint, key, text = made[0]
        if not isinstance(fingerprint, str) or not isinstance(key, str) or not isinstance(text, str | None):
            raise EnvironmentContractError(
                f"{where}: fingerprint {fingerprint!r:.80}, task_key {key!r:.80}, text {text!r:.80}: not all are texts"
            )
        if made != made[:1] * 3:
            raise EnvironmentContractError(f"{where} differs when it is made again")
        known.append((fingerprint, key))
    return known[:count]


def _check_disjoint(known: Mapping[Split, Sequence[Marks]]) -> None:
    for place, what in ((1, "key"), (0, "fingerprint")):
        trained_on = [marks[place] for marks in known["train"]]
        for index, marks in enumerate(known["val"]):
            if marks[place] in trained_on:
                same = trained_on.index(marks[place])
                raise EnvironmentContractError(f"splits: task (val, {index}) has the {what} of task (train, {same})")


def _check_first_prompts(env: Environment, legal: Scripts, plays: int) -> None:
    """Checks that random play of training tasks never reaches the start of a validation task."""

    def prompts(split: Split, scripts: Scripts, first: bool) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        for index in range(min(plays, env.num_tasks(split) or plays)):
            task = env.task(split, index)
            record = _run(play(env, task, ScriptedTeam(scripts(task), candidates=1)))
            for decision in record.decisions:
                if decision.turn == 0 or not first:
                    yield index, decision.agent, tuple(decision.prompt_ids)

    starts = {
        (agent, ids): index
        for index, agent, ids in prompts("val", lambda task: dict.fromkeys(env.agents, lambda prompt, k: "?"), True)
    }
    for index, agent, ids in prompts("train", legal, False):
        if (agent, ids) in starts:
            raise EnvironmentContractError(
                f"splits: random play of task (train, {index}) gives {agent!r} the first prompt of task "
                f"(val, {starts[agent, ids]}): leave out of task_key what moves change"
            )


def _check_other_process(
    make: str | Callable[..., Environment],
    options: Mapping[str, Any],
    known: Mapping[Split, Sequence[Marks]],
    prompts: Mapping[Split, Sequence[_Prompts]],
) -> None:
    """Checks that a fresh process with another PYTHONHASHSEED makes the same tasks and prompts.

    Raises ValueError for options that cannot be given to it.
    """
    factory = registry.load(make) if isinstance(make, str) else make
    module, name = getattr(factory, "__module__", "__main__"), getattr(factory, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        return
    counts = {split: (len(marks), len(prompts[split])) for split, marks in known.items()}
    try:
        asked = pickle.dumps((module, name, options, counts))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"options {options!r:.200} cannot be given to another process: {error}") from error
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made"
        done = subprocess.run(
            [sys.executable, "-c", "from verl_atgrpo.play import testing; testing._make_again()", file],
            input=asked,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if done.returncode:
            error_line = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise EnvironmentContractError(
                f"task: {module}:{name} cannot make its tasks in another process: {error_line}"
            )
        if not file.exists():  # it cannot import the module
            return
        marks_there, prompts_there = pickle.loads(file.read_bytes())
    for split, marks in known.items():
        for index, mark in enumerate(marks):
            if mark != marks_there[split][index]:
                raise EnvironmentContractError(f"task: task ({split}, {index}) differs in another process")
        for index, own in enumerate(prompts[split]):
            if own != prompts_there[split][index]:
                raise EnvironmentContractError(
                    f"prompt: task ({split}, {index}) has other prompts in another process; the order of a set of "
                    "texts differs between processes"
                )


def _make_again() -> None:
    """Runs in the fresh process: writes the tasks' marks and prompts, or nothing if it cannot import the module."""
    module, name, options, counts = pickle.load(sys.stdin.buffer)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return  # the tests' own, say, which pytest found by its path
        raise
    env = registry.make(f"{module}:{name}", **options)
    tasks = {split: [env.task(split, index) for index in range(n)] for split, (n, _) in counts.items()}
    marks = {split: [(env.fingerprint(task), env.task_key(task)) for task in made] for split, made in tasks.items()}
    prompts = {split: _prompts(env, split, n) for split, (_, n) in counts.items()}
    Path(sys.argv[1]).write_bytes(pickle.dumps((marks, prompts)))


def _run(episode: Coroutine[Any, Any, Any]) -> Any:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(episode)
    with ThreadPoolExecutor(1) as thread:  # a notebook's cell is in a loop, which plays no other
        return thread.submit(asyncio.run, episode).result()


def _prompts(env: Environment, split: Split, tasks: int) -> list[_Prompts]:
    """Returns the prompts of an episode of each of the first tasks, in which every reply is a question mark."""
    found = []
    for index in range(tasks):
        team = ScriptedTeam(dict.fromkeys(env.agents, lambda prompt, k: "?"), scheme="evaluate")
        record = _run(play(env, env.task(split, index), team))
        found.append({decision.name: tuple(decision.prompt_ids) for decision in record.decisions})
    return found


# ---------------------------------------------------------------------- episodes


@dataclass(frozen=True)
class Trial:
    """A task to be played, and the caller's limits."""

    env: Environment
    split: Split
    index: int
    bounds: tuple[float, float]
    """Of the team part and of the local part."""
    alpha: float
    floor: float
    """Largest mixed score of a hostile reply."""
    max_decisions: int

    def fault(self, check: str, team: str, what: str) -> EnvironmentContractError:
        """Returns an error with the check, the task, the team and what happened."""
        return EnvironmentContractError(f"{check}: task ({self.split}, {self.index}), {team} team: {what}")

    def scripts(self, team: str, make: Callable[[Any], Mapping[str, Script]]) -> dict[str, Script]:
        """Returns the scripts that `make` gives a team of this name, whose exceptions become ScriptErrors."""
        where = f"script: task ({self.split}, {self.index}), {team} team"
        task = self.env.task(self.split, self.index)
        try:
            made = dict(make(task))
        except Exception as error:
            raise ScriptError(f"{where}: the function that makes its scripts raises {in_a_line(error)}") from error
        if missing := [agent for agent in self.env.agents if agent not in made]:
            raise ScriptError(f"{where}: no script for {', '.join(map(repr, missing))}")

        def reply_of(agent: str, prompt: str, k: int) -> str:
            try:
                reply = made[agent](prompt, k)
            except Exception as error:
                raise ScriptError(f"{where}: the script of {agent!r} raises {in_a_line(error)}") from error
            if not isinstance(reply, str):
                raise ScriptError(f"{where}: the script of {agent!r} returns {reply!r:.80}, not a text")
            return reply

        return {agent: functools.partial(reply_of, agent) for agent in self.env.agents}


class WatchedTeam(ScriptedTeam):
    """A scripted team that checks prompts and scores, and has the replies of the `probes` scored as well."""

    def __init__(
        self, trial: Trial, name: str, scripts: Mapping[str, Script], probes: Mapping[str, Mapping[str, Script]]
    ) -> None:
        super().__init__(scripts, alpha=trial.alpha)
        self.policies.update({agent: _EndingPolicy(script) for agent, script in scripts.items()})
        self.trial, self.name, self.probes = trial, name, probes
        self.requested = self.probed = 0
        self.unfinished: list[str] = []
        """Agents of decisions that were begun."""
        self.cut: list[str] = []
        """Those of the decisions that had not ended when the episode did."""
        self._order = asyncio.Lock()
        self.fault: EnvironmentContractError | ScriptError | None = None
        """The first error, kept because an environment may catch what a decision raises."""

    async def close(self) -> None:
        self.cut = list(self.unfinished)
        await super().close()

    @property
    def left_over(self) -> list[str]:
        """Without the decisions of scores of probes, which belong to no candidate."""
        return [name for name in super().left_over if not name.startswith("probe.")]

    async def _decide(self, agent: str, ask: Ask) -> Candidate:
        prompt = ask.prompt
        self.unfinished.append(agent)
        try:
            if self.fault is not None:
                raise self.fault
            self.requested += not self._scope().name.startswith("probe.")
            if self.requested > self.trial.max_decisions:
                raise self.trial.fault("end", self.name, f"none after {self.trial.max_decisions} decisions")
            if not is_prompt(prompt):
                raise self.trial.fault("prompt", self.name, f"{agent!r} gets {prompt!r:.80}, not a text or a chat")
            scored = functools.partial(self._checked, agent, ask)
            checked = replace(ask, score=scored, score_all=None)
            if self._scope().name:
                # A decision of a score, which is within the decision that has the lock.
                return await super()._decide(agent, checked)
            # One at a time, in the order of requests: concurrent decisions of one agent are numbered in that order.
            async with self._order:
                await self._probe(agent, ask, scored)
                return await super()._decide(agent, checked)
        except (EnvironmentContractError, ScriptError) as fault:
            self.fault = self.fault or fault
            raise
        finally:
            self.unfinished.remove(agent)

    async def settle(self, reply: Candidate, score: ScoreFunction) -> Candidate:
        own = (one.agent for one in self.decisions if any(candidate is reply for candidate in one.candidates))
        return await super().settle(reply, functools.partial(self._checked, next(own, "settle"), Ask("", score)))

    async def _probe(self, agent: str, ask: Ask, score: Callable[[Any], Awaitable[Score]]) -> None:
        policy, messages = self.policies[agent], as_messages(ask.prompt)
        text = "".join(map(chr, self._tokens(agent, messages, ask.tools)))
        replies = {name: scripts[agent](text, policy.calls[text]) for name, scripts in self.probes.items()}

        async def worth_of(reply: str) -> Score:
            answer = Generation([], [], reply)
            parsed = await policy.parse(answer, ask.tools) if ask.tools else answer.parts[1]
            return await self._apart(score(parsed))

        earned = {name: await worth_of(reply) for name, reply in replies.items()}
        for name, reply in reversed(replies.items()):
            if (again := await worth_of(reply)) != earned[name]:
                what = f"{agent!r} earns {earned[name]} for {reply!r:.40}, and {again} when it is scored again"
                raise self.trial.fault("side effect", self.name, what)
        if self.name == "gold" and self.probes:
            worth = {name: earned[name].mixed(self.trial.alpha) for name in earned}
            best = max(worth, key=lambda name: worth[name])
            if worth[best] > worth["gold"] + ROUNDING:
                what = f"{agent!r} earns {worth['gold']:g}; the {best} team's {replies[best]!r:.40}, {worth[best]:g}"
                raise self.trial.fault("gold", self.name, what)

    async def _apart(self, score: Awaitable[Score]) -> Score:
        """Scores a probe. Decisions that its score makes leave no trace in the episode or in the scripts' counts."""
        before = {agent: Counter(policy.calls) for agent, policy in self.policies.items()}
        self.probed += 1

        async def scored() -> Score:
            self._enter(f"probe.{self.probed}/")
            return await score

        earned = await asyncio.create_task(scored())
        for agent, policy in self.policies.items():
            policy.calls = before[agent]
        return earned

    async def _checked(self, agent: str, ask: Ask, reply: Any) -> Score:
        low, high = self.trial.bounds
        made: Any = Score()
        with contained(f"agent {agent!r}: the score"):
            if ask.score_all is not None:
                made = ask.score_all([reply])
            elif ask.score is not None:
                made = ask.score(reply)
            made = await made if inspect.isawaitable(made) else made
        together = ask.score_all is not None and isinstance(made, Sequence) and len(made) == 1
        scored: Score = made[0] if together else made
        parts = (scored.team, scored.local) if isinstance(scored, Score) else (math.nan,)
        if not all(math.isfinite(part) and low - ROUNDING <= part <= high + ROUNDING for part in parts):
            what = f"{agent!r} gets {scored!r:.80} for {reply!r:.40}, not a Score inside [{low:g}, {high:g}]"
            raise self.trial.fault("score", self.name, what)
        return scored


class _EndingPolicy(ScriptedPolicy):
    """Returns one token for every answer: a model ends even an empty answer with one, so that it is no failure."""

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: ReplyLimits | None = None
    ) -> Generation:
        prompt = "".join(map(chr, prompt_ids))
        self.calls[prompt] += 1
        return Generation([0], [0.0], self.script(prompt, self.calls[prompt] - 1))


def in_a_line(error: BaseException) -> str:
    """Returns an error's class and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def is_prompt(prompt: object) -> bool:
    """Returns whether `prompt` is a text or a list of chat messages."""

    def is_message(message: object) -> bool:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return False
        content = message.get("content")
        parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
        return isinstance(content, str) or parts or (content is None and bool(message.get("tool_calls")))

    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return isinstance(prompt, str)
    return len(prompt) > 0 and all(map(is_message, prompt))


def _decided(record: EpisodeRecord) -> dict[str, tuple[list[int], str, Score]]:
    """Returns decisions without the order in which agents finished: name -> prompt ids, committed reply and score."""
    committed = {one.name: (one.prompt_ids, one.candidates[0]) for one in record.decisions}
    return {name: (ids, reply.text, reply.score) for name, (ids, reply) in committed.items()}


def _check_episodes(trial: Trial, gold: Scripts | None, exploits: Sequence[Scripts]) -> list[Outcome]:
    """Plays the task with every team; returns the outcomes."""
    task = trial.env.task(trial.split, trial.index)
    teams: dict[str, Mapping[str, Script]] = {
        name: dict.fromkeys(trial.env.agents, script) for name, script in {**HOSTILE, "medley": _medley}.items()
    }
    if gold is not None:
        teams["gold"] = trial.scripts("gold", gold)
    for number, scripts in enumerate(exploits):
        teams[f"exploits {number}"] = trial.scripts(f"exploits {number}", scripts)
    played: dict[str, EpisodeRecord] = {}
    for name in teams:
        played[name] = _play_twice(trial, task, name, teams)
        if not played[name].decisions:
            raise trial.fault("decisions", name, "run makes none, and a training ends at such an episode")
        if name in HOSTILE or name == "medley":
            _check_earns_nothing(trial, name, played[name])
    if gold is not None:
        _check_gold(trial, played)
    return [episode.outcome for episode in played.values()]


def _medley(prompt: str, k: int) -> str:
    return list(HOSTILE.values())[(k + len(prompt)) % len(HOSTILE)](prompt, k)


def _play_twice(trial: Trial, task: object, name: str, teams: Mapping[str, Mapping[str, Script]]) -> EpisodeRecord:
    """Plays two equal episodes concurrently, one with probes scored at every decision; both must be the same.

    Each has a task of its own, as episodes have in training.
    """
    pair = WatchedTeam(trial, name, teams[name], probes=teams), WatchedTeam(trial, name, teams[name], probes={})

    async def both() -> list[EpisodeRecord | None]:
        again = trial.env.task(trial.split, trial.index)
        return await asyncio.gather(*map(functools.partial(_play, trial), (task, again), pair))

    records: list[EpisodeRecord] = [record for record in _run(both()) if record is not None]
    for team in pair:
        if team.fault is not None:
            raise team.fault
    probed, plain = records
    cause = "making the task again, scoring further replies, or another episode at the same time, changes"
    others = _decided(plain)
    for decision, decided in _decided(probed).items():
        for what, ours, theirs in zip(
            ("prompt", "reply", "score"), decided, others.get(decision, (None,) * 3), strict=True
        ):
            if ours != theirs:
                raise trial.fault("side effect", name, f"{cause} the {what} of the decision {decision!r}")
    ends = [(len(e.decisions), e.outcome.success, e.outcome.team_reward) for e in (probed, plain)]
    if ends[0] != ends[1]:
        raise trial.fault("side effect", name, f"{cause} (decisions, success, team reward): {ends[0]}, {ends[1]}")
    return probed


async def _play(trial: Trial, task: object, team: WatchedTeam) -> EpisodeRecord | None:
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            record = await play(trial.env, task, team)
        for one in warned:
            if (text := str(one.message)).endswith("was never awaited"):
                raise trial.fault("await", team.name, f"{text}: write await before it")
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if team.cut:
            what = f"run ended before a decision of {team.cut[0]!r} that it had begun, which is lost: await it"
            raise trial.fault("await", team.name, what)
        return record
    except OutcomeError as error:
        team.fault = trial.fault("outcome", team.name, str(error))
        return None
    except EnvironmentContractError as fault:
        team.fault = team.fault or fault
        return None
    except Exception as error:  # noqa: BLE001  (reports any exception of a user's environment)
        if team.fault is None:
            team.fault = trial.fault("run", team.name, f"raises {in_a_line(error)}")
            team.fault.__cause__ = error
        return None


def _check_earns_nothing(trial: Trial, name: str, played: EpisodeRecord) -> None:
    if played.outcome.success:
        raise trial.fault("floor", name, "it succeeds")
    for decision, (_, reply, score) in _decided(played).items():
        if (earned := score.mixed(trial.alpha)) > trial.floor + ROUNDING:
            what = f"the decision {decision!r} earns {earned:g} for {reply!r:.40}, more than {trial.floor:g}"
            raise trial.fault("floor", name, what)


def _check_gold(trial: Trial, played: Mapping[str, EpisodeRecord]) -> None:
    gold = played["gold"]
    if not gold.outcome.success:
        raise trial.fault("gold", "gold", f"it does not succeed: {gold.outcome}")

    def worth(record: EpisodeRecord) -> dict[str, float]:
        scores = [score for _, _, score in _decided(record).values()]
        mixed = sum(score.mixed(trial.alpha) for score in scores) / max(1, len(scores))
        return {"team parts add up to": sum(score.team for score in scores), "mixed scores are on average": mixed}

    most = worth(gold)
    for name, other in played.items():
        for what, theirs in worth(other).items():
            if theirs > most[what] + ROUNDING:
                raise trial.fault("gold", name, f"its {what} {theirs:g}, those of gold only {most[what]:g}")
