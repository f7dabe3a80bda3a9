"""Prefix trees and adapters in verl's FSDP2 engine on a GPU: the same numbers as rows one by one, and as alone.

verl's engine, its loss and its optimizer run on one device, in this process. Empty modules take the place of
Ray, TransferQueue and vLLM where these are missing. The model is made on the spot. Prints how far log-probs, losses
and gradient norms of verl's engine and ours are apart, in float32 and bfloat16, likewise log-probs of small trees of
many sizes, and runs tests/test_adapters.py, which compares bits.

python tests/benchmarks/check_gpu.py
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import socket
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MISSING = tuple(name for name in ("ray", "transfer_queue", "vllm") if importlib.util.find_spec(name) is None)


class _Empty(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Stubs:
    """Finds empty modules for packages that are not installed."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in MISSING:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def start() -> None:
    """Joins a process group of one, on the GPU if there is one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ.update(place, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if DEVICE == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        from verl_atgrpo import cpu

        cpu.activate()
    torch.distributed.init_process_group("gloo" if DEVICE == "cpu" else "nccl", rank=0, world_size=1)


def make_model(folder: Path) -> None:
    """Writes a Qwen3 of 4.8 million parameters with random weights; FlexAttention needs heads of 16 or more."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verl_atgrpo.tiny_models.tiny import build_tokenizer

    tokenizer = build_tokenizer(())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def engines(folder: Path, dtype: str) -> None:
    """Compares verl's engine and ours on the same rows, in two optimizer steps."""
    from fakes.fsdp_rows import batch, make, some_rows
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    from verl_atgrpo import recipes
    from verl_atgrpo.prefix_tree.engine import TreeEngine

    overrides = [
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={dtype}",
    ]
    config = recipes.compose("plan_path_cpu", overrides).actor_rollout_ref
    rows, found = some_rows(0), []
    for kind in (FSDPEngineWithLMHead, TreeEngine):
        engine, section = make(kind, config)
        if kind is TreeEngine:
            engine.worth = 0.0  # however little it saves
            assert engine.refusal is None, engine.refusal
        with engine.eval_mode():
            inferred = engine.infer_batch(batch(rows, 0, 1).to(DEVICE))["model_output"]["log_probs"]
        pairs = zip(inferred.unbind(), rows, strict=True)
        log_probs = torch.cat([row[len(prompt) - 1 : -1].float().cpu() for row, (prompt, _) in pairs])
        steps = []
        for _ in range(2):
            with engine.train_mode():
                output = engine.train_batch(batch(rows, 0, 1).to(DEVICE), functools.partial(ppo_loss, config=section))
            steps.append((sum(output["loss"]), float(output["metrics"]["grad_norm"])))
        found.append((log_probs, torch.tensor(steps)))
    (plain, theirs), (trees, ours) = found
    apart = float((plain - trees).abs().max()), (theirs - ours).abs().amax(0).tolist()
    print(f"{dtype}: log-probs differ by {apart[0]:.1e}, losses by {apart[1][0]:.1e}, norms by {apart[1][1]:.1e}")


def small_trees(folder: Path, lengths: Sequence[int] = (40, 60, 90, 30, 127, 200, 64, 129, 300, 20)) -> None:
    """Compares two rows that share half of their tokens with their tree, for many sizes."""
    import numpy as np
    from transformers import AutoModelForCausalLM

    from verl_atgrpo.prefix_tree.forward import FLEX, Packed, log_probs, model_inputs
    from verl_atgrpo.prefix_tree.tree import Rows, cut, pack, sort

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    worst, seconds = 0.0, []
    for length in lengths:
        half = length // 2
        ids = np.random.default_rng(length).integers(0, net.config.vocab_size, (2, length))
        ids[1, :half] = ids[0, :half]
        net.set_attn_implementation("sdpa")
        tokens = torch.from_numpy(ids).to(DEVICE)
        with torch.no_grad():
            logits = net(tokens[:, :-1]).logits[:, half - 1 :].float()
        wanted = logits.log_softmax(-1).gather(-1, tokens[:, half:, None]).squeeze(-1)
        if DEVICE == "cuda":
            net.set_attn_implementation(FLEX)
        rows = Rows(ids.ravel(), np.arange(3) * length, np.full(2, half))
        order = sort(rows)
        (part,) = cut(rows, order, 4096)
        tree = pack(rows, order, part)
        began, packed = time.perf_counter(), Packed.of(tree, DEVICE)
        made = log_probs(net(**model_inputs(packed, net.config), use_cache=False).logits.squeeze(0), packed)
        made.sum().backward()  # type: ignore[no-untyped-call]
        apart = made.detach().view(2, -1)[np.argsort(tree.rows).tolist()] - wanted
        worst = max(worst, float(apart.abs().max()))
        seconds.append(time.perf_counter() - began)
    print(f"trees of {min(lengths)} to {max(lengths)} tokens: log-probs differ by {worst:.1e}")
    print(f"seconds of each: {' '.join(f'{each:.2f}' for each in seconds)}")


def adapters(folder: Path, out: Path) -> None:
    """Runs the comparison of adapters beside each other and alone, on this device."""
    import test_adapters

    made = test_adapters.batch
    changes = {"join": lambda *_: None, "batch": lambda *given, **options: made(*given, **options).to(DEVICE)}
    vars(test_adapters).update(changes)
    test_adapters._work(0, 1, 0, str(folder), str(out))
    print("adapters: beside others as alone, to the bit; the others and the base did not move; resumed, they go on")


def main() -> None:
    """Runs everything."""
    if MISSING:
        sys.meta_path.insert(0, _Stubs())  # type: ignore[arg-type]
    start()
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; replaced by empty modules: {', '.join(MISSING) or 'nothing'}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        make_model(folder)
        for dtype in ("fp32", "bf16"):
            engines(folder, dtype)
        small_trees(folder)
        adapters(folder, Path(place))


if __name__ == "__main__":
    main()
