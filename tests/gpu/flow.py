"""Follow the control flow of machine code: its blocks in an order in which they may run, and the loops they are in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Jump:
    """Where control may go after the instruction ``at``: to a label (None: nowhere), and on unless ``always``."""

    at: int
    label: str | None
    always: bool


@dataclass(frozen=True)
class Block:
    """Instructions ``start`` to ``stop - 1``, which run one after the other.

    `before` are blocks that may come before it, numbered in the order of the list; jumps back are left out.
    `loops` counts the loops that it is in.
    """

    start: int
    stop: int
    before: tuple[int, ...]
    loops: int


def blocks(length: int, labels: Mapping[str, int], jumps: Iterable[Jump]) -> list[Block]:
    """Cut code into blocks, each behind all that may come before it; code that nothing leads to is left out."""
    by_place = {jump.at: jump for jump in jumps}
    cuts = sorted({0, length, *(at for at in labels.values()), *(at + 1 for at in by_place)})
    starts = [at for at in cuts if at < length]
    stop = dict(zip(starts, [*starts[1:], length], strict=True))
    after: dict[int, list[int]] = {}
    for start in starts:
        jump = by_place.get(stop[start] - 1)
        to = [labels[jump.label]] if jump and jump.label in labels else []
        if not (jump and jump.always):
            to.append(stop[start])
        after[start] = [at for at in to if at < length]
    order, back = _order(after)
    number = {start: k for k, start in enumerate(order)}
    before: dict[int, list[int]] = {start: [] for start in order}
    for start in order:
        for to in after[start]:
            if (start, to) not in back:
                before[to].append(number[start])
    loops = _loops(after, order, back)
    return [Block(start, stop[start], tuple(before[start]), loops[start]) for start in order]


def _order(after: Mapping[int, Sequence[int]]) -> tuple[list[int], set[tuple[int, int]]]:
    """Blocks such that all edges but those back to a block that is open lead onward, and the edges back."""
    done: list[int] = []
    back: set[tuple[int, int]] = set()
    seen, open_ = {0}, {0}
    stack = [(0, iter(after[0]))] if after else []
    while stack:
        start, rest = stack[-1]
        to = next(rest, None)
        if to is None:
            stack.pop()
            open_.discard(start)
            done.append(start)
        elif to in open_:
            back.add((start, to))
        elif to not in seen:
            seen.add(to)
            open_.add(to)
            stack.append((to, iter(after[to])))
    return done[::-1], back


def _loops(after: Mapping[int, Sequence[int]], order: Sequence[int], back: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Count the loops of each block: one is all from which a jump back is reached without its head."""
    into: dict[int, list[int]] = {start: [] for start in order}
    for start in order:
        for to in after[start]:
            into[to].append(start)
    bodies: dict[int, set[int]] = {}
    for start, head in back:
        body = bodies.setdefault(head, {head})
        stack = [start]
        while stack:
            if (at := stack.pop()) not in body:
                body.add(at)
                stack += into[at]
    return {start: sum(start in body for body in bodies.values()) for start in order}
