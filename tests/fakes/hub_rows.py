"""Small replacements for the hub data sets of the recipes, with the columns of their data cards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

LENGTH = 130
"""Rows per data set: a step of the recipes has 128 tasks."""


def _apps(number: int) -> dict[str, Any]:
    return {
        "problem_id": number,
        "question": f"Print {number}.",
        "solutions": json.dumps([f"print({number})"]),
        "input_output": json.dumps({"inputs": [""], "outputs": [f"{number}\n"]}),
        "difficulty": "interview",
        "url": "",
        "starter_code": "",
    }


def _code_contests(number: int) -> dict[str, Any]:
    tests = {"input": [""], "output": [f"{number}\n"]}
    return {
        "name": "x",
        "description": f"Print {number}.",
        "public_tests": tests,
        "private_tests": {"input": [], "output": []},
        "generated_tests": tests,
        "solutions": {"language": [3], "solution": [f"print({number})"]},
        "incorrect_solutions": {"language": [], "solution": []},
    }


def _livecodebench(number: int) -> dict[str, Any]:
    return {
        "question_title": "x",
        "question_content": f"Print -{number} twice.",
        "public_test_cases": json.dumps([{"input": "", "output": f"-{number}-{number}\n", "testtype": "stdin"}]),
        "private_test_cases": "[]",
        "starter_code": "",
        "metadata": "{}",
    }


def _hotpotqa(number: int) -> dict[str, Any]:
    context = {"title": [f"Place {number}"], "sentences": [[f"Place {number} lies", f" in land {number}."]]}
    facts = {"title": [f"Place {number}"], "sent_id": [0]}
    rest = {"id": str(number), "type": "bridge", "level": "easy"}
    asked = {"question": f"Where does place {number} lie?", "answer": f"land {number}"}
    return {**rest, **asked, "context": context, "supporting_facts": facts}


def _2wiki(number: int) -> dict[str, Any]:
    row = _hotpotqa(number)
    context = [[f"Place {number}", row["context"]["sentences"][0]]]
    return {**row, "context": json.dumps(context), "supporting_facts": json.dumps([[f"Place {number}", 0]])}


HUB: dict[str, Callable[[int], dict[str, Any]]] = {
    "POLARIS-Project/Polaris-Dataset-53K": lambda n: {"problem": f"Add {n} and 1.", "answer": str(n + 1)},
    "HuggingFaceH4/aime_2024": lambda n: {
        "id": n,
        "problem": f"Take {n} from 1.",
        "answer": f"{1 - n}",
        "year": "2024",
    },
    "yentinglin/aime_2025": lambda n: {"id": n, "problem": f"Take {n} from 2.", "answer": f"{2 - n}", "year": "2025"},
    "Hothan/OlympiadBench": lambda n: {"id": n, "question": f"Take {n} from 3.", "final_answer": [f"{3 - n}"]},
    "hf://datasets/codeparrot/apps/train.jsonl": _apps,
    "deepmind/code_contests": _code_contests,
    "hotpotqa/hotpot_qa": _hotpotqa,
    "hf://datasets/xanhho/2WikiMultihopQA/train.parquet": _2wiki,
    "hf://datasets/xanhho/2WikiMultihopQA/dev.parquet": _2wiki,
    "hf://datasets/livecodebench/code_generation_lite/test6.jsonl": _livecodebench,
}


def overrides(config: DictConfig, folder: Path) -> list[str]:
    """Returns the overrides that replace a composed recipe's data sets."""
    changes = []
    for split in ("train", "val"):
        given = config.at_grpo.environment.get(split)
        if given is None:
            continue
        named = {split: given} if "path" in given else {f"{split}.{name}": section for name, section in given.items()}
        for option, section in named.items():
            if section.path in HUB:
                row, path = HUB[section.path], folder / f"{option}.jsonl"
                # The other split may be of the same data.
                first = LENGTH if section.get("split") == "validation" or "/dev." in section.path else 0
                path.write_text("".join(json.dumps(row(number)) + "\n" for number in range(first, first + LENGTH)))
                changes.append(f"at_grpo.environment.{option}.path={path}")
                changes += [f"~at_grpo.environment.{option}.{key}" for key in ("split", "subset") if section.get(key)]
    return changes
