"""Sampling with adapters on the CPU: seconds of vLLM alone for a training step's requests, with and without.

320 requests, eight candidates for each of 40 prompts of some 75 tokens, answers of 5 tokens; prompts take
two adapters in turn. Three rounds with prompts of their own; CPU seconds beside the wall's, as the machine may have
other work.

python benchmarks/bench_adapters.py --model runs/models/smollm2 --products none|grouped|vllm
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from pathlib import Path

import script

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 16,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 4096,
    "enable_chunked_prefill": False,
}
"""vLLM's settings of recipes/hardware/cpu.yaml."""
RANK, ADAPTERS, PROMPTS, CANDIDATES, ANSWER = 16, 2, 40, 8, 5


def write_adapter(folder: Path, model: Path, seed: int) -> str:
    """Writes a random adapter of all linear layers in peft's format; returns the folder."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    made.save_pretrained(str(folder))
    # verl's own, which vLLM reads as well, has a list.
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def main() -> None:
    """Prints the seconds of three rounds."""
    parser = script.parser(__doc__, model=Path)
    parser.add_argument("--products", choices=("none", "grouped", "vllm"), default="grouped")
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    from verl_atgrpo import cpu

    cpu.activate()
    from vllm.platforms import cpu as platform

    if options.products == "vllm":
        own = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
        setattr(platform.CpuPlatform, "get_punica_wrapper", classmethod(lambda _: own))  # noqa: B010
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapters = 0 if options.products == "none" else ADAPTERS
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(1, adapters + 1)
        loras = [
            LoRARequest(f"adapter_{n}", n, write_adapter(Path(folder) / str(n), options.model, n)) for n in numbers
        ]
        engine = LLM(
            model=str(options.model),
            **ENGINE,
            kv_cache_memory_bytes=2**28,
            max_model_len=133,
            **({"enable_lora": True, "max_loras": adapters, "max_lora_rank": RANK} if adapters else {}),
        )
        tokenizer, rng = engine.get_tokenizer(), random.Random(0)

        def sample(count: int) -> int:
            asked, chosen = [], []
            for number in range(count):
                facts = " ".join(f"Your goal is {rng.randint(1, 9)} rows {rng.choice(['up', 'down'])}." for _ in "ab")
                question = f"In which direction do you go first: up, down, left or right? Answer with a word. {facts}"
                messages = [{"role": "user", "content": question}]
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                asked += [{"prompt_token_ids": ids}] * CANDIDATES
                chosen += [loras[number % adapters]] * CANDIDATES if adapters else []
            parameters = SamplingParams(max_tokens=ANSWER, temperature=1.0, ignore_eos=True, logprobs=0)
            engine.generate(asked, parameters, use_tqdm=False, lora_request=chosen or None)
            return len(asked)

        sample(2)
        for _ in range(3):
            began, used = time.perf_counter(), time.process_time()
            requests = sample(PROMPTS)
            print(
                f"{options.products}: {requests} requests, {time.perf_counter() - began:.1f} s, "
                f"{time.process_time() - used:.1f} CPU seconds",
                flush=True,
            )


if __name__ == "__main__":
    main()
