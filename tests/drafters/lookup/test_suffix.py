"""Suffix decoding: its drafts are those of a search by hand, and what requests share; exactness is
in test_laws.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.lookup.suffix import LEAD, Suffix
from foretell.drafters.lookup.suffix_tree import LEAF, Suffixes
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws

SPECS = [
    "suffix:tree=no,factor=1,offset=0",
    "suffix:shared=yes,megabytes=1,min_prob=0.01",
    "suffix:shared=yes,tree=no,depth=4",
]


def context(
    drafter: Suffix,
    prompt: list[int],
    engine: Engine | None = None,
    tenant: str = "",
    new: int = 40,
) -> Context:
    engine = engine or Engine({"target": Toy(8)})
    request = Request(prompt, Speculative(drafter), Sampling(max_new_tokens=new), tenant=tenant)
    return Context(engine, request).scope_to(drafter)


def drafted(drafter: Suffix, prompt: list[int], budget: int = 17, new: int = 40) -> TokenTree:
    ctx = context(drafter, prompt, new=new)
    tree = drafter.propose(ctx, drafter.start(ctx), budget)
    tree.check()
    return tree


Node = tuple[tuple[int, ...], float]


def search(drafter: Suffix, text: list[int], size: int, levels: int) -> tuple[int, list[Node]]:
    """(match, nodes as (path, value)) by looking at every place for every length, as the card
    describes it.
    """

    def places(words: tuple[int, ...]) -> list[int]:
        return [
            i for i in range(len(text) - len(words)) if tuple(text[i : i + len(words)]) == words
        ]  # followed ones

    best, tried = (0.0, 0, list[Node]()), 0
    for m in range(min(drafter.depth // 2, len(text)), 0, -1):
        match = tuple(text[-m:])
        room = min(size, math.floor(m * drafter.factor + drafter.offset + 1e-6))
        if not places(match) or len(places(match)) < 2 * tried or room <= best[0]:
            continue
        tried = len(places(match))
        nodes, waiting = (
            [((), 1.0, places(match))],
            list[tuple[tuple[int, ...], float, list[int]]](),
        )
        while len(nodes) <= room:
            path, value, there = nodes[-1]
            if len(path) < min(levels, drafter.depth - m):
                words = match + path
                rare = (
                    sum(tuple(text[i : i + len(words)]) == words for i in range(len(text))) <= LEAF
                )
                after: dict[int, list[int]] = {}
                for i in there:
                    longer = list(text)
                    while rare and len(longer) <= i + m + len(path):  # it goes on into itself
                        longer.append(longer[i + m + len(longer) - len(text)])
                    if i + m + len(path) < len(longer):
                        after.setdefault(longer[i + m + len(path)], []).append(i)
                ranked = sorted(
                    after.items(), key=lambda item: (len(item[1]), item[1][-1]), reverse=True
                )
                total = sum(map(len, after.values()))
                steps = [
                    ((*path, token), value * len(f) / total if len(f) < total else value, f)
                    for token, f in ranked
                ]
                waiting += [
                    s for s in (steps if drafter.tree else steps[:1]) if s[1] >= drafter.min_prob
                ]
            if not waiting:
                break
            nodes.append(waiting.pop(max(range(len(waiting)), key=lambda i: (waiting[i][1], -i))))
        score = sum(value for _, value, _ in nodes[1:])
        if score > best[0]:
            best = score, m, [(path, value) for path, value, _ in nodes[1:]]
    return best[1], best[2]


configs: dict[str, Any] = {
    "depth": st.sampled_from([2, 5, 64]),
    "factor": st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    "offset": st.sampled_from([-1.0, 0.0, 2.0, 8.0]),
    "min_prob": st.sampled_from([0.0, 0.1, 0.4]),
    "tree": st.booleans(),
}


@settings(max_examples=150, deadline=None)
@given(
    st.builds(Suffix, **configs),
    st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=60)),
    st.integers(1, 14),
    st.integers(1, 20),
)
def test_a_draft_is_what_a_search_by_hand_finds(
    drafter: Suffix, text: list[int], budget: int, new: int
) -> None:
    tree = drafted(drafter, text, budget, new)
    match, nodes = search(drafter, text, budget - 1, new - 1)
    assert [tuple(tree.tokens_to(n)) for n in range(1, len(tree))] == [path for path, _ in nodes]
    assert tree.values[1:] == pytest.approx([value for _, value in nodes])
    assert (
        set(tree.matches[1:]) <= {match}
        and set(tree.sources[1:]) <= {"suffix"}
        and not tree.has_draws
    )
    for node, tries in enumerate(tree.tries):  # the values are a sub-probability tree
        assert sum(tree.values[t] for t in tries) <= tree.values[node] + 1e-9
    assert drafter.tree or tree.is_chain


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12))
def test_a_draft_depends_on_the_text_and_not_on_how_it_came(pieces: list[list[int]]) -> None:
    drafter = Suffix()
    ctx = context(drafter, [1], new=500)
    state = drafter.start(ctx)
    for piece in pieces:
        ctx.tokens.extend(piece)
        tree = drafter.propose(ctx, state, 12)
        want = drafted(drafter, list(ctx.tokens), 12, 500)
        assert (tree.tokens, tree.parents, tree.values) == (want.tokens, want.parents, want.values)


def test_the_longest_match_wins_a_tie_and_a_frequent_one_wins_by_its_sum() -> None:
    tree = drafted(Suffix(), [1, 2, 3, 5, 5, 5, 2, 3, 4, 4, 1, 2, 3])
    assert tree.tokens[1:4] == [5, 5, 5] and tree.matches[1] == 3
    often = [2, 3, 6, 7, 2, 3, 6, 7, 2, 3, 6, 7]
    tree = drafted(Suffix(factor=1, offset=0), [*often, 1, 2, 3, *often, 4, 2, 3])
    assert (
        tree.matches[1] == 2
        and tree.tokens[1:3] == [6, 7]
        and tree.values[1] == pytest.approx(6 / 7)
    )


def test_shares_are_of_what_follows_and_not_of_the_texts_own_end() -> None:
    often = drafted(
        Suffix(), [3] * 12
    )  # 3 stands more than 8 times, and three of its places are followed by 3, 3, 3
    assert often.is_chain and often.values[1:4] == [1.0] * 3
    tree = drafted(Suffix(), [1, 2, 1, 2, 1, 3, 1])
    assert {tree.tokens[n]: tree.values[n] for n in tree.tries[0]} == pytest.approx(
        {2: 2 / 3, 3: 1 / 3}
    )


def test_a_copy_that_reaches_the_end_of_the_text_goes_on_into_itself() -> None:
    assert drafted(Suffix(), [9, 3, 3]).tokens == [3] * 13
    tree = drafted(Suffix(), [7, 8, 1, 2, 7, 8])
    assert tree.tokens[1:10] == [1, 2, 7, 8, 1, 2, 7, 8, 1] and tree.values[1:] == [1.0] * 16
    shared = Suffix(shared=True)  # another request's text ends where it ends
    engine = Engine({"target": Toy(8)})
    first = context(shared, [1, 2], engine)
    state = shared.start(first)
    first.tokens.extend([3, 4, 5])
    shared.propose(first, state, 9)
    ctx = context(shared, [6, 3, 4], engine)
    assert shared.propose(ctx, shared.start(ctx), 9).tokens == [4, 5]


def test_only_endings_up_to_half_of_the_depth_are_searched() -> None:
    text = [*range(1, 8), 9, 3, 4, 5, 6, 7, 8, *range(1, 8)]
    assert drafted(Suffix(), text).tokens[1] == 9 and drafted(Suffix(), text).matches[1] == 7
    assert (
        drafted(Suffix(depth=8), text).matches[1] == 4
        and drafted(Suffix(depth=8), text).tokens[1] == 8
    )
    assert max(drafted(Suffix(depth=8, offset=64), text, 60).depths) == 4


def test_nothing_is_proposed_where_nothing_matches_or_nothing_fits() -> None:
    for prompt, budget, new in (
        ([1, 2, 3], 9, 40),
        ([4], 9, 40),
        ([1, 1, 1], 1, 40),
        ([1, 1, 1], 9, 1),
    ):
        assert len(drafted(Suffix(), prompt, budget, new)) == 1
    assert len(drafted(Suffix(factor=0, offset=0), [1, 1, 1])) == 1


def test_trees_are_asked_of_the_model_only_if_it_branches() -> None:
    assert Suffix().needs == ("tree",) and Suffix(tree=False).needs == ()


def steps(engine: Engine, drafter: Suffix, tenant: str = "", tokens: int = 40) -> int:
    sampling = Sampling(max_new_tokens=tokens)
    live = engine.add(Request([1, 2, 3, 4], Speculative(drafter, nodes=8), sampling, tenant=tenant))
    laws.finish(engine, live)
    return live.ctx.stats.steps


def test_past_outputs_speed_up_the_next_request_of_the_tenant_if_shared() -> None:
    engine = Engine({"target": Toy(16, sharpness=6.0)})
    first, again, other = (steps(engine, Suffix(shared=True), tenant) for tenant in ("a", "a", "b"))
    assert again < 0.4 * first and other == first
    assert steps(engine, Suffix(), "a") == first
    assert [key[0] for key, store in engine.stores.items() if isinstance(store, Suffixes)] == [
        "a",
        "b",
    ]


def test_the_shared_store_holds_outputs_with_the_last_tokens_of_their_prompts() -> None:
    engine, drafter = Engine({"target": Toy(8)}), Suffix(shared=True)
    live = engine.add(
        Request([1, 2, 3] * 5, Speculative(drafter, nodes=4), Sampling(max_new_tokens=9))
    )
    laws.finish(engine, live)
    store = drafter.start(context(drafter, [5], engine)).past
    assert store is not None
    assert [list(text.tokens) for text in store.texts.values()] == [
        live.ctx.tokens[15 - LEAD :],
        [5],
    ]


def test_the_shared_store_keeps_to_its_bytes_while_requests_run() -> None:
    engine, drafter = Engine({"target": Toy(8)}), Suffix(shared=True, megabytes=1)
    store = drafter.start(context(drafter, [1], engine)).past
    assert store is not None and store.limit == 1 << 20 and store.vocab == 8
    store.limit = 6000
    outputs = []
    for seed in range(6):
        sampling = Sampling(max_new_tokens=30, temperature=1.0, seed=seed)
        live = engine.add(Request([1, seed], Speculative(drafter, nodes=6), sampling))
        laws.finish(engine, live)
        outputs.append(live.ctx.output)
        assert 0 < store.nbytes <= 6000
    last = list(store.texts.values())[-1]
    assert list(last.tokens[last.first :])[-10:] == outputs[-1][-10:]


def test_a_draft_from_the_past_counts_with_its_own_match() -> None:
    engine, drafter = Engine({"target": Toy(8)}), Suffix(shared=True)
    past = context(drafter, [1, 2, 3, 4, 5], engine)
    drafter.start(past)
    ctx = context(drafter, [7, 2, 3], engine)
    tree = drafter.propose(ctx, drafter.start(ctx), 9)
    assert tree.tokens[1:] == [4, 5] and tree.matches[1:] == [2, 2]
    alone = context(replace(drafter, shared=False), [7, 2, 3], engine)
    assert len(drafter.propose(alone, replace(drafter, shared=False).start(alone), 9)) == 1
