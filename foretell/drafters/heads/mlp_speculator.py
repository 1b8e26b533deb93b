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
- it learns the target's laws on the target's own answers alone, with Muon; the paper trains on
texts first, with AdamW
- where there is no room for a whole suffix, as much of it is verified as there is room for
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Drafting
from foretell.core.model import Model
from foretell.drafters.heads.attach import attach_head
from foretell.drafters.heads.head_tree import Candidate, HeadReader, by_ranks, tree_of
from foretell.errors import BadConfig

MOST = 1023  # suffixes that are drafted


@dataclass(frozen=True)
class MlpSpeculator(Drafter):
    """Counts of children and suffixes."""

    head: str = ""  # folder of the head; without one, the head that ships for the target
    children: tuple[int, ...] = (5, 4, 3)  # of each node, by level
    suffixes: int = 5  # that are verified

    models = ("head",)
    needs = ("tree",)

    def __post_init__(self) -> None:
        counts = self.children
        if not (0 < len(counts) <= 64 and min(counts) >= 1 and prod(counts) <= MOST):
            allowed = f"counts of at least 1, whose product is at most {MOST}"
            raise BadConfig.field("mlp-speculator:children", counts, allowed)
        if not 1 <= self.suffixes <= MOST:
            allowed = f"between 1 and {MOST}"
            raise BadConfig.field("mlp-speculator:suffixes", self.suffixes, allowed)

    def bring(self, models: Mapping[str, Model]) -> Mapping[str, Model]:
        return attach_head(models["target"], "mlp-speculator", "mlp-speculator", self.head)

    def start(self, ctx: Context) -> HeadReader:
        return HeadReader(ctx)

    def steps(self, ctx: Context, reader: HeadReader, budget: int) -> Drafting:
        ranks = [range(count) for count in self.children]
        places = [path for level in range(len(ranks)) for path in product(*ranks[: level + 1])]
        found = yield from by_ranks(ctx, reader, places)
        chosen = best_suffixes(found, self.suffixes, budget - 1)
        return tree_of(ctx, found, chosen, "mlp-speculator")


def best_suffixes(found: list[Candidate], count: int, room: int) -> set[int]:
    """The nodes of the `count` likeliest of the deepest candidates' paths, at most `room`."""
    deepest = max((one.level for one in found), default=0)
    leaves = [number for number, one in enumerate(found) if one.level == deepest]
    chosen: set[int] = set()
    for leaf in sorted(leaves, key=lambda number: -found[number].total)[:count]:
        path, number = [], leaf
        while number >= 0:
            path.append(number)
            number = found[number].parent
        missing = [number for number in reversed(path) if number not in chosen]
        chosen.update(missing[: room - len(chosen)])
    return chosen
