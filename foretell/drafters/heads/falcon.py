"""A head that gives the states of two tokens a pass drafts a tree of eight levels in four.

The head reads tokens beside the target's states through an LSTM and one layer in which the rows of
a block see each other. From the last rows of the text it makes the distributions of the next
tokens, two unless it was made with larger blocks; the second one's distribution does not know the
first token. The states after these distributions and the tokens that were chosen are the block of
the next pass. Of each pass the `breadth` likeliest paths go on, and of all nodes the `total`
likeliest are verified.

Paper: Gao et al., arXiv:2412.12639
Guarantee: exact
Cost: target 1, head passes
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind falcon`
Try: --model MODEL --method falcon:head=FOLDER --compare
Differs:
- the tree grows by the head's own probabilities; the paper's has a fixed shape of 165 nodes
- any token may be the last of a block; the paper counts blocks from where a call begins, and
computes rows again that were kept of a block that is not whole
- it has one decoder layer, so keys and values are the same whatever the blocks are; an LSTM that
runs over the text in order, whose state is kept of every token
- it learns the target's distributions by KL; the paper adds a tenth of cross entropy with a token
drawn from them, and sharpens them a little
- blocks of a text begin at either parity in training, in the paper with its first token
- the share of wrong tokens that is shown in training falls from 0.45 to 0.1, as in the authors'
code; in the paper's text it falls from 0.4 to 0
- of the output matrix the rows of the commonest tokens alone are computed; the optimiser is Muon
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.settings import Range
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.drafters.heads.base import HeadDrafter
from foretell.drafters.heads.head_tree import (
    Candidate,
    HeadReader,
    Levels,
    add_candidates,
    best_tree,
)
from foretell.drafters.heads.networks.tree_shape import TreeShape


@dataclass(frozen=True)
class Falcon(HeadDrafter):
    """Counts of passes and nodes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    # of the head, each of which gives a level of the tree for every distribution it has
    passes: Annotated[int, Range(1, 32)] = 4
    breadth: Annotated[int, Range(1, 64)] = 10  # paths that go on, and children of each node
    total: Annotated[int, Range(1, 1023)] = 165  # nodes that are verified at most
    # no pass follows one whose best path is less likely
    least: Annotated[float, Range(0, 1, open_high=True)] = 0.0

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.passes, self.breadth, self.total, self.least)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        depth = reader.max_depth(ctx, 64)
        if depth < 1 or budget < 2:
            return TokenTree(ctx.tokens[-1])
        candidates = yield from candidates_by_blocks(ctx, reader, depth, self.shape)
        return best_tree(ctx, candidates, min(self.total, budget - 1), "falcon")


def candidates_by_blocks(
    ctx: Context, reader: HeadReader, depth: int, shape: TreeShape
) -> Generator[Ask, Any, list[Candidate]]:
    """All candidates of at most `depth` levels, by one ask for as many as the head has
    distributions.

    `shape.depth` is how many asks there are.
    """
    levels = Levels(ctx, reader)
    candidates: list[Candidate] = []
    frontier, level = [-1], 0
    for _ in range(shape.depth):
        rows = yield from levels.ask_rows(candidates, frontier)
        block_logits = [row.unflatten(0, (-1, len(reader.tokens))) for row in rows]
        block_ends: list[int] = []
        for parent, row in zip(frontier, block_logits, strict=True):
            parent_numbers = [parent]
            for law in row[: depth - level]:
                first_number = len(candidates)
                for number in parent_numbers:
                    add_candidates(candidates, number, law, shape.breadth, reader)
                parent_numbers = best_candidates(
                    candidates, range(first_number, len(candidates)), shape.breadth
                )
            block_ends += parent_numbers
        level += len(block_logits[0])
        frontier = best_candidates(candidates, block_ends, shape.breadth)
        if level >= depth or candidates[frontier[0]].total < shape.least:
            break
    return candidates


def best_candidates(candidates: list[Candidate], numbers: Any, count: int) -> list[int]:
    """The `count` of these candidates with the likeliest paths."""
    return sorted(numbers, key=lambda number: -candidates[number].total)[:count]
