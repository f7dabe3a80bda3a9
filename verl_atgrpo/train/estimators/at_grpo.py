"""AT-GRPO: the K candidates of a decision are compared: one episode, one agent, one turn, one prompt.

    A_c = (r_c - mean(r_1 ... r_K)) / (std(r_1 ... r_K) + eps),   r_c = alpha * team_c + w * local_c

The formula is that of `grpo.py`; the group is what is new, and the rollout makes it. `play.team` samples the K
candidates, `play.scoring` mixes the two parts of their reward and chooses the best one, which the next agent sees;
`rollout.episode_rows` gives their rows the tag `group`: task, episode, agent and turn.

Source: arXiv 2510.11062 (Stronger-MAS), agent- and turn-wise grouping and tree-structured sampling.
"""

from verl_atgrpo.train.estimators.spec import EstimatorSpec

PRESET = EstimatorSpec(name="at_grpo")
