"""A small recurrent network drafts all continuations of a few ranks, and the best are verified.

Its state begins as the target's last one and takes in one token a level. The best `children` tokens
of every node are drafted, and of the suffixes that this gives the `suffixes` likeliest are
verified, as one tree.

Paper: Wertheimer et al., arXiv:2404.19124
Guarantee: exact
Cost: target 1, head 3
Needs: hidden states of the target; a head made for it
Trains: `foretell train head --kind mlp-speculator`
Try: --model MODEL --method mlp-speculator:head=FOLDER --compare
Differs:
- a head trained here reads tokens as the target's embeddings through a matrix, and its state is
read by the target's output matrix, cut to its commonest tokens, through a matrix and a norm; the
paper trains an embedding and an output matrix of its own, and published heads keep theirs
- its state is as wide as the target's, and it has the weights of all steps but the first projection
as one, as several of the published models have
- it learns the target's distributions on the target's own answers alone, with Muon; the paper
trains on texts first, with AdamW
- where there is no room for a whole suffix, as much of it is verified as there is room for
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated

from foretell.core.context import Context
from foretell.core.drafter import Drafting
from foretell.core.settings import Range
from foretell.drafters.heads.base import HeadDrafter
from foretell.drafters.heads.head_tree import (
    Candidate,
    HeadReader,
    candidate_tree,
    candidates_by_ranks,
)
from foretell.errors import BadConfig

MOST = 1023  # suffixes that are drafted


@dataclass(frozen=True)
class MlpSpeculator(HeadDrafter):
    """Counts of children and suffixes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    children: tuple[int, ...] = (5, 4, 3)  # of each node, by level
    suffixes: Annotated[int, Range(1, MOST)] = 5  # that are verified

    def __post_init__(self) -> None:
        super().__post_init__()
        child_counts = self.children
        if not (
            0 < len(child_counts) <= 64 and min(child_counts) >= 1 and prod(child_counts) <= MOST
        ):
            allowed_counts = f"counts of at least 1, whose product is at most {MOST}"
            raise BadConfig.field("mlp-speculator:children", child_counts, allowed_counts)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        level_ranks = [range(count) for count in self.children]
        rank_paths = [
            path for level in range(len(level_ranks)) for path in product(*level_ranks[: level + 1])
        ]
        candidates = yield from candidates_by_ranks(ctx, reader, rank_paths)
        chosen_numbers = best_suffixes(candidates, self.suffixes, budget - 1)
        return candidate_tree(ctx, candidates, chosen_numbers, "mlp-speculator")


def best_suffixes(candidates: list[Candidate], count: int, max_nodes: int) -> set[int]:
    """The nodes of the `count` likeliest of the deepest candidates' paths, at most `max_nodes`."""
    deepest_level = max((candidate.level for candidate in candidates), default=0)
    leaf_numbers = [
        number for number, candidate in enumerate(candidates) if candidate.level == deepest_level
    ]
    chosen_numbers: set[int] = set()
    for leaf_number in sorted(leaf_numbers, key=lambda number: -candidates[number].total)[:count]:
        path, number = [], leaf_number
        while number >= 0:
            path.append(number)
            number = candidates[number].parent
        missing_numbers = [number for number in reversed(path) if number not in chosen_numbers]
        chosen_numbers.update(missing_numbers[: max_nodes - len(chosen_numbers)])
    return chosen_numbers
