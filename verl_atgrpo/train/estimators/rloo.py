"""RLOO: the baseline is the mean of the others, so that the gradient is unbiased with few candidates.

    A_i = r_i - (sum of r_j over j != i) / (n - 1)  =  n / (n - 1) * (r_i - mean(r))

The second form is what `arithmetic.standardise` computes for `center: leave_one_out`. Where an episode has several
rows in a group (`scheme: parallel`), they share what follows, so the mean is that of the other episodes' rows.

Source: arXiv 2402.14740 (Back to Basics).
"""

from verl_atgrpo.train.estimators.spec import EstimatorSpec

PRESET = EstimatorSpec(name="rloo", center="leave_one_out", scale="none")
