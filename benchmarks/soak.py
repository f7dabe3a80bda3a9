"""Soak test: a long training on simulated servers and devices with injected faults.

Trainer, replay buffer, updates, rollout worker, clients, sandbox and records run as in training, in one process, on
simulated servers (soak_job.py). Engines raise, requests hang, a replica of each policy dies, and sandbox processes are
killed. Every row must be trained once or dropped for lack of signal; the counts of servers, environment, queue and
devices must agree with the metrics; and processes, files, memory, tasks and leases must not leak.

python benchmarks/soak.py [--steps 2000] [--minutes 60] [--seed 0] [--branches]

Status 1 if a line says FAIL.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before the imports: verl's modules read them
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")  # hundreds of episodes fail on purpose

import script
from fakes.local_queue import LocalQueue
from fakes.simulated_cluster import Faults, LocalActor, SimulatedServer, event_loop, local_processes
from soak_job import (
    POLICIES,
    WORKERS,
    Letters,
    SoakGame,
    SoakManager,
    SoakTrainer,
    SoakWorker,
    answer,
    client_of,
    job_config,
)
from soak_ledger import Ledger
from waiting import HANG

from verl_atgrpo.sandbox.pool import POOL
from verl_atgrpo.train.serving.client import TeamClient

REPLICAS, CANDIDATES = 3, 4
BRANCHED = 4 + 3 * (4 + 3 + 2 + 1), 4 * CANDIDATES
"""Samples and rows of an episode that branches at its 4 decisions: its own, 3 others at each, and their ends."""
GROWTH = 1.05
"""Memory at the end over memory after the warm-up, at most."""


@dataclass(frozen=True)
class Use:
    """The process's resources."""

    megabytes: float
    processes: int
    """Child processes, without the sandbox's interpreter, which stays."""
    files: int
    """Open files."""
    temporary: int
    records_kb: int
    tasks: int
    """Of the event loop."""
    requests: int
    """Requests in flight in the servers, including dead ones."""
    leases: int
    """Servers acquired according to the clients and balancers."""


NOTHING_LEFT = ("processes", "temporary", "tasks", "requests", "leases")


def children_of(process: int) -> list[int]:
    """Returns the descendants of a process."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{process}/task"):
            found += map(int, Path(f"/proc/{process}/task/{task}/children").read_text().split())
    return found + [below for child in found for below in children_of(child)]


def sandbox_process() -> int | None:
    """Returns the sandbox's interpreter."""
    server = POOL.server
    return None if server is None else server.pid


class Job:
    """One soak run: its parts, faults and measurements."""

    def __init__(
        self,
        folder: Path,
        loop: asyncio.AbstractEventLoop,
        steps: int,
        seed: int,
        timeout: float,
        branches: bool,
    ) -> None:
        self.earlier = set(children_of(os.getpid()))
        self.folder, self.loop, self.rng = folder, loop, random.Random(seed)
        self.ledger = SoakGame.ledger = Ledger(branched=BRANCHED if branches else None)
        self.queue = LocalQueue(self.ledger.put)
        self.config = job_config(folder / "checkpoints", steps, seed, timeout, branches)
        faults = Faults(errors=0.003, hangs=0.01)
        self.servers = {
            name: [
                SimulatedServer(answer, faults, seed=seed * 100 + 10 * policy + number) for number in range(REPLICAS)
            ]
            for policy, name in enumerate(POLICIES)
        }
        clients = {
            name: client_of(self.config, name, servers, loop, self.ledger) for name, servers in self.servers.items()
        }
        self.clients = [client for client, _ in clients.values()]
        self.balancers = [balancer for _, balancer in clients.values()]
        self.trainer = SoakTrainer(self.config, self.queue, self.ledger, self._servers_sleep)
        tokenizers = {name: Letters(self.ledger) for name in POLICIES}
        team = TeamClient({name: client for name, (client, _) in clients.items()})
        self.workers = [SoakWorker(self.config, self.trainer.settings, team, tokenizers) for _ in range(WORKERS)]
        self.steps, self.longest_block, self.kills, self.stuck = steps, 0.0, 0, False
        self.uses: list[tuple[int, Use]] = []
        self.until = float("inf")

    def _servers_sleep(self) -> None:
        """Called after the rollout of a step: no request may be in flight."""
        self.settled()
        self.ledger.wrong["requests in flight when servers sleep"] += self.requests()

    def requests(self) -> int:
        """Returns the number of requests in flight in the servers."""
        return sum(len(server.running) for server in self.all_servers())

    def processes(self) -> int:
        """Returns the number of new child processes, without the sandbox's interpreter."""
        return len(set(children_of(os.getpid())) - self.earlier - {sandbox_process()})

    def all_servers(self) -> list[SimulatedServer]:
        """Returns the servers of all policies."""
        return [server for servers in self.servers.values() for server in servers]

    def leases(self) -> int:
        """Returns the number of acquired servers according to clients and balancers."""
        held = sum(len(client.leases) for client in self.clients)
        return held + sum(balancer.get_total_inflight() for balancer in self.balancers)

    def use(self) -> Use:
        """Returns the process's resources."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        records = [path.stat().st_size for path in self.folder.rglob("*.jsonl") if not path.name.startswith("metrics")]
        tasks = asyncio.run_coroutine_threadsafe(_tasks(), self.loop).result()
        return Use(
            megabytes=pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            processes=self.processes(),
            files=len(os.listdir("/proc/self/fd")),
            temporary=len([name for name in os.listdir(tempfile.gettempdir()) if name.startswith("sandbox-")]),
            records_kb=sum(records) // 1000,
            tasks=tasks,
            requests=self.requests(),
            leases=self.leases(),
        )

    def settled(self) -> None:
        """Waits until leases are released, requests cancelled and launchers ended, which is asynchronous.

        After a timeout it is not waited for again; the result then shows what was left.
        """
        until = time.monotonic() + HANG
        while not self.stuck and (self.requests() or self.leases() or self.processes()):
            self.stuck = time.monotonic() > until
            time.sleep(0.005)

    # ------------------------------------------------------------ one of verl's loggers

    def log(self, data: dict[str, Any], step: int) -> None:
        """Checks a step's rows, and injects the faults that are due."""
        self.ledger.settle(data, len(self.queue.tags["train"]))
        self.ledger.count["steps"] += 1
        if step % max(1, self.steps // 10) == 0 or step in (self.warm_up, self.trainer.total_training_steps):
            self.settled()
            self.uses.append((step, self.use()))
            print(f"{step:>6}  {show(self.uses[-1][1])}", flush=True)
        if step == self.steps // 3:
            for servers in self.servers.values():
                self.loop.call_soon_threadsafe(servers[0].kill)
        if time.monotonic() > self.until:
            self.trainer.total_training_steps = step + 1

    @property
    def warm_up(self) -> int:
        """The step with whose memory the end is compared."""
        return max(2, self.steps // 10)

    # ------------------------------------------------------------ faults

    async def kill_sandbox(self, every: float) -> None:
        """Randomly kills processes of the sandbox: its interpreter, a launcher, or a program.

        Not again while a program runs that a kill may have met: one that is killed three times has no result.
        """
        met: set[object] = set()
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * every)
            server = sandbox_process()
            if met.isdisjoint(self.ledger.running) and server is not None and (below := children_of(server)):
                met = set(self.ledger.running)
                victim = server if self.rng.random() < 0.2 else self.rng.choice(below)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    self.kills += 1

    async def interrupt(self, every: float) -> None:
        """Randomly interrupts all requests, as a weight sync during a rollout."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * every)
            for worker in self.workers:
                worker.pause()
            for server in self.all_servers():
                server.abort_all()
            await asyncio.sleep(0.02)
            for worker in self.workers:
                worker.resume()

    async def watch_loop(self) -> None:
        """Measures how long the event loop is blocked."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            self.longest_block = max(self.longest_block, time.monotonic() - began - 0.01)

    @contextmanager
    def background(self) -> Iterator[None]:
        """Runs the three coroutines above."""
        coroutines = self.kill_sandbox(every=0.7), self.interrupt(every=1.0), self.watch_loop()
        running = [asyncio.run_coroutine_threadsafe(coroutine, self.loop) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in running:
                task.cancel()

    def train(self) -> None:
        """Runs the whole training."""
        self.trainer.init()
        manager = SoakManager([LocalActor(worker, self.loop) for worker in self.workers])
        self.trainer.watcher = self
        with self.background():
            self.trainer.fit(manager)


async def _tasks() -> int:
    return len(asyncio.all_tasks()) - 4  # this one and the background tasks


def show(use: Use) -> str:
    """Returns a line of the table."""
    return (
        f"{use.megabytes:>8.1f}  {use.processes:>9}  {use.files:>5}  {use.temporary:>9}  {use.records_kb:>10}  "
        f"{use.tasks:>5}  {use.requests:>8}  {use.leases:>6}"
    )


def results(job: Job, seconds: float) -> list[tuple[str, str, bool]]:
    """Returns (name, value, whether the check passed)."""
    ledger, (_, warm), (_, last) = job.ledger, job.uses[0], job.uses[-1]
    lines = [(name, str(number), number == 0) for name, number in sorted(ledger.wrong.items())]
    for name, product, here in ledger.totals(CANDIDATES):
        lines.append((f"{name}: metrics, counted", f"{product:,} {here:,}", product == here))
    served = sum((server.counts for server in job.all_servers()), start=Counter[str]())
    for name, least, product, most in ledger.bounds(served["requests"], CANDIDATES):
        lines.append((f"{name}: least, metrics, most", f"{least:,} {product:,} {most:,}", least <= product <= most))
    lines += [(f"{name} at the end", str(getattr(last, name)), getattr(last, name) == 0) for name in NOTHING_LEFT]
    lines.append(("open files: warm, end", f"{warm.files} {last.files}", last.files <= warm.files + 2))
    lines.append(("records at most 1 MB", f"{last.records_kb} KB", last.records_kb <= 1000))
    grown = last.megabytes / warm.megabytes
    lines.append((f"memory: end / step {job.warm_up}", f"{grown:.3f}", grown <= GROWTH))
    happened = {
        "engine errors": served["errors"],
        "requests that hung": served["hung"],
        "requests retried on another replica": ledger.metrics["rollout/requests_retried"],
        "responses interrupted": ledger.count["requests interrupted"],
        "requests whose replica died": ledger.count["requests whose server died"],
        "sandbox processes killed": job.kills,
        "programs run": ledger.count["programs"],
        "programs run again": ledger.metrics["rollout/sandbox_reruns"],
        "restarts of the sandbox": ledger.metrics["rollout/sandbox_restarts"],
    }
    lines += [(name, f"{number:,}", number > 0) for name, number in happened.items()]
    steps = ledger.count["steps"]
    lines.append(("steps", f"{steps:,} of {job.steps:,} in {seconds:.0f} s", steps == job.steps))
    lines.append(("event loop blocked at most", f"{job.longest_block * 1e3:.0f} ms", True))
    return lines


def soak(steps: int, minutes: float, seed: int, timeout: float, branches: bool = False) -> list[tuple[str, str, bool]]:
    """Runs the job in a temporary folder, prints its resources, and returns the results."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, event_loop() as loop:
        os.chmod(folder, 0o711)  # programs run as other users
        there, tempfile.tempdir = tempfile.tempdir, folder
        try:
            job = Job(Path(folder), loop, steps, seed, timeout, branches)
            job.until = time.monotonic() + 60 * minutes
            print("  step  RSS (MB)  processes  files  temporary  records KB  tasks  requests  leases")
            began = time.monotonic()
            gc.freeze()  # a full collection of all imported modules would block the event loop
            with local_processes(job.queue):
                job.train()
            return results(job, time.monotonic() - began)
        finally:
            gc.unfreeze()
            tempfile.tempdir = there


def main() -> int:
    """Prints the results; status 1 if one fails."""
    parser = script.parser(__doc__, steps=2000, seed=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after the step in which they have passed")
    parser.add_argument("--timeout", type=float, default=0.25, help="seconds until a request times out")
    parser.add_argument("--branches", action="store_true", help="with at_grpo.scheme=branch at every decision")
    options = parser.parse_args()
    lines = soak(options.steps, options.minutes, options.seed, options.timeout, options.branches)
    print()
    for name, figure, holds in lines:
        print(f"{'PASS' if holds else 'FAIL'}  {name:<50}  {figure:>30}")
    return int(not all(holds for *_, holds in lines))


if __name__ == "__main__":
    raise SystemExit(main())
