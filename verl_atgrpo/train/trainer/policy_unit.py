"""One policy of a team in training: its workers, its servers, its weight sync and its update."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.utils import Role, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.policies import ADAPTERS
from verl_atgrpo.train.config.policy_rules import devices_of, of_context
from verl_atgrpo.train.config.schema import EXPANDED, SECTION, AtGrpoConfig, ConfigError
from verl_atgrpo.train.engine.arrival import ARRIVED, CHANGED, ArrivalWatch, served_dtype
from verl_atgrpo.train.engine.prefix_tree.engine import MODEL_TOKENS, ROW_TOKENS
from verl_atgrpo.train.engine.worker import TrainerWorker
from verl_atgrpo.train.rows.batch import Batch, Rows
from verl_atgrpo.train.serving.client import DecisionClient, balancer_class
from verl_atgrpo.train.serving.health import naming
from verl_atgrpo.train.serving.replicas import Replicas, StandaloneReplicas
from verl_atgrpo.train.serving.served_weights import ServedWeights, computing_dtype
from verl_atgrpo.train.serving.workers import PolicyServers, PolicyWorker
from verl_atgrpo.train.trainer import update_inputs
from verl_atgrpo.train.trainer.metrics import PROBS_DIFF

logger = logging.getLogger(__name__)


class Update(NamedTuple):
    """A policy's update of a step, and what its stages have found out."""

    rows: Batch
    """With padding, in training order."""
    metrics: dict[str, Any]
    timing: dict[str, float]
    """Seconds of its stages, by verl's names."""


class PolicyUnit:
    """Trains and serves one policy; those on one base share the workers and servers of one of them (`SharingUnit`)."""

    actor_rollout_wg: RayWorkerGroup
    ref_policy_wg: RayWorkerGroup
    replicas: Replicas
    _turns: threading.RLock | None = None
    """Where policies share the workers: held by the one whose adapter these have in use."""
    _client: DecisionClient | None = None
    _host: PolicyUnit | None = None

    def __init__(
        self,
        name: str,
        job: DictConfig,
        folder: str,
        trainable: bool,
        settings: AtGrpoConfig,
        *,
        first_replica: int,
    ) -> None:
        """Loads tokenizer and configuration; `place` and `start` create workers and servers.

        `job` has this policy's `actor_rollout_ref`, `folder` is its own inside a checkpoint, and `first_replica` the
        number of its first replica, which is unique over all policies. Raises ConfigError if the tokenizer has no chat
        template, or the model too few positions.
        """
        self.name, self.config, self.folder = name, job, folder
        self.trainable, self.first_replica = trainable, first_replica
        self._restarts, self._spec = settings.restart_servers, settings.spec
        loaded = omega_conf_to_dataclass(job.actor_rollout_ref.model)
        self.tokenizer = loaded.tokenizer
        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"policy {name!r}: the tokenizer of {job.actor_rollout_ref.model.path} has no chat template; "
                "a team's prompts are chats, set its model.custom_chat_template"
            )
        key = f"{SECTION}.policies.{name}" if EXPANDED in job else "actor_rollout_ref"
        longest = get_max_position_embeddings(loaded.hf_config)
        check(of_context(key, job.actor_rollout_ref.rollout, job.data, longest))
        self.use_reference_policy = trainable and need_reference_policy(job)
        model = job.actor_rollout_ref.model
        self.ref_in_actor = model.lora_rank > 0
        actor = job.actor_rollout_ref.actor
        self._sync_mode = settings.mode == "sync"
        self._optimizer_steps = job.data.train_batch_size // actor.ppo_mini_batch_size
        # A frozen policy's rows are not computed.
        self._prefix_tree: str | bool = settings.prefix_tree if trainable else False
        self._trees = False
        # Each policy of a run draws its own; a frozen one stays as it is.
        self._dither = stable_hash("dither", settings.seed, name) % 2**31 if trainable and settings.dither else None
        if OmegaConf.select(model, f"lora.{ADAPTERS}"):
            self._turns = threading.RLock()
        self._served = ServedWeights(name, computing_dtype(job.actor_rollout_ref))
        self._arrival = ArrivalWatch(name, served_dtype(job.actor_rollout_ref.rollout))

    @property
    def host(self) -> PolicyUnit:
        """The policy that has the workers and servers: another one if they share a base."""
        return self._host or self

    def place(self, pool: RayResourcePool) -> None:
        """Creates the worker processes on the devices of `pool`; must not run concurrently for two policies."""
        role = Role.ActorRolloutRef if self._own_reference else Role.ActorRollout
        self._place(pool, [role], PolicyWorker, first_replica=self.first_replica)

    @property
    def _own_reference(self) -> bool:
        return self.use_reference_policy and not self.ref_in_actor

    def _place(self, pool: RayResourcePool, roles: Sequence[Role], kind: type[TrainerWorker], **options: Any) -> None:
        """Creates workers of class `kind`, all roles in the same processes; the first role trains."""
        workers = {
            str(role): RayClassWithInitArgs(
                cls=ray.remote(kind),
                config=self.config.actor_rollout_ref,
                role=str(role),
                prefix_tree=bool(self._prefix_tree),
                dither=self._dither,
                **options,
            )
            for role in roles
        }
        group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=create_colocated_worker_cls(class_dict=workers),
            device_name=self.config.trainer.device,
            **self._profiling(),
        )
        self._pool = pool
        spawned = group.spawn(prefix_set=set(workers))
        self.actor_rollout_wg = spawned[str(roles[0])]
        self.ref_policy_wg = spawned.get(str(Role.RefPolicy), self.actor_rollout_wg)

    @property
    def own_server_devices(self) -> int:
        """Number of devices that only serve this policy."""
        return 0

    def start(self) -> None:
        """Loads the model and starts the servers, which then sleep and have no weights yet.

        Raises PolicyFailed if a worker or server does not start, RuntimeError if workers and servers of different
        policies are connected.
        """
        with naming(self.name, "its start"):
            # Before the models are loaded, which creates the process group.
            self.actor_rollout_wg.use_port(self.actor_rollout_wg.reserve_port())
            for group in self._worker_groups:
                group.init_model()
            self._look_at_trees()
            self._start_servers()

    @property
    def _worker_groups(self) -> Iterable[RayWorkerGroup]:
        return dict.fromkeys((self.actor_rollout_wg, self.ref_policy_wg))

    def actors(self) -> list[ray.actor.ActorHandle]:
        """Returns actors whose garbage collectors should skip what the start has made; servers do so themselves."""
        return [*self.actor_rollout_wg.workers, self.servers.global_load_balancer]

    def _start_servers(self) -> None:
        self._launch(Replicas, worker_group=self.actor_rollout_wg, rollout_resource_pool=self._pool)
        self.sleep_servers()

    def _launch(self, kind: type[Replicas], **shared: Any) -> None:
        """Starts the servers, with `shared` devices or their own, and their weight sync by the checkpoint engine."""
        rollout = self.config.actor_rollout_ref.rollout
        self.servers = PolicyServers.create(
            config=self.config, start_rank=self.first_replica, load_balancer_cls=balancer_class(rollout), **shared
        )
        engine, replicas = omega_conf_to_dataclass(rollout.checkpoint_engine), self.servers.get_replicas()
        self.sync = CheckpointEngineManager(config=engine, actor_wg=self.actor_rollout_wg, replicas=replicas)
        self.replicas = kind(self.name, self.actor_rollout_wg, self.servers, self.sync, self._restarts)

    def _look_at_trees(self) -> None:
        """Asks the workers whether they use prefix trees; raises ConfigError if they must and do not."""
        refusals = list(filter(None, (refusal for group in self._worker_groups for refusal in group.tree_refusal())))
        self._trees = bool(self._prefix_tree) and not refusals
        if self._prefix_tree is True and refusals:
            raise ConfigError(
                f"{SECTION}.prefix_tree=True cannot be had for policy {self.name!r}: {refusals[0]}; use auto or false"
            )

    def _profiling(self) -> dict[str, Any]:
        profiler = self.config.global_profiler
        if profiler.get("steps") is None:
            return {}
        if profiler.get("tool") != "nsys":
            return {"profile_steps": profiler.steps}
        options = OmegaConf.to_container(profiler.global_tool_config.nsys.worker_nsight_options)
        return {"profile_steps": profiler.steps, "worker_nsight_options": options}

    def sleep_servers(self) -> None:
        """Puts the servers to sleep, which frees their memory for the update; raises PolicyFailed if none is left."""
        with naming(self.name, "putting its servers to sleep"):
            self.replicas.poll()
            self.sync.sleep_replicas()

    def empty_cache(self) -> None:
        """Frees the device memory cached by the training workers, for the processes of other policies."""
        with naming(self.name, "emptying its device cache"):
            self.actor_rollout_wg.empty_cache()

    def interrupt_servers(self) -> None:
        """Aborts requests in flight, which return their tokens so far, and accepts no others."""
        with naming(self.name, "interrupting its servers"):
            self.replicas.poll()
            self.sync.abort_replicas()

    def resume_servers(self) -> None:
        """Accepts requests again."""
        with naming(self.name, "resuming its servers"):
            self.sync.resume_generation_replicas()

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the policy's servers, and where it has those of a shared base, of the weight sync."""
        if self._turns is None:
            return self.replicas.metrics()
        with naming(self.name, "asking its workers"):
            sent = sum(self.actor_rollout_wg.weights_sent())
        return {**self.replicas.metrics(), "team/weights_megabytes": sent / 1e6}

    def push_weights(self, global_steps: int) -> None:
        """Wakes the servers with the policy's weights, restarting dead ones; raises PolicyFailed if none is left."""
        with naming(self.name, "its weight sync"):
            self.replicas.push(global_steps)

    def revive(self) -> bool:
        """Restarts the servers if all are dead; returns whether they were, or raises PolicyFailed."""
        with naming(self.name, "restarting its servers"):
            return self.replicas.revive()

    def client(self) -> DecisionClient:
        """Returns the client that rollout workers sample this policy's candidates with."""
        if self._client is None:
            self._client = self.servers.get_client(client_cls=DecisionClient)
        return self._client

    # ------------------------------------------------------------ update

    def can_learn_from(self, rows: int) -> bool:
        """Returns whether the number of rows is enough for an update.

        An optimizer step without a row would have a loss of 0 / 0, or move the weights by momentum alone.
        """
        if self.trainable and 0 < rows < self._optimizer_steps:
            logger.warning(
                f"policy {self.name!r} is not updated: it has {rows} rows for {self._optimizer_steps} optimizer steps "
                "(data.train_batch_size over actor.ppo_mini_batch_size)"
            )
        return self.trainable and rows >= self._optimizer_steps

    def train(self, batch: Batch, global_steps: int) -> Update:
        """Updates the policy on its rows; raises PolicyFailed if a worker dies, and what `ServedWeights.look` does."""
        with naming(self.name, "its update"), self._turn():
            update, began = Update(batch, {}, {}), time.perf_counter()
            self._deal(update, seed=global_steps)
            self._log_probs(update, global_steps)
            self._advantages(update)
            output = self._update_actor(update)
            self._add_metrics(update, output, began)
            return update

    def freeze_self(self, slot: int) -> None:
        """Keeps the policy as it is as its past self in a slot of the pool of opponents."""
        with naming(self.name, "freezing its past self"):
            self.actor_rollout_wg.with_adapter("freeze_self", self.name, slot)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Has the workers use this policy's adapter, where others share them, and no other one meanwhile."""
        turns = self.host._turns
        if turns is None:
            yield
            return
        with turns:
            self.actor_rollout_wg.with_adapter("use", self.name)
            yield

    def _deal(self, update: Update, seed: int) -> None:
        """Pads rows to a multiple of ranks x optimizer steps, and deals them to both."""
        with marked_timer("deal", update.timing):
            workers, batch = self.actor_rollout_wg, update.rows
            update.metrics["team/tokens"] = float(sum(tags["seq_len"] for tags in batch.tags))
            if "actor" not in workers._dispatch_info:
                workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
            ranks = max(workers._dispatch_info["actor"]) + 1
            steps = self._optimizer_steps
            batch.pad(ranks * steps, self.tokenizer.eos_token_id)
            order, balance = update_inputs.deal(batch.tags, ranks, steps, seed, shared=self.host._trees)
            batch.reorder(order)
            update_inputs.write_temperatures(batch)
            update.metrics.update(balance, **{"team/padding_rows": float(len(batch.padding))})

    def _log_probs(self, update: Update, global_steps: int) -> None:
        """Computes the actor's log-probs, or uses the servers' in bypass mode, and those of the reference policy."""
        workers, batch = self.actor_rollout_wg, update.rows
        with marked_timer("old_log_prob", update.timing, color="blue"):
            if self._correction is not None and self._correction.get("bypass_mode", False):
                update_inputs.bypass_old_log_probs(batch)
            else:
                self._infer(workers.compute_log_prob, batch, calculate_entropy=True)
                # In sync mode every row must be fresh, so verl's metric over all rows is kept as a check.
                fresh = None if self._sync_mode else global_steps - 1
                actor = self.config.actor_rollout_ref.actor
                update.metrics.update(update_inputs.write_old_log_probs(batch, actor, fresh))
            if (difference := update.metrics.get(PROBS_DIFF)) is not None:
                self._served.look(difference, global_steps)
        if not self.use_reference_policy:
            return
        with marked_timer("ref", update.timing, color="olive"):
            if self.ref_in_actor:
                self._infer(workers.compute_log_prob, batch, calculate_entropy=False, no_lora_adapter=True)
            else:
                self._infer(self.ref_policy_wg.compute_ref_log_prob, batch, calculate_entropy=False)
            update_inputs.write_ref_log_probs(batch)

    def _infer(self, compute: Callable[[Rows], Rows], batch: Batch, **extra_info: Any) -> None:
        done = compute(batch.for_workers(compute_loss=False, **extra_info))
        assert len(done) == len(batch)

    def _advantages(self, update: Update) -> None:
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        with marked_timer("adv", update.timing, color="brown"):
            found = update_inputs.write_advantages(update.rows, self._spec, mode, self._correction)
            update.metrics.update(found)

    @property
    def _correction(self) -> Any:
        return self.config.algorithm.get("rollout_correction", None)

    @property
    def _ppo_epochs(self) -> int:
        """Passes over the rows of an update."""
        return int(self.config.actor_rollout_ref.actor.ppo_epochs)

    def _update_actor(self, update: Update) -> dict[str, Any]:
        """Updates the policy in the configured number of optimizer steps; returns the workers' metrics."""
        actor = self.config.actor_rollout_ref.actor
        with marked_timer("update_actor", update.timing, color="red"):
            rows = update.rows.for_workers(
                calculate_entropy=actor.calculate_entropy or actor.entropy_coeff != 0.0,
                # The denominator of sequence-mean losses: real rows only, equal for all mini-batches.
                global_batch_size=len(update.rows.real) / self._optimizer_steps,
                mini_batch_size=len(update.rows) // self._optimizer_steps,
                epochs=self._ppo_epochs,
                seed=actor.data_loader_seed,
            )
            metrics: dict[str, Any] = self.actor_rollout_wg.update_actor(rows)["metrics"]
            return metrics

    def _add_metrics(self, update: Update, output: dict[str, Any], began: float) -> None:
        """Adds the workers' metrics to those of the update, and the seconds since it began."""
        metrics = rename_dict(output, "actor/")
        metrics["perf/mfu/actor"] = metrics.pop("actor/mfu")
        of_rows, of_model = (metrics.pop(f"actor/{name}", None) for name in (ROW_TOKENS, MODEL_TOKENS))
        update.metrics.update(reduce_metrics(metrics))
        if of_rows:
            update.metrics["team/prefix_tree_ratio"] = sum(of_rows) / sum(of_model)
        if (arrived := update.metrics.get(f"actor/{ARRIVED}")) is not None:
            self._arrival.look(arrived, update.metrics[f"actor/{CHANGED}"])
        steps = self._optimizer_steps * self._ppo_epochs
        seconds = time.perf_counter() - began
        update.metrics.update({"team/optimizer_steps": float(steps), "team/update_seconds": seconds})

    # ------------------------------------------------------------ checkpoints

    def save(self, step_folder: str, global_steps: int) -> None:
        """Saves a trainable policy into its folder; the caller removes old checkpoints."""
        if not self.trainable:
            return
        folder = f"{step_folder}/{self.folder}"
        with naming(self.name, "saving its checkpoint"):
            if self.host._turns is not None:
                self.actor_rollout_wg.with_adapter("save_adapter", self.name, Path(folder))
            else:
                self.actor_rollout_wg.save_checkpoint(folder, None, global_steps)

    def load(self, step_folder: str) -> None:
        """Loads a trainable policy; a frozen one keeps the weights of its model path."""
        if not self.trainable:
            return
        folder = f"{step_folder}/{self.folder}"
        with naming(self.name, "loading its checkpoint"):
            if self.host._turns is not None:
                self.actor_rollout_wg.with_adapter("load_adapter", self.name, Path(folder))
            else:
                self.actor_rollout_wg.load_checkpoint(local_path=folder, del_local_after_load=False)


class SharingUnit(PolicyUnit):
    """Trains an adapter on the workers of another policy, its `host`, whose servers serve it, too.

    What concerns workers and servers as a whole (place, start, sleep, weight sync, interruption, restart) is only
    called on the host.
    """

    _host: PolicyUnit

    def __init__(self, *given: Any, host: PolicyUnit) -> None:
        """As `PolicyUnit`, with the policy that has the workers and servers of the base."""
        super().__init__(*given, first_replica=host.first_replica)
        self._host = host

    @property
    def actor_rollout_wg(self) -> RayWorkerGroup:  # type: ignore[override]
        """The workers of the base."""
        return self._host.actor_rollout_wg

    @property
    def ref_policy_wg(self) -> RayWorkerGroup:  # type: ignore[override]
        """The same workers: the reference is the base without an adapter."""
        return self._host.actor_rollout_wg

    @property
    def replicas(self) -> Replicas:  # type: ignore[override]
        """The replicas of the base."""
        return self._host.replicas

    def client(self) -> DecisionClient:
        """Returns the client of the base's servers; requests name the adapter."""
        return self._host.client()


class StandaloneUnit(PolicyUnit):
    """Trains one policy on the trainer's devices and serves it on others, also meanwhile (`mode: separate_async`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs
        with open_dict(options):
            # verl looks up the processes of a weight sync by this name, so each policy needs its own.
            given = OmegaConf.select(options, "nccl.group_name") or "at_grpo"
            OmegaConf.update(options, "nccl.group_name", f"{given}-{self.name}")
        self._has_weights = False

    @property
    def own_server_devices(self) -> int:
        """Number of devices that only serve this policy: all of its servers'."""
        return devices_of(self.config.actor_rollout_ref)

    def place(self, pool: RayResourcePool) -> None:
        """Creates the training workers on the devices of `pool`, which no server shares."""
        roles = [Role.Actor, Role.RefPolicy] if self._own_reference else [Role.Actor]
        self._place(pool, roles, TrainerWorker)

    def actors(self) -> list[ray.actor.ActorHandle]:
        """Returns the training workers, the servers' workers and the load balancer."""
        return [*super().actors(), *(worker for replica in self.replicas.serving for worker in replica.workers)]

    def _start_servers(self) -> None:
        self._launch(StandaloneReplicas)

    def push_weights(self, global_steps: int) -> None:
        """Interrupts the servers' requests, syncs the weights and resumes the requests.

        A frozen policy's servers get weights only once, and afterwards only the version. Raises PolicyFailed if a
        server is dead or dies meanwhile.
        """
        with naming(self.name, "its weight sync"):
            if self.trainable or not self._has_weights:
                self.replicas.push(global_steps)
                self._has_weights = True
                return
            self.replicas.poll()
            servers = [server for replica in self.replicas.serving for server in replica.servers]
            ray.get([server.set_global_steps.remote(global_steps) for server in servers])
