"""The text between the tables of docs/configuration.md."""

HEAD = """
# Configuration

<!-- Written by scripts/config_reference.py from the code: change the docstrings there, then run it. -->

*Reference.* Every key of `at_grpo:`, every option of the environments, and [verl's keys](#verls-keys) that do not work
here.

Our keys are in the section `at_grpo:`, which `trainer.v1.trainer_mode=at_grpo` needs. Recipes list all of them, so the
command line has `at_grpo.candidates=8`, without `+`. What cannot work is refused before Ray starts, in one line that
names the key, the value and what to set instead.

Your own recipe can start from one of the package:

```yaml
defaults:
  - plan_path_qwen3_1p7b    # or: at_grpo_trainer and your own settings
  - _self_

at_grpo:
  candidates: 8
```

`--config-dir=<folder> --config-name=<file>` finds it.
"""

OF_ENVIRONMENTS = """
## `at_grpo.environment`

`name` is a registered environment or `module:Class`; all other keys are options of that environment: arguments of its
class. `verl_atgrpo.register` adds names. [Data sets](environments.md#data-sets) describes the sections `train` and
`val`.
"""

OF_SEVERAL = """
### Options of several environments
"""

OF_BASE = """
## verl's keys set by `at_grpo_trainer`

Every recipe of the package has [at_grpo_trainer.yaml](../recipes/at_grpo_trainer.yaml) in its defaults: verl's
`ppo_trainer` with the defaults of `at_grpo:` and some of verl's keys, which a recipe may change.
"""

OF_WIRING = """
## verl's keys set by the trainer

These follow from `at_grpo:`. A recipe that sets another source of tasks or another rollout manager is refused.
"""

WIRED = {
    "actor_rollout_ref": "the first policy's, for what verl does once per job; every policy is trained and served by "
    "its own",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "the manager whose workers play episodes",
    "data.custom_cls": "the data set of tasks",
    "data.train_files": "`train`, the split",
    "data.val_files": "`val`",
    "data.at_grpo": "the section `at_grpo`, as verl passes only `data` to the data set",
    "data.at_grpo_tasks": "the number of tasks of each split",
    "data.at_grpo_data_sets": "their data sets, under whose names validation reports",
    "trainer.v1.sampler.sync_refill_failed_groups": "`true`: failed episodes are replaced",
    "data.gen_batch_size": "`1`: one task at a time",
}
"""The keys that `trainer.dataset.wire` sets; the generator compares them with its source."""

OF_KEYS = """
## verl's keys

A key of `ppo_trainer` (verl 0.9.1) accepts what has the type of verl's default. The keys listed here have no effect in
a team's job, or an unexpected one, for the reason given: only verl's default is accepted, or the values named.
`actor_rollout_ref` is left out before `actor`, `model`, `ref` and `rollout`; `{a,b}` is either. The same holds for a
policy's block, whose `model`, `actor`, `optim` and `rollout` are merged into `actor_rollout_ref`. Keys that verl does
not have are refused; a section of your own at the top level is fine if an interpolation names it.
"""
