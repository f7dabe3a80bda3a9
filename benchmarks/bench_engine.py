"""Compares generated tokens per second in a rollout with vLLM's offline throughput on the same requests.

Rollouts: a training job (trainer, servers, rollout worker, queues) without updates, timed from submitting a step's
tasks to having its rows. Offline: `LLM.generate` with all requests of a rollout, with the recorded prompts and
numbers of tokens, and the servers' engine arguments, sampling parameters and number of threads. Rounds alternate;
every rollout and its replay give a ratio, and the result is the median. Then the CPU time of a rollout by process.

python benchmarks/bench_engine.py --model runs/models/plan_path_tiny [--rounds 2 --rollouts 5] [--limit 0.85]
    [--plain] [--answer-tokens 64] [override ...]

--plain replays without seeds and log-probs, which training needs.
--answer-tokens forces the length of every response in the rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import real_stack
from processes import exit_on_sigterm
from real_stack import Request

LIMIT = 0.85


def ratios(rollouts: Sequence[float], replays: Sequence[float]) -> list[float]:
    """Returns the rollouts' throughput over the replays', from the seconds of the same requests."""
    return [replay / rollout for rollout, replay in zip(rollouts, replays, strict=True)]


def replay_parameters(request: Request, sampling: dict[str, Any], plain: bool) -> dict[str, Any]:
    """Returns vLLM's sampling parameters to generate exactly as many tokens again.

    Args:
        request: what was recorded.
        sampling: temperature, top_p, top_k.
        plain: no seed and no log-probs.
    """
    forced = {"max_tokens": request.tokens, "ignore_eos": True, "detokenize": False}
    return {**sampling, **forced, **({} if plain else {"logprobs": 0, "seed": request.seed})}


def forced_length(max_prompt_length: int, tokens: int) -> list[str]:
    """Returns the overrides that force the length of every response."""
    return [
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"data.max_response_length={tokens}",
        f"actor_rollout_ref.rollout.max_model_len={max_prompt_length + tokens}",
    ]


def roll_out(options: argparse.Namespace) -> dict[str, Any]:
    """Plays a warm-up rollout and `--rollouts` more, and records them in `--record`."""
    config = real_stack.compose(options.recipe, options.model, options.overrides)
    played = list(real_stack.rollouts(config, options.rollouts))
    real_stack.save(options.record, [each.requests for each in played])
    spent = sum((each.cpu for each in played), start=Counter[str]())
    cpu = {name: value / options.rollouts for name, value in spent.items()}
    return {"seconds": [each.seconds for each in played], "cpu": cpu}


def replay(options: argparse.Namespace) -> dict[str, Any]:
    """Replays the recorded rollouts one after the other, after a warm-up with the first."""
    from verl.plugin.platform import get_platform

    config = real_stack.compose(options.recipe, options.model, options.overrides)
    os.environ.update(get_platform().rollout_env_vars())
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from verl_atgrpo.lab.evaluation.engine import engine_args

    policy = config.actor_rollout_ref
    arguments = {**engine_args("actor_rollout_ref", str(policy.model.path), policy)}
    arguments["logprobs_mode"] = policy.rollout.logprobs_mode
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="engine_kwargs.vllm"))
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(build_cli_args_from_config(arguments))))
    sampling = {key: policy.rollout[key] for key in ("temperature", "top_p", "top_k")}
    recorded = real_stack.load(options.record)
    seconds = []
    for requests in [recorded[0], *recorded]:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        parameters = [SamplingParams(**replay_parameters(request, sampling, options.plain)) for request in requests]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        drawn = [len(output.outputs[0].token_ids) for output in outputs]
        assert drawn == [request.tokens for request in requests], "a replay drew other numbers of tokens"
    return {"seconds": seconds[1:]}


def measure(options: argparse.Namespace) -> float:
    """Runs all rounds, prints their times and returns the median ratio."""
    played, replayed = list[float](), list[float]()
    requests, tokens = list[int](), list[int]()
    overrides = list(options.overrides)
    if options.answer_tokens is not None:
        config = real_stack.compose(options.recipe, options.model, overrides)
        overrides += forced_length(config.data.max_prompt_length, options.answer_tokens)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            record = Path(folder) / f"{number}.jsonl"
            common = ["--model", str(options.model), "--recipe", options.recipe, "--record", str(record)]
            common += [f"--rollouts={options.rollouts}", *(["--plain"] if options.plain else [])]
            common += [] if options.threads is None else [f"--threads={options.threads}"]
            rolled = real_stack.run_part(__file__, "--part=rollout", *common, *overrides, f"data.seed={number}")
            offline = real_stack.run_part(__file__, "--part=offline", *common, *overrides)
            played += rolled["seconds"]
            replayed += offline["seconds"]
            for rollout in real_stack.load(record):
                requests.append(len(rollout))
                tokens.append(sum(request.tokens for request in rollout))
            found = ratios(rolled["seconds"], offline["seconds"])
            print(
                f"round {number + 1}: rollout {statistics.median(rolled['seconds']):.2f} s, offline "
                f"{statistics.median(offline['seconds']):.2f} s, ratio {statistics.median(found):.3f} "
                f"({min(found):.3f} to {max(found):.3f}); {real_stack.load_average()}",
                flush=True,
            )
    print(
        f"a rollout: {statistics.mean(requests):,.0f} requests, {statistics.mean(tokens):,.0f} tokens, "
        f"{sum(tokens) / sum(requests):.1f} a request"
    )
    rates = [sum(tokens) / sum(seconds) for seconds in (played, replayed)]
    print(f"tokens a second: rollout {rates[0]:,.0f}, offline {rates[1]:,.0f}{' (plain)' if options.plain else ''}")
    print(f"CPU time of a rollout of {statistics.mean(rolled['seconds']):.2f} s, last round:")
    a_rollout = statistics.mean(requests[-options.rollouts :])
    for name, value in sorted(rolled["cpu"].items(), key=lambda item: -item[1]):
        if value >= 0.005:
            print(f"  {name:30} {value:6.2f} s  {value / a_rollout * 1e3:6.3f} ms a request")
    return statistics.median(ratios(played, replayed))


def main() -> int:
    """Prints the ratio; status 1 if it is below the limit."""
    parser = real_stack.parser(__doc__, rounds=2, plain=False, limit=LIMIT)
    parser.add_argument("--rollouts", type=int, default=5, help="per round")
    parser.add_argument("--answer-tokens", type=int)
    parser.add_argument("--threads", type=int, help="of the offline engine; default: the servers' number")
    parser.add_argument("--part", choices=("rollout", "offline"), help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    exit_on_sigterm()
    if options.part:
        result = roll_out(options) if options.part == "rollout" else replay(options)
        print(f"\n{json.dumps(result)}", flush=True)
        return 0
    ratio = measure(options)
    print(f"rollout / offline: {ratio:.3f} (at least {options.limit})")
    return int(ratio < options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
