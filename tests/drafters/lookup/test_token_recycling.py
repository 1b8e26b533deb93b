"""Token recycling: what it learns and the trees it grows; its exactness is in test_laws.py."""

from __future__ import annotations

import pytest
import torch

from foretell.core.context import Context
from foretell.core.drafter import Feedback
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup import token_recycling
from foretell.drafters.lookup.token_recycling import Store, TokenRecycling
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws

SPECS = ["token-recycling:k=2,depth=2"]

VOCAB = 1000


def context(
    drafter: TokenRecycling, prompt: list[int], engine: Engine | None = None, tenant: str = ""
) -> Context:
    engine = engine or Engine({"target": Toy(8)})
    return Context(
        engine, Request(prompt, Speculative(drafter), Sampling(max_new_tokens=40), tenant=tenant)
    )


def test_the_prompts_own_bigrams_are_the_first_candidates() -> None:
    drafter = TokenRecycling()
    ctx = context(drafter, [1, 2, 1, 3, 1])
    tree = drafter.propose(ctx, drafter.start(ctx), 50)
    tree.check()
    assert [tree.tokens[c] for c in tree.tries[0]] == [3, 2], (
        "the most recent continuation comes first"
    )
    assert not tree.has_draws


def test_it_learns_the_best_tokens_of_every_row_accepted_ones_last() -> None:
    drafter = TokenRecycling(k=2)
    ctx = context(drafter, [1, 2, 1])
    store = drafter.start(ctx)
    tree = drafter.propose(ctx, store, 4)
    rows = torch.zeros(len(tree), 8)
    for node in range(len(tree)):
        rows[node, [(node + 3) % 8, (node + 4) % 8]] = torch.tensor([2.0, 1.0])
    path = [1]
    reply, outcome = Reply(rows, {}, list(range(len(tree)))), Outcome(path, 5, [(1, True)])
    drafter.observe(ctx, store, Feedback(tree, reply, outcome, [2, 5]))
    last = {}
    for node in [*range(len(tree)), 0, *path]:
        last[tree.tokens[node]] = [(node + 3) % 8, (node + 4) % 8]
    drafter.propose(ctx, store, 1)
    assert {t: store.rows[t][:2] for t in last} == last


def test_unread_rows_are_bounded_and_kept_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, store = TokenRecycling(k=2), Store(2, VOCAB)
    monkeypatch.setattr(token_recycling, "HELD", 100 * 256)
    for token in range(200):
        row = torch.zeros(1, 256)
        row[0, token], row[0, token + 1] = 2.0, 1.0
        step = Feedback(TokenTree(token), Reply(row, {}, [0]), Outcome([], 0), [0])
        drafter.observe(context(drafter, [1]), store, step)
        assert len(store.unread) <= store.held <= 100
    tensors = store.tensors()
    assert dict(zip(tensors["tokens"].tolist(), tensors["rows"].tolist(), strict=True)) == {
        token: [token, token + 1] for token in range(200)
    }


def test_rows_of_refused_nodes_are_forgotten_when_nobody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, store = TokenRecycling(k=1), Store(1, VOCAB)
    monkeypatch.setattr(token_recycling, "HELD", 100 * 256)
    for i in range(60):
        tree = TokenTree(i).chain([100 + i]).chain([170 + i])
        path = [1] if i % 2 else []
        reply = Reply(torch.zeros(3, 256).index_fill_(1, torch.tensor([i]), 1.0), {}, [0, 1, 2])
        drafter.observe(context(drafter, [1]), store, Feedback(tree, reply, Outcome(path, 0), [0]))
    taken = {*range(33), *(100 + i for i in range(1, 33, 2))}  # at the 34th step it was too much
    assert taken <= set(store.rows) and not {*range(170, 203), *range(100, 133, 2)} & set(
        store.rows
    )


def test_after_a_pause_a_draft_is_that_of_a_store_that_was_never_idle() -> None:
    draw = torch.Generator().manual_seed(0)
    drafter, idle, busy = TokenRecycling(k=3, floor=0), Store(3, VOCAB), Store(3, VOCAB)
    for _ in range(80):
        tokens = torch.randint(0, 300, (5,), generator=draw).tolist()
        tree = TokenTree(tokens[0]).chain(tokens[1:])
        step = Feedback(
            tree, Reply(torch.randn(5, 300, generator=draw), {}, [*range(5)]), Outcome([1], 0), [0]
        )
        for store in (idle, busy):
            drafter.observe(context(drafter, [1]), store, step)
        busy.read_all()
    assert len(idle.unread) > token_recycling.UNREAD
    ctx = context(drafter, [tokens[0]])
    trees = [drafter.propose(ctx, store, 20) for store in (idle, busy)]
    assert trees[0].tokens == trees[1].tokens and trees[0].parents == trees[1].parents
    assert len(idle.unread) > token_recycling.UNREAD, "few of them were looked at"
    ours, theirs = idle.tensors(), busy.tensors()
    order = [ours["tokens"].argsort(), theirs["tokens"].argsort()]
    assert all(
        torch.equal(ours[name][order[0]], theirs[name][order[1]]) for name in ("tokens", "rows")
    )


def test_trees_keep_to_size_depth_and_distinct_children() -> None:
    for k, depth, budget in ((1, 3, 99), (8, 6, 6), (8, 2, 99), (8, 6, 7)):
        drafter = TokenRecycling(k=k, depth=depth)
        strategy = Speculative(drafter, nodes=budget - 1)
        engine = Engine({"target": Toy(8, copy=2.0)})
        live = engine.add(
            Request([1, 2, 3, 1], strategy, Sampling(max_new_tokens=30, temperature=1.0))
        )
        laws.finish(engine, live)
        ctx = context(drafter, live.ctx.tokens, engine)
        tree = drafter.propose(ctx, drafter.start(ctx), budget)
        tree.check()
        assert 1 < len(tree) <= budget and max(tree.depths) <= depth
        assert all(len(tries) <= k for tries in tree.tries)


def test_the_store_is_shared_in_a_tenant_and_not_beyond() -> None:
    engine, drafter = Engine({"target": Toy(8, copy=1.0)}), TokenRecycling()
    a, b, c = (
        context(drafter, [i, i + 1], engine, tenant) for i, tenant in ((1, "x"), (3, "x"), (5, "y"))
    )
    assert drafter.start(a) is drafter.start(b) and drafter.start(a) is not drafter.start(c)
    assert 5 not in drafter.start(a).rows


def test_what_one_request_learns_speeds_up_the_next() -> None:
    engine = Engine({"target": Toy(8, copy=1.0, sharpness=6.0)})
    strategy = Speculative(TokenRecycling(floor=0), nodes=24)  # a toy is unsure of everything
    steps = []
    for _ in range(2):
        live = engine.add(Request([1, 2], strategy, Sampling(max_new_tokens=40)))
        laws.finish(engine, live)
        steps.append(live.ctx.stats.steps)
    assert steps[1] <= steps[0] and live.ctx.stats.mat > 1.2


def test_a_store_is_written_and_read() -> None:
    store = Store(3, VOCAB)
    assert store.nbytes == 0
    store.rows, store.chance = {5: [1, 2, 3], 1: [4]}, [0.5, 0.25, 0.125]
    again = Store(3, VOCAB)
    again.restore(store.tensors())
    assert (again.rows, again.chance) == (
        store.rows,
        store.chance,
    ) and again.nbytes == store.nbytes > 0
    empty = Store(3, VOCAB)
    empty.restore(Store(3, VOCAB).tensors())
    assert empty.rows == {}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": torch.zeros(2, 2, dtype=torch.int32)},
        {"tokens": torch.tensor([1, -2])},
        {"chance": torch.tensor([2.0, 0, 0])},
        {"rows": torch.full((2, 3), -1, dtype=torch.int32)},
        {"tokens": torch.tensor([1, VOCAB], dtype=torch.int32)},
        {"tokens": torch.tensor([1, 1], dtype=torch.int32)},
        {"tokens": torch.tensor([1.0, 2.0])},
        {"rows": torch.full((2, 3), VOCAB, dtype=torch.int32)},
        {"rows": torch.full((2, 3), 2**31 - 1, dtype=torch.int32)},
        {"rows": torch.full((2, 3), 1.0)},
        {"tokens": None},
    ],
)
def test_a_store_that_does_not_fit_is_refused(change: dict[str, torch.Tensor | None]) -> None:
    store = Store(3, VOCAB)
    store.rows = {5: [1, 2, 3], 1: [4]}
    tensors = {k: v for k, v in (store.tensors() | change).items() if v is not None}
    fresh = Store(3, VOCAB)
    with pytest.raises(ValueError):
        fresh.restore(tensors)
    assert fresh.rows == {}
