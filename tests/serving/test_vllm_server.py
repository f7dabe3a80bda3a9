"""Our server on verl's code: which replicas use it, and a decision's requests between verl's gate and the engine."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer, and the worker with it)
from fakes.simulated_engine import run_virtually, virtually
from omegaconf import OmegaConf
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
from vllm.sampling_params import RequestOutputKind

from verl_atgrpo.train.serving.balancer import AvoidingBalancer
from verl_atgrpo.train.serving.decision_server import DecisionServer
from verl_atgrpo.train.serving.requests import engine_params
from verl_atgrpo.train.serving.vllm_server import VllmServer
from verl_atgrpo.train.serving.workers import PolicyServers, replica_class


class Engine:
    """A fake of vLLM: a token per second; a prompt's last id is the number of tokens, 0 for a request that hangs."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[int], Any, str]] = []
        self.aborted: list[str] = []
        self.output_processor = SimpleNamespace(request_states={})
        self._stop = asyncio.Event()

    async def generate(self, *, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        """Yields the response so far after every token."""
        ids = prompt["prompt_token_ids"]
        self.requests.append((ids, sampling_params, request_id))
        tokens: list[int] = []
        try:
            while len(tokens) < ids[-1] or not ids[-1]:
                await (asyncio.sleep(1) if ids[-1] else asyncio.Event().wait())
                if self._stop.is_set():
                    yield self._output(tokens, sampling_params, "abort")
                    return
                tokens.append(7)
                yield self._output(tokens, sampling_params, "length" if len(tokens) == ids[-1] else None)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise

    async def pause_generation(self, **_: Any) -> None:
        """Aborts requests in flight."""
        self._stop.set()

    def _output(self, tokens: list[int], params: Any, reason: str | None) -> Any:
        log_probs = create_sample_logprobs(params.flat_logprobs)
        for number, token in enumerate(tokens):
            append_logprobs_for_next_position(log_probs, [token], [-0.5 - number], [None], rank=1, num_logprobs=0)
        completion = SimpleNamespace(token_ids=[*tokens], logprobs=log_probs, finish_reason=reason)
        return SimpleNamespace(outputs=[completion], num_cached_tokens=1, prompt_logprobs=None)


def fake_server() -> VllmServer:
    """Returns a server with the attributes that verl's `generate` and its gate use."""
    server = VllmServer.__new__(VllmServer)
    server.config = OmegaConf.create(
        {"max_model_len": 64, "full_determinism": False, "enable_rollout_routing_replay": False, "mtp": None}
    )
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.engine = Engine()
    server.global_steps, server.replica_rank, server.node_rank = 3, 0, 0
    server._disaggregation_role, server._pd_decode_peers = "null", []
    server._submission_paused = server._rejecting = False
    server._admitting, server._resume_event = 0, asyncio.Event()
    return server


async def group(server: VllmServer, lengths: list[int], timeout: float = 100.0) -> list[Any]:
    """Samples responses of these lengths."""
    ids = [f"r{number}" for number in range(len(lengths))]
    params = [{"max_tokens": 20, "logprobs": True, "seed": number} for number in range(len(lengths))]
    return await responses(server.generate_group([1, 2], ids, [[length] for length in lengths], params, timeout))


async def responses(stream: AsyncIterator[list[tuple[int, Any]]]) -> list[Any]:
    """Returns a call's answers in the order of its requests."""
    return [answer for _, answer in sorted([one async for batch in stream for one in batch], key=lambda one: one[0])]


def test_every_replica_has_our_server_also_when_it_is_started_again() -> None:
    rollout = {
        "_target_": "verl.workers.config.RolloutConfig", "name": "vllm", "nnodes": 1, "n_gpus_per_node": 1,
        "tensor_model_parallel_size": 1, "disaggregation": {"enabled": False},
    }  # fmt: skip
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})
    for servers in PolicyServers(config=config, worker_group=[], start_rank=7), PolicyServers(config=config):
        plain = {name: value for name, value in rollout.items() if name != "disaggregation"}
        replica = servers.rollout_replica_class(7, OmegaConf.create(plain), {}, gpus_per_node=1)
        # verl starts the class in this attribute, also after a restart.
        assert issubclass(replica.server_class.__ray_metadata__.modified_class, DecisionServer)
        assert "self.server_class.options(" in inspect.getsource(replica.launch_servers)


def test_the_actor_has_all_methods_of_the_server() -> None:
    def public(kind: type) -> set[str]:
        return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}

    assert public(DecisionServer) == public(VllmServer)


@virtually
async def test_a_call_to_the_actor_is_one_to_its_server() -> None:
    closed = []

    class Fake:
        async def sleep(self, level: int = 0) -> int:
            return level + 1

        def get_server_address(self) -> str:
            return "here"

        async def generate_group(self, prompt_ids: list[int]) -> AsyncIterator[int]:
            try:
                for one in prompt_ids:
                    yield one
            finally:
                closed.append(True)

    actor: Any = DecisionServer.__new__(DecisionServer)
    actor._server = Fake()
    assert (await actor.sleep(level=1), await actor.get_server_address()) == (2, "here")
    stream = actor.generate_group(prompt_ids=[5, 6])
    assert await anext(stream) == 5
    await stream.aclose()  # as Ray does where the call is cancelled
    assert closed == [True]


@pytest.mark.parametrize("kind", [DecisionServer, AvoidingBalancer])
def test_a_process_that_gets_a_handle_imports_neither_verl_nor_torch(kind: type) -> None:
    listed = f"import sys, {kind.__module__}; print(*{{'verl', 'vllm', 'torch', 'numpy'}} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", listed], capture_output=True, check=True).stdout.split() == []


def test_a_replica_without_that_attribute_is_not_used() -> None:
    class Changed:
        """verl's, one day."""

    with pytest.raises(RuntimeError, match="Changed has no server_class"):
        replica_class(Changed, 0)()


def test_verls_server_takes_what_we_give_it() -> None:
    parameters = inspect.signature(vLLMHttpServer.generate).parameters
    assert {"prompt_ids", "request_id", "sampling_params"} <= parameters.keys()
    required = [name for name, one in parameters.items() if one.default is one.empty]
    assert required == ["self", "prompt_ids", "sampling_params", "request_id"]
    assert "global_steps" in inspect.signature(vLLMHttpServer.set_global_steps).parameters
    sent = inspect.signature(VllmServer.generate).parameters
    assert list(sent)[:4] == required


@virtually
async def test_every_request_is_one_of_the_engines_with_its_own_parameters() -> None:
    server = fake_server()
    params = {"max_tokens": 20, "logprobs": True, "temperature": 0.5, **engine_params("sync")}
    both = [{**params, "seed": 8}, {**params, "seed": 9, "max_tokens": 18}]
    answers = await responses(server.generate_group([1, 2], ["x", "y"], [[3], [4, 5]], both, 100.0))
    assert [answer.token_ids for answer in answers] == [[7] * 3, [7] * 5]
    assert [answer.log_probs for answer in answers] == [[-0.5, -1.5, -2.5], [-0.5, -1.5, -2.5, -3.5, -4.5]]
    assert all(answer.extra_fields == {"global_steps": 3, "num_cached_tokens": 1} for answer in answers)
    (first, mine, one), (second, yours, other) = server.engine.requests
    assert (first, second, one, other) == ([1, 2, 3], [1, 2, 4, 5], "x", "y")
    assert (mine.seed, mine.max_tokens, yours.seed, yours.max_tokens) == (8, 20, 9, 18)
    assert mine.output_kind is yours.output_kind is RequestOutputKind.FINAL_ONLY
    assert (mine.detokenize, mine.flat_logprobs, mine.logprobs, mine.temperature) == (False, True, 0, 0.5)


def test_only_the_request_that_times_out_is_aborted_in_the_engine() -> None:
    async def run() -> None:
        server = fake_server()
        answers = await group(server, [2, 0, 9], timeout=20.0)
        assert [None if answer is None else len(answer.token_ids) for answer in answers] == [2, None, 9]
        assert (server.engine.aborted, server._admitting) == (["r1"], 0)

    _, seconds = run_virtually(run())
    assert seconds == 20


def test_an_abort_returns_the_tokens_so_far() -> None:
    async def run() -> None:
        server = fake_server()
        call = asyncio.ensure_future(group(server, [2, 12, 9]))
        await asyncio.sleep(4.5)
        await server.abort_all_requests()
        answers = await call
        assert [len(answer.token_ids) for answer in answers] == [2, 4, 4]
        assert [answer.stop_reason for answer in answers] == ["completed", "aborted", "aborted"]
        assert server.engine.aborted == []

    _, seconds = run_virtually(run())
    assert seconds < 6


@virtually
async def test_a_call_at_a_closed_gate_waits_and_can_time_out() -> None:
    server = fake_server()
    server._submission_paused = True
    late = await group(server, [2, 2], timeout=5.0)
    assert (late, server.engine.requests, server._admitting) == ([None, None], [], 0)
    waiting = asyncio.ensure_future(group(server, [2, 2], timeout=50.0))
    await asyncio.sleep(10)
    assert (server.engine.requests, waiting.done()) == ([], False)
    await server.open_submission_gate()
    assert [len(answer.token_ids) for answer in await waiting] == [2, 2]


@virtually
async def test_an_error_of_verls_server_is_of_one_request() -> None:
    params = [{"max_tokens": 5}, {"max_tokens": 5}]
    answers = await responses(fake_server().generate_group([1, 2], ["x", "y"], [[3], [4] * 80], params, 100.0))
    assert len(answers[0].token_ids) == 3
    assert isinstance(answers[1].cause, ValueError)
    assert "leaves no room to generate" in str(answers[1])
