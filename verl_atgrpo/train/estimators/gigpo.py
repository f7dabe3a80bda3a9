"""GiGPO: episodes are compared, and besides the rows of different episodes that answer the same prompt.

    A = A^E + w * A^S
    A^E = (R_i - mean(R)) / (std(R) + eps)                  over the episodes i of a task, as in `mas_grpo`
    A^S = (rho_t - mean(rho)) / (std(rho) + eps)            over the task's rows with this row's prompt
    rho_t = gamma^(number of later decisions) * R_i         the only reward is paid at the episode's end

The prompt is the paper's anchor state: the same token ids, in any episode at any turn. A row whose prompt occurs once
has no second term. w is `step_weight`, gamma `step_gamma`; `step_scope: agent` compares rows of one agent only.

Source: arXiv 2505.10978, episode and step relative advantages.
"""

from dataclasses import replace

from verl_atgrpo.train.estimators.arithmetic import pairs, standardise
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels, Tensor

PRESET = EstimatorSpec(name="gigpo", unit="trajectory", step_weight=1.0, step_gamma=0.95)


def step_term(values: Tensor, labels: Labels, spec: EstimatorSpec) -> Tensor:
    """Returns A^S, which `advantages` adds to the advantages of any unit but "call": (N,) float64 -> (N,)."""
    same_prompt = pairs(labels["groups"], labels["anchors"])
    if spec.step_scope == "agent":
        same_prompt = pairs(same_prompt, labels["agents"])
    returns = values * spec.step_gamma ** labels["left"].double()
    return standardise(returns, same_prompt, replace(spec, singleton="zero"), units=labels.get("units"))
