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
    """Its environment for one agent in both roles."""
    solo: str
    """Prefix of its environments for one role alone (`solo`)."""
    overrides: tuple[str, ...] = ()
    """For all of its variants: the recipe's, where it says nothing."""
    test_every: int = 3
    """Training steps between two validations, at most."""


GAMES: Mapping[str, Game] = {
    "plan_path": Game("plan_path_cpu", 60_000, "plan_path_single", "PlanPath"),
    # The recipe's learning rate is for a short run: at three times this one the policy soon draws one answer only.
    # It is learnt in a few steps, so every other one is validated.
    "sudoku": Game("sudoku_cpu", 60_000, "sudoku_single", "Sudoku", ("actor_rollout_ref.actor.optim.lr=2.5e-4",), 2),
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
    start: str | None = None
    """The variant whose first validation is also this one's: same model, prompts and draws."""
    keep: bool = False
    """Its models are needed by others."""


# Eight whole episodes a task, the outcome as every row's reward; half of the tasks, since whole episodes take twice
# the tokens of a decision tree: so that a step generates about as much as one of AT-GRPO in the beginning.
_EPISODES = (
    "at_grpo.scheme=parallel",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)


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
        ("at_grpo.environment.name={single}", *_EPISODES, "at_grpo.estimator=mas_grpo"),
        test_every=2,
    ),
    "single_at_grpo": Variant("single agent, AT-GRPO", ("at_grpo.environment.name={single}",), start="single_grpo"),
    "team_grpo": Variant(
        "team, GRPO (whole episodes)",
        (*_EPISODES, "at_grpo.estimator=mas_grpo"),
        test_every=2,
        start="at_grpo",
    ),
    "dr_mas": Variant(
        "team, Dr. MAS (whole episodes)",
        (*_EPISODES, "at_grpo.estimator=dr_mas"),
        test_every=2,
        start="at_grpo",
    ),
    "at_grpo_roles": Variant("AT-GRPO, a policy per role", _roles("{model}", "{model}"), start="at_grpo", keep=True),
    "swapped": Variant(
        "the same, roles swapped afterwards",
        _roles("{first}", "{second}"),
        needs=("at_grpo_roles:planner", "at_grpo_roles:tool_user"),
    ),
    "no_local": Variant("AT-GRPO without local reward", ("at_grpo.local_weight=0",), start="at_grpo"),
    "k2": Variant("AT-GRPO, K = 2", _wide(2), start="at_grpo"),
    "k4": Variant("AT-GRPO, K = 4", _wide(4), start="at_grpo"),
    "first": Variant("AT-GRPO, commits the first candidate", ("at_grpo.selection=first",), start="at_grpo"),
    "random": Variant("AT-GRPO, commits a random candidate", ("at_grpo.selection=random",), start="at_grpo"),
    "tool_user_alone": Variant(
        "tool user alone, AT-GRPO",
        ("at_grpo.environment.name=solo:{solo}ToolUser",),
        share=0.5,
        keep=True,
    ),
    "planner_alone": Variant(
        "planner alone, AT-GRPO",
        ("at_grpo.environment.name=solo:{solo}Planner",),
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
        # team/async.yaml, spelt out: a game's recipe is one of the synchronous mode.
        (
            "at_grpo.mode=colocate_async",
            "trainer.v1.colocate_async.num_warmup_batches=1",
            "trainer.v1.sampler.max_off_policy_strategy=wait",
            "trainer.v1.sampler.max_off_policy_threshold=3",
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_is_threshold=2.0",
        ),
        start="at_grpo",
    ),
}
