"""Tasks as verl's dataset: a row says which task, the rollout worker makes it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from torch.utils.data import Dataset

from verl_atgrpo.environment import Split

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
