"""What requests ask of an engine beside verl's sampling parameters: nothing that changes a probability."""

from __future__ import annotations

from typing import Any


def engine_params(engine: str, mode: str) -> dict[str, Any]:
    """Returns further sampling parameters of every request.

    Args:
        engine: `rollout.name`; only vLLM's server takes parameters that verl has no key for.
        mode: `at_grpo.mode`.
    """
    if engine != "vllm":
        return {}
    # The text is decoded by the rollout worker, once and as a whole; vLLM need not do it token by token. Log-probs in
    # flat lists are a few objects for an answer, not three for every token.
    params: dict[str, Any] = {"detokenize": False, "flat_logprobs": True}
    if mode == "sync":
        from vllm.sampling_params import RequestOutputKind

        # verl's server waits for the end, and by default is handed the whole answer so far after every token. Where
        # requests are interrupted it needs that: it ends none whose first token it has not seen.
        params["output_kind"] = RequestOutputKind.FINAL_ONLY
    return params
