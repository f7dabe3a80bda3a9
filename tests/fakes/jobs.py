"""Jobs of which single rules are asked, without the configuration that these do not read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.run_check import OF_POLICIES, check_keys_of_policies
from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.config.view import View


def asked(rule: Any, settings: AtGrpoConfig, env: Environment | None = None, **sections: Any) -> None:
    """Raises ConfigError if a rule refuses a job with these settings and these sections of verl's."""
    job = Job(View(OmegaConf.create(sections)), settings)
    if env is not None:
        job.env = env
    messages: Iterator[str] = rule(job)
    check(messages)


def check_policies(job: Job) -> None:
    """Raises ConfigError if a rule refuses a policy of a job, whose environment is not made."""
    check_keys_of_policies(job)
    check(itertools.chain.from_iterable(rule(job) for rule in OF_POLICIES))
