"""A conformance test for environments: `check_environment("my_module:MyEnvironment")` in a test of your own.

It plays scripted episodes, so it needs neither verl nor a model. What it asks of an environment is what training takes
for granted: tasks that every process makes alike, splits that share nothing, scores that follow from the state and the
reply, and nothing to be earned but by solving (docs/environments.md says why).
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_atgrpo import environment
from verl_atgrpo.environment import Environment, Outcome, Score, Split
from verl_atgrpo.team import EpisodeRecord, ScriptedTeam, play
from verl_atgrpo.watched_team import (
    ROUNDING,
    EnvironmentContractError,
    Script,
    ScriptError,
    Trial,
    WatchedTeam,
    in_a_line,
    is_finite,
)

__all__ = ["HOSTILE", "EnvironmentContractError", "Script", "ScriptError", "Scripts", "check_environment"]

Scripts = Callable[[Any], Mapping[str, Script]]
"""Task -> the script of every agent."""
Decided = tuple[list[int], str, Score]
"""A prompt, the committed reply and its score."""
Marks = tuple[str, str]
"""A task's fingerprint and key."""
_CONTROL = "\x00\x07\x1b[31m\r\u202e\u2028\ufeff\ufffd ٣½ \U0001f9e9 Ⅷ {}%s \\n ```python\n"
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
"""What no agent should be paid for, nor any environment fall over; a team that mixes them is played as well."""


def check_environment(
    make: str | Callable[..., Environment],
    options: Mapping[str, Any] | None = None,
    *,
    gold: Scripts | None = None,
    bouncing: Sequence[Scripts] = (),
    legal: Scripts | None = None,
    plays: int = 1000,
    tasks: int = 20,
    episodes: int = 2,
    bounds: tuple[float, float] = (-1.0, 1.0),
    alpha: float = 1.0,
    floor: float = 0.2,
    max_decisions: int = 100,
) -> None:
    """Raises EnvironmentContractError if an environment breaks what training takes for granted, and ScriptError if one
    of the caller's scripts raises.

    Args:
        make: as in a recipe, a registered name or "module:Class"; or a class or function that makes the environment.
            A fresh process makes the tasks as well, if it can import this: a lambda or a local class leaves that out.
        options: what a recipe says beside the name.
        gold: task -> scripts that solve it, a good answer by every agent at every decision. Their episodes must
            succeed; at their decisions no reply of the other scripts may be worth more; and no other episode may
            have a larger sum of team parts, or a larger mean of mixed scores.
        bouncing: further scripts (task -> scripts) for that comparison, each of which tries to earn without solving.
        legal: task -> scripts that play at random, by the rules. What they lead to on training tasks must not be the
            first prompt of a validation task: then `task_key` holds something that a move changes.
        plays: so many training tasks are played by `legal`, and compared with as many validation tasks.
        tasks: so many of each split are made, and made again.
        episodes: so many of those are played, with every kind of team.
        bounds: of the team part and of the local part.
        alpha: weight of the team part in the mixed score.
        floor: the most that a hostile reply (`HOSTILE`) may earn at a decision, mixed; .2 is what the paper pays for
            the form of an answer.
        max_decisions: an episode that takes more is taken for one without end.
    """
    if bouncing and gold is None:
        raise ValueError("bouncing scripts are compared with gold ones: give gold as well")
    factory = functools.partial(environment.make, make) if isinstance(make, str) else make
    options = dict(options or {})
    env, again = factory(**options), factory(**options)
    _check_agents(env)
    known = {split: _check_tasks(env, again, split, tasks) for split in _SPLITS}
    _check_disjoint(known)
    _check_other_process(make, options, known)
    for split in _SPLITS:
        trials = [
            Trial(env, split, index, bounds, alpha, floor, max_decisions)
            for index in range(min(episodes, len(known[split])))
        ]
        outcomes = [outcome for trial in trials for outcome in _check_episodes(trial, gold, bouncing)]
        # verl averages metrics over the episodes of a split, and wants the same ones in each.
        if len(kinds := {tuple(sorted(outcome.metrics)) for outcome in outcomes}) > 1:
            raise EnvironmentContractError(f"metrics: the episodes of split {split!r} have {sorted(kinds)}")
    if legal is not None:
        _check_first_prompts(env, legal, plays)


# ---------------------------------------------------------------------- tasks


def _check_agents(env: Environment) -> None:
    agents = getattr(env, "agents", None)
    named = isinstance(agents, tuple) and all(isinstance(agent, str) and agent.isidentifier() for agent in agents)
    if not agents or not named or len(set(agents)) < len(agents):
        raise EnvironmentContractError(f"agents: {agents!r} is not a tuple of identifiers, each one once")


def _check_tasks(env: Environment, again: Environment, split: Split, tasks: int) -> list[Marks]:
    """Returns the fingerprints and keys of the first tasks, which both instances must make alike."""
    size = env.size(split)
    if size is not None and (not isinstance(size, int) or size < 1):
        raise EnvironmentContractError(f"size: split {split!r} has {size!r} tasks; None, or 1 and more")
    count = min(tasks, size or tasks)
    known: list[Marks] = []
    for index in sorted({*range(count), (size or count) - 1}):
        where = f"task: task ({split}, {index})"
        try:
            made = [
                (maker.fingerprint(task), maker.task_key(task), maker.text(task))
                for maker in (env, env, again)
                for task in [maker.task(split, index)]
            ]
        except Exception as error:
            raise EnvironmentContractError(f"{where} cannot be made: {in_a_line(error)}") from error
        fingerprint, key, text = made[0]
        if not isinstance(fingerprint, str) or not isinstance(key, str) or not isinstance(text, str | None):
            raise EnvironmentContractError(
                f"{where}: fingerprint {fingerprint!r:.80}, task_key {key!r:.80}, text {text!r:.80}: no texts"
            )
        if made != made[:1] * 3:
            raise EnvironmentContractError(f"{where} is another one when it is made again")
        known.append((fingerprint, key))
    return known[:count]


def _check_disjoint(known: Mapping[Split, Sequence[Marks]]) -> None:
    trained_on = [key for _, key in known["train"]]
    for index, (_, key) in enumerate(known["val"]):
        if key in trained_on:
            same = trained_on.index(key)
            raise EnvironmentContractError(f"splits: task (val, {index}) has the key of task (train, {same})")


def _check_first_prompts(env: Environment, legal: Scripts, plays: int) -> None:
    """Checks that random play of training tasks never comes to where a validation task starts."""

    def prompts(split: Split, scripts: Scripts, first: bool) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        for index in range(min(plays, env.size(split) or plays)):
            task = env.task(split, index)
            record = asyncio.run(play(env, task, ScriptedTeam(scripts(task), candidates=1)))
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
                f"splits: random play of task (train, {index}) asks {agent!r} the first prompt of task "
                f"(val, {starts[agent, ids]}): leave out of task_key what moves change"
            )


def _check_other_process(
    make: str | Callable[..., Environment], options: Mapping[str, Any], known: Mapping[Split, Sequence[Marks]]
) -> None:
    """Checks that a fresh process, in which strings hash otherwise, makes the same tasks."""
    factory = environment._load(make) if isinstance(make, str) else make
    module, name = getattr(factory, "__module__", "__main__"), getattr(factory, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        return
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", "from verl_atgrpo import testing; testing._tell_tasks()"],
        input=json.dumps([f"{module}:{name}", options, {split: len(marks) for split, marks in known.items()}]),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        raise EnvironmentContractError(f"task: {module}:{name} cannot make its tasks in another process: {said}")
    told = json.loads(done.stdout.splitlines()[-1])
    for split, marks in known.items():
        for index, mark in enumerate(marks):
            if mark != tuple(told[split][index]):
                raise EnvironmentContractError(f"task: task ({split}, {index}) is another one in another process")


def _tell_tasks() -> None:
    """What the other process does: answers with fingerprints and keys, on a line of their own."""
    name, options, counts = json.load(sys.stdin)
    env = environment.make(name, **options)
    tasks = {split: [env.task(split, index) for index in range(n)] for split, n in counts.items()}
    told = {split: [(env.fingerprint(task), env.task_key(task)) for task in those] for split, those in tasks.items()}
    sys.stdout.write("\n" + json.dumps(told))


# ---------------------------------------------------------------------- episodes


@dataclass(frozen=True)
class _Played:
    """An episode as the checks see it: nothing here depends on the order in which agents finished."""

    outcome: Outcome
    decisions: dict[tuple[str, int], Decided]
    """(agent, turn) -> what was decided."""

    @classmethod
    def of(cls, record: EpisodeRecord) -> _Played:
        decided = {(d.agent, d.turn): (d.prompt_ids, d.candidates[0]) for d in record.decisions}
        return cls(record.outcome, {key: (ids, reply.text, reply.score) for key, (ids, reply) in decided.items()})

    def team_parts(self) -> float:
        return sum(score.team for _, _, score in self.decisions.values())

    def mean_mixed(self, alpha: float) -> float:
        return sum(score.mixed(alpha) for _, _, score in self.decisions.values()) / max(1, len(self.decisions))


def _check_episodes(trial: Trial, gold: Scripts | None, bouncing: Sequence[Scripts]) -> list[Outcome]:
    """Plays the task with every team and returns the outcomes."""
    task = trial.env.task(trial.split, trial.index)
    teams: dict[str, Mapping[str, Script]] = {
        name: dict.fromkeys(trial.env.agents, script) for name, script in {**HOSTILE, "medley": _medley}.items()
    }
    if gold is not None:
        teams["gold"] = trial.scripts("gold", gold)
    for number, scripts in enumerate(bouncing):
        teams[f"bouncing {number}"] = trial.scripts(f"bouncing {number}", scripts)
    played: dict[str, _Played] = {}
    for name in teams:
        played[name] = _play_twice(trial, task, name, teams)
        if name in HOSTILE or name == "medley":
            _check_earns_nothing(trial, name, played[name])
    if gold is not None:
        _check_gold(trial, played)
    return [episode.outcome for episode in played.values()]


def _medley(prompt: str, k: int) -> str:
    return list(HOSTILE.values())[(k + len(prompt)) % len(HOSTILE)](prompt, k)


def _play_twice(trial: Trial, task: object, name: str, teams: Mapping[str, Mapping[str, Script]]) -> _Played:
    """Plays an episode twice at once, in one of them with probes scored at every decision: both must be alike."""
    pair = WatchedTeam(trial, name, teams[name], probes=teams), WatchedTeam(trial, name, teams[name], probes={})

    async def both() -> list[EpisodeRecord | None]:
        return await asyncio.gather(*(_play(trial, task, team) for team in pair))

    records = [record for record in asyncio.run(both()) if record is not None]
    for team in pair:
        if team.fault is not None:
            raise team.fault
    for record in records:
        _check_outcome(trial, name, record.outcome)
    probed, plain = map(_Played.of, records)
    cause = "scoring further replies, or another episode at the same time, changes"
    for (agent, turn), decided in probed.decisions.items():
        for what, ours, theirs in zip(
            ("prompt", "reply", "score"), decided, plain.decisions.get((agent, turn), (None,) * 3), strict=True
        ):
            if ours != theirs:
                raise trial.fault("side effect", name, f"{cause} the {what} of {agent!r}, turn {turn}")
    ends = [(len(e.decisions), e.outcome.success, e.outcome.team_reward) for e in (probed, plain)]
    if ends[0] != ends[1]:
        raise trial.fault("side effect", name, f"{cause} (decisions, success, team reward): {ends[0]}, {ends[1]}")
    return probed


async def _play(trial: Trial, task: object, team: WatchedTeam) -> EpisodeRecord | None:
    try:
        return await play(trial.env, task, team)
    except Exception as error:  # noqa: BLE001  (whatever a user's environment raises is what we report)
        if team.fault is None:
            team.fault = trial.fault("run", team.name, f"raises {in_a_line(error)}")
            team.fault.__cause__ = error
        return None


def _check_outcome(trial: Trial, name: str, outcome: object) -> None:
    if not isinstance(outcome, Outcome) or not isinstance(outcome.success, bool):
        raise trial.fault("outcome", name, f"{outcome!r:.80} is no Outcome whose success is a bool")
    for key, value in {**outcome.metrics, "team_reward": outcome.team_reward}.items():
        if not is_finite(value):
            raise trial.fault("outcome", name, f"{key}={value!r} is no finite number")


def _check_earns_nothing(trial: Trial, name: str, played: _Played) -> None:
    if played.outcome.success:
        raise trial.fault("floor", name, "it succeeds")
    for (agent, turn), (_, reply, score) in played.decisions.items():
        if (earned := score.mixed(trial.alpha)) > trial.floor + ROUNDING:
            what = f"{agent!r}, turn {turn}, earns {earned:g} for {reply!r:.40}, more than {trial.floor:g}"
            raise trial.fault("floor", name, what)


def _check_gold(trial: Trial, played: Mapping[str, _Played]) -> None:
    gold = played["gold"]
    if not gold.outcome.success:
        raise trial.fault("gold", "gold", f"it does not succeed: {gold.outcome}")
    for name, other in played.items():
        for what, theirs, most in (
            ("team parts add up to", other.team_parts(), gold.team_parts()),
            ("mixed scores are on average", other.mean_mixed(trial.alpha), gold.mean_mixed(trial.alpha)),
        ):
            if theirs > most + ROUNDING:
                raise trial.fault("gold", name, f"its {what} {theirs:g}, those of gold only {most:g}")
