"""A smaller model drafts a tree of whole continuations drawn without replacement.

This is stochastic beam search. On every level the tree keeps `width` different continuations, drawn
from the draft model's distribution of whole continuations, under the request's sampling options: so
a likely beginning gets many children and an unlikely one none. Those of the next level are drawn so
that they agree with these. The children of a node are tried in the order in which they were drawn,
each against what those before it left of the target's distribution. One draft forward gives a whole
level. At temperature 0 it is a beam search.

Paper: Jeon et al., Recursive Speculative Decoding: Accelerating LLM Inference via Sampling Without
Replacement (RSD-S), arXiv:2402.14160; Kool, van Hoof, Welling (stochastic beam search),
arXiv:1903.06059
Guarantee: exact
Cost: target 1, draft length
Needs: a draft model with the target's tokenizer; a target that takes trees, unless width is 1
Trains: the draft model, best distilled from the target
Differs:
- the defaults, length 4 and width 4, are ours: the paper tries several sizes of trees
- which continuation comes next is drawn as in a race of exponential clocks, which has the
distribution and the order of the perturbed scores, truncated Gumbels, but needs finitely many
outcomes
- a budget below width times length makes the tree narrower, then shorter
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.model.reader import DraftReader
from foretell.drafters.model.without_replacement import Urn, best_tokens


@dataclass(frozen=True)
class RsdS(Drafter):
    """Both are counts."""

    length: Annotated[int, Range(1, 64)] = 4  # levels of the tree
    width: Annotated[int, Range(1, 64)] = 4  # continuations kept on each level

    models = ("draft",)
    draws = True

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("tree",) if self.width > 1 else ()

    def start(self, ctx: Context) -> DraftReader:
        return DraftReader(ctx)

    def steps(self, ctx: Context, reader: DraftReader, budget: int) -> Drafting:
        tree = TokenTree(ctx.tokens[-1])
        if not reader.can_read(ctx.tokens):
            return tree
        width = min(self.width, -(-(budget - 1) // self.length))
        # Ends of the continuations, in the order in which they were drawn. One that ends the text
        # keeps its place without having children.
        beam = [0]
        race = Race(ctx, tree)
        for _ in range(min(self.length, reader.max_depth(ctx))):
            count = min(width, budget - len(tree))
            open_ends = [node for node in beam if not ctx.ends(tree, node)]
            if not open_ends or count < 1:
                break
            reply = yield Ask(tree, "draft", ctx.branch, rows=open_ends)
            rows = dict(zip(open_ends, reader.resized_rows(reply), strict=True))
            if ctx.sampler.greedy:
                beam = extend_beam(ctx, tree, beam, rows, count)
            else:
                beam = race.run(beam, rows, count)
        return tree


def extend_beam(
    ctx: Context, tree: TokenTree, beam: list[int], rows: dict[int, torch.Tensor], count: int
) -> list[int]:
    """Adds the `count` best continuations by rows (V,) of their ends; returns the new beam."""
    continuations: list[tuple[float, int, int | None]] = []  # probability, node, token below it
    for node in beam:
        if node not in rows:
            continuations.append((tree.values[node], node, None))
            continue
        scores = ctx.sampler.scores(rows[node], [*ctx.output, *tree.tokens_to(node)])
        for token, probability in best_tokens(scores, count):
            continuations.append((tree.values[node] * probability, node, token))
    continuations.sort(key=lambda continuation: -continuation[0])
    beam_ends: list[int] = []
    for value, end_node, next_token in continuations[:count]:
        beam_ends.append(
            end_node
            if next_token is None
            else tree.add(end_node, next_token, value=value, source="rsd-s")
        )
    return beam_ends


class Race:
    """Draws continuations without replacement, level by level, for one tree.

    Every continuation has a clock that rings at a rate of its probability, and the first ones to
    ring are drawn. A beginning rings with the first of its continuations. So on the next level
    those of a beginning that has rung are in the race, and the next beginning comes with its first
    one. Who is next in a race does not depend on when that is, so no times are drawn. A node's
    value is its probability.
    """

    def __init__(self, ctx: Context, tree: TokenTree):
        self.ctx = ctx
        self.tree = tree
        self.draws = 0  # in this step

    def run(self, beam: list[int], rows: dict[int, torch.Tensor], count: int) -> list[int]:
        """Adds the first `count` continuations of a beam by rows (V,) of its ends; returns theirs,
        in order.
        """
        tree = self.tree
        urns: dict[int, Urn] = {}  # of the beam's ends that have rung and go on
        waiting_ends = list(beam)
        unseen_chance = 1.0  # probability of all that has not rung yet on the level of the beam
        beam_ends: list[int] = []
        while len(beam_ends) < count:
            rates = [tree.values[node] * urn.left for node, urn in urns.items()]
            ringing_index = self._next_turn(
                [unseen_chance if waiting_ends else 0.0, *rates], bool(waiting_ends)
            )
            if ringing_index < 0:
                break
            if ringing_index:
                node = list(urns)[ringing_index - 1]
            else:
                node = waiting_ends.pop(0)
                unseen_chance = max(0.0, unseen_chance - tree.values[node])
                if node not in rows:
                    beam_ends.append(node)
                    continue
                law = self.ctx.sampler.law(rows[node], [*self.ctx.output, *tree.tokens_to(node)])
                urns[node] = Urn(law)
            self.draws += 1
            beam_ends.append(urns[node].add_draw(self.ctx, tree, node, self.draws, "rsd-s"))
        return beam_ends

    def _next_turn(self, rates: list[float], waiting: bool) -> int:
        """Whose clock rings next: a place of `rates`, or -1 if none is left.

        0 stands for the next of the beam; where no other can ring, that needs no draw.
        """
        if not any(rates[1:]):
            return 0 if waiting else -1
        self.draws += 1
        ring_chances = torch.tensor(rates, dtype=torch.float64)
        return self.ctx.rng.sample(
            ring_chances / ring_chances.sum(), "draft", len(self.ctx.output), self.draws
        )
