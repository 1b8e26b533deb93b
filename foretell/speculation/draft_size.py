"""How much a step should draft: expected tokens against measured time, "nothing" included.

The expectation is of each kind of node's acceptance rate.

Of every kind of node, told apart by its source, rank, depth and the length of the match after it,
the policy counts how often it was accepted once its parent was, starting from the drafter's own
estimate; only tested nodes count. A deterministic tree is cut, best first, to the size n that
maximises (1 + probabilities of its n nodes) / cost(n + 1), 0 unless that wins by a margin; now and
then twice that is tried, where that is cheap. A drafter that gains less time than it takes is asked
more rarely; what a request's first draft takes does not count, since it takes in the whole text as
well.

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
OTHERS = 0.6  # probability of the next continuation of a copy, to that of the one before it
KEEP = 1 - 1 / 64  # what a trial leaves of the weight of earlier ones
DRAWN_SIZES = (0, 4, 8, 16, 32, 64, LIMIT)  # nodes that drawn trees may have
DRAWN_START = 16  # nodes of the first drawn tree
PAUSE = 32  # steps without a draft after which one is tried again
# Of a node: source, rank, and the length of its copy, or its depth and the drafter's own
# probability.
Kind = tuple[str, int, int]
Chances = dict[Kind, list[float]]  # [trials, accepted]


class Sizes(Protocol):
    """Decides the sizes of one request's drafts."""

    def node_budget(self) -> int:
        """Nodes a drafter may propose now, its root counted. 1: it is not to be asked."""

    def fit_tree(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        """The proposed tree, maybe cut; drafting it took `seconds`."""

    def observe(self, outcome: Outcome) -> None:
        """Learns from what became of the step, with or without a draft."""


def sizes_for(ctx: Context, max_nodes: int, drafter: Drafter) -> Sizes:
    """`max_nodes`: how many at most; 0: the policy decides."""
    sizes: Sizes
    draws_tokens = drafter.draws and not ctx.sampler.greedy
    if max_nodes or (ctx.timed and not draws_tokens):
        sizes = Policy(ctx, max_nodes, drafter.whole)
    else:
        sizes = DrawnSizes(ctx, drafter.whole)
    request_room = ctx.request.room
    return sizes if request_room is None else Capped(sizes, request_room.nodes)


def temperature_key(ctx: Context) -> int:
    """The temperature in quarters: what is learnt of drafts at one holds little at another."""
    return round(4 * ctx.sampler.sampling.temperature)


def chances_of(ctx: Context) -> Chances:
    """How often nodes of each kind were accepted at the request's temperature."""
    return ctx.shared(dict, f"chances {temperature_key(ctx)}")


def estimate_nodes(tree: TokenTree, chances: Chances) -> tuple[list[float], list[Kind]]:
    """The probability of each node to be reached, and the kinds of the nodes."""
    reach_values = [1.0] * len(tree)
    node_kinds: list[Kind] = [("", 0, 0)] * len(tree)
    for parent, siblings in enumerate(tree.tries):
        ranks: dict[str, int] = {}
        for node in siblings:
            source, depth = tree.sources[node], tree.depths[node]
            rank = ranks[source] = ranks.get(source, -1) + 1
            # Along a copy what counts is how long it has held, before the draft and in it;
            # elsewhere how deep the node is, and how sure of it its drafter is.
            match_length = tree.matches[node]
            held_tokens = match_length + depth - 1 if match_length else 0
            draft_probability = tree.values[node] / max(tree.values[parent], 1e-9)
            kind_place = (
                held_tokens.bit_length()
                if held_tokens
                else -min(depth, 8) - 8 * int(4 * min(draft_probability, 0.99))
            )
            node_kinds[node] = node_kind = source, rank, kind_place
            trials, accepted = chances.get(node_kind, (0.0, 0.0))
            # Copies that have held for n tokens were seen to go on with 1 - 4 / (5 n), and what
            # else stood there once with OTHERS of that for each one before it.
            prior_cap = (1 - 4 / (5 * held_tokens)) * OTHERS**rank if held_tokens else 1.0
            prior = min(prior_cap, draft_probability)
            acceptance = (PRIOR * prior + accepted) / (PRIOR + trials)
            reach_values[node] = reach_values[parent] * min(1.0, acceptance)
    return reach_values, node_kinds


class Policy:
    """Sizes by measured time; what it learns is shared by all requests of the same drafter."""

    def __init__(self, ctx: Context, max_nodes: int, never_cut: bool = False):
        """`max_nodes`: 0: it decides; `never_cut`: trees are verified as they come."""
        self.ctx = ctx
        self.nodes = max_nodes
        self.whole = never_cut
        self.waited = 0  # proposals since a larger tree was tried
        self.size = 8  # nodes that were best last
        if never_cut:  # such a tree may cost half a forward
            cost_curve = ctx.costs.curve(LIMIT, len(ctx.tokens))
            self.size = max(8, int((cost_curve <= 1.5 * cost_curve[0]).sum()) // 2)
        self.chances = chances_of(ctx)
        self.payoff = ctx.shared(Payoff, f"worth {temperature_key(ctx)}")
        self.kinds: list[Kind] = []  # of the last tree's nodes
        self.begun = False  # whether a draft was made: the first one also takes in the text
        self.spent = -1.0  # seconds the last draft took beyond a plain step; below 0: no draft
        self.plain_seconds = 0.0  # of a plain step then
        self.rows_alone = 0.0  # seconds for rows beside a root alone, of which a draft is made next

    def node_budget(self) -> int:
        self.spent = -1.0
        self.kinds = []
        if not self.nodes and not self.payoff.is_due():
            return 1
        return (self.nodes or min(LIMIT, max(16, 2 * self.size))) + 1

    def fit_tree(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        fit_start = time.perf_counter()
        # Other requests may draft as much in the same forward.
        step_seconds = self.ctx.shares(len(tree) + tree.beside)
        if len(tree) > 1 + self.nodes and not (tree.has_draws or self.whole):
            values, self.kinds = estimate_nodes(tree, self.chances)
            ranked_nodes = sorted(range(1, len(tree)), key=lambda node: -values[node])
            node_count = self.nodes or self._best_count(
                [values[node] for node in ranked_nodes], step_seconds.tolist()
            )
            kept_nodes = sorted(ranked_nodes[:node_count])
            tree = tree.keep(kept_nodes)
            self.kinds = [self.kinds[node] for node in (0, *kept_nodes)]
        self.plain_seconds = float(step_seconds[0])
        extra_seconds = float(step_seconds[len(tree) + tree.beside - 1]) - self.plain_seconds
        extra_seconds += seconds + time.perf_counter() - fit_start
        if len(tree) == 1 and tree.beside:  # it is the next draft that pays for them
            self.rows_alone += extra_seconds
            self.payoff.wait = 0
            return tree
        self.spent, self.rows_alone = extra_seconds + self.rows_alone, 0.0
        return tree

    def _best_count(self, values: list[float], step_seconds: list[float]) -> int:
        """How many nodes of these values, best first, make the most of a forward's time."""
        best_count = 0
        speed = 1 / step_seconds[0]  # tokens a second
        speed_floor = speed * (STAY if self.size else START)
        expected_tokens = [1.0]
        for node_count, value in enumerate(values, 1):
            expected_tokens.append(expected_tokens[-1] + value)
            if expected_tokens[node_count] / step_seconds[node_count] > max(speed, speed_floor):
                best_count, speed = (
                    node_count,
                    expected_tokens[node_count] / step_seconds[node_count],
                )
        self.size = best_count
        self.waited += 1
        larger_count = min(max(8, 2 * best_count), len(values))
        lost_seconds = step_seconds[larger_count] - expected_tokens[larger_count] / speed
        if self.waited < max(PROBE, lost_seconds / (PROBE_LOSS * step_seconds[best_count])):
            return best_count
        self.waited = 0
        return larger_count

    def observe(self, outcome: Outcome) -> None:
        for node, accepted in outcome.tested if self.kinds else ():
            trial_counts = self.chances.setdefault(self.kinds[node], [0.0, 0.0])
            trial_counts[0] = KEEP * trial_counts[0] + 1
            trial_counts[1] = KEEP * trial_counts[1] + accepted
        if self.spent >= 0 and not self.nodes:
            if self.begun:
                gained_tokens, request_count = len(outcome.path), self.ctx.engine.running
                self.payoff.note_attempt(
                    gained_tokens, self.spent, self.plain_seconds, request_count
                )
            self.begun = True


class Capped:
    """Sizes of at most so many nodes."""

    def __init__(self, sizes: Sizes, max_nodes: int):
        self.sizes = sizes
        self.nodes = max_nodes

    def node_budget(self) -> int:
        return min(self.sizes.node_budget(), self.nodes + 1)

    def fit_tree(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        return self.sizes.fit_tree(tree, seconds)

    def observe(self, outcome: Outcome) -> None:
        self.sizes.observe(outcome)


class History:
    """Outcomes of drafts of each size in DRAWN_SIZES, the latest counting most."""

    def __init__(self) -> None:
        self.trials = [0.0] * len(DRAWN_SIZES)
        self.gains = [0.0] * len(DRAWN_SIZES)
        self.node_seconds = 0.0  # that drafting a node takes

    @property
    def tried_sizes(self) -> list[int]:
        """Places of the sizes that were tried, 0 aside."""
        return [
            size_index for size_index, trials in enumerate(self.trials) if trials and size_index
        ]

    def note_draft(self, size_index: int, gained_tokens: int) -> None:
        self.trials[size_index] = KEEP * self.trials[size_index] + 1
        self.gains[size_index] = KEEP * self.gains[size_index] + gained_tokens

    def note_seconds(self, nodes: int, seconds: float) -> None:
        change = seconds / nodes - self.node_seconds
        self.node_seconds += change * (RATE if self.node_seconds else 1.0)

    def expected_drafts(self, size_index: int) -> float:
        """Drafts of a step that are accepted with the size at this place. Of a size not tried yet:
        what its nearest tried neighbour brings in, scaled by the logarithm of the sizes.
        """
        if not size_index:
            return 0.0
        if not self.tried_sizes:
            return math.inf
        nearest_index = min(
            self.tried_sizes, key=lambda tried_index: (abs(tried_index - size_index), tried_index)
        )
        mean_gain = self.gains[nearest_index] / self.trials[nearest_index]
        return (
            mean_gain * math.log1p(DRAWN_SIZES[size_index]) / math.log1p(DRAWN_SIZES[nearest_index])
        )


class DrawnSizes:
    """Sizes of drawn drafts, chosen before the draw.

    Where a seed's tokens must come again, neither other requests nor the machine's mood have a say:
    the request's own history decides, and a cost curve that was measured beforehand. Without a seed
    all requests share what they learn, and sizes follow the load and the time that drafting takes.
    """

    def __init__(self, ctx: Context, never_cut: bool = False):
        self.ctx = ctx
        self.whole = never_cut
        self.repeats = ctx.repeats
        cost_curve = ctx.costs.fixed_curve(LIMIT + 1, len(ctx.tokens))
        self.fixed = (
            None if cost_curve is None else [float(cost_curve[size]) for size in DRAWN_SIZES]
        )
        self.history = (
            History()
            if self.repeats
            else ctx.shared(History, f"drawn sizes {temperature_key(ctx)}")
        )
        self.chosen = DRAWN_SIZES.index(DRAWN_START)
        self.used = 0  # place of the size of the running step
        self.steps = 0
        self.waited = 0  # steps without a draft
        if self.history.tried_sizes:
            self._choose_size()

    def costs(self) -> list[float] | None:
        """Seconds of a step with a draft of each size; None: nothing was measured."""
        if self.repeats:
            return self.fixed
        step_seconds = self.ctx.shares(LIMIT + 1)
        return [
            float(step_seconds[size]) + size * self.history.node_seconds for size in DRAWN_SIZES
        ]

    def node_budget(self) -> int:
        self.steps += 1
        self.used = self.chosen
        if self.steps % PROBE == 0 and self.chosen and self.costs() is not None:
            # Next larger and next smaller in turn, so that the estimates stay fresh.
            direction = 1 if (self.steps // PROBE) % 2 else -1
            self.used = min(max(1, self.chosen + direction), len(DRAWN_SIZES) - 1)
        if not self.chosen:
            self.waited += 1
            if self.waited > PAUSE:
                self.waited = 0
                self.used = 1
        return DRAWN_SIZES[self.used] + 1

    def fit_tree(self, tree: TokenTree, seconds: float = 0.0) -> TokenTree:
        if len(tree) > 1 and not self.repeats:
            self.history.note_seconds(len(tree) - 1, seconds)
        max_nodes = DRAWN_SIZES[self.used]
        if tree.has_draws or self.whole or len(tree) <= 1 + max_nodes:
            return tree
        ranked_nodes = sorted(range(1, len(tree)), key=lambda node: -tree.values[node])
        return tree.keep(sorted(ranked_nodes[:max_nodes]))

    def observe(self, outcome: Outcome) -> None:
        if not self.used or self.costs() is None:
            return
        self.history.note_draft(self.used, len(outcome.path))
        self._choose_size()

    def _choose_size(self) -> None:
        step_costs = self.costs()
        assert step_costs is not None
        speeds = [
            (1 + self.history.expected_drafts(size_index)) / cost
            for size_index, cost in enumerate(step_costs)
        ]
        best_index = int(np.argmax(speeds))
        # Not far beyond what was tried, and drafting has to win by a margin.
        best_index = min(best_index, self.history.tried_sizes[-1] + 1)
        margin = STAY if self.chosen else START
        self.chosen = best_index if speeds[best_index] > margin * speeds[0] else 0
