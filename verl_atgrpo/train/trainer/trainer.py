"""verl's trainer, extended by episodes, several policies and per-agent metrics."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.debug import marked_timer
from verl.utils.tracking import Tracking

from verl_atgrpo import compat, platform_choice
from verl_atgrpo.play.curriculum import Curriculum, LevelOrder
from verl_atgrpo.play.opponents import Opponent, OpponentPool
from verl_atgrpo.play.task_order import HalfSolvedFirst
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.chat_rules import (
    answering,
    hindsights,
    of_chats,
    of_hindsight,
    of_template_arguments,
)
from verl_atgrpo.train.config.policies import config_of_host, config_of_policy
from verl_atgrpo.train.config.run_check import MODE
from verl_atgrpo.train.config.schema import EXPANDED
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.estimators.rae import Baselines
from verl_atgrpo.train.rollout.episode_rows import OPPONENT, RECORDED, SUBMISSION
from verl_atgrpo.train.rows import queue
from verl_atgrpo.train.rows.batch import PARTITION, Batch, Rows
from verl_atgrpo.train.rows.row_advantages import rows_with_signal
from verl_atgrpo.train.rows.step_rows import StepRows, sample_rows
from verl_atgrpo.train.serving.client import TeamClient
from verl_atgrpo.train.serving.health import PolicyFailed, RolloutFailed
from verl_atgrpo.train.trainer import checkpoints, schedule
from verl_atgrpo.train.trainer.critic_unit import CriticUnit, mix_scores
from verl_atgrpo.train.trainer.dataset import TeamTokenizer, wire
from verl_atgrpo.train.trainer.metrics import (
    AgentProgress,
    Signal,
    every_episode_failed,
    policy_metrics,
    staleness_metrics,
    step_metrics,
    training_metrics,
)
from verl_atgrpo.train.trainer.policies import TeamSync, for_all, train_all
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, SharingUnit, StandaloneUnit
from verl_atgrpo.train.trainer.record_files import FOLDER, RecordFiles
from verl_atgrpo.train.trainer.recorder import Recorder, about_run
from verl_atgrpo.train.trainer.rollout_watch import RolloutWatch
from verl_atgrpo.train.trainer.schedule import make_schedule
from verl_atgrpo.train.trainer.trackers import table_rows, write_table
from verl_atgrpo.train.trainer.value_critic import ValueCritic

logger = logging.getLogger(__name__)

_POOL = "global_pool"
_DATA = "data"
"""Among a checkpoint's states."""


@register_trainer(MODE)
class AtGrpoTrainer(PPOTrainer):  # type: ignore[misc]
    """Trains a team's policies on the episodes it plays."""

    _dump_futures: list[Future[None]]
    _gc_frozen = False
    """Whether garbage collectors skip what was there after the first step."""
    _order: LevelOrder | HalfSolvedFirst | None = None
    """The order of tasks if it follows from their success; else it is the data loader's."""
    _opponents: OpponentPool | None = None
    """Who answers for the other side of a game, if the recipe says."""
    _critic: CriticUnit | ValueCritic | None = None
    """What scores candidates, if the recipe says."""
    _step_over: float | None = None
    """When the last step and its validation ended."""

    def __init__(self, config: DictConfig) -> None:
        compat.check_symbols(compat.SYMBOLS + (compat.CPU_SYMBOLS if platform_choice.wants_cpu() else ()))
        self.settings = read_section(config)
        environment = self.settings.make_environment()
        wire(config, self.settings, environment)
        if isinstance(environment, Curriculum):
            self._order = LevelOrder(environment, self.settings.split_size(environment, "train"))
        elif self.settings.task_order == "half_solved":
            self._order = HalfSolvedFirst(self.settings.split_size(environment, "train"), self.settings.seed)
        if (given := self.settings.opponents) is not None:
            weights = {"current": given.current, "past": given.past, **given.others}
            self._opponents = OpponentPool(
                self.settings.self_played, weights, given.size, given.every, given.choose, self.settings.seed
            )
        self._hindsights = hindsights(self.settings, environment)
        self._answering = answering(self.settings, environment)
        self._spec = self.settings.spec
        self._baselines = Baselines(self._spec)
        self.schedule = make_schedule(self.settings.mode, config.trainer)
        self._unfinished: deque[int] = deque()
        self._submissions = schedule.Submissions()
        self._tags: list[dict[str, Any]] = []
        self._sampled: dict[str, Any] = {}
        """The step's metrics as far as they are known."""
        self._progress = AgentProgress()
        self._updated = False
        self._checkpoint: Path | None = None
        self.recorder: Recorder | None = None
        super().__init__(config)
        queue.pace(self.replay_buffer, queue.POLL_INTERVAL, check=self.collect_report)
        queue.on_validation_sample(self.replay_buffer, self.on_validation_sample)

    @property
    def trainer_mode(self) -> str:
        """The mode for verl's base class, which compares it with the literal "sync" in several places."""
        return self.settings.mode

    @trainer_mode.setter
    def trainer_mode(self, mode: str) -> None:
        assert mode == MODE, mode

    # ------------------------------------------------------------ policies

    def _setup(self) -> None:
        """Starts every policy's workers and servers, and resumes from a checkpoint if there is one."""
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        pools = self._make_pools()
        made = self._make_units(pools)
        self.units = [made[name] for name in self.settings.policy_settings()]
        for unit in self.units:
            check(of_chats(self.settings, self._answering, unit.name, unit.tokenizer))
        tokenizers = {f"policy {unit.name!r}": unit.tokenizer for unit in self.units}
        check(of_template_arguments(self.config.data, tokenizers))
        for name in self.settings.critic_reads_as:
            check(of_hindsight(self._hindsights, made[name].tokenizer, self.config.data))
        if (critic := self.settings.critic) is not None and critic.policy is None:
            self._critic = ValueCritic(critic, self.units)
        hosts = self.hosts
        for unit in hosts:
            unit.place(pools[unit.name])
        for_all(hosts, PolicyUnit.start, self.concurrent)
        self.checkpoint_manager = TeamSync(hosts, self.concurrent)
        self.tokenizer = TeamTokenizer({unit.name: unit.tokenizer for unit in self.units})
        # Environments compute rewards; verl only checks whether there is a reward model.
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.teacher_model_manager = None
        self.distillation_config = None
        # verl's profiling supports one policy.
        self.actor_rollout_wg, self.ref_policy_wg = hosts[0].actor_rollout_wg, hosts[0].ref_policy_wg
        self.llm_server_manager = hosts[0].servers
        most = max(one.training_episodes for _, one in self.settings.each())
        self.watch = RolloutWatch(hosts, self.settings.max_failed_episodes, most)
        self._load_checkpoint()
        self.recorder = self._make_recorder()

    @property
    def hosts(self) -> list[PolicyUnit]:
        """The policies that have workers and servers; others are adapters beside one of them."""
        return [unit for unit in self.units if unit.host is unit]

    @property
    def _split(self) -> bool:
        return self.settings.placement == "split"

    @property
    def concurrent(self) -> bool:
        """Whether policies start, update and sync weights concurrently instead of one after the other.

        Colocated policies on GPUs take turns: two updates may not fit into a GPU's memory, and servers that start at
        the same time misjudge how much is free. On the CPU, one policy uses the cores that another leaves idle.
        """
        return self._split or platform_choice.wants_cpu()

    def _make_units(self, pools: Mapping[str, RayResourcePool]) -> dict[str, PolicyUnit]:
        """Returns policy -> its unit; those that share a base beside the one that has its workers and servers."""
        policies, critic = self.settings.policy_settings(), self.settings.critic
        kind = StandaloneUnit if self.settings.mode == "separate_async" else PolicyUnit
        made: dict[str, PolicyUnit] = {}
        replicas = 0

        def given(name: str, job: DictConfig) -> tuple[Any, ...]:
            # A single policy is saved where verl's tools expect it.
            folder = "actor" if len(policies) == 1 else f"policies/{name}"
            return name, job, folder, policies[name].trainable, self.settings

        for host, names in self.settings.bases().items():
            job = config_of_host(self.config, self.settings, host)
            made[host] = kind(*given(host, job), first_replica=replicas)
            # At least as many as it has servers, on their own devices or those of its pool.
            replicas += made[host].own_server_devices or int(pools[host].world_size)
            for name in (one for one in names if one != host):
                sharing = given(name, config_of_policy(self.config, name))
                if critic is not None and name == critic.policy:
                    self._critic = made[name] = CriticUnit(*sharing, host=made[host], critic=critic)
                else:
                    made[name] = SharingUnit(*sharing, host=made[host])
        return made

    def _make_pools(self) -> dict[str, RayResourcePool]:
        """Returns the resource pools of the policies that have workers: one for all, or one for each."""
        trainer, policies, hosts = self.config.trainer, self.settings.policy_settings(), list(self.settings.bases())
        own = {host: policies[host].gpus or trainer.n_gpus_per_node for host in hosts}
        spec = own if self._split else {_POOL: trainer.n_gpus_per_node}
        self.resource_pool_manager = ResourcePoolManager(
            resource_pool_spec={name: [gpus] * trainer.nnodes for name, gpus in spec.items()},
            mapping={},
            max_colocate_count=max(3, len(policies)),
        )
        self.resource_pool_manager.create_resource_pool()
        pools = self.resource_pool_manager.resource_pool_dict
        return {host: pools[host if self._split else _POOL] for host in hosts}

    def _init_dataloader(self) -> None:
        """Sets every policy's number of training steps, which verl derives from the data."""
        super()._init_dataloader()
        steps = self.config.actor_rollout_ref.actor.optim.total_training_steps
        critic = self.settings.critic
        for name, policy in self.config.get(EXPANDED, {}).items():
            # A learning rate's schedule counts updates, of which each optimizer step of a critic is one.
            each = 1
            if critic is not None and name == critic.policy:
                each = critic.epochs * (self.config.data.train_batch_size // policy.actor.ppo_mini_batch_size)
            with open_dict(policy):
                policy.actor.optim.total_training_steps = steps * each

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> Batch:
        """Samples a step's rows and updates every trainable policy on its own rows."""
        with marked_timer("gen", timing_raw, color="red"):
            self.on_sample_begin()
            rows = self.sample_step(sample_batch_size)
            self.on_sample_end()
        metrics.update(rows.metrics)
        self._tags, self._sampled = rows.tags, metrics
        of_critic = self._ask_critic(rows, timing_raw)
        with marked_timer("bookkeeping", timing_raw):
            self._learn_from(rows)
            batches = {unit.name: rows.rows_for({unit.name}) for unit in self.units}
            learning = [unit for unit in self.units if unit.can_learn_from(len(batches[unit.name]))]
            by_policy: dict[str, dict[str, Any]] = {}
            for unit in self.units:
                own = {"team/rows": float(len(batches[unit.name])), "team/updated": float(unit in learning)}
                if unit.trainable and self.settings.group_filter is not None:
                    own["team/tokens_dropped_share"] = rows.tokens_dropped_share(unit.name)
                by_policy[unit.name] = {**own, **unit.metrics(), **of_critic.get(unit.name, {})}
        self._updated = bool(learning)
        updates = train_all(learning, batches, self.global_steps, self.concurrent, timing_raw)
        self._freeze_self(self.global_steps)
        for name, update in updates.items():
            by_policy[name] |= update.metrics
        metrics.update(policy_metrics(by_policy))
        with marked_timer("bookkeeping", timing_raw):
            if self.recorder is not None:
                # While they are in the queue, including what is dropped, frozen or not trained on.
                self.recorder.record(self.global_steps, rows + rows.untrained)
            return rows.close({name: update.rows for name, update in updates.items()})

    def _ask_critic(self, rows: StepRows, timing: dict[str, float]) -> dict[str, dict[str, Any]]:
        """Has the critic score the step's candidates and learn from their episodes; returns policy -> its metrics."""
        settings, critic = self.settings.critic, self._critic
        if settings is None or critic is None or not rows.of_critic:
            return {}
        with marked_timer("critic", timing, color="olive"):
            update = critic.train(rows.of_critic, self.global_steps)
        update.rows.remove()
        if isinstance(critic, CriticUnit) and not self.concurrent and len(self.settings.bases()) > 1:
            critic.empty_cache()  # its processes have used the devices of those that are updated now
        mix_scores(rows, rows.of_critic, settings.weight if critic.steps > settings.warmup else 0.0)
        if isinstance(critic, CriticUnit):
            return {critic.name: update.metrics}
        self._sampled.update({f"critic/{name}": value for name, value in update.metrics.items()})
        return {}

    def _learn_from(self, rows: StepRows) -> None:
        """Has the order of tasks and the opponents follow the results of a step's episodes."""
        episodes = {tags["episode"]: tags for tags in rows.tags}.values()
        if self._order is not None:
            self._order.learn((episode["task"], episode["episode_success"]) for episode in episodes)
            self._sampled.update(self._order.metrics())
        if self._opponents is not None:
            games: dict[str, tuple[Opponent, list[float]]] = {}
            for one in episodes:
                if OPPONENT in one:
                    task, _, _ = one["episode"].rpartition("_")
                    games.setdefault(task, (Opponent.parse(one[OPPONENT]), []))[1].append(one["episode_reward"])
            self._opponents.add(games.values(), self.global_steps)
            self._sampled.update(self._opponents.metrics())
        if "baseline" in self._spec.needs:
            self._sampled.update(self._baselines.metrics())
            self._baselines.update(rows.tags)

    def _freeze_self(self, due: int) -> None:
        """Adds the policy as it is to the pool of opponents if a past self is due after a step; 0 is before the first.

        A run that has no pool yet needs the first one wherever it begins.
        """
        if self._opponents is not None and self._opponents.is_due(due):
            self._self_played.freeze_self(self._opponents.freeze(self.global_steps))

    @property
    def _self_played(self) -> PolicyUnit:
        """The policy of which past selves play."""
        return next(unit for unit in self.units if unit.name == self.settings.self_played)

    def _sample(self, tasks: int) -> tuple[Rows, dict[str, float]]:
        """Waits for a number of tasks; returns their rows, labelled, and verl's metrics of the wait."""
        options = {"global_steps": self.global_steps, "partition_id": PARTITION, "batch_size": tasks}
        rows, metrics = self.replay_buffer.sample(**options)
        if "baseline" in self._spec.needs:
            self._baselines.write(rows.tags)
        return rows, metrics

    def sample_step(self, tasks: int) -> StepRows:
        """Returns a step's rows; in sync mode all were sampled with the same weights."""
        rows = sample_rows(
            sample=self._sample,
            add_tasks=super()._add_prompts_to_generate,  # not ours, which is for failed episodes
            tasks=tasks,
            group_filter=self.settings.group_filter,
            trainable=self._trainable,
            spec=self._spec,
        )
        rows.sort()
        return rows

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains; when a process dies, the error names the checkpoint that the next run can resume from."""
        try:
            super().fit(agent_loop_manager)
        except (PolicyFailed, RolloutFailed, checkpoints.SaveFailed) as failure:
            raise type(failure)(
                f"{failure}; {checkpoints.resume_hint(self.config.trainer, self._checkpoint)}"
            ) from failure

    # ------------------------------------------------------------ schedule

    def on_init_end(self) -> None:
        """Sends the servers the initial or resumed weights."""
        self.checkpoint_manager.update_weights(self.global_steps)

    def on_step_begin(self) -> None:
        """Counts the time since the last step, without its validation: metrics, records and removal of rows."""
        if self._step_over is not None:
            self.timing_raw["between_steps"] = time.perf_counter() - self._step_over

    def on_sample_end(self) -> None:
        """Ends the rollout before the update, or interrupts it."""
        with marked_timer("end_rollout", self.timing_raw, color="red"):
            self.schedule.sample_end(self.checkpoint_manager, self.agent_loop_manager)
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        """Sends the servers the new weights."""
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.schedule.step_end(self.checkpoint_manager, self.agent_loop_manager, self.global_steps)

    # ------------------------------------------------------------ episodes

    def get_llm_client(self) -> TeamClient:
        """Returns the clients that rollout workers sample candidates with."""
        return TeamClient({unit.name: unit.client() for unit in self.units})

    def prepare_step(self) -> dict[str, Any]:
        """Submits the step's tasks to the rollout; before the first asynchronous step also the warm-up's."""
        with marked_timer("submit", self.timing_raw):
            batch = self.config.data.train_batch_size
            last_step = min(self.total_training_steps, self.steps_per_epoch * self.config.trainer.total_epochs)
            steps_left = last_step - self.global_steps + 1
            in_flight = queue.unfinished_tasks()
            if isinstance(self._order, HalfSolvedFirst):
                self._order.set_in_flight([*in_flight, *self._unfinished])
            if tasks := schedule.tasks_to_submit(len(in_flight), batch, self.schedule.prefetch, steps_left):
                super()._add_prompts_to_generate(tasks)
        return {}

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        """Submits tasks to the rollout workers, and records them in the queue for a restart."""
        tasks = list(batch["index"])
        earlier = self._submissions.number(tasks, self.global_steps)
        batch[SUBMISSION] = torch.tensor(earlier)
        if self._opponents is not None:
            numbered = zip(map(int, tasks), earlier, strict=True)
            drawn = [str(self._opponents.draw(self.global_steps, *place)) for place in numbered]
            batch[OPPONENT] = NonTensorStack(*map(NonTensorData, drawn))
        most = 0 if self.settings.record is None else self.settings.record.train_tasks
        lowest = set(sorted(set(tasks))[:most])
        batch[RECORDED] = torch.tensor([task in lowest for task in tasks])
        queue.put_tasks(batch["uid"], tasks, self.global_steps)
        self.agent_loop_manager.generate_sequences(batch)
        return len(batch)

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Replaces tasks that verl's replay buffer has evicted because their episodes failed."""
        self.collect_report()
        self.watch.check_servers()
        submitted: int = super()._add_prompts_to_generate(num_prompts)
        return submitted

    def collect_report(self) -> None:
        """Collects the rollout workers' counts; raises what `RolloutWatch.collect` does."""
        self.watch.collect(self.agent_loop_manager, self.global_steps)

    def _validate(self) -> dict[str, float]:
        """Returns the team's success on the validation tasks (`val-core/<environment or data set>/acc/mean@n`)."""
        try:
            metrics: dict[str, float] = super()._validate()
            self.tokenizer.check_complete()
        finally:
            # After a defect in a rollout worker verl gets an empty batch, and its error would not name the cause.
            self.collect_report()
        if every_episode_failed(metrics):
            for unit in self.hosts:
                unit.replicas.check()
            raise RuntimeError("every validation episode failed; the rollout workers' log says why")
        return metrics

    def on_validation_sample(self, batch: Batch) -> None:
        """Registers a validation batch with the tokenizer, and records it."""
        self.tokenizer.expect(batch.tags)
        if self.recorder is not None:
            self.recorder.record(self.global_steps, batch)

    # ------------------------------------------------------------ records

    def _make_recorder(self) -> Recorder | None:
        """Returns the writer of the report's records; needs the step that the run resumes from."""
        settings, folder = self.settings.record, Path(self.config.trainer.default_local_dir) / FOLDER
        if settings is None:
            return None
        files = RecordFiles(folder, settings.max_megabytes, self.global_steps, about_run(self.config, self.units))
        return Recorder(settings, files, {unit.name: unit.tokenizer for unit in self.units}, self.in_background)

    def in_background(self, work: Callable[..., None], *arguments: Any) -> None:
        """Submits work to verl's executor for rollout dumps; raises the error of earlier work."""
        earlier, self._dump_futures = self._dump_futures, []
        for future in earlier:
            if future.done():
                future.result()
            else:
                self._dump_futures.append(future)
        self._dump_futures.append(self._dump_executor.submit(work, *arguments))

    @property
    def logger(self) -> Tracking:
        """verl's logger, with the report's records as one more backend."""
        return self._logger

    @logger.setter
    def logger(self, tracking: Tracking) -> None:
        if self.recorder is not None:
            tracking.logger["record"] = self.recorder
        self._logger = tracking

    def _maybe_log_val_generations(self, inputs: list[str], outputs: list[str], scores: list[float]) -> None:
        """Writes a table of decisions to the trackers, in place of verl's of last replies in random order."""
        most = self.config.trainer.log_val_generations
        if most and self.recorder is not None:
            wait(self._dump_futures)  # their errors are raised by the next work
            write_table(self.logger.logger, table_rows(self.recorder.validated, most), self.global_steps)

    # ------------------------------------------------------------ checkpoints

    def _save_checkpoint(self) -> None:
        """Saves all policies and the unfinished tasks as one step; an incomplete step is never resumed from.

        The step's records come first: whatever ends the run afterwards, a step to resume from has them.
        """
        if self.recorder is not None:
            wait(self._dump_futures)  # their errors are raised by the next work
            of_step = step_metrics(self._tags, self._signal_of(self._tags))
            self.recorder.log({**self._sampled, **of_step}, self.global_steps)
        unfinished = [*queue.unfinished_tasks(), *self._unfinished]
        if isinstance(self._order, HalfSolvedFirst):
            self._order.set_in_flight(unfinished)  # counts the tasks that failed in this step
        tasks = self.train_dataloader.state_dict() if self._order is None else self._order.state()
        states = {name: part.state() for name, part in self._stateful.items()} | {_DATA: self._data}
        folder = checkpoints.save(self.config.trainer, self.units, self.global_steps, tasks, unfinished, states)
        self._checkpoint = folder
        self.checkpoint_callback.on_save(
            trainer=self, global_step=self.global_steps, checkpoint_dir=str(folder), async_save=False
        )

    @property
    def _stateful(self) -> dict[str, Any]:
        """What has a state in checkpoints, beside policies and tasks."""
        values = self._critic if isinstance(self._critic, ValueCritic) else None
        parts = {"baselines": self._baselines, "opponents": self._opponents, "critic": values}
        return {name: part for name, part in parts.items() if part is not None}

    def _load_checkpoint(self) -> None:
        """Resumes all policies and the order of tasks from the last complete step; unfinished tasks come first."""
        resumed = checkpoints.load(self.config.trainer, self.units)
        self.global_steps, tasks, unfinished, self._checkpoint, states = resumed
        for name, part in self._stateful.items():
            if name in states:
                part.restore(states[name])
        if self._opponents is not None and not self._opponents.slots:
            self._freeze_self(0)
        data = states.get(_DATA, self._data)
        if tasks is not None:
            self._restore_order(tasks, data)
        self._unfinished = deque(unfinished if self._order is not None or data == self._data else ())
        further = self.train_dataloader if self._order is None else self._tasks_in_order(self._order)
        self.train_dataloader_it = chain(checkpoints.replay_unfinished(self.train_dataset, self._unfinished), further)

    def _restore_order(self, tasks: dict[str, Any], data: dict[str, Any]) -> None:
        """Goes on in the order of a checkpoint's tasks, which were made from `data`."""
        if self._order is not None:
            self._order.restore(tasks)
        elif "level" in tasks or "tried" in tasks:
            name = f"environment.name={self.settings.environment['name']}"
            raise ValueError(
                f"at_grpo.{name if 'level' in tasks else 'task_order=shuffled'}: tasks of {self._checkpoint} were in "
                "an order that followed their success; use the one that it was saved with, or set "
                "trainer.resume_mode=disable"
            )
        elif data == self._data:
            self.train_dataloader.load_state_dict(tasks)
        else:
            given = ", ".join(f"{key}={value} (was {data[key]})" for key, value in self._data.items())
            logger.warning("the order of training tasks begins anew, as they are others than before: %s", given)

    @property
    def _data(self) -> dict[str, Any]:
        """What the data loader's order of training tasks follows from, beside the seed."""
        return {"training tasks": len(self.train_dataset), "data.shuffle": bool(self.config.data.shuffle)}

    def _tasks_in_order(self, order: LevelOrder | HalfSolvedFirst) -> Iterator[dict[str, Any]]:
        """Yields tasks in the form of verl's data loader, each chosen when it is asked for."""
        while True:
            yield collate_fn([self.train_dataset[order.next()]])

    # ------------------------------------------------------------ metrics

    @property
    def _trainable(self) -> set[str]:
        return {unit.name for unit in self.units if unit.trainable}

    def _signal_of(self, tags: Sequence[Mapping[str, Any]]) -> Signal:
        return rows_with_signal(tags, self._spec, self._trainable)

    def _get_n_gpus_for_throughput(self) -> int:
        """Returns the number of the job's devices, including those that only serve."""
        devices: int = super()._get_n_gpus_for_throughput()
        return devices + sum(unit.own_server_devices for unit in self.hosts)

    def _compute_metrics(
        self, batch: Rows, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """Adds verl's metrics of the rows that were trained on, and the team's metrics of all rows.

        verl calls this after a step's validation, if one was due, so training episodes are resumed here.
        """
        self._step_over = time.perf_counter()
        self.schedule.step_over(self.agent_loop_manager)
        if self.recorder is not None:
            timing_raw["record"] = self.recorder.take_seconds()
        if self._updated:
            gpus = self._get_n_gpus_for_throughput()
            metrics.update(training_metrics(batch.tags, timing_raw, global_steps, epoch, gpus))
        else:
            metrics.update({"training/global_step": global_steps, "training/epoch": epoch})
            metrics.update({f"timing_s/{stage}": seconds for stage, seconds in timing_raw.items()})
        tags, signal = self._tags, self._signal_of(self._tags)
        metrics.update(step_metrics(tags, signal))
        if self.settings.critic is not None:
            # It tells answers apart where all of them are wrong, so it would hide that an agent has collapsed.
            tags = [{**one, "reward": one.get("without_critic", one["reward"])} for one in tags]
            signal = self._signal_of(tags)
        metrics.update(self._progress.metrics(tags, signal))
        if self.settings.mode != "sync":
            trained = [tags for tags in self._tags if tags["policy"] in self._trainable]
            metrics.update(staleness_metrics(trained, global_steps))
        self.collect_report()
        metrics.update(self.watch.take_metrics())
        if self._updated and not self._gc_frozen:
            self._gc_frozen = True
            self._freeze_gc()

    def _freeze_gc(self) -> None:
        """Has all garbage collectors skip what the start and the first step have made; does not wait for them."""
        for actor in chain(queue.actors(), *(unit.actors() for unit in self.hosts)):
            actor.__ray_call__.remote(compat.freeze_startup_objects)
        compat.freeze_startup_objects()

    def _log_rollout_data(self, batch: Rows, timing_raw: dict[str, float], rollout_data_dir: str) -> None:
        """Writes the step's rows as text, each decoded with its policy's tokenizer."""
        self.tokenizer.expect(batch.tags)
        super()._log_rollout_data(batch, timing_raw, rollout_data_dir)
        self.tokenizer.check_complete()
