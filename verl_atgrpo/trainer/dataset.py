"""What verl's trainer is told of a team's tasks: its dataset, its configuration, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, open_dict
from torch.utils.data import Dataset

from verl_atgrpo.config.policies import EXPANDED
from verl_atgrpo.config.schema import SECTION, AtGrpoConfig
from verl_atgrpo.environment import Environment, Split

SIZES = "at_grpo_tasks"
"""Key of the `data` section: split -> tasks that the run deals out, so that no data set is read again for that."""
DATA_SETS = "at_grpo_data_sets"
"""Likewise: split -> [name, tasks] of each data set, in the order of tasks."""


class TeamTaskDataset(Dataset[dict[str, Any]]):
    """The tasks of one split, by index.

    `data_files` is the name of the split. The row carries no task: environments make it again from
    (split, index), which costs less than sending it and keeps the dataloader's state small.
    """

    def __init__(
        self,
        data_files: Split,
        tokenizer: Any,
        config: DictConfig,
        processor: Any = None,
        max_samples: int = -1,  # refused: `at_grpo.train_tasks` and `val_tasks` say it
    ) -> None:
        self._size = int(config[SIZES][data_files])
        self._split = data_files
        self._source = str(config.at_grpo.environment.name).replace("/", ".")
        self._sources: list[tuple[str, int]] = [
            (str(name), int(tasks)) for name, tasks in config[DATA_SETS][data_files]
        ]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        # verl counts `raw_prompt` to know the batch size; the prompts are made by the environment.
        return {"raw_prompt": [], "index": index, "split": self._split, "data_source": self._source_of(index)}

    def _source_of(self, index: int) -> str:
        for name, tasks in self._sources:
            if index < tasks:
                return name
            index -= tasks
        return self._source


def wire(config: DictConfig, settings: AtGrpoConfig, environment: Environment) -> None:
    """Sets the keys of verl that follow from the `at_grpo:` section, so that a recipe need not name them."""
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
        # verl's own way to replace an episode that failed; it fetches tasks one by one.
        config.trainer.v1.sampler.sync_refill_failed_groups = True
        config.data.gen_batch_size = 1


class TeamTokenizer:
    """Decodes every row with the tokenizer of the policy that wrote it.

    verl's trainer decodes the rows of a batch in their order, all prompts and then all responses, with one
    tokenizer. `expect` tells which rows come; `decode` then takes them in that order.
    """

    pad_token_id = -1
    """Padding that is no token of any policy."""

    def __init__(self, tokenizers: Mapping[str, Any]) -> None:
        self._tokenizers = tokenizers
        self._coming: Iterator[str] = iter(())

    def expect(self, tags: Sequence[Mapping[str, Any]]) -> None:
        """Announces a batch by its rows' tags."""
        policies = [str(row["policy"]) for row in tags]
        self._coming = iter(policies + policies)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """Returns the text of the next row announced."""
        tokenizer = self._tokenizers[next(self._coming)]
        ids = [int(token) for token in token_ids if token != self.pad_token_id]
        text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text
