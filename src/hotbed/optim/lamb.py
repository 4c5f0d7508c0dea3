"""LAMB: Adam with a trust ratio."""

from __future__ import annotations

from hotbed.optim.adam import BETAS, FIRST, AdamBase
from hotbed.optim.rules import Moment, Rule


class LAMB(AdamBase):
    """LAMB with each row as a layer of its own.

    m̂ and v̂ as in `Adam`; ``r = m̂ / (√v̂ + ε) + λ · w``; ``w ← w − lr · (‖w‖ / ‖r‖) · r``, the ratio being 1 where a norm
    is 0.

    Source: You et al. 2020, Algorithm 2 with φ the identity; norms per row as in FBGEMM's ``LAMB``. *Lazy* as
    `Adam` is.

    Parameters
    ----------
    model, lr, betas, eps, max_grad_norm, max_norm, groups
        As for `Adam`.
    weight_decay
        λ.
    """

    rule = Rule(
        "lamb",
        hyper=(*BETAS, "eps", "weight_decay"),
        moments=(FIRST, Moment("exp_avg_sq", "element")),
        corrected=BETAS,
    )
    weight_decay_mode = "own"
