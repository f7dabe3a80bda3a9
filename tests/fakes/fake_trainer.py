"""The trainer with verl's replay buffers and data loader, on a fake rollout, fake servers and fake policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transfer_queue as tq
import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.dataset.rl_dataset import collate_fn

from verl_atgrpo import Candidate, Outcome, Score
from verl_atgrpo.play.curriculum import LevelOrder
from verl_atgrpo.play.opponents import OpponentPool
from verl_atgrpo.play.task_order import HalfSolvedFirst
from verl_atgrpo.play.types import Decision, EpisodeRecord, Generation
from verl_atgrpo.train.config.section import parse_section
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.estimators.rae import Baselines
from verl_atgrpo.train.rollout.episode_rows import OPPONENT, RECORDED, SUBMISSION, training_rows, untrained_rows
from verl_atgrpo.train.rollout.worker import WorkerReport
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.trainer import schedule
from verl_atgrpo.train.trainer.metrics import AgentProgress
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, Update
from verl_atgrpo.train.trainer.rollout_watch import RolloutWatch
from verl_atgrpo.train.trainer.schedule import make_schedule
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer

AT_GRPO = PRESETS["at_grpo"]
Tags = dict[str, Any]
FLAT, STEEP = [0.0, 0.0], [0.0, 1.0]


def episode(team_reward: float, *decisions: tuple[str, int, list[float]]) -> EpisodeRecord:
    """An episode of decisions (agent, turn, candidates' rewards); agent a is played by policy p_a."""
    answer = Generation([7], [-0.1], "x")
    return EpisodeRecord(
        [
            Decision(
                agent, turn, f"p_{agent}", [1], tuple(Candidate(answer, Score(), reward) for reward in rewards), 0
            )
            for agent, turn, rewards in decisions
        ],
        Outcome(team_reward > 0, team_reward),
    )


class FakeRollout:
    """TransferQueue, rollout workers and servers; the unit of time is a poll of the replay buffer.

    A task takes `polls(task)` polls in which requests are not paused and the servers are awake. Then its rows are in
    the queue, or it has failed.
    """

    def __init__(self) -> None:
        self.rewards: list[list[list[float]]] = []
        """Rewards of the next tasks to end: task -> decision -> candidate. By default `STEEP` for every decision."""
        self.agents = ["a"]
        """The agents, in the order of their turns."""
        self.drafts = 0
        """Candidates of a decision at the start of every episode that is not trained on."""
        self.polls: Callable[[int], int] = lambda task: 0
        self.fails: Callable[[int], bool] = lambda task: False
        self.items: dict[str, Tags] = {}
        self.cleared: Counter[str] = Counter()
        self.submitted: list[int] = []
        self.seeds: list[tuple[int, int, int]] = []
        """What the seeds of every submission depend on: step, task, and how often it was submitted in the step."""
        self.sides = True
        """Whether tasks have opponents."""
        self.opponents: dict[str, str] = {}
        """Who answers for the other side, by the task's uid."""
        self.calls: list[str] = []
        self.weights = 0
        self._left: dict[str, int] = {}
        self._recorded: dict[str, bool] = {}
        self._submission: dict[str, int] = {}
        self._began: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._paused = self._asleep = False

    # Interface of the rollout manager.

    def generate_sequences(self, batch: Any) -> None:
        assert not self._asleep or self._paused, "the servers have no weights"
        for uid, task in zip(list(batch["uid"]), list(batch["index"]), strict=True):
            assert self.items[uid]["task"] == task
            self.submitted.append(int(task))
            self._left[uid] = self.polls(int(task))
        self._recorded |= dict(zip(batch["uid"], batch[RECORDED].tolist(), strict=True))
        if OPPONENT in batch and self.sides:
            self.opponents |= dict(zip(batch["uid"], list(batch[OPPONENT]), strict=True))
        self._submission |= dict(zip(batch["uid"], batch[SUBMISSION].tolist(), strict=True))
        step = int(batch["global_steps"])
        self.seeds += [
            (step, int(task), int(deal)) for task, deal in zip(batch["index"], batch[SUBMISSION], strict=True)
        ]
        self._play()

    def pause(self) -> None:
        self._paused = True
        self.calls.append("pause")

    def resume(self) -> None:
        self._paused = False
        self.calls.append("resume")

    def crash(self) -> None:
        """Ends the process, whose queue and tasks in flight are lost; what is submitted next is in a new one."""
        self.items, self.submitted, self._left = {}, [], {}
        self._paused = False

    def drain_report(self) -> WorkerReport:
        report = WorkerReport(self._counts)
        self._counts = Counter()
        return report

    # Interface of the servers.

    def sleep_replicas(self) -> None:
        self._asleep = True
        self.calls.append("sleep")

    def update_weights(self, global_steps: int) -> None:
        self._asleep, self.weights = False, global_steps
        self.calls.append("update")

    def abort_replicas(self) -> None:
        self.calls.append("abort")

    def resume_generation_replicas(self) -> None:
        self.calls.append("resume")

    # Interface of TransferQueue.

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tags]]:
        if partition_id is None:
            self._play()
        return {"train": {key: dict(tags) for key, tags in self.items.items()}}

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: list[Tags]) -> None:
        self.items.update(zip(keys, (dict(one) for one in tags), strict=True))

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        assert keys, "TransferQueue refuses an empty list"
        for key in keys:
            del self.items[key]
            self.cleared[key] += 1

    def _play(self) -> None:
        if self._paused or self._asleep:
            return
        for uid in list(self._left):
            began = self._began.setdefault(uid, self.weights)
            self._left[uid] -= 1
            if self._left[uid] >= 0:
                self.items[uid]["status"] = "running"
                continue
            del self._left[uid], self._began[uid]
            task = self.items[uid]["task"]
            if self.fails(task):
                self._counts["episodes_failed"] += 1
                self.items[uid]["status"] = "failure"
                continue
            rewards = self.rewards.pop(0) if self.rewards else [STEEP] * len(self.agents)
            decisions = [
                (self.agents[number % len(self.agents)], number // len(self.agents), each)
                for number, each in enumerate(rewards)
            ]
            played = episode(1.0, *decisions)
            if self.drafts and self._recorded[uid]:
                (draft,) = episode(1.0, (self.agents[0], 99, [0.0] * self.drafts)).decisions
                played.decisions.insert(0, replace(draft, trained=False))
            for item in (*training_rows(uid, 0, played, "tree"), *untrained_rows(uid, 0, played, "tree")):
                self.items[item.key] = {
                    **item.tags,
                    **({OPPONENT: self.opponents[uid]} if uid in self.opponents else {}),
                    "task": task,
                    "num_turns": len(rewards),
                    "global_steps": self.items[uid]["global_steps"],
                    SUBMISSION: self._submission[uid],
                    "prompt_len": 1,
                    "response_len": 1,
                    "seq_len": 2,
                    "min_global_steps": began,
                    "max_global_steps": self.weights,
                    "resumed": int(began != self.weights),
                }
            self.items[uid]["status"] = "finished"


class FakeUnit(PolicyUnit):
    """A policy that records its updates."""

    def __init__(self, name: str, optimizer_steps: int, trainable: bool = True) -> None:
        self.name, self.folder, self.trainable, self._optimizer_steps = name, name, trainable, optimizer_steps
        self.updates: list[Batch] = []
        self.replicas = SimpleNamespace(metrics=dict)
        self.deaths = 0

    def revive(self) -> bool:
        self.deaths -= 1
        return self.deaths >= 0

    def train(self, batch: Batch, global_steps: int) -> Update:
        self.updates.append(batch)
        for tags in batch.tags:
            tags.update(advantage=0.0, trained_tokens=tags["response_len"])
        return Update(batch, {}, {"update_actor": 1.0})

    def save(self, step_folder: str, global_steps: int) -> None:
        pass

    def load(self, step_folder: str) -> None:
        pass


class FakeTrainer(AtGrpoTrainer):
    """The trainer without processes: four tasks per step, at most two failed episodes."""

    _gc_frozen = True  # there are no actors

    def __init__(
        self,
        rollout: FakeRollout,
        *units: FakeUnit,
        filters: Any = None,
        mode: str = "sync",
        warmup: float = 1,
        threshold: int = 3,
        tasks: int = 16,
        steps: int = 100,
        failures: int = 2,
        folder: Path | None = None,
        levels: LevelOrder | HalfSolvedFirst | None = None,
        opponents: OpponentPool | None = None,
    ) -> None:
        self.rollout = rollout
        self.settings = parse_section(
            {
                "environment": {"name": "plan_path"},
                "group_filter": filters,
                "max_failed_episodes": failures,
                "mode": mode,
            }
        )
        self.config = OmegaConf.create(
            {
                "data": {"train_batch_size": 4, "gen_batch_size": 1, "shuffle": False},
                "actor_rollout_ref": {"rollout": {"temperature": 0.5}},
                "trainer": {
                    "total_epochs": 1000,
                    "default_local_dir": str(folder),
                    "resume_mode": "auto" if folder else "disable",
                    "v1": {mode: {"num_warmup_batches": warmup}},
                },
            }
        )
        self.schedule = make_schedule(mode, self.config.trainer)
        self.units = list(units or [FakeUnit("p_a", 2)])
        self.total_training_steps, self.steps_per_epoch = steps, max(1, tasks // 4)
        self.timing_raw: dict[str, float] = {}
        self.curr_step_profile = False
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self._updated, self.recorder, self._submissions = False, None, schedule.Submissions()
        self._progress = AgentProgress()
        self._spec = AT_GRPO
        self.saved: list[dict[str, Any]] = []
        """Events of the checkpoint callback."""
        self.checkpoint_callback = SimpleNamespace(on_save=lambda **event: self.saved.append(event))
        self.watch = RolloutWatch(self.units, failures, episodes=1)
        refill = self._add_prompts_to_generate
        if mode == "sync":
            self.replay_buffer = ReplayBuffer("sync", None, None, "drop", None, 0.0, refill, None, 4, 1, 1, True)
        else:
            self.replay_buffer = ReplayBufferAsync(mode, None, threshold, "wait", None, 0.0, refill)
        self.agent_loop_manager = self.checkpoint_manager = rollout  # type: ignore[assignment]
        self.train_dataset = [{"raw_prompt": [], "index": index} for index in range(tasks)]
        self.train_dataloader = StatefulDataLoader(self.train_dataset, batch_size=1, collate_fn=collate_fn)
        self._order, self._opponents, self._baselines = levels, opponents, Baselines(self._spec)
        self._load_checkpoint()
        rollout.update_weights(self.global_steps)
        rollout.calls.clear()
        self.global_steps += 1

    @property
    def concurrent(self) -> bool:
        return True

    def play(self) -> tuple[Batch, dict[str, Any]]:
        """Runs a step as verl's `fit`, up to the checkpoint."""
        metrics: dict[str, Any] = {}
        self.prepare_step()
        return self._step_once(metrics, {}, 4), metrics

    def save(self) -> None:
        """Saves a checkpoint, as verl does before `on_step_end`."""
        self._save_checkpoint()

    def finish(self, batch: Batch, metrics: dict[str, Any]) -> None:
        """Runs the rest of a step."""
        self.on_step_end()
        self.end_step(batch, metrics)

    def end_step(self, batch: Batch, metrics: dict[str, Any]) -> None:
        """Runs the rest of a step after `on_step_end` and the validation."""
        self._compute_metrics(batch, metrics, {"gen": 2.0, "step": 3.0}, global_steps=self.global_steps, epoch=0)
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        self.global_steps += 1

    def run_and_save(self) -> None:
        """Runs a whole step with a checkpoint."""
        batch, metrics = self.play()
        self.save()
        self.finish(batch, metrics)

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Runs whole steps; returns their metrics."""
        played = []
        for _ in range(steps):
            batch, metrics = self.play()
            self.finish(batch, metrics)
            played.append(metrics)
        return played


def tasks_of(unit: FakeUnit) -> list[list[int]]:
    """The tasks of every update of a policy; a task counts once per submission."""
    by_update = []
    for update in unit.updates:
        submitted = {tags["episode"]: tags["task"] for tags in update.tags}
        by_update.append(list(submitted.values()))
    return by_update
