"""A training job without Ray, vLLM and a model, on `simulated_cluster`.

Trainer, replay buffer, updates, rollout worker, clients and sandbox are real; the simulated parts count in a `Ledger`.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from fakes.local_queue import LocalQueue
from fakes.simulated_cluster import LocalActor, SimulatedServer
from fakes.simulated_worker import SimulatedWorker
from omegaconf import DictConfig, open_dict
from soak_ledger import Ledger
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from waiting import HANG

from verl_atgrpo import Environment, EpisodeFailed, Outcome, Score, Team, recipes
from verl_atgrpo.sandbox.runner import Limits, run_python
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config.policies import config_of_policy, expand_policies
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.rollout.manager import TeamRolloutManager
from verl_atgrpo.train.serving.balancer import AvoidingBalancer
from verl_atgrpo.train.serving.client import DecisionClient, TeamClient
from verl_atgrpo.train.serving.requests import Gate
from verl_atgrpo.train.serving.served_weights import ServedWeights
from verl_atgrpo.train.trainer.dataset import TeamTokenizer
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit
from verl_atgrpo.train.trainer.rollout_watch import RolloutWatch
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer

POLICIES = ("coder", "tester")
WORKERS = 2
_EPISODE = re.compile(r"episode (\d+),")

# ------------------------------------------------------------------ rollout


class Letters:
    """A tokenizer with one token per character."""

    eos_token_id = pad_token_id = 0
    all_special_tokens = ()
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        """Returns the code points of the messages' contents; called once per decision."""
        self._ledger.count["decisions"] += 1
        return [ord(char) for message in messages for char in message["content"]]

    def decode(self, token_ids: Any, **_: Any) -> str:
        """Returns the characters."""
        return "".join(chr(token) for token in token_ids if token)


def episode_of(prompt_ids: Any) -> tuple[int, int]:
    """Returns the episode of a prompt, and the number of response tokens that follow it."""
    prompt, _, answer_so_far = "".join(map(chr, prompt_ids)).partition("\n")
    found = _EPISODE.match(prompt)
    assert found
    return int(found[1]), len(answer_so_far)


def answer(prompt_ids: list[int], seed: int) -> list[int]:
    """Returns a number, filler of random length and the end token, all from the seed."""
    rng = random.Random(seed)
    return [ord(char) for char in f"{rng.randrange(1000)} {'.' * rng.randrange(24)}"] + [0]


class SoakGame(Environment):
    """Two agents, two turns each; every eighth response of the coder is scored by a program in the sandbox."""

    agents = POLICIES
    ledger: Ledger
    """Set by the job before the trainer creates the environment."""

    def task(self, split: str, index: int) -> int:
        """Returns the index, negative for validation."""
        return index if split == "train" else -1 - index

    def fingerprint(self, task: int) -> str:
        """Returns the index as text."""
        return str(task)

    async def run(self, task: int, team: Team) -> Outcome:
        """Plays the turns, in every third episode both agents concurrently; records the end in the ledger."""
        episode = self.ledger.begin(task)

        async def act(agent: str, turn: int) -> int:
            prompt = f"episode {episode}, task {task}, turn {turn}, {agent}\n"
            chosen = await team[agent].act(prompt, score=lambda reply: self._score(episode, agent, reply))
            return int(chosen.text.split()[0])

        last = 0
        try:
            for turn in range(2):
                if episode % 3:
                    last = sum([await act(agent, turn) for agent in self.agents])
                else:
                    last = sum(await asyncio.gather(*(act(agent, turn) for agent in self.agents)))
        except EpisodeFailed as failure:
            self.ledger.fail(episode, failure.reason)
            raise
        self.ledger.end(episode)
        return Outcome(success=last % 2 == 0, team_reward=float(last % 2 == 0))

    async def _score(self, episode: int, agent: str, reply: str) -> Score:
        number = int(reply.split()[0])
        if agent == "coder" and number % 8 == 0:
            program = object()
            self.ledger.running.add(program)
            try:
                result = await run_python(f"print({number} * 7)", limits=Limits(cpu_seconds=20, wall_seconds=HANG))
            finally:
                self.ledger.running.remove(program)
            self.ledger.judge(result.ok and result.stdout == f"{number * 7}\n")
        self.ledger.scored(episode)
        return Score(team=float(number % 2), local=number % 3 / 2)


class SoakWorker(SimulatedWorker):
    """The rollout worker with verl's own handling of batches, and clients of simulated servers."""

    def __init__(self, config: DictConfig, settings: Any, client: TeamClient, tokenizers: Mapping[str, Any]) -> None:
        super().__init__(None, lambda *_: None)  # type: ignore[arg-type]
        self.config, self._settings, self.llm_client = config, settings, client
        self._environment = settings.make_environment()
        self._policy_of = settings.policies_of(self._environment)
        self._validation_policy_of = settings.validation_policies_of(self._environment)
        self._needs = settings.spec.needs
        self._chats = {name: Chat(tokenizer) for name, tokenizer in tokenizers.items()}
        self.background_tasks: set[Any] = set()
        self._gate = Gate()
        self._training_clients = self._patient(self._gate)
        self._validation_clients = self._patient(Gate())


class SoakManager(TeamRolloutManager):
    """The rollout manager with workers in this process."""

    def __init__(self, workers: list[LocalActor]) -> None:
        self.agent_loop_workers, self._late = workers, {}
        self._most_silent = 600.0


# ------------------------------------------------------------------ training


class _Devices:
    """A worker group of one rank, which records the rows of its updates."""

    def __init__(self, name: str, queue: LocalQueue, ledger: Ledger) -> None:
        self._name, self._queue, self._ledger = name, queue, ledger
        self._dispatch_info = {"actor": [0]}

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Writes a log-prob and an entropy for every token."""
        values = [torch.full((tags["seq_len"],), -0.5) for tags in self._tags(batch)]
        nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        fields = TensorDict({"log_probs": nested, "entropy": nested + 1.0}, batch_size=len(batch))
        return self._queue.kv_batch_put(batch.keys, "train", fields)

    def update_actor(self, batch: KVBatchMeta) -> Any:
        """Records the rows, which must have all fields for an update."""
        data = self._queue.kv_batch_get(batch.keys, "train", ["input_ids", "old_log_probs", "advantages"])
        assert len(data.keys()) == 3
        rows = zip(batch.keys, self._tags(batch), strict=True)
        self._ledger.train(self._name, [(key, tags) for key, tags in rows if not tags.get("is_padding")])
        return {"metrics": {"loss": [0.0], "mfu": [0.0], "grad_norm": [1.0]}}

    def _tags(self, batch: KVBatchMeta) -> list[dict[str, Any]]:
        """Returns the queue's tags: workers receive none."""
        return [self._queue.tags["train"][key] for key in batch.keys]


class SoakUnit(PolicyUnit):
    """A policy with simulated devices, without weight sync; only clients detect dead servers."""

    def __init__(self, name: str, job: DictConfig, queue: LocalQueue, ledger: Ledger) -> None:
        self.name, self.config, self.folder = name, job, name
        self.trainable, self.first_replica = True, 0
        self.tokenizer = Letters(ledger)
        self.use_reference_policy = self.ref_in_actor = False
        self._optimizer_steps, self._sync_mode, self._spec = 2, True, PRESETS["at_grpo"]
        self._served = ServedWeights(name, "bfloat16")  # no model computes anything here
        self._trees = False
        self.replicas = SimpleNamespace(metrics=dict, check=lambda: None)  # type: ignore[assignment]
        self.actor_rollout_wg = self.ref_policy_wg = _Devices(name, queue, ledger)

    def revive(self) -> bool:
        """Restarts no server."""
        return False


class SoakTrainer(AtGrpoTrainer):
    """The trainer with simulated policies and its real `fit`."""

    def __init__(self, config: DictConfig, queue: LocalQueue, ledger: Ledger, servers_sleep: Any) -> None:
        self._parts = queue, ledger, servers_sleep
        self.watcher: Any = None
        """A further backend of the logger."""
        super().__init__(config)

    def _compute_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.logger.logger["soak"] = self.watcher
        super()._compute_metrics(*args, **kwargs)

    def _freeze_gc(self) -> None:
        """Has no actors to freeze."""

    def _setup(self) -> None:
        queue, ledger, servers_sleep = self._parts
        self.tokenizer = self.processor = None  # type: ignore[assignment]
        self._init_dataloader()
        self._init_dump_executor()
        self.units = [SoakUnit(name, config_of_policy(self.config, name), queue, ledger) for name in POLICIES]
        self.tokenizer = TeamTokenizer({unit.name: unit.tokenizer for unit in self.units})
        self.checkpoint_manager: Any = SimpleNamespace(sleep_replicas=servers_sleep, update_weights=lambda step: None)
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        self.watch = RolloutWatch(self.units, self.settings.max_failed_episodes, episodes=1)
        self.global_steps = 0
        self.recorder = self._make_recorder()


def job_config(folder: Path, steps: int, seed: int, timeout: float, branches: bool) -> DictConfig:
    """Returns the job's configuration: 8 tasks per step, K = 4, two policies, group filter and records."""
    scheme = ["at_grpo.scheme=branch", "+at_grpo.branch={at: every, score_weight: 0.5}"] if branches else []
    config = recipes.compose(
        "plan_path_cpu_roles",
        [
            "at_grpo.agents={tool_user: null, planner: null}",
            f"at_grpo.seed={seed}",
            "at_grpo.candidates=4",
            *scheme,
            f"at_grpo.train_tasks={100 * steps}",  # every task at most once
            f"at_grpo.request_timeout={timeout}",
            "at_grpo.max_failed_episodes=1000000",  # on a busy machine every request may time out
            "at_grpo.group_filter={min_groups: 26, max_tasks: 16}",
            "at_grpo.record={train_tasks: 2, val_tasks: 0, max_megabytes: 1}",
            "data.train_batch_size=8",
            f"data.seed={seed}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            f"actor_rollout_ref.rollout.agent.num_workers={WORKERS}",
            "data.max_prompt_length=64",
            "data.max_response_length=40",
            "actor_rollout_ref.rollout.max_model_len=104",
            "trainer.logger=[]",
            "trainer.val_before_train=false",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}",
        ],
    )
    with open_dict(config):
        section = config.at_grpo
        section.environment = {"name": "soak_job:SoakGame"}
        section.agents = {name: name for name in POLICIES}
        section.policies = {name: dict(model) for name, model in zip(POLICIES, section.policies.values(), strict=True)}
    expand_policies(config, read_section(config))
    return config


def client_of(
    config: DictConfig, policy: str, servers: list[SimulatedServer], loop: asyncio.AbstractEventLoop, ledger: Ledger
) -> tuple[DecisionClient, AvoidingBalancer]:
    """Returns the client of these servers, and their balancer."""

    delivered: set[str] = set()

    def seen(method: str, request: dict[str, Any], got: Any) -> None:
        if method != "generate_group":
            return
        ids = request["request_ids"]
        left = [number for number, one in enumerate(ids) if one not in delivered]
        for number, answer in got if isinstance(got, list) else [(number, got) for number in left]:
            delivered.add(ids[number])
            ledger.delivered(*episode_of(request["prompt_ids"] + request["token_ids"][number]), answer)
        if delivered.issuperset(ids):
            delivered.difference_update(ids)

    actors = {f"{policy}-{number}": LocalActor(server, loop, seen) for number, server in enumerate(servers)}
    balancer = AvoidingBalancer(actors)
    return DecisionClient(config=config, load_balancer_handle=LocalActor(balancer, loop)), balancer
