"""How many nodes a step should draft: expected tokens against measured time, "none" included.

The engine notes what every forward cost; a policy notes how often the node of each rank was accepted. A deterministic
tree is cut to the size n that maximises (1 + acceptance over its first n nodes) / cost(n + 1), 0 unless that wins by a
margin; every PROBE-th proposal is tried at twice that. Drawn trees are not cut: that would bias them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foretell.tree import TokenTree

if TYPE_CHECKING:
    from foretell.engine import Context

MARGIN = 1.02  # drafting must promise this much more than not drafting
PROBE = 16  # proposals
LIMIT = 80  # nodes, unless a number is given
RATE = 1 / 16  # of the running means


class Costs:
    """Seconds of a forward by its number of tokens: running means at powers of two, interpolated between them."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """One forward. An outlier counts at most twice the mean, so a hiccup does not end drafting."""
        old = self.seconds.get(size := 1 << (tokens - 1).bit_length(), seconds)
        self.seconds[size] = old + RATE * 2 * (min(seconds, 2 * old) - old)

    def __call__(self, tokens: int) -> float:
        """Estimated seconds; never falling with size. Sizes never seen cost as on a machine bound by memory."""
        sizes, seconds = zip(*sorted(self.seconds.items() or [(1, 1.0)]), strict=True)
        base = float(np.interp(tokens, sizes, np.maximum.accumulate(seconds)))
        return base * (1.0 + max(0, tokens - int(sizes[-1])) / 64)


class Policy:
    """The budget of one request; acceptance by rank is shared by all requests of the same drafter."""

    def __init__(self, ctx: Context, nodes: int, fixed: bool = False):
        """`nodes`: how many at most, 0: it decides; `fixed`: trees are verified as they come."""
        self.ctx, self.nodes, self.fixed, self.size, self.step = ctx, nodes, fixed or nodes > 0, 8, 0
        self.accepted: list[float] = ctx.shared(list, "policy")

    def budget(self) -> int:
        """Nodes a drafter may propose now, its root counted: twice what was found best last, so that it can grow."""
        return (self.nodes or min(LIMIT, max(16, 2 * self.size))) + 1

    def fit(self, tree: TokenTree) -> TokenTree:
        """Cuts a deterministic tree to the size worth its cost, which may be the root alone."""
        if tree.drawn or self.fixed or len(tree) == 1:
            return tree
        self.accepted += tree.values[len(self.accepted) :]
        costs, self.size, gain = self.ctx.costs, 1, 1.0
        best = MARGIN / costs(1)
        for n in range(1, len(tree)):
            gain += self.accepted[n]
            if gain / costs(n + 1) > best:
                best, self.size = gain / costs(n + 1), n + 1
        self.step += 1
        return tree.prune(max(8, 2 * self.size) if self.step % PROBE == 0 else self.size)

    def observe(self, tree: TokenTree, path: set[int]) -> None:
        """`path`: the accepted nodes. Every node of a verified tree is decided, so none of it is censored."""
        for n in range(1, min(len(tree), len(self.accepted))):
            self.accepted[n] += RATE * ((n in path) - self.accepted[n])
