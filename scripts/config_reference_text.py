"""The text between the tables of docs/configuration.md."""

HEAD = """
# Configuration

<!-- Written by scripts/config_reference.py from the code: change the docstrings there, then run it. -->

*Reference.* Every key of `at_grpo:`, every option of the environments, and what each of verl's keys does here.

A job of verl-atgrpo is a job of verl, and [each key of verl's](#verls-keys) works, is refused, or has no meaning here.
Ours are in the section `at_grpo:`, which `trainer.v1.trainer_mode=at_grpo` needs. Recipes list all of them, so
the command line has `at_grpo.candidates=8`, without `+`. Unknown keys, options and values are refused before Ray
starts, in one line that names them.

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

OF_PRESETS = """
The presets differ from these defaults in:
"""

OF_ENVIRONMENTS = """
## `at_grpo.environment`

`name` is a registered environment or `module:Class`; all other keys are options of that environment: arguments of its
class. `verl_atgrpo.register` adds names. [Data sets](environments.md#data-sets) describes the sections `train` and
`val`.
"""

OF_BASE = """
## verl's keys set by `at_grpo_trainer`

Every recipe of the package has `at_grpo_trainer` in its defaults: verl's `ppo_trainer` with the defaults of `at_grpo:`
and these keys of verl, which a recipe may change unless a table below refuses the value.
"""

OF_WIRING = """
## verl's keys set by the trainer

These follow from `at_grpo:`. A recipe that sets another source of tasks or another rollout manager is refused.
"""

WIRED = {
    "actor_rollout_ref": "with `at_grpo.policies`: the first policy's, for what verl does once per job (displayed "
    "text, token counts). Every policy is trained and served by its own",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "`verl_atgrpo.rollout.manager.TeamRolloutManager`, "
    "whose workers play episodes",
    "data.custom_cls": "the data set of tasks: a row has split and index, the environment makes the task",
    "data.train_files": "`train`: the name of the split instead of files",
    "data.val_files": "`val`, likewise",
    "data.at_grpo": "the section `at_grpo`, because verl passes only `data` to the data set",
    "data.at_grpo_tasks": "the number of tasks of each split",
    "data.at_grpo_data_sets": "their data sets, under whose names validation reports",
    "trainer.v1.sampler.sync_refill_failed_groups": "`true`: verl replaces failed episodes",
    "data.gen_batch_size": "`1`: replacements are fetched one task at a time",
}
"""The keys that `trainer.dataset.wire` sets; the generator compares them with its source."""

OF_KEYS = """
## verl's keys

Every key of `ppo_trainer` in verl 0.9.1 with its effect in a team's job. Keys are relative to the section; `*` is one
part of a key, `**` any number of parts. If two rows match a key, the more specific one holds.

- **works**: the named code reads the value; tests search it for the key. A value of another type, or beyond the bounds
  given here, is refused like those of the next kind.
- **refused**: any other value ends the command before Ray starts, in one line with the key, the value and the remedy.
- **no meaning**: any value is accepted and has no effect.

The same holds for a policy's block (`at_grpo.policies.<name>`), whose `model`, `actor`, `optim` and `rollout` are
merged into `actor_rollout_ref`. Keys that verl does not have are refused; top-level sections that are neither verl's
nor ours are a recipe's own, for its interpolations, and refused if none names them.
"""

OF_REFUSALS = """
## What is refused

Besides invalid values and those that the tables above refuse, these settings are refused, because they would have no
effect, or an unexpected one. `…` stands for values, and at the beginning of a line for `actor_rollout_ref` or a
policy's block.
"""
