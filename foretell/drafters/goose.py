"""A copied chain for a spine, with remembered candidates of every token for its side branches.

The spine is what followed the newest 5, 4 or 3 tokens at their most recent earlier place. At the
root and along it hang the candidates that the target last had after the same two tokens, or else
after the same one, learnt from the rows of all verified nodes, also the rejected ones, and shared
by all requests; theirs hang below them. The tree grows best first by measured acceptance: of a
spine's token by how long the match has held, whether its places agree and whether the candidates
do; of a candidate by its share of the remembered row.

Paper: Jin, Nguyen, Inoue, Goose: Anisotropic Speculation Trees for Training-Free Speculative
Decoding, arXiv:2604.02047
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the most probable nodes fill the budget, where the paper divides it by fixed shares and by widths
that fall as 1/i along the spine (harmonic=1 sets these widths), so that no candidate is left out
for its small share - a spine that its places agree on goes without branches only where it is more
likely right than not - the most recent place is copied (the reference implementation takes the
first), and a copy that reaches the end of the text goes on into itself - rows of the prompt, which
the engine does not compute, are replaced by the prompt's own pairs
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretell.core.drafter import Drafter, Feedback
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.candidates import KINDS, Store
from foretell.ops.lookup import Index, copied
from foretell.ops.rows import best
from foretell.ops.trees import best_first, grow

HELD = (4, 5, 7, 10)  # between classes of spine tokens, by the length of the match up to them
PLACES = 8  # of an n-gram that are asked whether they agree


@dataclass
class State:
    """Of a request: the index of its text, and the spine of its last draft, copied by a match of
    `match` tokens.
    """

    store: Store
    index: Index
    spine: list[int] = field(default_factory=list)
    match: int = 0
    agreed: bool = False  # at least two places, and all go on alike

    def kind(self, at: int, ids: Sequence[int]) -> int:
        """The class of the spine's token `at` (0: the first), beside these candidates."""
        agree = 1 if not ids else 2 if ids[0] == self.spine[at] else int(self.spine[at] in ids)
        return 2 * KINDS + (bisect_right(HELD, self.match + at) * 3 + agree) * 2 + self.agreed


@dataclass(frozen=True)
class Goose(Drafter):
    """All but the two switches are counts."""

    longest: int = 5  # n-gram looked up first
    shortest: int = 3  # n-gram looked up last
    copy: int = 20  # tokens of a spine at most
    k: int = 10  # candidates kept of each token and pair
    depth: int = 6  # levels of candidates below the root and each token of the spine
    bypass: bool = True  # whether a spine that at least two places agree on goes without branches
    harmonic: bool = False  # whether the branches along a spine get narrower as 1/i
    megabytes: int = 64  # that the candidates may take

    needs = ("tree", "rows")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("longest", 1, 64),
            ("shortest", 1, self.longest),
            ("copy", 1, 1024),
            ("k", 1, 64),
            ("depth", 1, 64),
            ("megabytes", 1, 65536),
        ):
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"goose:{name}", getattr(self, name), f"between {low} and {high}"
                )

    def start(self, ctx: Context) -> State:
        store = ctx.shared(lambda: Store(ctx.models["target"].vocab, self.k, self.megabytes))
        rows: dict[
            int, dict[int, None]
        ] = {}  # of tokens without entry: those after them in the prompt, newest first
        for token, following in zip(ctx.tokens[-2::-1], ctx.tokens[:0:-1], strict=False):
            if token not in store.rows and len(row := rows.setdefault(token, {})) < self.k:
                row[following] = None
        ids, scores = (
            np.zeros((len(rows), self.k), np.int32),
            np.zeros((len(rows), self.k), np.float32),
        )
        for i, row in enumerate(rows.values()):
            ids[i, : len(row)], scores[i, : len(row)] = list(row), 0.5 ** np.arange(1, len(row) + 1)
        store.put(list(rows), ids, scores)
        return State(store, Index(self.longest, least=self.shortest, every=True))

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        tokens, store, chance = ctx.tokens, state.store, state.store.chance
        state.index.extend(tokens)
        state.spine, size = [], min(self.copy, budget - 1, ctx.depth)
        for n in range(self.longest, self.shortest - 1, -1):
            if places := state.index.all(tokens, n, PLACES):
                state.spine = copied(tokens, places[0], size)
                state.match, state.agreed = (
                    n,
                    len(places) > 1 and len({tokens[p] for p in places}) == 1,
                )
                break
        spine, room, before = (
            state.spine,
            (budget - 1 - len(state.spine)) / 2,
            tokens[-2] if len(tokens) > 1 else -1,
        )
        along, below = (
            {0: 0},
            [0],
        )  # node -> tokens of the spine up to it; levels of each node below root or spine

        def successors(tree: TokenTree, node: int) -> Iterable[tuple[int, float]]:
            parent, token = tree.parents[node], tree.tokens[node]
            if node:
                held = along.get(parent, len(spine))
                if held < len(spine) and spine[held] == token:
                    along[node] = held + 1
                    below.append(0)
                else:
                    below.append(below[parent] + 1)
            if below[node] >= self.depth:
                return ()
            ids, kinds = store.look(tree.tokens[parent] if node else before, token)
            if (at := along.get(node, len(spine))) == len(spine):
                return best_first(ids, [chance[kind] for kind in kinds])
            right = chance[state.kind(at, ids)]
            if self.bypass and state.agreed and right > 0.5:
                return [(spine[at], right)]
            # What the spine leaves is divided among the others as their own chances say.
            others = {t: chance[kind] for t, kind in zip(ids, kinds, strict=True)}
            same = others.pop(spine[at], 0.0)
            scale = (1 - right) / max(sum(others.values()), 1 - same, 1e-9)
            width = len(others)
            if self.harmonic:  # half of the room at the root, the other half along the spine
                width = int(
                    room if at == 0 else room / at / sum(1 / (i + 1) for i in range(len(spine)))
                )
            return best_first(
                [spine[at], *list(others)[:width]],
                [right, *(c * scale for c in [*others.values()][:width])],
            )

        tree = grow(tokens[-1], successors, budget, ctx.depth, "goose")
        for node in along:
            tree.matches[node] = state.match if node else 0
        return tree

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        tokens, store, path, spine = (
            step.tree.tokens,
            state.store,
            [0, *step.outcome.path],
            state.spine,
        )
        root = len(ctx.tokens) - len(step.tokens) - 1
        before = [
            ctx.tokens[root - 1] if root > 0 else -1,
            *[tokens[p] for p in step.tree.parents[1:]],
        ]
        # What followed the nodes on the path is known, whether it was drafted or not: nothing of it
        # is censored.
        text = [*[tokens[node] for node in path[1:]], step.outcome.token]
        for at, (node, right) in enumerate(zip(path, text, strict=True)):
            ids, kinds = store.look(before[node], tokens[node])
            for token, kind in zip(ids, kinds, strict=True):
                store.learn(kind, token == right)
            if at < len(spine) and text[:at] == spine[:at]:
                store.learn(state.kind(at, ids), spine[at] == right)
        state.spine = []
        values, places = best(step.reply.logits, self.k)
        rows = store.pack(places.cpu().numpy(), values.softmax(-1).float().cpu().numpy())
        # Accepted nodes last: where a token stands twice in a tree, what really happened is
        # remembered.
        nodes = [*range(len(tokens)), *path]
        store.note([(tokens[node], rows[node]) for node in nodes])
        store.note(
            [((before[node] + 1) * store.vocab + tokens[node], rows[node]) for node in nodes]
        )
