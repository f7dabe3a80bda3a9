"""Reading a job's configuration, and refusing what cannot work before Ray starts.

`run_check` calls all checks in their order. Where a key is refused:

- `at_grpo.*`: `section`, by the types and bounds in `schema`, then by rules of several keys
- a key of verl's: `verl_keys`, by the list in `verl_key_table`
- a key by the rest of the job: `job_rules`, `policy_rules`
- `at_grpo.environment.*`: `play.registry`; `at_grpo.estimator.*`: `train.estimators.choice`
- names and keys that no longer exist: `recipes.gone`
- what this machine or the models cannot do: `machine_rules`, `chat_rules`
"""

from __future__ import annotations

from collections.abc import Iterator

SECTION = "at_grpo"


class ConfigError(ValueError):
    """A configuration that cannot work. The message is one line with the key, the value and the remedy."""


def check(messages: Iterator[str], prefix: str = "") -> None:
    """Raises ConfigError with the first message of rules, if there is one; what comes after it is not evaluated."""
    if (message := next(messages, None)) is not None:
        raise ConfigError(f"{prefix}{message}")
