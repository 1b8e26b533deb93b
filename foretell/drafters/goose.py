"""A copied chain for a spine, with remembered candidates of every token for its side branches.

The spine is what followed the newest 5, 4 or 3 tokens at their most recent earlier place. At the root and along it
hang the candidates that the target last had after the same two tokens, or else after the same one, learnt from the rows
of all verified nodes, also the rejected ones, and shared by all requests; theirs hang below them. The tree grows best
first by measured acceptance: of a spine's token by how long the match has held, whether its places agree and whether
the candidates do; of a candidate by its share of the remembered row.

Paper: Jin, Nguyen, Inoue, Goose: Anisotropic Speculation Trees for Training-Free Speculative Decoding, arXiv:2604.02047
Guarantee: exact
Cost: target 1
Needs: a model that takes trees
Trains: nothing
Differs: the most probable nodes fill the budget, where the paper divides it by fixed shares and by widths that fall as 1/i along the spine (harmonic=1 sets these widths), so that no candidate is left out for its small share; a spine that its places agree on goes without branches only where it is more likely right than not; the most recent place is copied (the reference implementation takes the first), and a copy that reaches the end of the text goes on into itself; rows of the prompt, which the engine does not compute, are replaced by the prompt's own pairs
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from struct import unpack

import numpy as np
import torch

from foretell.drafter import Drafter, Step
from foretell.engine import Context
from foretell.errors import BadConfig
from foretell.ops.lookup import Index
from foretell.ops.trees import grow
from foretell.tree import TokenTree

LEVELS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)  # between classes of candidates, by share of their row
KINDS = len(LEVELS) + 1
HELD = (4, 5, 7, 10)  # between classes of spine tokens, by the length of the match up to them
ODDS = (2.0, 3.0, 5.0, 10.0, 30.0)  # that one is right, before anything was measured
PLACES = 8  # of an n-gram that are asked whether they agree
ENTRY = 200  # bytes that a row takes besides its content


class Store:
    """Candidates after a token or a pair of tokens, those not seen for longest giving way; and which are how often right.

    A key is a token, plus (the token before it + 1) * vocab for a pair; its row is k candidates, best first, and their
    softmax as the target last had them. Score 0: no candidate.
    """

    def __init__(self, vocab: int, k: int, megabytes: int):
        self.vocab, self.k, self.row = vocab, k, f"<{k}i{k}f"
        self.capacity = (megabytes << 20) // (ENTRY + 8 * k)
        self.rows: OrderedDict[int, bytes] = OrderedDict()
        self.chance = [f * (a + b) for f in (0.3, 0.4) for a, b in zip((0, *LEVELS), (*LEVELS, 1), strict=True)]
        for odds in ODDS:
            self.chance += [o / (1 + o) for agree in (1 / 3, 1, 3) for o in (odds * agree, 4 * odds * agree)]
        self.seen = [0] * len(self.chance)

    @property
    def nbytes(self) -> int:
        return len(self.rows) * (ENTRY + 8 * self.k)

    def put(self, keys: Iterable[int], ids: np.ndarray, scores: np.ndarray) -> None:
        """Rows (n, at most k) of n keys. Of a key that stands there twice the last row counts."""
        block = np.zeros(len(ids), [("ids", "<i4", (self.k,)), ("scores", "<f4", (self.k,))])
        block["ids"][:, : ids.shape[1]], block["scores"][:, : ids.shape[1]] = ids, scores
        for key, row in zip(keys, block, strict=True):
            self.rows[key] = row.tobytes()
            self.rows.move_to_end(key)
        while len(self.rows) > self.capacity:
            self.rows.popitem(last=False)

    def look(self, before: int, token: int) -> list[tuple[int, int]]:
        """(candidate, its class) after the pair, else after the token, best first."""
        kind, row = KINDS, self.rows.get((before + 1) * self.vocab + token)
        if row is None:
            kind, row = 0, self.rows.get(token)
        values = unpack(self.row, row) if row else ()
        pairs = zip(values[: self.k], values[self.k :], strict=True)
        return [(t, kind + bisect_right(LEVELS, s)) for t, s in pairs if s > 0]

    def learn(self, kind: int, right: bool) -> None:
        self.seen[kind] = min(64, self.seen[kind] + 1)
        self.chance[kind] += (right - self.chance[kind]) / (4 + self.seen[kind])

    def tensors(self) -> dict[str, torch.Tensor]:
        """`keys` (n,), the one not seen for longest first, `ids` and `scores` (n, k); `chance`, `seen` of each class."""
        block = np.frombuffer(b"".join(self.rows.values()), np.int32).reshape(-1, 2, self.k)
        parts = {"ids": block[:, 0].copy(), "scores": block[:, 1].copy().view(np.float32),
                 "keys": np.array(list(self.rows), np.int64),
                 "chance": np.array(self.chance), "seen": np.array(self.seen)}  # fmt: skip
        return {name: torch.from_numpy(part) for name, part in parts.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if tensors.keys() != {"keys", "ids", "scores", "chance", "seen"}:
            raise ValueError(f"holds {', '.join(tensors)}, which are not the parts of a goose store")
        size, kinds = tensors["keys"].numel(), len(self.chance)
        for name, kind, shape, high in (
            ("keys", torch.int64, (size,), (self.vocab + 1) * self.vocab - 1), ("seen", torch.int64, (kinds,), 64),
            ("ids", torch.int32, (size, self.k), self.vocab - 1), ("scores", torch.float32, (size, self.k), 1),
            ("chance", torch.float64, (kinds,), 1),
        ):  # fmt: skip
            part = tensors[name]
            if part.dtype != kind or part.shape != shape or not bool(((part >= 0) & (part <= high)).all()):
                raise ValueError(f"{name} is not {kind} of shape {shape}, all of it between 0 and {high}")
        if len(tensors["keys"].unique()) < size:
            raise ValueError("a key stands there twice")
        self.rows.clear()
        self.put(tensors["keys"].tolist(), tensors["ids"].numpy(), tensors["scores"].numpy())
        self.chance, self.seen = tensors["chance"].tolist(), tensors["seen"].tolist()


@dataclass
class State:
    """Of a request: the index of its text, and the spine of its last draft, copied by a match of `match` tokens."""

    store: Store
    index: Index
    spine: list[int] = field(default_factory=list)
    match: int = 0
    agreed: bool = False  # at least two places, and all go on alike

    def kind(self, at: int, row: list[tuple[int, int]]) -> int:
        """The class of the spine's token `at` (0: the first), beside this row of candidates."""
        ranks = [rank for rank, (token, _) in enumerate(row) if token == self.spine[at]]
        agree = 1 if not row else 0 if not ranks else 2 if ranks[0] == 0 else 1
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
        for name, low, high in (("longest", 1, 64), ("shortest", 1, self.longest), ("copy", 1, 1024), ("k", 1, 64),
                                ("depth", 1, 64), ("megabytes", 1, 65536)):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise BadConfig.field(f"goose:{name}", getattr(self, name), f"between {low} and {high}")

    def start(self, ctx: Context) -> State:
        store = ctx.shared(lambda: Store(ctx.models["target"].vocab, self.k, self.megabytes))
        rows: dict[int, dict[int, None]] = {}  # of tokens without entry: those after them in the prompt, newest first
        for token, following in zip(ctx.tokens[-2::-1], ctx.tokens[:0:-1], strict=False):
            if token not in store.rows and len(row := rows.setdefault(token, {})) < self.k:
                row[following] = None
        ids, scores = np.zeros((len(rows), self.k), np.int32), np.zeros((len(rows), self.k), np.float32)
        for i, row in enumerate(rows.values()):
            ids[i, : len(row)], scores[i, : len(row)] = list(row), 0.5 ** np.arange(1, len(row) + 1)
        store.put(rows, ids, scores)
        return State(store, Index(self.longest, least=self.shortest, every=True))

    def propose(self, ctx: Context, state: State, budget: int) -> TokenTree:
        tokens, store, chance = ctx.tokens, state.store, state.store.chance
        state.index.extend(tokens)
        state.spine, size = [], min(self.copy, budget - 1, ctx.depth)
        for n in range(self.longest, self.shortest - 1, -1):
            if places := state.index.all(tokens, n, PLACES):
                period = len(tokens) - places[0]
                state.spine = [tokens[places[0] + i % period] for i in range(size)]
                state.match, state.agreed = n, len(places) > 1 and len({tokens[p] for p in places}) == 1
                break
        spine, room, before = state.spine, (budget - 1 - len(state.spine)) / 2, tokens[-2] if len(tokens) > 1 else -1
        along, below = {0: 0}, {0: 0}  # node -> tokens of the spine up to it; -> levels below root or spine

        def successors(tree: TokenTree, node: int) -> list[tuple[int, float]]:
            parent, token = tree.parents[node], tree.tokens[node]
            if node and spine[along.get(parent, len(spine)) :][:1] == [token]:
                along[node], below[node], tree.matches[node] = along[parent] + 1, 0, state.match
            elif node:
                below[node] = below[parent] + 1
            if below[node] >= self.depth:
                return []
            row = store.look(tree.tokens[parent] if node else before, token)
            if (at := along.get(node, len(spine))) == len(spine):
                return sorted(((t, chance[kind]) for t, kind in row), key=lambda option: -option[1])
            held, others = chance[state.kind(at, row)], {t: chance[kind] for t, kind in row}
            same = others.pop(spine[at], 0.0)
            if self.bypass and state.agreed and held > 0.5:
                return [(spine[at], held)]
            # What the spine leaves is divided among the others as their own chances say.
            scale = (1 - held) / max(sum(others.values()), 1 - same, 1e-9)
            options = [(t, c * scale) for t, c in others.items()]
            if self.harmonic:  # half of the room at the root, the other half along the spine
                options = options[: int(room if at == 0 else room / at / sum(1 / (i + 1) for i in range(len(spine))))]
            return sorted([(spine[at], held), *options], key=lambda option: -option[1])

        return grow(tokens[-1], successors, budget, ctx.depth, "goose")

    def observe(self, ctx: Context, state: State, step: Step) -> None:
        tree, store, path, spine = step.tree, state.store, [0, *step.outcome.path], state.spine
        root = len(ctx.tokens) - len(step.tokens) - 1
        before = [ctx.tokens[root - 1] if root > 0 else -1, *(tree.tokens[p] for p in tree.parents[1:])]
        # What followed the nodes on the path is known, whether it was drafted or not: nothing of it is censored.
        text = [*(tree.tokens[node] for node in path[1:]), step.outcome.token]
        for at, (node, right) in enumerate(zip(path, text, strict=True)):
            row = store.look(before[node], tree.tokens[node])
            for token, kind in row:
                store.learn(kind, token == right)
            if at < len(spine) and text[:at] == spine[:at]:
                store.learn(state.kind(at, row), spine[at] == right)
        state.spine = []
        top = step.reply.logits.topk(min(self.k, step.reply.logits.shape[-1]))
        # Accepted nodes last: where a token stands twice in a tree, what really happened is remembered.
        nodes = [*range(len(tree)), *path]
        ids, scores = top.indices.cpu().numpy()[nodes], top.values.softmax(-1).float().cpu().numpy()[nodes]
        for pair in (0, 1):
            store.put((pair * (before[n] + 1) * store.vocab + tree.tokens[n] for n in nodes), ids, scores)
