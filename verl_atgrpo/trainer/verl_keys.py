"""What verl's configuration must say for a team, beyond what a recipe says."""

from __future__ import annotations

from omegaconf import DictConfig, open_dict

from verl_atgrpo.config.policies import EXPANDED
from verl_atgrpo.config.schema import SECTION, AtGrpoConfig
from verl_atgrpo.environment import Environment, Split
from verl_atgrpo.trainer.dataset import DATA_SETS, SIZES


def wire(config: DictConfig, environment: Environment) -> None:
    """Sets the keys of verl that follow from the `at_grpo:` section, so that a recipe need not name them."""
    settings = AtGrpoConfig.from_config(config)
    splits: tuple[Split, ...] = ("train", "val")
    with open_dict(config):
        if EXPANDED in config:
            # What verl does once for the job (dataset, displayed text, token counts), it does with the first policy.
            config.actor_rollout_ref = next(iter(config[EXPANDED].values()))
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = (
            "verl_atgrpo.rollout.manager.TeamRolloutManager"
        )
        config.data.custom_cls = {"path": "pkg://verl_atgrpo.trainer.dataset", "name": "TeamTaskDataset"}
        config.data.train_files, config.data.val_files = "train", "val"
        # The dataset is handed `data` alone.
        config.data[SECTION] = config[SECTION]
        config.data[SIZES] = {split: settings.split_size(environment, split) for split in splits}
        config.data[DATA_SETS] = {
            split: [[*pair] for pair in environment.data_sets(split).items()] for split in splits
        }
        config.algorithm.at_grpo_estimator = config[SECTION].get("estimator", "at_grpo")
        # verl's own way to replace an episode that failed; it fetches tasks one by one.
        config.trainer.v1.sampler.sync_refill_failed_groups = True
        config.data.gen_batch_size = 1
