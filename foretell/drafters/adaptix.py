"""Searches a map of tri-grams for the continuations that the text makes likely.

For every pair of tokens the map holds the weights of what followed it: shares of the occurrences in
a prompt, and a little more for every step in which the tri-gram is among the newest tokens. From
the last pair a tree search walks the map, exploring by weight, and the beginnings it visited most
are proposed, each with its likeliest next token.

Paper: Liu et al., Adaptive Draft-Verification for Efficient Large Language Model Decoding (ADED),
arXiv:2407.12021
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs:
- the map starts from the prompts rather than from a corpus counted beforehand - it is bounded, and
the limit of 12 successors holds while it learns, so that a new one takes the place of the lightest
- play-outs use the same random numbers in every step, so a search depends on nothing but the map -
no tri-gram of a step longer than the window is passed over - search=false grows the tree best first
from the same weights, which takes a fraction of the time
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from foretell.core.drafter import Drafter, Feedback
from foretell.core.context import Context
from foretell.core.tree import TokenTree
from foretell.errors import BadConfig
from foretell.ops.trees import grow

Pair = tuple[int, int]
KEEP, WINDOW, GAIN, MOST = (
    12,
    16,
    0.04,
    3.0,
)  # successors of a pair; tokens; weight a step adds; largest weight
C1, C2 = 32.0, 8.0  # of the search: how much it explores
DOUBT = 0.5  # weight that speaks for a token never seen: few observations promise less than many
ROW, CELL = 480, 100  # bytes of a pair and of each successor, about


class Map:
    """`rows[pair][token]`: weight above 0. Beyond its bytes the pair met longest ago is
    forgotten.
    """

    def __init__(self, vocab: int, limit: int):
        """`limit`: bytes."""
        self.vocab, self.limit, self.cells = vocab, limit, 0
        self.rows: OrderedDict[Pair, dict[int, float]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return ROW * len(self.rows) + CELL * self.cells

    def learn(self, pair: Pair, token: int, gain: float) -> None:
        """Adds to a weight, up to MOST. Of more than KEEP successors the lightest is forgotten."""
        row = self.rows[pair] = self.rows.pop(pair, {})
        if token not in row:
            if len(row) == KEEP:
                del row[min(row, key=row.__getitem__)]
                self.cells -= 1
            row[token] = 0.0
            self.cells += 1
        row[token] = min(MOST, row[token] + gain)
        self._forget()

    def _forget(self) -> None:
        while self.nbytes > self.limit and len(self.rows) > 1:
            self.cells -= len(self.rows.popitem(last=False)[1])

    def read(self, text: Sequence[int]) -> None:
        """Raises the weights to the shares that the successors of each pair have in `text`."""
        counts: dict[Pair, Counter[int]] = {}
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            counts.setdefault((a, b), Counter())[c] += 1
        for pair, row in counts.items():
            total, known = row.total(), self.rows.get(pair, {})
            for token, count in reversed(row.most_common(KEEP)):
                self.learn(pair, token, max(0.0, count / total - known.get(token, 0.0)))

    def meet(self, text: Sequence[int]) -> None:
        """Adds GAIN to the weight of every tri-gram of `text`."""
        for a, b, c in zip(text, text[1:], text[2:], strict=False):
            self.learn((a, b), c, GAIN)

    def after(self, pair: Pair) -> list[tuple[int, float]]:
        """(successor, its chance), heaviest first."""
        row = self.rows.get(pair)
        if not row:
            return []
        total = sum(row.values()) + DOUBT
        return sorted(
            ((token, weight / total) for token, weight in row.items()), key=lambda item: -item[1]
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """For `restore`: trigrams (C, 3), the pair met longest ago first, and their weights
        (C,).
        """
        cells = [
            (*pair, token, weight)
            for pair, row in self.rows.items()
            for token, weight in row.items()
        ]
        return {
            "trigrams": torch.tensor([cell[:3] for cell in cells], dtype=torch.int64).reshape(
                -1, 3
            ),
            "weights": torch.tensor([cell[3] for cell in cells], dtype=torch.float64),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was learnt, without the oldest if they are too many. Raises
        ValueError.
        """
        count = tensors["weights"].numel() if "weights" in tensors else 0
        for name, dtype, shape in (
            ("weights", torch.float64, [count]),
            ("trigrams", torch.int64, [count, 3]),
        ):
            if (got := tensors.get(name)) is None or got.dtype != dtype or [*got.shape] != shape:
                raise ValueError(f"{name} is missing, not {dtype} or not of shape {shape}")
        grams, weights = tensors["trigrams"], tensors["weights"]
        if bool((grams < 0).any() | (grams >= self.vocab).any()):
            raise ValueError(f"trigrams holds a token beyond the vocabulary of {self.vocab} tokens")
        if not bool(((weights > 0) & (weights <= MOST)).all()):
            raise ValueError(f"weights are not all above 0 and at most {MOST}")
        rows: OrderedDict[Pair, dict[int, float]] = OrderedDict()
        for (a, b, c), weight in zip(grams.tolist(), weights.tolist(), strict=True):
            rows.setdefault((a, b), {})[c] = weight
        if (
            sum(map(len, rows.values())) < len(grams)
            or max(map(len, rows.values()), default=0) > KEEP
        ):
            raise ValueError(f"trigrams holds one twice, or more than {KEEP} for a pair")
        self.rows, self.cells = rows, len(grams)
        self._forget()


def explore(store: Map, pair: Pair, size: int, depth: int, rounds: int, paths: int) -> TokenTree:
    """The tree of at most `size` nodes that the search finds below `pair`; the last tokens are best
    successors.
    """
    draw, rows = random.Random(0).random, store.rows
    pairs, weights, parents, children = (
        [pair],
        [0.0],
        [-1],
        list[list[int]]([[]]),
    )  # by node of the search
    visits, scores = [0], [0.0]
    for _ in range(rounds if pair in rows else 0):
        node, level, reward = 0, 0, 1.0
        while children[node]:
            tried = visits[node]
            scale, best = (C1 + math.log((tried + C2 + 1) / C2)) * math.sqrt(tried), -1.0
            for child in children[node]:
                if not (seen := visits[child]):
                    node = child
                    break
                score = scores[child] / seen + scale * weights[child] / (1 + seen)
                if score > best:
                    node, best = child, score
            level, reward = level + 1, reward + weights[node]
        if level < depth - 1 and (row := rows.get(pairs[node])):
            children[node] += range(len(pairs), len(pairs) + len(row))
            pairs += [(pairs[node][1], token) for token in row]
            weights += row.values()
            parents += [node] * len(row)
            visits += [0] * len(row)
            scores += [0.0] * len(row)
            children += [[] for _ in row]
            node, level, reward = len(pairs) - 1, level + 1, reward + weights[-1]
        at = pairs[node]
        while level < depth - 1 and (row := rows.get(at)):
            rest = draw() * sum(row.values())
            for token, weight in row.items():  # noqa: B007
                rest -= weight
                if rest < 0:
                    break
            at, level, reward = (at[1], token), level + 1, reward + weight
        while node >= 0:
            visits[node] += 1
            scores[node] += reward
            node = parents[node]
    return _tree(store, pairs, parents, visits, size, paths)


def _tree(
    store: Map, pairs: list[Pair], parents: list[int], visits: list[int], size: int, paths: int
) -> TokenTree:
    """The most visited nodes of a search, each with its best successor: the `size` of them with the
    highest values.
    """
    values, chances = {0: 1.0}, dict[int, dict[int, float]]()
    found: list[tuple[float, int, int, int]] = []  # -value, node, its parent, its token
    for node in sorted(range(len(pairs)), key=lambda node: -visits[node])[:paths]:
        if node:
            (parent, token), sure = (
                (parents[node], pairs[node][1]),
                sum(chances[parents[node]].values()),
            )
            # Its share of the visits, and what the map says as one visit more, so that no chance is
            # 0.
            chance = (visits[node] * sure + chances[parent][token]) / (visits[parent] + 1)
            values[node] = values[parent] * chance
            found.append((-values[node], node, parent, token))
        chances[node] = dict(store.after(pairs[node]))
        for token, chance in [*chances[node].items()][:1]:
            found.append((-values[node] * chance, len(pairs), node, token))
    tree, place = TokenTree(pairs[0][1]), {0: 0}
    for value, node, parent, token in sorted(found):
        if len(tree) == size:
            break
        place[node] = tree.add(place[parent], token, None, -value, "adaptix")
    return tree


@dataclass(frozen=True)
class Adaptix(Drafter):
    """All but `search` and `megabytes` are counts."""

    depth: int = 4  # tokens of a draft, the last of them added to what the search found
    rounds: int = 150  # of the search
    paths: int = 24  # beginnings it keeps, the empty one among them
    search: bool = True  # false: best first, which takes less time
    megabytes: int = 64  # of the map

    needs = ("tree",)

    def __post_init__(self) -> None:
        for name, high in (
            ("depth", 64),
            ("rounds", 100_000),
            ("paths", 1024),
            ("megabytes", 1 << 20),
        ):
            if not 1 <= getattr(self, name) <= high:
                raise BadConfig.field(
                    f"adaptix:{name}", getattr(self, name), f"between 1 and {high}"
                )

    def start(self, ctx: Context) -> Map:
        store = ctx.shared(lambda: Map(ctx.models["target"].vocab, self.megabytes << 20))
        store.read(ctx.tokens)
        store.meet(ctx.tokens[-WINDOW:])
        return store

    def propose(self, ctx: Context, state: Map, budget: int) -> TokenTree:
        tokens, depth = ctx.tokens, min(self.depth, ctx.depth)
        if len(tokens) < 2 or depth < 1:
            return TokenTree(tokens[-1])
        pair = tokens[-2], tokens[-1]
        if self.search:
            return explore(state, pair, budget, depth, self.rounds, self.paths)

        def successors(tree: TokenTree, node: int) -> list[tuple[int, float]]:
            return state.after(
                (tree.tokens[tree.parents[node]] if node else pair[0], tree.tokens[node])
            )

        return grow(tokens[-1], successors, budget, depth, "adaptix")

    def observe(self, ctx: Context, state: Map, step: Feedback) -> None:
        state.meet(ctx.tokens[-max(WINDOW, len(step.tokens) + 2) :])
