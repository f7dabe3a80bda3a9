"""What stands between the tables of docs/configuration.md."""

HEAD = """
# Configuration

<!-- Written by scripts/config_reference.py out of the code: change the docstrings there, then run it. -->

*Reference.* Every key of `at_grpo:`, every option of the environments, and what each of verl's keys does here.

A job of verl-atgrpo is a job of verl, and [each key of verl's](#verls-keys) works, is refused, or has no meaning here.
Ours are in the section `at_grpo:`, which `trainer.v1.trainer_mode=at_grpo` needs. Recipes list all of them, so
on the command line it is `at_grpo.candidates=8`, without `+`. A key, an option or a value that nobody knows is refused
before Ray starts, in one line that names it.

A recipe of your own starts from those of the package:

```yaml
defaults:
  - plan_path_qwen3_1p7b    # or: ppo_trainer, team/base and your own settings
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

`name` is a registered environment or `module:Class`; everything else in the section is an option of that environment:
an argument of its class. `verl_atgrpo.register` adds names. [Data sets](environments.md#data-sets) says what the
sections `train` and `val` hold.
"""

OF_BASE = """
## What `team/base` sets of verl

Every recipe of the package has `team/base` in its defaults. Besides the defaults of `at_grpo:` it sets these keys of
verl, which a recipe may change where nothing below refuses it.
"""

OF_WIRING = """
## What the trainer sets of verl

These follow from `at_grpo:`. A recipe that says something else of the tasks or of who plays them is refused.
"""

WIRED = {
    "actor_rollout_ref": "with `at_grpo.policies`: the first policy's, for what verl does once per job (displayed "
    "text, token counts). Every policy is trained and served by its own",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": "`verl_atgrpo.rollout.manager.TeamRolloutManager`, "
    "whose workers play episodes",
    "data.custom_cls": "the data set of tasks: a row says split and index, the environment makes the task",
    "data.train_files": "`train`: the name of the split in the place of files",
    "data.val_files": "`val`, in the same way",
    "data.at_grpo": "the section `at_grpo`, because verl hands the data set `data` alone",
    "data.at_grpo_tasks": "how many tasks each split deals out",
    "data.at_grpo_data_sets": "which data sets they are from, by whose names validation reports",
    "trainer.v1.sampler.sync_refill_failed_groups": "`true`: verl's own way to replace a failed episode",
    "data.gen_batch_size": "`1`: replacements are fetched one task at a time",
}
"""What `trainer.verl_keys.wire` sets; the generator compares the keys with its source."""

OF_KEYS = """
## verl's keys

Every key of `ppo_trainer` in verl 0.9.1, and what it does in a job with a team. Keys are below the section's; `*` is
one part of a key, `**` any number of parts, and where two rows fit a key, the one with the most letters holds.

- **works**: the value reaches the code that is named; tests look for the key in it.
- **refused**: any other value than the one named ends the command before Ray starts, in one line that names the key,
  the value and what would do.
- **no meaning**: any value is accepted, and nothing here depends on it.

The same holds of the keys in a policy's block (`at_grpo.policies.<name>`), whose `model`, `actor`, `optim` and
`rollout` are laid over `actor_rollout_ref`. A key that verl does not have is refused; sections of the first level
that are neither verl's nor ours are a recipe's own, for its interpolations.
"""

OF_REFUSALS = """
## What is refused

Beyond values that make no sense and what the table above refuses, these settings are refused, because they would have
no effect beside others, or another one than they seem to have. `…` stands for values, and at the beginning of a line
for `actor_rollout_ref` or a policy's block.
"""
