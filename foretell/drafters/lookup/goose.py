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
that fall as 1/i along the spine, so that no candidate is left out for its small share; harmonic=1
sets these widths
- a spine that its places agree on goes without branches only where it is more likely right than not
- the most recent place is copied, where the reference implementation takes the first
- a copy that reaches the end of the text goes on into itself
- rows of the prompt, which the engine does not compute, are replaced by the prompt's own pairs
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foretell.core.context import Context
from foretell.core.drafter import Drafter, Feedback
from foretell.core.tree import TokenTree
from foretell.core.tree_building import best_first, grow
from foretell.drafters.lookup.candidates import KINDS, Store
from foretell.drafters.lookup.lookup import Index, copied
from foretell.errors import BadConfig
from foretell.ops.logits import best

HELD = (4, 5, 7, 10)  # between kinds of spine tokens, by the length of the match up to them
PLACES = 8  # of an n-gram that are asked whether they agree


@dataclass
class State:
    """Of a request."""

    store: Store  # of all requests
    index: Index  # of its text
    spine: list[int] = field(default_factory=list)  # of the last draft
    match: int = 0  # tokens that matched where the spine was copied from
    agreed: bool = False  # at least two places, and all go on alike

    def kind(self, at: int, ids: Sequence[int]) -> int:
        """The kind of the spine's token `at` (0: the first), beside these candidates."""
        agree = 1  # nothing is known
        if ids:
            agree = 2 if ids[0] == self.spine[at] else int(self.spine[at] in ids)
        held = bisect_right(HELD, self.match + at)
        return 2 * KINDS + (held * 3 + agree) * 2 + self.agreed


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
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadConfig.field(f"goose:{name}", value, f"between {low} and {high}")

    def start(self, ctx: Context) -> State:
        store = ctx.shared(lambda: Store(ctx.models["target"].vocab, self.k, self.megabytes))
        # Of tokens without an entry: those that follow them in the prompt, the newest first.
        rows: dict[int, dict[int, None]] = {}
        for token, following in zip(ctx.tokens[-2::-1], ctx.tokens[:0:-1], strict=False):
            if token not in store.rows:
                row = rows.setdefault(token, {})
                if len(row) < self.k:
                    row[following] = None
        ids = np.zeros((len(rows), self.k), np.int32)
        scores = np.zeros((len(rows), self.k), np.float32)
        for i, row in enumerate(rows.values()):
            ids[i, : len(row)] = list(row)
            scores[i, : len(row)] = 0.5 ** np.arange(1, len(row) + 1)
        store.put(list(rows), ids, scores)
        return State(store, Index(self.longest, least=self.shortest, every=True))

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        tokens, store = ctx.tokens, state.store
        state.index.extend(tokens)
        self._find_spine(state, tokens, min(self.copy, budget - 1, ctx.depth))
        spine, chance = state.spine, store.chance
        room = (budget - 1 - len(spine)) / 2  # for branches, at the root and along the spine each
        before = tokens[-2] if len(tokens) > 1 else -1
        along = {0: 0}  # node -> tokens of the spine up to it
        levels = [0]  # of each node, below root or spine

        def successors(tree: TokenTree, node: int) -> Iterable[tuple[int, float]]:
            parent, token = tree.parents[node], tree.tokens[node]
            if node:
                held = along.get(parent, len(spine))
                if held < len(spine) and spine[held] == token:
                    along[node] = held + 1
                    levels.append(0)
                else:
                    levels.append(levels[parent] + 1)
            if levels[node] >= self.depth:
                return ()
            ids, kinds = store.after(tree.tokens[parent] if node else before, token)
            at = along.get(node, len(spine))
            if at == len(spine):
                return best_first(ids, [chance[kind] for kind in kinds])
            right = chance[state.kind(at, ids)]
            if self.bypass and state.agreed and right > 0.5:
                return [(spine[at], right)]
            # What the spine leaves is divided among the others as their own chances say.
            others = {t: chance[kind] for t, kind in zip(ids, kinds, strict=True)}
            same = others.pop(spine[at], 0.0)
            scale = (1 - right) / max(sum(others.values()), 1 - same, 1e-9)
            branches = list(others.items())
            if self.harmonic:
                width = room
                if at:
                    width = room / at / sum(1 / (i + 1) for i in range(len(spine)))
                branches = branches[: int(width)]
            return best_first(
                [spine[at], *(token for token, _ in branches)],
                [right, *(chance * scale for _, chance in branches)],
            )

        tree = grow(tokens[-1], successors, budget, ctx.depth, "goose")
        for node in along:
            tree.matches[node] = state.match if node else 0
        return tree

    def _find_spine(self, state: State, tokens: list[int], size: int) -> None:
        """Copies what followed the newest tokens at their most recent earlier place."""
        state.spine = []
        for n in range(self.longest, self.shortest - 1, -1):
            places = state.index.all(tokens, n, PLACES)
            if places:
                state.spine = copied(tokens, places[0], size)
                state.match = n
                state.agreed = len(places) > 1 and len({tokens[p] for p in places}) == 1
                return

    def observe(self, ctx: Context, state: State, step: Feedback) -> None:
        store, tokens = state.store, step.tree.tokens
        path = [0, *step.outcome.path]
        root = len(ctx.tokens) - len(step.tokens) - 1
        # Of each node: the token before it.
        before = [ctx.tokens[root - 1] if root > 0 else -1]
        before += [tokens[parent] for parent in step.tree.parents[1:]]
        self._learn_chances(state, step, path, before)
        values, places = best(step.reply.logits, self.k)
        rows = store.pack(places.cpu().numpy(), values.softmax(-1).float().cpu().numpy())
        # Accepted nodes last: where a token stands twice in a tree, what really happened is
        # remembered.
        nodes = [*range(len(tokens)), *path]
        store.keep([(tokens[node], rows[node]) for node in nodes])
        pairs = [(before[node] + 1) * store.vocab + tokens[node] for node in nodes]
        store.keep([(pair, rows[node]) for pair, node in zip(pairs, nodes, strict=True)])

    def _learn_chances(
        self, state: State, step: Feedback, path: list[int], before: list[int]
    ) -> None:
        """Learns which candidates were right behind each node of the accepted path.

        What followed there is known whether it was drafted or not, so nothing of it is censored.
        """
        store, spine, tokens = state.store, state.spine, step.tree.tokens
        text = [tokens[node] for node in step.outcome.path]
        if step.outcome.token is not None:  # else the text ended with the path
            text.append(step.outcome.token)
        for at, (node, right) in enumerate(zip(path, text, strict=False)):
            ids, kinds = store.after(before[node], tokens[node])
            for token, kind in zip(ids, kinds, strict=True):
                store.learn(kind, token == right)
            if at < len(spine) and text[:at] == spine[:at]:
                store.learn(state.kind(at, ids), spine[at] == right)
        state.spine = []
