"""Counts of servers, environment, queue and devices in a soak run, compared with the metrics of the code under test.

Rows are checked at the end of every step, so the ledger stays as small as a step.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

Row = tuple[str, Mapping[str, Any]]
"""Key and tags."""


@dataclass
class _Episode:
    """One episode in the environment and the servers."""

    scored: int = 0
    answered: int = 0
    tokens: int = 0
    """Tokens of those responses."""
    failed: str | None = None
    ended: bool = False
    errors: int = 0
    """Engine errors, which are not retried."""
    deaths: int = 0


@dataclass
class Ledger:
    """Counts independently of the code under test; `wrong` counts violations.

    An episode is known by its task, which is played once in a step, or again and again for its branches.
    """

    branched: tuple[int, int] | None = None
    """With `scheme: branch`, what an episode has that ended: samples and rows."""
    count: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    metrics: Counter[str] = field(default_factory=Counter)
    """Sums of the logged metrics over steps."""
    running: set[object] = field(default_factory=set)
    """Programs of the sandbox that have not ended."""
    _episodes: dict[int, _Episode] = field(default_factory=dict)
    _written: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    """Key -> the row's episode and tags."""
    _trained: Counter[str] = field(default_factory=Counter)

    # ------------------------------------------------------------ the environment

    def begin(self, task: int) -> int:
        """Returns the number of the task's episode."""
        if task not in self._episodes:
            self.count["episodes begun"] += 1
            self._episodes[task] = _Episode()
        else:
            self.wrong["tasks played twice in a step"] += self.branched is None
        return task

    def scored(self, episode: int) -> None:
        """Counts a scored candidate."""
        self._episodes[episode].scored += 1

    def judge(self, right: bool) -> None:
        """Counts a program of the sandbox; all succeed unless a run is lost."""
        self.count["programs"] += 1
        self.wrong["scores lost in the sandbox"] += not right

    def end(self, episode: int) -> None:
        """Records that an episode has ended."""
        self._episodes[episode].ended = True

    def fail(self, episode: int, reason: str) -> None:
        """Records that an episode has failed."""
        self._episodes[episode].failed = reason

    # ------------------------------------------------------------ the servers

    def delivered(self, episode: int, before: int, got: Any) -> None:
        """Counts what a caller received from a server: a response, an error, or nothing because it was cancelled.

        Args:
            episode: the request's episode.
            before: tokens of the response from earlier requests.
            got: the last part of the response, or the error; None after a timeout.
        """
        mine = self._episodes.get(episode)
        if mine is None:
            self.wrong["responses after their step"] += 1
        elif got is None or isinstance(got, asyncio.CancelledError):
            self.count["requests withdrawn"] += 1  # after a timeout, or because the episode had failed
        elif isinstance(got, BaseException):
            died = isinstance(got, ray.exceptions.RayActorError)
            mine.errors += not died
            mine.deaths += died
            self.count[f"requests whose server {'died' if died else 'failed'}"] += 1
        elif got.stop_reason == "aborted":
            self.count["requests interrupted" if got.token_ids else "requests interrupted before a token"] += 1
        else:
            mine.answered += 1
            mine.tokens += before + len(got.token_ids)

    # ------------------------------------------------------------ the queue and the devices

    def put(self, keys: Sequence[str], fields: Any, tags: Sequence[dict[str, Any]]) -> None:
        """Counts rows that the rollout writes."""
        from soak_job import episode_of

        for key, prompt, mine in zip(keys, fields["prompts"].unbind(), tags, strict=True):
            if mine.get("is_padding"):
                continue
            self.wrong["rows written twice"] += key in self._written
            self._written[key] = episode_of(prompt.tolist())[0], mine
            self.count["rows written"] += 1

    def train(self, policy: str, rows: Iterable[Row]) -> None:
        """Counts rows of a policy's update."""
        for key, tags in rows:
            self.wrong["rows trained that were not written"] += key not in self._written
            self.wrong["rows trained by another's policy"] += tags["policy"] != policy
            self._trained[key] += 1

    # ------------------------------------------------------------ settling

    def settle(self, metrics: Mapping[str, Any], left: int) -> None:
        """Checks a step: every row was trained once or dropped, and dropped groups had no signal.

        Args:
            metrics: the logged metrics.
            left: number of keys that are still in the queue.
        """
        self.wrong["keys left in the queue"] += left
        self.wrong["rows trained twice"] += sum(times - 1 for times in self._trained.values())
        self.count["rows trained"] += sum(self._trained.values())
        dropped = self._written.keys() - self._trained.keys()
        self.count["rows dropped"] += len(dropped)
        self._settle_groups(dropped)
        self._settle_episodes()
        for name, value in metrics.items():
            if name.startswith("rollout/") or name in (
                "team/episodes",
                "team/tasks",
                "team/rows_dropped",
                "training/rollout_failure/evicted_samples",
            ):
                self.metrics[name] += round(float(value))
        for policy in {tags["policy"] for _, tags in self._written.values()}:
            self.metrics["policy/rows"] += round(float(metrics[f"policy/{policy}/rows"]))
        self._episodes.clear()
        self._written.clear()
        self._trained.clear()

    def _settle_groups(self, dropped: Iterable[str]) -> None:
        rewards: dict[str, set[float]] = defaultdict(set)
        for _, tags in self._written.values():
            rewards[tags["group"]].add(tags["reward"])
        lost = sum(len(rewards[self._written[key][1]["group"]]) > 1 for key in dropped)
        self.wrong["rows lost: neither trained nor without signal"] += lost

    def _settle_episodes(self) -> None:
        rows = Counter(episode for episode, _ in self._written.values())
        tokens: Counter[int] = Counter()
        for number, tags in self._written.values():
            tokens[number] += tags["response_len"]
        for number, episode in self._episodes.items():
            # The episode itself may have ended, and one of its branches have failed.
            ended = episode.ended if self.branched is None else rows[number] > 0
            which = "ended" if ended else "failed"
            self.count[f"episodes {which}"] += 1
            self.count[f"responses of episodes that {which}"] += episode.answered
            self.count[f"tokens of episodes that {which}"] += episode.tokens
            if ended:
                self.wrong["responses without a score"] += abs(episode.answered - episode.scored)
                self.wrong["engine errors without a failed episode"] += episode.errors
                if self.branched is None:
                    self.wrong["candidates without a row"] += episode.scored - rows[number]
                    self.wrong["tokens lost on the way into rows"] += abs(episode.tokens - tokens[number])
                else:
                    samples, trained = self.branched
                    self.wrong["samples of branches, more or fewer"] += abs(episode.answered - samples)
                    self.wrong["rows of branches, more or fewer"] += abs(rows[number] - trained)
                continue
            self.wrong["rows of failed episodes"] += rows[number]
            if self.branched is None:
                self.count[f"failed/{episode.failed}"] += 1
                # A timeout needs no fault: on a slow machine it may occur before the request is sent.
                faults = {"engine": episode.errors + episode.deaths, "timeout": 1}
                self.wrong["failures without a fault"] += not faults.get(episode.failed or "", 0)
        self.wrong["rows of no episode"] += sum(
            count for number, count in rows.items() if number not in self._episodes
        )

    def totals(self, candidates: int) -> list[tuple[str, int, int]]:
        """Returns (name, logged count, own count)."""
        here, product = self.count, self.metrics
        found = {name.removeprefix("rollout/") for name in (*here, *product)}
        reasons = sorted(name for name in found if name.startswith("failed/"))
        if self.branched is None:
            failed = [(f"  {reason}", product[f"rollout/{reason}"], here[reason]) for reason in reasons]
            sampled = [("candidates", product["rollout/candidates"], here["decisions"] * candidates)]
        else:  # the environment does not see why, as many candidates are sampled outside `run`
            of_faults = sum(product[f"rollout/failed/{reason}"] for reason in ("engine", "timeout"))
            failed, sampled = [("  engine, timeout", of_faults, here["episodes failed"])], []
        return [
            ("episodes", product["team/episodes"], here["episodes ended"]),
            ("episodes failed", product["rollout/episodes_failed"], here["episodes failed"]),
            *failed,
            ("tasks replaced", product["training/rollout_failure/evicted_samples"], here["episodes failed"]),
            ("tasks", product["team/tasks"], here["episodes begun"] - here["episodes failed"]),
            *sampled,
            ("rows trained", product["policy/rows"], here["rows trained"]),
            ("rows dropped", product["team/rows_dropped"], here["rows dropped"]),
            ("rows", here["rows written"], here["rows trained"] + here["rows dropped"]),
        ]

    def bounds(self, requests: int, candidates: int) -> list[tuple[str, int, int, int]]:
        """Returns (name, minimum, logged count, maximum); inexact because a response may arrive as its episode fails.

        Args:
            requests: requests that servers received.
            candidates: candidates per decision.
        """
        here, product = self.count, self.metrics
        ended = here["tokens of episodes that ended"]
        again = product["rollout/requests_retried"] + product["rollout/requests_resumed"]
        sent = product["rollout/candidates"] + again + here["requests interrupted before a token"]
        # In flight at once: two agents' candidates, or a continuation of every sample.
        in_flight = 2 * candidates if self.branched is None else self.branched[0]
        of_failed = in_flight * here["episodes failed"]
        resumed, interrupted = product["rollout/requests_resumed"], here["requests interrupted"]
        # A request that times out during a pause is sent again without being counted as a retry.
        least = requests - here["requests withdrawn"]
        answered = here["responses of episodes that ended"]
        most = answered + here["responses of episodes that failed"] + of_failed
        return [
            ("candidates", answered, product["rollout/candidates"], most),
            ("tokens", ended, product["rollout/tokens"], ended + here["tokens of episodes that failed"]),
            ("responses resumed", interrupted - of_failed, resumed, interrupted),
            ("requests", least, sent, requests + of_failed),
        ]
