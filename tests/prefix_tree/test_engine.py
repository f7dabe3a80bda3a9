"""verl's engine over prefix trees against verl's own, with FSDP2 and real optimizer steps on one rank and on two."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from fakes.fsdp_rows import batch as of_engine
from fakes.fsdp_rows import join, make, save_model, some_rows, spawn

from verl_atgrpo.train.engine.prefix_tree.tree import Tree, pack

pytestmark = pytest.mark.slow


def _without_ends(tree: Tree) -> Tree:
    return dataclasses.replace(tree, ends=np.full(len(tree), len(tree)))


def _raise(*_: object) -> None:
    raise TypeError("no such kernel\nat line 3")


def _train(rank: int, ranks: int, port: int, model: str, overrides: Sequence[str], out: str) -> None:
    """Runs both engines in one of `ranks` processes; writes what they computed."""
    join(rank, ranks, port)
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    from verl_atgrpo import recipes
    from verl_atgrpo.train.engine.prefix_tree import engine as product
    from verl_atgrpo.train.engine.prefix_tree.engine import TreeEngine

    config = recipes.compose("plan_path_cpu", [f"actor_rollout_ref.model.path={model}", *overrides]).actor_rollout_ref
    rows = some_rows(rank)
    done = {}
    for kind in (FSDPEngineWithLMHead, TreeEngine):
        engine, section = make(kind, config)
        loss, steps = functools.partial(ppo_loss, config=section), []
        batch = functools.partial(of_engine, rows, rank, ranks, use_dynamic_bsz=section.use_dynamic_bsz)
        if kind is TreeEngine:
            engine.worth = 0.0  # however little it saves
            assert engine.refusal is None
            figures = product.compare(engine)
            assert figures.largest < 1e-5 and figures.typical < figures.largest and figures.leak < 1e-6
            with pytest.MonkeyPatch.context() as patch:
                # Every token sees its siblings' answers.
                patch.setattr(product, "pack", lambda *arguments: _without_ends(pack(*arguments)))
                assert "in the self-test log-probs differ by" in engine._refusal()
                assert product.compare(engine).leak > product.LEAK
                patch.setattr(product, "TOLERANCE", 100.0)
                assert "tokens of one branch change another's log-probs" in engine._refusal()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(product, "compare", _raise)
                assert "the self-test fails: TypeError: no such kernel" in engine._refusal()
            engine.module.config.attention_dropout = 0.1
            assert "in training mode (dropout" in engine._refusal()
            engine.module.config.attention_dropout = 0.0
            engine.switch = 9
            assert engine._trees_of(batch()) is None, "a row is longer than the switch"
            engine.switch = None
            assert engine._trees_of(batch()) is not None
        with engine.eval_mode():
            inferred = engine.infer_batch(batch())["model_output"]
            if kind is TreeEngine:
                plain = of_engine(rows, rank, ranks, use_dynamic_bsz=section.use_dynamic_bsz, hidden_states=True)
                engine.worth = math.inf
                states = [engine.infer_batch(plain)["model_output"]["hidden_states"]]
                engine.worth = 0.0
                states.append(engine.infer_batch(batch(hidden_states=True))["model_output"]["hidden_states"])
                done["states"] = [torch.stack(one.unbind()) for one in states]
        for _ in range(2):
            with engine.train_mode():
                output = engine.train_batch(batch(), loss)
            steps.append((sum(output["loss"]), float(output["metrics"]["grad_norm"])))
        probabilities = {
            name: torch.cat(
                [row[len(prompt) - 1 : -1] for row, (prompt, _) in zip(inferred[name].unbind(), rows, strict=True)]
            )
            for name in ("log_probs", "entropy")
        }
        # Of verl's metrics those that are sums; `ppo_kl` and the clip fractions are means of micro-batches' means.
        metrics = {
            name: value.aggregate()
            for name, value in output["metrics"].items()
            if hasattr(value, "aggregate") and "ppo_kl" not in name and "clipfrac" not in name
        }
        trees = {name: value for name, value in output["metrics"].items() if name.endswith("_tokens")}
        done[kind.__name__] = {**probabilities, "steps": steps, "metrics": metrics, "trees": trees}
    torch.save(done, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@torch.no_grad()
def _at_prompt_ends(model: Path, rank: int) -> torch.Tensor:
    """What transformers computes in front of the output head, at the last token of each row's prompt."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [torch.tensor([prompt]) for prompt, _ in some_rows(rank)]
    return torch.cat([net(ids, output_hidden_states=True).hidden_states[-1][:, -1] for ids in prompts])


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (
            1,
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=false",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            ],
        ),
        (1, ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.entropy_coeff=0.01"]),
        (2, ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]),
    ],
)
def test_optimizer_steps_are_those_of_the_plain_path(
    ranks: int, overrides: list[str], model: Path, tmp_path: Path
) -> None:
    spawn(_train, ranks, str(model), overrides, str(tmp_path))
    for rank in range(ranks):
        done = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        plain, trees = done["FSDPEngineWithLMHead"], done["TreeEngine"]
        for states in done["states"]:  # row by row, and in trees
            torch.testing.assert_close(states, _at_prompt_ends(model, rank), atol=1e-5, rtol=1e-5)
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(trees[name], plain[name], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(trees["steps"]), torch.tensor(plain["steps"]), atol=1e-6, rtol=1e-5)
        assert trees["metrics"] == pytest.approx(plain["metrics"], abs=1e-5)
        assert plain["trees"] == {}
        (rows,), (tree,) = trees["trees"].values()
        assert rows == sum(len(prompt + response) for prompt, response in some_rows(rank)) > 2 * tree > 0


@pytest.mark.parametrize("packed", [True, False])
def test_states_are_read_at_the_ends_of_prompts_however_rows_are_laid_out(packed: bool) -> None:
    """Row after row, with padding at the end of all, or each padded at the right."""
    from verl_atgrpo.train.engine.prefix_tree.engine import _at_prompt_ends

    rows = some_rows(0)
    places = [torch.arange(len(prompt + response)) + 100 * row for row, (prompt, response) in enumerate(rows)]
    numbers = torch.cat([*places, torch.tensor([-1])]) if packed else torch.nn.utils.rnn.pad_sequence(places, True)
    states = torch.stack([numbers, -numbers], -1).reshape(-1 if not packed else 1, *numbers.shape[-1:], 2)
    found = _at_prompt_ends(states, None, of_engine(rows, 0, 1, use_remove_padding=packed))
    expected = [100 * row + len(prompt) - 1 for row, (prompt, _) in enumerate(rows)]
    assert torch.stack(found.unbind()).tolist() == [[one, -one] for one in expected]
