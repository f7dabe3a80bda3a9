"""The trainer mode `at_grpo`: verl's synchronous trainer, fed by episodes of a team."""
