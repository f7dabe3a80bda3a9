"""The text between the tables of docs/configuration.md."""

HEAD = """
# Configuration

<!-- Written by scripts/config_reference.py from docstrings. -->

*Reference.* Every key of `at_grpo:`, every option of the environments, and [verl's keys](#verls-keys) that do not work
here.

Your recipe can start from one of the package:

```yaml
defaults:
  - plan_path_qwen3_1p7b    # or: at_grpo_trainer and your own settings
  - _self_

at_grpo:
  candidates: 8
```

Editors with a YAML language server complete and check it by its first line, `# yaml-language-server:
$schema=at_grpo.schema.json`, after `verl-atgrpo schema > at_grpo.schema.json`.

`--config-dir=<folder> --config-name=<file>` finds it. Recipes list all keys of `at_grpo:`, so the command line has
`at_grpo.candidates=8`, without `+`. What cannot work is refused before Ray starts, with what to set instead.

In brackets are the accepted values, then the default. Of named values the first is the default; the text has the
others.
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
with the defaults of `at_grpo:` and of some of verl's keys, which you may change. A key accepts what has the type of
verl's default. Keys that verl does not have are refused, except a section of your own at the top level that an
interpolation names.

Below, `actor_rollout_ref` is left out before `actor`, `model`, `ref` and `rollout`, and `{a,b}` is either. A policy's
block has the same rules.

### Refused

Only verl's default is accepted, or the values in brackets:
"""

OF_NEEDED = """
### Keys that need another

They have an effect only beside this:
"""

OF_NO_MEANING = """
### Keys without a meaning

Nothing depends on them:
"""
