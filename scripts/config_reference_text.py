"""The text between the tables of docs/configuration.md."""

HEAD = """
# Configuration

<!-- Written by scripts/config_reference.py from docstrings. -->

*Reference.* Every key of `at_grpo:`, and every option of the environments.

Your recipe can start from one of the package:

```yaml
defaults:
  - plan_path_qwen3_1p7b    # or: at_grpo_trainer and your own settings
  - _self_

at_grpo:
  candidates: 8
```

`--config-dir=<folder> --config-name=<file>` finds it. On the command line keys of `at_grpo:` need no `+`, further
ones inside a section do: `+at_grpo.environment.min_distance=2`. `~at_grpo.agents +at_grpo.agents={...}` replaces a
section. What cannot work is refused before Ray starts, with what to set instead.

Editors with a YAML language server complete and check a recipe whose first line is `# yaml-language-server:
$schema=at_grpo.schema.json`, after `verl-atgrpo schema > at_grpo.schema.json`.

In brackets are the accepted values, then the default. Of named values the first is the default. Keys without a default
are empty or null.
"""

GROUPS = {
    "environment": "Team and policies",
    "placement": "Devices and updates",
    "candidates": "Candidates and rewards",
    "seed": "Tasks",
    "request_timeout": "Failures and records",
}
"""Headings among the keys of `at_grpo`: the first key of each -> its text."""

OF_ENVIRONMENTS = """
## `at_grpo.environment`

`name` is a registered environment (`verl_atgrpo.register` adds names) or `module:Class`; the other keys are arguments
of its class. `train` and `val` are [data sets](environments.md#data-sets).
"""

OF_SEVERAL = """
### Options of several environments
"""

OF_KEYS = """
## verl's keys

Every recipe has [at_grpo_trainer.yaml](../recipes/at_grpo_trainer.yaml) in its defaults: verl's `ppo_trainer` (0.9.1)
with some other defaults. A key accepts what has the type of verl's default. Keys that verl does not have are refused,
except a section of your own at the top level that an interpolation names.

Keys without effect here are refused, and the message says what to set instead
([the table](../verl_atgrpo/train/config/verl_key_table.py)). A policy's block follows the same rules.
"""
