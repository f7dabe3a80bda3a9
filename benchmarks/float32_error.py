"""Shows how far float32 is from float64: the probabilities of sampled tokens, by vLLM and by transformers.

    python benchmarks/float32_error.py --model runs/models/smollm2 [--tasks 6] [--candidates 8]

vLLM samples answers to prompts of walks among walls. Of every token the probability by the server and that by a
float32 pass of transformers, with the actor's attention, are compared with that by a float64 pass, and
with each other: how much of `training/rollout_probs_diff_max` float32 explains.
"""

from __future__ import annotations

import os
import random
from typing import Any

import script
from fakes.scripted_episodes import prompt_of, scripted
from real_stack import ENGINE

from verl_atgrpo import make
from verl_atgrpo.cpu import ENVIRONMENT

REPLIES = {"navigator": ("up", "down", "left", "right"), "checker": ("wall", "free")}


def prompts_of(tasks: int) -> list[str]:
    """Returns the different prompts of training tasks, answered at random."""
    environment, rng = make("walk_walls"), random.Random(0)
    scripts = {agent: lambda prompt, k, replies=replies: rng.choice(replies) for agent, replies in REPLIES.items()}
    records = (scripted(environment, environment.task("train", index), scripts) for index in range(tasks))
    return list(dict.fromkeys(prompt_of(decision) for record in records for decision in record.decisions))


def main() -> None:
    """Prints one line for each comparison."""
    arguments = script.parser(__doc__, model=str, tasks=6, candidates=8).parse_args()
    for name, value in {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams, TokensPrompt

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in prompts_of(arguments.tasks)]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    server = LLM(
        arguments.model,
        max_model_len=256,
        seed=0,
        **ENGINE,
    )
    sampling = SamplingParams(n=arguments.candidates, max_tokens=5, temperature=1.0, logprobs=0)
    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in encoded]
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
