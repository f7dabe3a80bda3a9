"""Rows of random tokens and verl's FSDP engines for them, in processes of their own."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import socket
import sys
import unittest.mock
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from verl_atgrpo.lab.tiny_models.tiny import build_model, build_tokenizer

_IMPORTS = "fakes.fsdp_imports"
ROWS = 12
"""Of each rank."""
Row = tuple[list[int], list[int]]
"""Prompt and response."""


def some_rows(seed: int) -> list[Row]:
    """Prompts that share what they begin with, and responses, some of them equal."""
    rng = random.Random(seed)
    stems = [[rng.randrange(20) for _ in range(rng.randrange(5, 25))] for _ in range(2)]
    return [
        (
            rng.choice(stems) + [rng.randrange(3) for _ in range(rng.randrange(3))],
            [rng.randrange(3) for _ in range(rng.randrange(1, 6))],
        )
        for _ in range(ROWS)
    ]


def save_model(folder: Path) -> Path:
    """Writes a tiny model with random weights and its tokenizer; returns the folder."""
    tokenizer = build_tokenizer(())
    tokenizer.save_pretrained(folder)
    build_model(tokenizer, seed=0, hidden=16, layers=2).save_pretrained(folder)
    return folder


def _jagged(values: Sequence[Any]) -> Any:
    return torch.nested.as_nested_tensor([torch.as_tensor(each) for each in values], layout=torch.jagged)


def batch(rows: Sequence[Row], rank: int, ranks: int, log_prob: float = -1.0, **options: Any) -> Any:
    """Returns rows as an engine gets them: random advantages, old log-probs around `log_prob`, three temperatures."""
    from verl.utils import tensordict_utils as tu

    def responses(mean: float) -> Any:
        rng = random.Random(f"{rank}.{mean}")
        return _jagged([[rng.gauss(mean, 0.3) for _ in response] for _, response in rows])

    fields = {
        "input_ids": _jagged([prompt + response for prompt, response in rows]),
        "position_ids": _jagged([range(len(prompt + response)) for prompt, response in rows]),
        "prompts": _jagged([prompt for prompt, _ in rows]),
        "responses": _jagged([response for _, response in rows]),
        "response_mask": _jagged([[1] * len(response) for _, response in rows]),
        "loss_mask": _jagged([[1] * len(response) for _, response in rows]),
        "advantages": responses(0.0),
        "old_log_probs": responses(log_prob),
        "ref_log_prob": responses(log_prob - 0.2),
        "rollout_is_weights": responses(1.0),
        # Of each row, as where agents differ.
        "temperature": torch.tensor([(0.7, 1.0, 1.3)[row % 3] for row in range(len(rows))]),
    }
    plain = {
        "global_batch_size": ROWS * ranks,
        "calculate_entropy": True,
        "use_remove_padding": False,
        "pad_token_id": 0,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 120,
        "micro_batch_size_per_gpu": 4,
        **options,
    }
    return tu.get_tensordict(fields, plain)


def spawn(main: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Runs `main(rank, ranks, port, *arguments)` in `ranks` processes; `join` is its first call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _start_fork_server()
    torch.multiprocessing.start_processes(main, (ranks, port, *arguments), ranks, start_method="forkserver")


@functools.cache
def _start_fork_server() -> None:
    """Starts the server of this process's forks with what they import; it finds modules by PYTHONPATH alone."""
    multiprocessing.set_forkserver_preload([_IMPORTS])
    with unittest.mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()


def join(rank: int, ranks: int, port: int) -> None:
    """Joins the process group of a `spawn`, in CPU mode."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0}
    os.environ.update({name: str(value) for name, value in place.items()}, VERL_PLATFORM="cpu")
    assert _IMPORTS in sys.modules, "the fork server has imported nothing"
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)


def make(kind: Any, config: Any) -> tuple[Any, Any]:
    """Returns an engine of class `kind` for an `actor_rollout_ref`, started, and its actor's section."""
    from verl.utils.config import omega_conf_to_dataclass

    section = omega_conf_to_dataclass(config.actor)
    section.model_config = settings = omega_conf_to_dataclass(config.model)
    settings.model_type = "language_model"
    engine = kind(settings, section.engine, section.optim, section.checkpoint)
    torch.manual_seed(0)  # an adapter starts at random
    engine.initialize()
    return engine, section
