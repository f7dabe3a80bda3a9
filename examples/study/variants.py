"""What the study compares: for every variant, what it changes about the environment's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Game:
    """An environment of the study."""

    recipe: str
    budget: int
    """Tokens that a variant may generate in training, all candidates counted."""
    single: str
    """Its environment for a single agent."""
    planner: str
    """Its environment for the planner alone (`planner_alone`)."""
    learning_rate: float
    """Of two optimizer steps a training step."""
    test_every: int = 3
    """Training steps between two validations, at most."""


GAMES: Mapping[str, Game] = {
    "plan_path": Game("plan_path_cpu", 60_000, "plan_path_single", "PlanPathPlanner", 7e-4),
    # The recipe's learning rate is for a short run: at three times this one the policy soon draws one answer only.
    # It is learnt in a few steps, so every other one is validated.
    "sudoku": Game("sudoku_cpu", 60_000, "sudoku_single", "SudokuPlanner", 2.5e-4, 2),
}


@dataclass(frozen=True)
class Variant:
    """One way to train, or to put together what others trained."""

    title: str
    overrides: tuple[str, ...] = ()
    share: float = 1.0
    """Of the game's budget."""
    test_every: int = 3
    """Training steps between two validations; the game may ask for more of them."""
    needs: tuple[str, ...] = ()
    """What it puts together without training, as `variant:policy`: the tool user's and the planner's."""
    rate: float = 1.0
    """Of the game's learning rate."""
    keep: bool = False
    """Its models are needed by others."""


# Eight whole episodes a task, the outcome as every row's reward; half of the tasks, since whole episodes take twice
# the tokens of a decision tree: so that a step generates about as much as one of AT-GRPO in the beginning.
_EPISODES = (
    "at_grpo.scheme=parallel",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)


_SINGLE = ("at_grpo.environment.name={single}", "at_grpo.environment.tool=null")


def _wide(candidates: int) -> tuple[str, ...]:
    """As many candidates a step as with eight: more tasks, the same number of optimizer steps."""
    tasks = 32 * 8 // candidates
    return (
        f"at_grpo.candidates={candidates}",
        f"data.train_batch_size={tasks}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={tasks // 2}",
    )


def _roles(tool_user: str, planner: str) -> tuple[str, ...]:
    return (
        "~at_grpo.agents",  # a mapping is added to, not replaced
        "+at_grpo.agents={tool_user: tool_user, planner: planner}",
        f"at_grpo.policies={{tool_user: {{model: {{path: {tool_user}}}}}, planner: {{model: {{path: {planner}}}}}}}",
    )


VARIANTS: Mapping[str, Variant] = {
    "at_grpo": Variant("AT-GRPO, one policy, K = 8"),
    "single_grpo": Variant(
        "single agent, GRPO",
        (*_SINGLE, *_EPISODES, "at_grpo.estimator=mas_grpo"),
        test_every=2,
    ),
    "single_at_grpo": Variant("single agent, AT-GRPO", _SINGLE),
    "team_grpo": Variant(
        "team, GRPO (whole episodes)",
        (*_EPISODES, "at_grpo.estimator=mas_grpo"),
        test_every=2,
    ),
    "dr_mas": Variant(
        "team, Dr. MAS (whole episodes)",
        (*_EPISODES, "at_grpo.estimator=dr_mas"),
        test_every=2,
    ),
    "at_grpo_roles": Variant("AT-GRPO, a policy per role", _roles("{model}", "{model}"), keep=True),
    "swapped": Variant(
        "the same, roles swapped afterwards",
        _roles("{first}", "{second}"),
        needs=("at_grpo_roles:planner", "at_grpo_roles:tool_user"),
    ),
    "no_local": Variant("AT-GRPO without local reward", ("at_grpo.local_weight=0",)),
    "k2": Variant("AT-GRPO, K = 2", _wide(2)),
    "k4": Variant("AT-GRPO, K = 4", _wide(4)),
    "first": Variant("AT-GRPO, commits the first candidate", ("at_grpo.selection=first",)),
    "random": Variant("AT-GRPO, commits a random candidate", ("at_grpo.selection=random",)),
    "tool_user_alone": Variant(
        "tool user alone (the single agent's prompts), AT-GRPO",
        _SINGLE,
        share=0.5,
        keep=True,
    ),
    "planner_alone": Variant(
        "planner alone, AT-GRPO",
        ("at_grpo.environment.name=planner_alone:{planner}",),
        share=0.5,
        keep=True,
    ),
    "alone_in_team": Variant(
        "each trained alone, then put in the team",
        _roles("{first}", "{second}"),
        needs=("tool_user_alone:shared", "planner_alone:shared"),
    ),
    "colocate_async": Variant(
        "AT-GRPO, updates not waiting for the slowest episodes",
        # mode/async.yaml, spelt out: a game's recipe is one of the synchronous mode.
        (
            "at_grpo.mode=colocate_async",
            "trainer.v1.colocate_async.num_warmup_batches=1",
            "trainer.v1.sampler.max_off_policy_strategy=wait",
            "trainer.v1.sampler.max_off_policy_threshold=3",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_threshold=2.0",
        ),
    ),
}

OPTIMIZER_STEPS = (1, 2, 4, 8, 16)
"""Optimizer steps a training step; a step has 32 tasks."""
RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Factors of a game's learning rate, of which one seed shows which suits a number of optimizer steps."""


def update_variant(steps: int, rate: float) -> str:
    """Returns the name of AT-GRPO with so many optimizer steps a training step, and a factor of the learning rate."""
    return f"steps_{steps}_rate_{rate:g}"


SELECTION_SEED = 3
"""The seed whose trainings choose the learning rates; it is in no comparison."""
UPDATES: Mapping[str, Variant] = {
    update_variant(steps, rate): Variant(
        f"AT-GRPO, {steps} optimizer steps, {rate:g} times the learning rate",
        (f"actor_rollout_ref.actor.ppo_mini_batch_size={32 // steps}",),
        rate=rate,
    )
    for steps in OPTIMIZER_STEPS
    for rate in RATES
}
"""How many updates: AT-GRPO with one policy, by optimizer steps and learning rate."""
ALL: Mapping[str, Variant] = {**VARIANTS, **UPDATES}
