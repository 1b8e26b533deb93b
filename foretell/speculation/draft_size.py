"""How much a step should draft: expected tokens against measured time, "nothing" included.

Of every kind of node, told apart by its source, rank, depth and the length of the match behind it,
the policy counts how often it was accepted once its parent was, starting from the drafter's own
estimate; only tested nodes count. A deterministic tree is cut, best first, to the size n that
maximises (1 + chances of its n nodes) / cost(n + 1), 0 unless that wins by a margin; now and then
twice that is tried, where that is cheap. A drafter that gains less time than it takes is asked more
rarely; what a request's first draft takes does not count, since it takes in the whole text as well.

Where other drafts would mean other samples (drawn trees, some rules) neither the draw nor a clock
may decide, or a seed would not give its tokens again: `DrawnSizes` chooses the number of nodes
before they are drawn, by what the request's own earlier drafts of that size brought in and by the
cost curve that was measured beforehand. A request without a seed promises no tokens: there the load
and the time that drafting takes decide as well.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from foretell.core.tree import TokenTree
from foretell.core.types import Outcome
from foretell.speculation.costs import RATE, Payoff

if TYPE_CHECKING:
    from foretell.core.context import Context
    from foretell.core.drafter import Drafter

START = 1.05  # drafting must promise this much more than not drafting, to begin
STAY = 1.02  # and this much, to go on
PROBE = 16  # every so many proposals a larger tree is tried, more rarely where that is expensive:
PROBE_LOSS = 0.005  # share of the time that it may lose
LIMIT = 80  # nodes, unless a number is given
PRIOR = 4.0  # trials a drafter's own estimate counts for
OTHERS = 0.6  # chance of the next continuation of a copy, to that of the one before it
KEEP = 1 - 1 / 64  # what a trial leaves of the weight of earlier ones
DRAWN_SIZES = (0, 4, 8, 16, 32, 64, LIMIT)  # nodes that drawn trees may have
DRAWN_START = 16  # nodes of the first drawn tree
PAUSE = 32  # steps without a draft after which one is tried again
# Of a node: source, rank, and the length of its copy, or its depth and the drafter's own chance.
Kind = tuple[str, int, int]
Chances = dict[Kind, list[float]]  # [trials, accepted]


class Sizes(Protocol):
    """Decides the sizes of one request's drafts."""

    def budget(self) -> int:
        """Nodes a drafter may propose now, its root counted. 1: it is not to be asked."""

    def fit(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        """The proposed tree, maybe cut; drafting it took `seconds`."""

    def observe(self, outcome: Outcome) -> None:
        """Learns from what became of the step, with or without a draft."""


def sizes_for(ctx: Context, nodes: int, drafter: Drafter) -> Sizes:
    """`nodes`: how many at most; 0: the policy decides."""
    sizes: Sizes
    drawn = drafter.draws and not ctx.sampler.greedy
    if nodes or (ctx.timed and not drawn):
        sizes = Policy(ctx, nodes, drafter.whole)
    else:
        sizes = DrawnSizes(ctx, drafter.whole)
    room = ctx.request.room
    return sizes if room is None else Capped(sizes, room.nodes)


def heat(ctx: Context) -> int:
    """The temperature in quarters: what is learnt of drafts at one holds little at another."""
    return round(4 * ctx.sampler.sampling.temperature)


def chances_of(ctx: Context) -> Chances:
    """How often nodes of each kind were accepted at the request's temperature."""
    return ctx.shared(dict, f"chances {heat(ctx)}")


def estimate(tree: TokenTree, chances: Chances) -> tuple[list[float], list[Kind]]:
    """The chance of each node to be reached, and the kinds of the nodes."""
    values = [1.0] * len(tree)
    kinds: list[Kind] = [("", 0, 0)] * len(tree)
    for parent, tries in enumerate(tree.tries):
        ranks: dict[str, int] = {}
        for node in tries:
            source, depth = tree.sources[node], tree.depths[node]
            rank = ranks[source] = ranks.get(source, -1) + 1
            # Along a copy what counts is how long it has held, before the draft and in it;
            # elsewhere how deep the node is, and how sure of it its drafter is.
            match = tree.matches[node]
            held = match + depth - 1 if match else 0
            own = tree.values[node] / max(tree.values[parent], 1e-9)
            place = held.bit_length() if held else -min(depth, 8) - 8 * int(4 * min(own, 0.99))
            kinds[node] = kind = source, rank, place
            trials, accepted = chances.get(kind, (0.0, 0.0))
            # Copies that have held for n tokens were seen to go on with 1 - 4 / (5 n), and what
            # else stood there once with OTHERS of that for each one before it.
            cap = (1 - 4 / (5 * held)) * OTHERS**rank if held else 1.0
            prior = min(cap, own)
            chance = (PRIOR * prior + accepted) / (PRIOR + trials)
            values[node] = values[parent] * min(1.0, chance)
    return values, kinds


class Policy:
    """Sizes by measured time; what it learns is shared by all requests of the same drafter."""

    def __init__(self, ctx: Context, nodes: int, whole: bool = False):
        """`nodes`: how many at most, 0: it decides; `whole`: trees are verified as they come."""
        self.ctx = ctx
        self.nodes = nodes
        self.whole = whole
        self.waited = 0  # proposals since a larger tree was tried
        self.size = 8  # nodes that were best last
        if whole:  # such a tree may cost half a forward
            curve = ctx.costs.curve(LIMIT, len(ctx.tokens))
            self.size = max(8, int((curve <= 1.5 * curve[0]).sum()) // 2)
        self.chances = chances_of(ctx)
        self.payoff = ctx.shared(Payoff, f"worth {heat(ctx)}")
        self.kinds: list[Kind] = []  # of the last tree's nodes
        self.begun = False  # whether a draft was made: the first one also takes in the text
        self.spent = -1.0  # seconds the last draft took beyond a plain step; below 0: no draft
        self.plain_seconds = 0.0  # of a plain step then
        self.rows_alone = 0.0  # seconds for rows beside a root alone, of which a draft is made next

    def budget(self) -> int:
        self.spent = -1.0
        self.kinds = []
        if not self.nodes and not self.payoff.due():
            return 1
        return (self.nodes or min(LIMIT, max(16, 2 * self.size))) + 1

    def fit(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        began = time.perf_counter()
        # Other requests may draft as much in the same forward.
        curve = self.ctx.shares(len(tree) + tree.beside)
        if len(tree) > 1 + self.nodes and not (tree.drawn or self.whole):
            values, self.kinds = estimate(tree, self.chances)
            order = sorted(range(1, len(tree)), key=lambda node: -values[node])
            count = self.nodes or self._best([values[node] for node in order], curve.tolist())
            nodes = sorted(order[:count])
            tree = tree.keep(nodes)
            self.kinds = [self.kinds[node] for node in (0, *nodes)]
        self.plain_seconds = float(curve[0])
        spent = float(curve[len(tree) + tree.beside - 1]) - self.plain_seconds
        spent += seconds + time.perf_counter() - began
        if len(tree) == 1 and tree.beside:  # it is the next draft that pays for them
            self.rows_alone += spent
            self.payoff.wait = 0
            return tree
        self.spent, self.rows_alone = spent + self.rows_alone, 0.0
        return tree

    def _best(self, values: list[float], curve: list[float]) -> int:
        """How many nodes of these values, best first, make the most of a forward's time."""
        best = 0
        speed = 1 / curve[0]  # tokens a second
        least = speed * (STAY if self.size else START)
        expected = [1.0]
        for count, value in enumerate(values, 1):
            expected.append(expected[-1] + value)
            if expected[count] / curve[count] > max(speed, least):
                best, speed = count, expected[count] / curve[count]
        self.size = best
        self.waited += 1
        larger = min(max(8, 2 * best), len(values))
        lost_seconds = curve[larger] - expected[larger] / speed
        if self.waited < max(PROBE, lost_seconds / (PROBE_LOSS * curve[best])):
            return best
        self.waited = 0
        return larger

    def observe(self, outcome: Outcome) -> None:
        for node, accepted in outcome.tested if self.kinds else ():
            entry = self.chances.setdefault(self.kinds[node], [0.0, 0.0])
            entry[0] = KEEP * entry[0] + 1
            entry[1] = KEEP * entry[1] + accepted
        if self.spent >= 0 and not self.nodes:
            if self.begun:
                gained, live = len(outcome.path), self.ctx.engine.running
                self.payoff.note(gained, self.spent, self.plain_seconds, live)
            self.begun = True


class Capped:
    """Sizes of at most so many nodes."""

    def __init__(self, sizes: Sizes, nodes: int):
        self.sizes = sizes
        self.nodes = nodes

    def budget(self) -> int:
        return min(self.sizes.budget(), self.nodes + 1)

    def fit(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        return self.sizes.fit(tree, seconds)

    def observe(self, outcome: Outcome) -> None:
        self.sizes.observe(outcome)


class History:
    """What drafts of each size in DRAWN_SIZES came to, the latest counting most."""

    def __init__(self) -> None:
        self.trials = [0.0] * len(DRAWN_SIZES)
        self.gains = [0.0] * len(DRAWN_SIZES)
        self.node_seconds = 0.0  # that drafting a node takes

    @property
    def tried(self) -> list[int]:
        """Places of the sizes that were tried, 0 aside."""
        return [place for place, trials in enumerate(self.trials) if trials and place]

    def note(self, place: int, gained: int) -> None:
        self.trials[place] = KEEP * self.trials[place] + 1
        self.gains[place] = KEEP * self.gains[place] + gained

    def note_seconds(self, nodes: int, seconds: float) -> None:
        change = seconds / nodes - self.node_seconds
        self.node_seconds += change * (RATE if self.node_seconds else 1.0)

    def expected(self, place: int) -> float:
        """Drafts of a step that are accepted with the size at this place. Of a size not tried yet:
        what its nearest tried neighbour brings in, scaled by the logarithm of the sizes.
        """
        if not place:
            return 0.0
        if not self.tried:
            return math.inf
        nearest = min(self.tried, key=lambda i: (abs(i - place), i))
        mean = self.gains[nearest] / self.trials[nearest]
        return mean * math.log1p(DRAWN_SIZES[place]) / math.log1p(DRAWN_SIZES[nearest])


class DrawnSizes:
    """Sizes of drawn drafts, chosen before the draw.

    Where a seed's tokens must come again, neither other requests nor the machine's mood have a say:
    the request's own history decides, and a cost curve that was measured beforehand. Without a seed
    all requests share what they learn, and sizes follow the load and the time that drafting takes.
    """

    def __init__(self, ctx: Context, whole: bool = False):
        self.ctx = ctx
        self.whole = whole
        self.repeats = ctx.repeats
        curve = ctx.costs.fixed_curve(LIMIT + 1, len(ctx.tokens))
        self.fixed = None if curve is None else [float(curve[size]) for size in DRAWN_SIZES]
        self.history = (
            History() if self.repeats else ctx.shared(History, f"drawn sizes {heat(ctx)}")
        )
        self.chosen = DRAWN_SIZES.index(DRAWN_START)
        self.used = 0  # place of the size of the running step
        self.steps = 0
        self.waited = 0  # steps without a draft
        if self.history.tried:
            self._choose()

    def costs(self) -> list[float] | None:
        """Seconds of a step with a draft of each size; None: nothing was measured."""
        if self.repeats:
            return self.fixed
        curve = self.ctx.shares(LIMIT + 1)
        return [float(curve[size]) + size * self.history.node_seconds for size in DRAWN_SIZES]

    def budget(self) -> int:
        self.steps += 1
        self.used = self.chosen
        if self.steps % PROBE == 0 and self.chosen and self.costs() is not None:
            # Next larger and next smaller in turn, so that the estimates stay fresh.
            step = 1 if (self.steps // PROBE) % 2 else -1
            self.used = min(max(1, self.chosen + step), len(DRAWN_SIZES) - 1)
        if not self.chosen:
            self.waited += 1
            if self.waited > PAUSE:
                self.waited = 0
                self.used = 1
        return DRAWN_SIZES[self.used] + 1

    def fit(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        if len(tree) > 1 and not self.repeats:
            self.history.note_seconds(len(tree) - 1, seconds)
        nodes = DRAWN_SIZES[self.used]
        if tree.drawn or self.whole or len(tree) <= 1 + nodes:
            return tree
        order = sorted(range(1, len(tree)), key=lambda node: -tree.values[node])
        return tree.keep(sorted(order[:nodes]))

    def observe(self, outcome: Outcome) -> None:
        if not self.used or self.costs() is None:
            return
        self.history.note(self.used, len(outcome.path))
        self._choose()

    def _choose(self) -> None:
        costs = self.costs()
        assert costs is not None
        speeds = [(1 + self.history.expected(place)) / cost for place, cost in enumerate(costs)]
        best = int(np.argmax(speeds))
        # Not far beyond what was tried, and drafting has to win by a margin.
        best = min(best, self.history.tried[-1] + 1)
        margin = STAY if self.chosen else START
        self.chosen = best if speeds[best] > margin * speeds[0] else 0
