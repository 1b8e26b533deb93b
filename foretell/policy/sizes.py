"""How much a step should draft: expected tokens against measured time, "nothing" included.

Of every kind of node, told apart by its source, rank, depth and the length of the match behind it,
the policy counts how often it was accepted once its parent was, starting from the drafter's own
estimate; only tested nodes count. A deterministic tree is cut, best first, to the size n that
maximises (1 + chances of its n nodes) / cost(n + 1), 0 unless that wins by a margin; now and then
twice that is tried. Drawn trees are never cut: that would bias them. A drafter that gains less time
than it takes is asked more rarely: every 33rd step, or so that it costs a twentieth of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.policy.costs import Worth

if TYPE_CHECKING:
    from foretell.core.engine import Context

START, STAY = (
    1.05,
    1.02,
)  # drafting must promise this much more than not drafting: to begin, to go on
PROBE = 16  # every so many proposals a larger tree is tried
LIMIT = 80  # nodes, unless a number is given
PRIOR = 4.0  # trials a drafter's own estimate counts for
KEEP = 1 - 1 / 64  # what a trial leaves of the weight of earlier ones
Key = tuple[str, int, int]


class Policy:
    """The sizes of one request's drafts; what it learns is shared by all requests of the same
    drafter.
    """

    def __init__(self, ctx: Context, nodes: int, whole: bool = False):
        """`nodes`: how many at most, 0: it decides if it may; `whole`: trees are verified as they
        come.
        """
        self.ctx, self.nodes, self.whole, self.step = ctx, nodes or 16 * (not ctx.timed), whole, 0
        line = ctx.costs.line(LIMIT, len(ctx.tokens)) if whole else np.zeros(1)
        self.size = max(
            8, int((line <= 1.5 * line[0]).sum()) // 2
        )  # a whole tree may cost half a forward
        self.chances: dict[Key, list[float]] = ctx.shared(dict, "chances")  # [trials, accepted]
        self.worth = ctx.shared(Worth, "worth")
        self.keys: list[Key] = []
        self.spent = (
            -1.0
        )  # seconds the last draft took beyond a plain step, added to by who drafts; below 0: none

    def budget(self) -> int:
        """Nodes a drafter may propose now, its root counted: twice what was best last. 1: it is not
        to be asked.
        """
        self.spent, self.keys = -1.0, []
        if not self.nodes and not self.worth.due():
            return 1
        return (self.nodes or min(LIMIT, max(16, 2 * self.size))) + 1

    def estimate(self, tree: TokenTree) -> list[float]:
        """The chance of each node to be reached; notes the kinds of the nodes."""
        values, self.keys = [1.0] * len(tree), [("", 0, 0)] * len(tree)
        for parent, tries in enumerate(tree.tries):
            ranks: dict[str, int] = {}
            for node in tries:
                source, match, depth = tree.sources[node], tree.matches[node], tree.depths[node]
                rank = ranks[source] = ranks.get(source, -1) + 1
                # Along a copy what counts is how long it has held: before the draft and in it.
                held = match + depth - 1 if match else 0
                key = self.keys[node] = source, rank, held.bit_length() if held else -min(depth, 8)
                trials, accepted = self.chances.get(key, (0.0, 0.0))
                # Copies that have held for n tokens were seen to hold with 1 - 2 / (3 n), whoever
                # made them.
                own = min(
                    1 - 2 / (3 * held) if held else 1.0,
                    tree.values[node] / max(tree.values[parent], 1e-9),
                )
                values[node] = values[parent] * (
                    (PRIOR * own + accepted) / (PRIOR + trials)
                )  # rounds to no more
        return values

    def fit(self, tree: TokenTree) -> TokenTree:
        """Cuts a deterministic tree to what is worth its cost, maybe the root alone."""
        line = self.ctx.costs.share(
            len(tree), len(self.ctx.tokens), len(self.ctx.live)
        )  # others may draft as much
        if not (tree.drawn or self.whole or len(tree) <= 1 + self.nodes):
            values = self.estimate(tree)
            order = sorted(range(1, len(tree)), key=lambda n: -values[n])
            count = self.nodes or self._best([values[n] for n in order], line.tolist())
            nodes = sorted(order[:count])
            tree, self.keys = tree.keep(nodes), [self.keys[n] for n in (0, *nodes)]
        self.spent, self.unit = float(line[len(tree) - 1] - line[0]), float(line[0])
        return tree

    def _best(self, values: list[float], line: list[float]) -> int:
        """How many nodes of these values, best first, make the most of a forward's time."""
        best, fastest, total = 0, 1 / line[0] * (STAY if self.size else START), 1.0
        for count, value in enumerate(values, 1):
            total += value
            if (speed := total / line[count]) > fastest:
                best, fastest = count, speed
        self.size, self.step = best, self.step + 1
        return max(8, 2 * best) if self.step % PROBE == 0 else best

    def observe(self, outcome: Outcome) -> None:
        """Learns from what became of the last tree."""
        for node, accepted in outcome.tested if self.keys else ():
            entry = self.chances.setdefault(self.keys[node], [0.0, 0.0])
            entry[:] = KEEP * entry[0] + 1, KEEP * entry[1] + accepted
        if self.spent >= 0 and not self.nodes:
            self.worth.note(len(outcome.path), self.spent, self.unit)
