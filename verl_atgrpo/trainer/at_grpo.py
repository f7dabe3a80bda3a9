"""verl's synchronous trainer with what a team needs: episodes, several policies, per-agent metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.experimental.reward_loop import RewardLoopManager
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer
from verl.utils.tracking import Tracking

from verl_atgrpo import compat, platform_choice
from verl_atgrpo.config import SECTION, AtGrpoConfig
from verl_atgrpo.environment import Environment, Split
from verl_atgrpo.policy_config import EXPANDED, PolicySettings, job_of
from verl_atgrpo.report.reader import FOLDER
from verl_atgrpo.report.records import RecordFiles
from verl_atgrpo.rollout.client import TeamClient
from verl_atgrpo.run_check import MODE, check_team_run
from verl_atgrpo.trainer import checkpoints
from verl_atgrpo.trainer.dataset import SIZES
from verl_atgrpo.trainer.decoding import TeamTokenizer
from verl_atgrpo.trainer.failures import PolicyFailed
from verl_atgrpo.trainer.metrics import every_episode_failed, policy_metrics, rollout_metrics, step_metrics
from verl_atgrpo.trainer.policy_unit import PolicyUnit, TeamSync, for_all
from verl_atgrpo.trainer.recorder import Recorder
from verl_atgrpo.trainer.step_rows import PARTITION, StepRows, draw

if TYPE_CHECKING:
    from verl_atgrpo.rollout.manager import TeamRolloutManager

_POOL = "global_pool"


def wire(config: DictConfig, environment: Environment) -> None:
    """Sets the keys of verl that follow from the `at_grpo:` section, so that a recipe need not name them."""
    settings = AtGrpoConfig.from_config(config)
    splits: tuple[Split, ...] = ("train", "val")
    with open_dict(config):
        if EXPANDED in config:
            # What verl does once for the job (dataset, displayed text, token counts), it does with the first policy.
            config.actor_rollout_ref = next(iter(config[EXPANDED].values()))
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = (
            "verl_atgrpo.rollout.manager.TeamRolloutManager"
        )
        config.data.custom_cls = {"path": "pkg://verl_atgrpo.trainer.dataset", "name": "TeamTaskDataset"}
        config.data.train_files, config.data.val_files = "train", "val"
        # The dataset is handed `data` alone.
        config.data[SECTION] = config[SECTION]
        config.data[SIZES] = {split: settings.split_size(environment, split) for split in splits}
        config.algorithm.at_grpo_estimator = config[SECTION].get("estimator", "at_grpo")
        # verl's own way to replace an episode that failed; it fetches tasks one by one.
        config.trainer.v1.sampler.sync_refill_failed_groups = True
        config.data.gen_batch_size = 1


@register_trainer(MODE)
class AtGrpoTrainer(PPOTrainerSync):  # type: ignore[misc]
    """Trains a team's policies from its episodes."""

    _dump_futures: list[Future[None]]

    def __init__(self, config: DictConfig) -> None:
        compat.check_symbols(cpu=platform_choice.wants_cpu())
        wire(config, check_team_run(config))
        self.settings = AtGrpoConfig.from_config(config)
        self._replaced = 0
        self._counts: Counter[str] = Counter()
        self._tags: list[dict[str, Any]] = []
        self._updated = False
        self._recorder: Recorder | None = None
        super().__init__(config)
        self.replay_buffer.poll_interval = self.settings.poll_interval

    @property
    def trainer_mode(self) -> str:
        """The mode verl's base class shall see: it compares with the literal "sync" in several places."""
        return "sync"

    @trainer_mode.setter
    def trainer_mode(self, mode: str) -> None:
        assert mode == MODE, mode

    # ------------------------------------------------------------ policies

    def _setup(self) -> None:
        """Starts every policy's workers and servers and resumes."""
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        policies = self.settings.policy_settings()
        pools = self._make_pools(policies)
        self.units: list[PolicyUnit] = []
        replicas = 0
        for name, settings in policies.items():
            job = job_of(self.config, name)
            # verl's own folder where there is one policy, so that its tools find it.
            folder = "actor" if len(policies) == 1 else f"policies/{name}"
            self.units.append(PolicyUnit(name, job, folder, settings.trainable, replicas))
            replicas += pools[name].world_size  # no policy has more servers than devices
        for unit in self.units:
            unit.place(pools[unit.name])
        for_all(self.units, PolicyUnit.start, self._at_once)
        self.checkpoint_manager = TeamSync(self.units, self._at_once)
        self.tokenizer = TeamTokenizer({unit.name: unit.tokenizer for unit in self.units})
        self.reward_loop_manager = RewardLoopManager(config=self.config, rm_resource_pool=None)
        self.teacher_model_manager = None
        self.distillation_config = None
        # For verl's profiling, which knows one policy.
        self.actor_rollout_wg = self.ref_policy_wg = self.units[0].actor_rollout_wg
        self.llm_server_manager = self.units[0].servers
        self._load_checkpoint()
        self._recorder = self._make_recorder()

    @property
    def _split(self) -> bool:
        return self.settings.placement == "split"

    @property
    def _at_once(self) -> bool:
        """Colocated policies take turns: two updates may not fit into a GPU's memory, and servers that start
        together misjudge what is free. The CPU's memory is not shared out, and what one policy leaves idle
        another can use."""
        return self._split or platform_choice.wants_cpu()

    def _make_pools(self, policies: Mapping[str, PolicySettings]) -> dict[str, RayResourcePool]:
        """Returns policy -> devices: the same for all, or some of their own for each."""
        trainer = self.config.trainer
        own = {name: settings.gpus or trainer.n_gpus_per_node for name, settings in policies.items()}
        spec = own if self._split else {_POOL: trainer.n_gpus_per_node}
        self.resource_pool_manager = ResourcePoolManager(
            resource_pool_spec={name: [gpus] * trainer.nnodes for name, gpus in spec.items()},
            mapping={},
            max_colocate_count=max(3, len(policies)),
        )
        self.resource_pool_manager.create_resource_pool()
        pools = self.resource_pool_manager.resource_pool_dict
        return {name: pools[name if self._split else _POOL] for name in policies}

    def _init_dataloader(self) -> None:
        """Hands every policy the length of its schedule, which verl derives from the data."""
        super()._init_dataloader()
        steps = self.config.actor_rollout_ref.actor.optim.total_training_steps
        for policy in self.config.get(EXPANDED, {}).values():
            with open_dict(policy):
                policy.actor.optim.total_training_steps = steps

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        """Samples a step's rows and updates every trainable policy on its own."""
        with marked_timer("gen", timing_raw, color="red"):
            self.on_sample_begin()
            rows = self._draw(sample_batch_size)
            self.on_sample_end()
        metrics.update(rows.metrics)
        self._tags = rows.tags
        parts = {unit.name: self._rows_of(unit, rows) for unit in self.units}
        learning = [unit for unit in self.units if unit.can_learn_from(len(parts[unit.name]))]
        by_policy = {
            unit.name: {"team/rows": float(len(parts[unit.name])), "team/updated": float(unit in learning)}
            for unit in self.units
        }
        self._updated = bool(learning)
        unused = rows.but({unit.name for unit in learning})
        if not learning:
            # verl clears what it gets back, and stops at a step without rows.
            metrics.update(policy_metrics(by_policy))
            self._record_rows(rows, trained=set())
            return unused
        timings: dict[str, dict[str, float]] = {name: {} for name in parts}

        def train(unit: PolicyUnit) -> None:
            name = unit.name
            parts[name] = unit.train(parts[name], self.global_steps, by_policy[name], timings[name])

        with marked_timer("policies", timing_raw, color="red"):
            for_all(learning, train, self._at_once)
        metrics.update(policy_metrics(by_policy))
        total = max if self._at_once else sum
        for stage in {stage for timing in timings.values() for stage in timing}:
            timing_raw[stage] = total(timing.get(stage, 0.0) for timing in timings.values())
        self._record_rows(rows, {key for unit in learning for key in parts[unit.name].keys})
        if len(unused):
            # Nothing is computed from them; verl clears only what it gets back.
            tq.kv_clear(keys=unused.keys, partition_id=unused.partition_id)
        return KVBatchMeta(
            partition_id=PARTITION,
            keys=[key for unit in learning for key in parts[unit.name].keys],
            tags=[tags for unit in learning for tags in parts[unit.name].tags],
        )

    def _draw(self, tasks: int) -> StepRows:
        """Returns a step's rows; tasks added for the group filter are played with the same weights as the others."""
        buffer = self.replay_buffer
        rows = draw(
            sample=lambda number: buffer.sample(
                global_steps=self.global_steps, partition_id=PARTITION, batch_size=number
            ),
            add_tasks=super()._add_prompts_to_generate,  # not ours: these replace no failed episode
            tasks=tasks,
            group_filter=self.settings.filter(),
            trainable={unit.name for unit in self.units if unit.trainable},
            algorithm=self.config.algorithm,
        )
        rows.sort()
        return rows

    def _rows_of(self, unit: PolicyUnit, rows: StepRows) -> KVBatchMeta:
        batch = rows.of({unit.name})
        batch.extra_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        return batch

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains; when a policy's process dies, the error says where the next run will go on from."""
        try:
            super().fit(agent_loop_manager)
        except PolicyFailed as failure:
            checkpoint = checkpoints.last_complete(self.config.trainer)
            raise PolicyFailed(
                f"{failure}; "
                + (
                    f"the last complete checkpoint is {checkpoint}: the same command goes on from it"
                    if checkpoint
                    else "there is no complete checkpoint yet: the same command starts from scratch"
                )
            ) from failure

    # ------------------------------------------------------------ episodes

    def get_llm_client(self) -> TeamClient:
        """Returns the clients that rollout workers draw candidates with."""
        return TeamClient({unit.name: unit.client() for unit in self.units})

    def prepare_step(self) -> dict[str, Any]:
        """Hands a step's tasks to the rollout."""
        self._replaced = 0
        metrics: dict[str, Any] = super().prepare_step()
        return metrics

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Replaces failed episodes by new tasks; stops the run if that does not end."""
        self._collect_report()
        self._check_servers()
        self._replaced += num_prompts
        if self._replaced > self.settings.max_failed_episodes:
            raise RuntimeError(
                f"{self._replaced} episodes of step {self.global_steps} failed ({dict(self._counts)}), more than "
                f"{SECTION}.max_failed_episodes={self.settings.max_failed_episodes}; the rollout workers' log says why"
            )
        submitted: int = super()._add_prompts_to_generate(num_prompts)
        return submitted

    def _check_servers(self) -> None:
        """Raises PolicyFailed if an episode failed because a server is dead: replacing it would not help."""
        for unit in self.units:
            unit.check_servers()

    def _collect_report(self) -> None:
        """Adds up what the workers counted; raises RuntimeError if one of them met a defect."""
        manager: TeamRolloutManager = self.agent_loop_manager
        report = manager.drain_report()
        self._counts.update(report.counts)
        if report.error is not None:
            raise RuntimeError(f"the rollout stopped on a defect: {report.error}")

    def _validate(self) -> dict[str, float]:
        """Returns the team's success on the validation tasks (`val-core/<environment>/acc/mean@n`)."""
        sample = self.replay_buffer.sample

        def announced(*args: Any, **kwargs: Any) -> Any:
            batch, metrics = sample(*args, **kwargs)
            self.tokenizer.expect(batch.tags)
            if self._recorder is not None:
                self._recorder.record(self.global_steps, batch, trained=set())
            return batch, metrics

        self.replay_buffer.sample = announced
        try:
            metrics: dict[str, float] = super()._validate()
        finally:
            self.replay_buffer.sample = sample
            # A defect leaves verl with an empty batch; its own error would not say why.
            self._collect_report()
        if every_episode_failed(metrics):
            self._check_servers()
            raise RuntimeError("every validation episode failed; the rollout workers' log says why")
        return metrics

    # ------------------------------------------------------------ records

    def _record_rows(self, rows: StepRows, trained: set[str]) -> None:
        """Records a step's rows, dropped ones and frozen policies' included, while they are in the queue."""
        if self._recorder is not None:
            batch = KVBatchMeta(partition_id=PARTITION, keys=rows.keys, tags=rows.tags)
            self._recorder.record(self.global_steps, batch, trained)

    def _make_recorder(self) -> Recorder | None:
        """Returns what writes the report's records, once it is known from which step the run goes on."""
        settings = self.settings.record_settings()
        if settings is None:
            return None
        about = {
            "project": self.config.trainer.project_name,
            "experiment": self.config.trainer.experiment_name,
            "section": OmegaConf.to_container(self.config[SECTION], resolve=True),
            "models": {unit.name: unit.config.actor_rollout_ref.model.path for unit in self.units},
            "frozen": [unit.name for unit in self.units if not unit.trainable],
        }
        folder = Path(self.config.trainer.default_local_dir) / FOLDER
        files = RecordFiles(folder, settings.max_megabytes, self.global_steps, about)
        return Recorder(settings, files, {unit.name: unit.tokenizer for unit in self.units}, self._in_background)

    def _in_background(self, work: Callable[..., None], *arguments: Any) -> None:
        """Hands work to verl's writer of rollout dumps; raises what earlier work raised."""
        for future in self._dump_futures:
            if future.done():
                future.result()
        self._dump_futures = [future for future in self._dump_futures if not future.done()]
        self._dump_futures.append(self._dump_executor.submit(work, *arguments))

    @property
    def logger(self) -> Tracking:
        """What verl logs to; the records are one logger among those of `trainer.logger`."""
        return self._logger

    @logger.setter
    def logger(self, tracking: Tracking) -> None:
        if self._recorder is not None:
            tracking.logger["record"] = self._recorder
        self._logger = tracking

    # ------------------------------------------------------------ checkpoints

    def _save_checkpoint(self) -> None:
        """Saves all policies as one step: complete, or not there."""
        checkpoints.save(self.config.trainer, self.units, self.global_steps, self.train_dataloader.state_dict())

    def _load_checkpoint(self) -> None:
        """Resumes all policies and the order of tasks from the last complete step."""
        self.global_steps, tasks = checkpoints.load(self.config.trainer, self.units)
        if tasks is not None:
            self.train_dataloader.load_state_dict(tasks)

    # ------------------------------------------------------------ metrics

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        """Adds the team's metrics to verl's, which are of the rows that were trained on."""
        if self._recorder is not None:
            timing_raw["record"] = self._recorder.take_seconds()
        if self._updated:
            super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        else:
            metrics.update({"training/global_step": global_steps, "training/epoch": epoch})
            metrics.update({f"timing_s/{stage}": seconds for stage, seconds in timing_raw.items()})
        metrics.update(step_metrics(self._tags))
        self._collect_report()
        metrics.update(rollout_metrics(self._counts))
        self._counts.clear()

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict[str, float], rollout_data_dir: str) -> None:
        """Writes the step's rows as text, each decoded with its policy's tokenizer."""
        self.tokenizer.expect(batch.tags)
        super()._log_rollout_data(batch, timing_raw, rollout_data_dir)
