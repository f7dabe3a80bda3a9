"""Texts of reports and logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def counted(number: int, noun: str) -> str:
    """Returns "1 turn", "2 turns", "1,000 turns" for the noun "turn"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def title(about: Mapping[str, Any]) -> str:
    """Returns the title of a run's report."""
    return str(about.get("experiment") or "a run of verl-atgrpo")


def about(run: Mapping[str, Any]) -> list[str]:
    """Returns a short description of a run: environment, candidates, estimator, policies.

    Args:
        run: `Run.about`.
    """
    section = run.get("section", {})
    environment = dict(section.get("environment", {}))
    phrases = []
    if environment:
        name = environment.pop("name", "")
        options = ", ".join(f"{key} {value}" for key, value in environment.items())
        phrases.append(f"{name} ({options})" if options else str(name))
    if section.get("scheme") == "parallel":
        phrases.append(f"{counted(section.get('candidates', 0), 'episode')} a task")
    elif "candidates" in section:
        phrases.append(f"{counted(section['candidates'], 'candidate')} a decision")
    if "estimator" in section:
        phrases.append(f"estimator {section['estimator']}")
    frozen = run.get("frozen", [])
    for policy, model in run.get("models", {}).items():
        phrases.append(f"policy {policy}: {model}" + (" (frozen)" if policy in frozen else ""))
    return phrases
