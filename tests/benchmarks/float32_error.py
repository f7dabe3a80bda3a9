"""Shows how far float32 is from float64: the probabilities of sampled tokens, by vLLM and by transformers.

    python tests/benchmarks/float32_error.py --model runs/models/smollm2 [--prompts 40] [--candidates 8]

vLLM samples answers to prompts of walks among walls. Of every token the probability by the server, and by a single
float32 pass of transformers with the actor's attention, is compared with that by a float64 pass. What these two differ
by is what `training/rollout_probs_diff_max` can be at best.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

from verl_atgrpo import EpisodeFailed, make
from verl_atgrpo.cpu import ENVIRONMENT
from verl_atgrpo.environment import Message
from verl_atgrpo.team import Generation, Team, TeamOptions, play

REPLIES = {"navigator": ("up", "down", "left", "right"), "checker": ("wall", "free")}


class Recorder:
    """A sampler that gives one of an agent's replies and keeps the prompts."""

    def __init__(self, tokenizer: Any, replies: Sequence[str], prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self._tokenizer, self._replies, self._rng = tokenizer, replies, random.Random(0)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of a chat."""
        chat = [dict(message) for message in messages]
        ids: list[int] = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        """Returns a random reply."""
        self.prompts.append(prompt_ids)
        return Generation([0], [0.0], self._rng.choice(self._replies))


async def played(samplers: Mapping[str, Recorder], number: int) -> list[list[int]]:
    """Plays training tasks until there are so many prompts, and returns them."""
    environment = make("walk_walls")
    prompts = samplers["navigator"].prompts
    index = 0
    while len(prompts) < number:
        team = Team({agent: agent for agent in samplers}, samplers, TeamOptions(candidates=1))
        with contextlib.suppress(EpisodeFailed):  # its prompts are as good
            await play(environment, environment.task("train", index), team)
        index += 1
    return prompts[:number]


def main() -> None:
    """Prints one line for each of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--candidates", type=int, default=8)
    arguments = parser.parse_args()
    for name, value in {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams, TokensPrompt

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prompts: list[list[int]] = []
    samplers = {agent: Recorder(tokenizer, replies, prompts) for agent, replies in REPLIES.items()}
    prompts = asyncio.run(played(samplers, arguments.prompts))
    server = LLM(
        arguments.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        enable_chunked_prefill=False,
        block_size=16,
        seed=0,
    )
    sampling = SamplingParams(n=arguments.candidates, max_tokens=5, temperature=1.0, logprobs=0)
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    answers = [
        (output.prompt_token_ids, answer.token_ids, [position[token].logprob for token, position in tokens])
        for output in server.generate(inputs, sampling, use_tqdm=False)
        for answer in output.outputs
        for tokens in [list(zip(answer.token_ids, answer.logprobs or (), strict=True))]
    ]

    @torch.no_grad()
    def by_transformers(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa").eval()
        found = []
        for prompt, answer, _ in answers:
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].double())
        return torch.cat(found).exp()

    exact = by_transformers(torch.float64)
    served = torch.tensor([log_prob for *_, log_probs in answers for log_prob in log_probs], dtype=torch.float64).exp()
    single = by_transformers(torch.float32)
    pairs = {"vLLM": (served, exact), "transformers": (single, exact), "both": (served, single)}
    for name, (one, other) in pairs.items():
        error = (one - other).abs()
        print(f"{name:12}  largest {error.max():.1e}  mean {error.mean():.1e}  ({len(exact)} tokens)")


if __name__ == "__main__":
    main()
