"""A data set of reasoning-gym with one question, registered when this module is imported; its scorer is careless."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset


@dataclasses.dataclass
class Config:
    seed: int = 0
    size: int = 1


class OneQuestion(ProceduralDataset):
    """Its scorer does what a reply names, as careless ones do."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return {"question": "What is 3 + 4?", "answer": "7", "metadata": {}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        said = str(answer)
        kind, _, rest = said.partition(":")
        if kind == "wait":
            time.sleep(10_000)
        if kind == "count":
            return sum(1 for _ in iter(int, 1))
        if kind == "copies":
            return float(len(rest * 10**11))
        if kind == "deep":
            return 1.0 + self.score_answer(said, entry)
        if kind == "lines":
            sys.stdout.write("1\n" * 1000)
            return 0.5
        if kind == "evaluate":
            return float(eval(rest))  # noqa: S307
        if kind == "execute":
            exec(rest)  # noqa: S102
        if kind == "later":
            import colorsys  # a module that only this needs

            return colorsys.rgb_to_hls(1, 1, 1)[1] / 2
        return float(said == "7")


register_dataset("one_question", OneQuestion, Config)
