"""Reading a job's configuration, and refusing what cannot work before Ray starts.

`run_check` calls all checks in their order. Where a key is refused:

- `at_grpo.*`, unknown or with a value of another type or bound: `schema`; by the section's other keys: `section_rules`
- a key of verl's: `verl_keys`, by the list in `verl_key_table`
- a key by the rest of the job: `job_rules`, `policy_rules`, `mode_rules`
- `at_grpo.environment.*`: `play.registry`; `at_grpo.estimator.*`: `train.estimators.choice`
- names and keys that no longer exist: `recipes.gone`
- what this machine or the models cannot do: `machine_check`, `answer_check`
"""
