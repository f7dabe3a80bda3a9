"""Dr. GRPO: no division by the standard deviation, which gives groups that are nearly solved the largest gradients.

    A_i = r_i - mean(r)

The paper also divides the loss by a constant instead of by an answer's length: verl's `loss_agg_mode:
seq-mean-token-sum-norm` with `loss_scale_factor`.

Source: arXiv 2503.20783 (Understanding R1-Zero-Like Training).
"""

from verl_atgrpo.train.estimators.spec import EstimatorSpec

PRESET = EstimatorSpec(name="dr_grpo", scale="none")
