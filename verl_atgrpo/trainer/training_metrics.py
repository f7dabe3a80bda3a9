"""verl's metrics of the rows that were trained on, from their tags: verl itself fetches and pads all their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics

from verl_atgrpo.trainer.row_parts import Tags, is_padding


def training_metrics(
    rows: Sequence[Tags], timing: Mapping[str, float], global_steps: int, epoch: int, gpus: int
) -> dict[str, float]:
    """Returns what verl's `PPOTrainer._compute_metrics` adds after a step.

    Args:
        rows: tags of the rows with padding, advantages in them (see `advantages.write_advantages`).
        timing: seconds of every stage, `step` among them.
        gpus: the job's devices.
    """
    real = [tags for tags in rows if not is_padding(tags)]
    return {
        "training/global_step": global_steps,
        "training/epoch": epoch,
        **_data_metrics(real, rows),
        **_throughput(rows, timing, gpus),
        **_turns(real),
        **_off_policy(real, global_steps),
    }


def _column(rows: Sequence[Tags], key: str) -> torch.Tensor:
    return torch.tensor([tags[key] for tags in rows], dtype=torch.float32)


def _data_metrics(real: Sequence[Tags], rows: Sequence[Tags]) -> dict[str, float]:
    def width(key: str) -> torch.Tensor:
        # verl takes the longest row's length, padding's included, from a shape; so this costs no memory.
        return torch.zeros(1, 1).expand(len(real), max(tags[key] for tags in rows))

    advantages, tokens = _column(real, "advantage"), _column(real, "trained_tokens")
    rewards = _column(real, "reward")[:, None]
    data = {
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
        "advantages": advantages[:, None],
        "returns": advantages[:, None],
        "response_mask": (tokens > 0)[:, None],
        "prompts": width("prompt_len"),
        "responses": width("response_len"),
        "prompt_length": _column(real, "prompt_len"),
        "response_length": _column(real, "response_len"),
    }
    metrics = compute_data_metrics(DataProto(batch=TensorDict(data, batch_size=[len(real)])), use_critic=False)
    # A row counted once above; its advantage stands on each of its tokens.
    mean = ((advantages.double() * tokens.double()).sum() / tokens.double().sum()).item()
    return {**metrics, "critic/advantages/mean": mean, "critic/returns/mean": mean}


def _throughput(rows: Sequence[Tags], timing: Mapping[str, float], gpus: int) -> dict[str, float]:
    lengths = {"prompt_length": _column(rows, "prompt_len"), "response_length": _column(rows, "response_len")}
    data = DataProto(
        batch=TensorDict(lengths, batch_size=[len(rows)]),
        meta_info={"global_token_num": [tags["seq_len"] for tags in rows]},
    )
    return {**compute_timing_metrics(data, dict(timing)), **compute_throughout_metrics(data, dict(timing), gpus)}


def _turns(real: Sequence[Tags]) -> dict[str, float]:
    turns = np.array([tags["num_turns"] for tags in real])
    figures = {"mean": turns.mean(), "max": turns.max(), "min": turns.min()}
    return {f"{prefix}num_turns/{key}": value for prefix in ("", "training/") for key, value in figures.items()}


def _off_policy(real: Sequence[Tags], global_steps: int) -> dict[str, float]:
    first, last = (
        np.array([tags[key] for tags in real], dtype=int) for key in ("min_global_steps", "max_global_steps")
    )
    figures = {
        "trajectory_spans": last - first + 1,
        "trajectory_staleness": global_steps - 1 - last,
        "trajectory_staleness_worst": global_steps - 1 - first,
    }
    return {
        f"training/off_policy/{name}/{key}": figure
        for name, values in figures.items()
        for key, figure in (("mean", values.mean()), ("max", values.max()), ("min", values.min()))
    }
