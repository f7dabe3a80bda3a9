"""The model card of an exported policy, and its way to a hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_atgrpo import __version__
from verl_atgrpo.files import HUB_NAME, FileError
from verl_atgrpo.lab.evaluation import figures, results
from verl_atgrpo.lab.export import number_of
from verl_atgrpo.lab.report import counted, records
from verl_atgrpo.lab.report.learning_curve import SUCCESS

logger = logging.getLogger(__name__)

CARD = "README.md"
_TOKENS = "rollout/tokens"


def measured_by(evaluation: Path, run: records.Run) -> str:
    """Returns what a result file of `verl-atgrpo eval` says of the models that it names.

    Raises ValueError if it is of another environment than the run's, or was ended before all tasks were played, and as
    `results.read` and `figures.figures`.
    """
    found = results.read(evaluation)
    played = (found.settings.get("environment") or {}).get("name")
    trained = _environments(run.about.get("section", {}).get("environment") or {})
    if trained and played not in trained:
        names = ", ".join(sorted(trained))
        raise ValueError(f"--evaluation {evaluation}: its tasks are of {played!r}, the run trained on {names}")
    measured, tasks = figures.figures([*found.rows.values()]), {key.task for key in found.rows}
    if missing := max(tasks) + 1 - len(tasks):  # those that end first are the easier ones
        unfinished = f"{counted(missing, 'task')} before the last one have no episode"
        raise ValueError(f"--evaluation {evaluation}: {unfinished}; run eval again with the same command")
    success, interval = measured.success, f"{measured.success.low:.1%} to {measured.success.high:.1%}"
    sources = sorted({str(player.get("source")) for player in found.settings.get("players", {}).values()})
    said = f"{success.value:.1%} of {measured.tasks} tasks solved, 95% interval {interval}"
    if failed := sum(measured.failed.values()):
        said += f"; {counted(failed, 'episode')} failed and count as not solved"
    return f"{said}; played by {', '.join(sources)}" if sources else said


def _environments(environment: Mapping[str, Any]) -> set[str]:
    """Returns the name of a run's environment, and of those in a mixture or curriculum."""
    parts = environment.get("parts") or {}
    inner = (environment.get("of") or {}).get("name"), *((part or {}).get("name", key) for key, part in parts.items())
    return {name for name in (environment.get("name"), *inner) if name}


def run_of(step: Path) -> records.Run:
    """Returns the records beside a folder `global_step_<n>`, empty ones with `record: null`.

    What cannot be read is logged, and left out. Raises FileError if they do not even say what the run was.
    """
    try:
        folder = records.find(step.parent)
    except ValueError:
        return records.Run()
    try:
        return records.read(folder)
    except FileError as error:
        logger.warning("the model card has no results of the training: %s", error)
        return records.Run(records.about(folder))


def critic_of(run: records.Run) -> str:
    """Returns the policy that was a critic, which answers for no agent; an empty text if there was none."""
    critic = run.about.get("section", {}).get("critic") or {}
    return str(critic.get("policy") or "")


def write_cards(step: Path, run: records.Run, exported: Mapping[str, Path], evaluation: str = "") -> None:
    """Writes a model card into the folder of each policy exported from `step`, a folder `global_step_<n>`.

    `evaluation` is what `measured_by` says.
    """
    for policy, folder in exported.items():
        (folder / CARD).write_text(card(policy, number_of(step), run, evaluation))


def card(policy: str, step: int, run: records.Run, evaluation: str = "") -> str:
    """Returns the card of a policy after a step; what the run's records do not have is left out."""
    about = run.about
    section: dict[str, Any] = about.get("section", {})
    base = about.get("models", {}).get(policy, "")
    environment = section.get("environment", {})
    agents = _agents(section, policy, run)
    options = ", ".join(f"{key}: {value}" for key, value in environment.items() if key != "name")
    tokens = sum(float(data.get(_TOKENS, 0.0)) for number, data in run.metrics.items() if number <= step)
    lines = {
        "base": base,
        "task": f"{environment.get('name', '')}{f' ({options})' if options else ''}",
        "agents": ", ".join(agents),
        "algorithm": _algorithm(section),
        "training": f"{step} steps, {tokens:,.0f} generated tokens" if tokens else f"{step} steps",
        "validation": _validation(run, step),
        "evaluation": evaluation,
    }
    cells = {name: " ".join(value.split()).replace("|", "\\|") for name, value in lines.items()}
    rows = "\n".join(f"| {name} | {value} |" for name, value in cells.items() if value)
    named = f"base_model: {base}\n" if HUB_NAME.fullmatch(base) and not Path(base).exists() else ""
    command = about.get("command")
    how = f"\n## Command\n\n```sh\n{command}\n```\n" if command else ""
    return f"""---
library_name: transformers
{named}tags: [reinforcement-learning, multi-agent, verl, verl-atgrpo]
---
# {about.get("experiment", "verl-atgrpo")}: {policy}

A policy of a team, trained with verl-atgrpo {__version__}. It answers the prompts of its agents, through the
tokenizer's chat template.

| | |
|---|---|
{rows}
{how}"""


def _agents(section: Mapping[str, Any], policy: str, run: records.Run) -> list[str]:
    """Returns the agents that a policy answers for: those that are named, and those whose decisions are recorded."""
    named = {agent for agent, owner in section.get("agents", {}).items() if owner == policy} - {"all"}
    return sorted(named | {row["agent"] for rows in run.episodes.values() for row in rows if row["policy"] == policy})


def _algorithm(section: Mapping[str, Any]) -> str:
    if not section:
        return ""
    estimator, candidates = section.get("estimator", ""), section.get("candidates", "")
    name = estimator if isinstance(estimator, str) else json.dumps(estimator)
    return f"{name}, scheme {section.get('scheme', 'tree')}, K = {candidates}"


def _validation(run: records.Run, step: int) -> str:
    """Returns the success of the first validation and of the last one until a step."""
    known = {
        number: found
        for number, data in run.metrics.items()
        if number <= step and (found := {name[9:]: value for name, value in data.items() if SUCCESS.fullmatch(name)})
    }
    if not known:
        return ""
    first, last = min(known), max(known)
    told = []
    for name, value in known[last].items():
        before = f" (step {first}: {float(known[first][name]):.1%})" if first < last and name in known[first] else ""
        told.append(f"{name.rpartition('/acc/')[0]}: {float(value):.1%} solved{before}")
    return f"step {last}, " + ", ".join(told)


def push(exported: Mapping[str, Path], name: str) -> list[str]:
    """Sends exported policies to a hub as `name`, or as `name-<policy>` if there are several; returns their addresses.

    The hub is `HF_ENDPOINT`'s, the token that of `huggingface-cli login` or `HF_TOKEN`. Raises RuntimeError if the hub
    refuses or cannot be reached, with what sends those that are left.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    api, pushed = HfApi(), list[str]()
    places = {name if len(exported) == 1 else f"{name}-{policy}": folder for policy, folder in exported.items()}
    for repository, folder in places.items():
        try:
            made = api.create_repo(repository, exist_ok=True)
            api.upload_folder(
                repo_id=made.repo_id,
                folder_path=folder,
                commit_message="verl-atgrpo export",
                # Of an earlier export no weights may stay.
                delete_patterns=["*.safetensors", "*.index.json"],
            )
        except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, httpx.HTTPError, OSError) as error:
            left = [f"`hf upload {one} {places[one]}`" for one in list(places)[len(pushed) :]]
            raise RuntimeError(
                f"--push {repository}: {api.endpoint} says {error}; log in with `hf auth login` or set HF_TOKEN "
                f"(HF_ENDPOINT for another hub), then {' and '.join(left)}"
            ) from error
        pushed.append(str(made))
    return pushed
