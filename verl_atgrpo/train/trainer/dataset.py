"""What verl's trainer sees of a team: the dataset of tasks, configuration keys that follow, and a tokenizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, open_dict
from torch.utils.data import Dataset

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.types import Split
from verl_atgrpo.train.config.schema import EXPANDED, SECTION, AtGrpoConfig

SIZES = "at_grpo_tasks"
"""Key of the `data` section: split -> number of tasks of the run, so that no data set is read again for it."""
DATA_SETS = "at_grpo_data_sets"
"""Key of the `data` section: split -> [name, number of tasks] of each data set, in the order of tasks."""


class TeamTaskDataset(Dataset[dict[str, Any]]):
    """The tasks of one split, by index.

    `data_files` is the name of the split. A row does not contain its task: environments create it again from
    (split, index), which costs less than sending it and keeps the data loader's state small.
    """

    def __init__(
        self,
        data_files: Split,
        tokenizer: Any,
        config: DictConfig,
        processor: Any = None,
        max_samples: int = -1,  # refused: use `at_grpo.train_tasks` and `val_tasks`
    ) -> None:
        self._size, self._split = int(config[SIZES][data_files]), data_files
        self._source = str(config.at_grpo.environment.name).replace("/", ".")
        self._sources = [(str(name), int(tasks)) for name, tasks in config[DATA_SETS][data_files]]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        # verl takes the batch size from `raw_prompt`; the environment writes the prompts.
        return {"raw_prompt": [], "index": index, "split": self._split, "data_source": self._source_of(index)}

    def _source_of(self, index: int) -> str:
        for name, tasks in self._sources:
            if index < tasks:
                return name
            index -= tasks
        return self._source


def wire(config: DictConfig, settings: AtGrpoConfig, environment: Environment) -> None:
    """Sets verl's keys that follow from the `at_grpo:` section, so that a recipe need not contain them."""
    splits: tuple[Split, ...] = ("train", "val")
    with open_dict(config):
        if EXPANDED in config:
            # verl does some things once per job (dataset, displayed text, token counts): with the first policy.
            config.actor_rollout_ref = next(iter(config[EXPANDED].values()))
        config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = (
            "verl_atgrpo.train.rollout.manager.TeamRolloutManager"
        )
        config.data.custom_cls = {"path": "pkg://verl_atgrpo.train.trainer.dataset", "name": "TeamTaskDataset"}
        config.data.train_files, config.data.val_files = "train", "val"
        # verl passes only `data` to the dataset.
        config.data[SECTION] = config[SECTION]
        config.data[SIZES] = {split: settings.split_size(environment, split) for split in splits}
        config.data[DATA_SETS] = {
            split: [[*pair] for pair in environment.data_sets(split).items()] for split in splits
        }
        if environment.ordered:
            config.data.shuffle = False
        # verl replaces a failed episode itself, and fetches tasks one by one to do so.
        config.trainer.v1.sampler.sync_refill_failed_groups = True
        config.data.gen_batch_size = 1


class TeamTokenizer:
    """Decodes every row with its policy's tokenizer.

    verl's trainer passes `decode` nothing but token ids: of a batch's prompts in the order of its rows, then of its
    responses. So the batch is registered by `expect`, and every call is checked against the row that is due.
    """

    pad_token_id = -1
    """Padding that is no token of any policy."""

    def __init__(self, tokenizers: Mapping[str, Any]) -> None:
        self._tokenizers = tokenizers
        self._expected: deque[tuple[str, int]] = deque()

    def expect(self, tags: Sequence[Mapping[str, Any]]) -> None:
        """Registers a batch by its rows' tags; raises what `check_complete` does."""
        self.check_complete()
        self._expected.extend(
            (row["policy"], row[length]) for length in ("prompt_len", "response_len") for row in tags
        )

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """Returns the batch's next text; raises RuntimeError if it has another length, or if none is left."""
        ids = [int(token) for token in token_ids if token != self.pad_token_id]
        policy, length = self._expected.popleft() if self._expected else ("", 0)
        if len(ids) != length:
            raise RuntimeError(
                f"verl decodes a text of {len(ids)} tokens where one of {length} was expected: "
                "not the rows that it sampled, or in another order"
            )
        text: str = self._tokenizers[policy].decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def check_complete(self) -> None:
        """Raises RuntimeError if verl has not decoded every text of the batch."""
        if self._expected:
            raise RuntimeError(f"verl has not decoded {len(self._expected)} texts of the rows that it sampled")
