"""The same rows through verl's own functions."""

import numpy as np
import pytest
import torch

from verl_atgrpo.train.estimators.plain_job import at_grpo_advantage


def batch(seed: int, sizes: list[int], length: int = 5) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    uids = np.array([f"group-{number}" for number, size in enumerate(sizes) for _ in range(size)], dtype=object)
    uids = uids[torch.randperm(len(uids), generator=generator).numpy()]
    mask = (torch.rand(len(uids), length, generator=generator) < 0.7).float()
    mask[:, 0] = 1
    return torch.randn(len(uids), length, generator=generator) * mask, mask, uids


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_grpo_equals_verl(norm: bool, seed: int) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    rewards, mask, uids = batch(seed, [2, 3, 4, 8, 8, 17])
    expected, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, uids, norm_adv_by_std_in_grpo=norm)
    for preset in ("at_grpo", "grpo") if norm else ("dr_grpo",):
        config = {"at_grpo_estimator": preset}
        torch.testing.assert_close(at_grpo_advantage(rewards, mask, config, uids)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_rloo_equals_verl(seed: int) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    rewards, mask, uids = batch(seed, [2, 3, 4, 8, 8, 17])
    expected, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, uids)
    result, _ = at_grpo_advantage(rewards, mask, {"at_grpo_estimator": "rloo"}, uids)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_singletons_differ_from_verl_unless_raw() -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    rewards, mask, uids = batch(0, [1, 1, 4])
    lone = torch.tensor([(uids == uid).sum() == 1 for uid in uids])
    for preset, theirs in (
        ("grpo", core_algos.compute_grpo_outcome_advantage),
        ("rloo", core_algos.compute_rloo_outcome_advantage),
    ):
        expected, _ = theirs(rewards, mask, uids)
        torch.testing.assert_close(expected[lone], rewards[lone].sum(-1, keepdim=True) * mask[lone])
        ours, _ = at_grpo_advantage(rewards, mask, {"at_grpo_estimator": preset}, uids)
        assert ours[lone].count_nonzero() == 0
        torch.testing.assert_close(ours[~lone], expected[~lone], rtol=1e-4, atol=1e-5)
        raw = {"at_grpo_estimator": {"preset": preset, "singleton": "raw"}}
        torch.testing.assert_close(at_grpo_advantage(rewards, mask, raw, uids)[0], expected, rtol=1e-4, atol=1e-5)


def test_called_by_verl() -> None:
    trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer", exc_type=ImportError)
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
    algorithm = pytest.importorskip("verl.trainer.config.algorithm", exc_type=ImportError)
    protocol = pytest.importorskip("verl.protocol")
    rewards, mask, uids = batch(1, [4, 4])
    core_algos.register_adv_est("at_grpo_test")(at_grpo_advantage)
    try:
        data = protocol.DataProto.from_dict(
            tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uids}
        )
        data = trainer.compute_advantage(data, "at_grpo_test", config=algorithm.AlgoConfig())
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["at_grpo_test"]
    expected, _ = at_grpo_advantage(rewards, mask, None, uids)
    assert torch.equal(data.batch["advantages"], expected)
