"""Choose which of several models answers a request: by shares of the traffic, the same one for the same key.

A key is a point in [0, 1) by its hash, and models have intervals in the order of ``--share``. A client that sends its
key (a user's id) meets one model as long as the shares stay; when a later model's share grows, keys move to it only.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from itertools import accumulate

from hotbed.errors import RecipeError, did_you_mean

KEY_HEADER = "X-Routing-Key"


class Shares:
    """Shares of the traffic by name of a model, in their order; they are divided by their sum.

    Raises
    ------
    RecipeError
        If a share is negative or not finite, or all are 0.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        for name, share in shares.items():
            if not math.isfinite(share) or share < 0:
                raise RecipeError(f"--share gives {name} {share}, must be a number of at least 0")
        total = sum(shares.values())
        if not total or not math.isfinite(total):
            raise RecipeError("--share gives no model any traffic; give one a share above 0")
        self._names, self._ends = list(shares), [end / total for end in accumulate(shares.values())]
        self._last = next(name for name in reversed(self._names) if shares[name])

    def choose(self, key: str | None) -> str:
        """Name of the model for a key; any by the shares where there is no key."""
        content = secrets.token_bytes(8) if key is None else key.encode("utf-8", "surrogatepass")
        point = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2.0**64
        return next((name for name, end in zip(self._names, self._ends, strict=True) if point < end), self._last)


def parse_shares(text: str | None, names: Sequence[str]) -> dict[str, float]:
    """Read ``NAME=0.9,NEW=0.1``; without it, the first model has all of the traffic.

    Raises
    ------
    RecipeError
        If it is not of this form, or names another model.
    """
    if text is None:
        return {name: float(i == 0) for i, name in enumerate(names)}
    shares = dict[str, float]()
    for entry in text.split(","):
        name, _, number = entry.strip().partition("=")
        if name not in names:
            raise RecipeError(f"--share names {name!r}, but there are {', '.join(names)}{did_you_mean(name, names)}")
        if name in shares:
            raise RecipeError(f"--share names {name!r} twice; once will do")
        try:
            shares[name] = float(number)
        except ValueError:
            raise RecipeError(f"--share gives {name} {number!r}, must be a number: {name}=0.1") from None
    return shares
