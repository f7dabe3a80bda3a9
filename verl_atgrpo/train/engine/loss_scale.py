"""verl's gradient scaler in float16: no optimizer step is lost to an overflow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict

logger = logging.getLogger(__name__)
LOSS_SCALE, OVERFLOWS = "loss_scale", "overflows"
"""Metrics of an optimizer step: the factor of its loss, and how many larger ones were tried."""
_LEAST = 1.0
"""A smaller scale helps no gradient."""


def repeat_overflows(engine: Any) -> None:
    """Has an engine of verl's that scales losses repeat a step whose gradients overflow, at half the scale.

    verl's scaler skips such a step, and the scale begins where many overflow. What is not finite at any scale is
    skipped with a warning. An engine without a scaler, as in other dtypes than float16, is left as it is.
    """
    if engine.scaler is None:
        return
    once = engine.train_batch

    def train_batch(data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        scaler = engine.scaler
        began, overflows = scaler.get_scale(), 0
        while True:
            scale = scaler.get_scale()
            output = once(data, loss_function)
            if scaler.get_scale() >= scale:
                break
            overflows += 1
            if scale <= _LEAST:
                scaler.update(began)
                _say(engine, "a step is skipped: its gradients are not finite at any loss scale; see precision=bf16")
                break
        if overflows and scale > _LEAST:
            _say(engine, f"gradients overflowed at a loss scale of {began:.0f}: the step was repeated at {scale:.0f}")
        output["metrics"].update({LOSS_SCALE: [scale], OVERFLOWS: [overflows]})  # lists, as all of micro-batches
        return output

    engine.train_batch = train_batch


def _say(engine: Any, what: str) -> None:
    if engine.rank == 0:
        logger.warning("%s in float16: %s", engine.model_config.local_path, what)
