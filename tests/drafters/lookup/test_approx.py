"""Copying along lags with mismatches: what is drafted, learnt and gained; its exactness is in
test_laws.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.drafter import Feedback
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Outcome, Reply, Sampling
from foretell.drafters.lookup.approx import TOP, Approx, State
from foretell.engine.engine import Engine
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws
from tests.texts import set_limit, set_text

SPECS = ["approx:k=0,votes=0,floor=0", "approx:votes=1,floor=0"]
EXACT = Approx(k=0, votes=0, floor=0)


def context(
    prompt: list[int], new: int = 100, vocab: int = 8, stops: tuple[int, ...] = ()
) -> Context:
    sampling = Sampling(max_new_tokens=new, stop_token_ids=stops)
    return Context(Engine({"target": Toy(vocab)}), Request(prompt, Speculative(Approx()), sampling))


def step(
    drafter: Approx, ctx: Context, state: State, budget: int, rest: list[int]
) -> tuple[TokenTree, Feedback]:
    """Drafts, and lets `rest`, what truly follows, decide what is accepted."""
    tree, node, path, tested = (
        drafter.propose(ctx, state, budget),
        0,
        list[int](),
        list[tuple[int, bool]](),
    )
    while len(path) + 1 < len(rest):
        child = tree.find_child(node, rest[len(path)])
        tested += [(n, n == child) for n in tree.tries[node]]
        if child < 0:
            break
        path.append(node := child)
    kept = rest[: len(path) + 1]
    done = Feedback(tree, Reply(torch.empty(0), {}, []), Outcome(path, kept[-1], tested), kept)
    set_text(ctx, ctx.tokens + kept)
    drafter.observe(ctx, state, done)
    return tree, done


def tokens_a_step(drafter: Approx, prompt: list[int], answer: list[int], nodes: int = 32) -> float:
    ctx = context(prompt, len(answer) + 1, vocab=4096)
    state, steps = drafter.start(ctx), 0
    while rest := answer[len(ctx.output) :]:
        tree, _ = step(drafter, ctx, state, nodes + 1, rest)
        assert len(tree) <= nodes + 1
        steps += 1
    return len(answer) / steps


# --- the definition in loops


def agreement(text: list[int], lag: int) -> list[bool]:
    """Newest first: whether each of the last TOP tokens equals the one `lag` before."""
    ends = range(len(text) - 1, len(text) - 1 - TOP, -1)
    return [at - lag >= 0 and text[at] == text[at - lag] for at in ends]


def run_of(text: list[int], lag: int) -> int:
    same = agreement(text, lag)
    return same.index(False) if False in same else TOP


def score(text: list[int], lag: int) -> int:
    same = agreement(text, lag)
    return 4 * sum(same[:4]) + 2 * sum(same[:8]) + sum(same[:16]) + sum(same)


def continued(text: list[int], lag: int, count: int) -> list[int]:
    whole = list(text)
    for _ in range(count):
        whole.append(whole[-lag])
    return whole[len(text) :]


def chance(run: int, matches: int) -> float:
    """Before anything is learnt."""
    return 0.98 - 0.98 / (1 + (min(run, 32) / 3) ** 2) / (1 + (min(matches, 32) / 16) ** 4)


def twin(
    text: list[int], drafter: Approx, size: int, depth: int
) -> list[tuple[tuple[int, ...], float]]:
    """(path, value) of the nodes drafted by a state that has learnt nothing, best first."""
    lags = []
    by_run = max(range(1, len(text) + 1), key=lambda lag: (run_of(text, lag), -lag))
    if run_of(text, by_run):
        lags.append(by_run)
    by_score = max(range(1, len(text) + 1), key=lambda lag: (score(text, lag), -lag))
    if drafter.k and sum(agreement(text, by_score)) >= TOP - drafter.k and by_score not in lags:
        lags.append(by_score)
    nodes: list[tuple[float, int, int, tuple[int, ...]]] = []
    for which, lag in enumerate(lags):
        run, matches, value = run_of(text, lag), sum(agreement(text, lag)), 1.0
        for d in range(depth):
            value *= chance(run + d, matches + d // 2)
            if value >= drafter.floor:
                nodes.append((-value, which, d, tuple(continued(text, lag, d + 1))))
    found: dict[tuple[int, ...], float] = {}
    for negative, _, _, path in sorted(nodes):
        if path not in found and len(found) < size:
            found[path] = -negative
    return list(found.items())


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(
    TEXT,
    st.sampled_from([0, 24, 30, 31]),
    st.sampled_from([0, 0.05, 0.3]),
    st.integers(0, 20),
    st.integers(0, 9),
)
def test_the_likeliest_tokens_of_both_lags(
    text: list[int], k: int, floor: float, size: int, depth: int
) -> None:
    drafter = Approx(k=k, floor=floor)
    ctx = context(text)
    set_limit(ctx, len(text) + depth + 1)
    tree = drafter.propose(ctx, drafter.start(ctx), size + 1)
    tree.check()
    want = twin(text, drafter, size, depth)
    assert [tuple(tree.tokens_to(node)) for node in range(1, len(tree))] == [
        path for path, _ in want
    ]
    assert tree.values[1:] == pytest.approx([value for _, value in want])
    assert all(tree.values[node] <= tree.values[tree.parents[node]] for node in range(1, len(tree)))
    assert all(match >= 1 for match in tree.matches[1:]) and set(tree.sources[1:]) <= {"approx"}


@given(TEXT, st.integers(1, 12))
def test_without_mismatches_it_is_lookup_of_the_longest_match(text: list[int], size: int) -> None:
    ctx = context(text[:1])
    state = EXACT.start(ctx)
    for end in range(1, len(text) + 1):
        set_text(ctx, text[:end])
        tree = EXACT.propose(ctx, state, size + 1)
    best, lag = max((run_of(text, lag), -lag) for lag in range(1, len(text) + 1))
    assert tree.is_chain and tree.tokens[1:] == (continued(text, -lag, size) if best else [])


def test_a_replaced_token_does_not_end_the_copy() -> None:
    source = list(range(40))
    ctx = context([*source, 99, *source[:20], 77], vocab=128)
    tree = Approx().propose(ctx, Approx().start(ctx), 9)
    assert tree.tokens[1:] == source[21:29]
    assert len(EXACT.propose(ctx, EXACT.start(ctx), 9)) == 1, "exact lookup has lost its place"


# --- renaming


def voted(
    drafter: Approx, pairs: list[tuple[int, int]], stops: tuple[int, ...] = ()
) -> dict[int, int]:
    """Names after a copy in which token a is b, for (a, b) in turn, each between tokens that stay
    the same.
    """
    filler = iter(range(1000, 3000))
    blocks = [[next(filler), next(filler), a, next(filler), next(filler)] for a, _ in pairs]
    lead = [next(filler) for _ in range(30)]
    source = lead + [t for block in blocks for t in block]
    ctx = context([*source, 999, *lead], vocab=4096, stops=stops)
    state = drafter.start(ctx)
    for block, (_, b) in zip(blocks, pairs, strict=True):
        for token in [*block[:2], b, *block[3:]]:
            drafter.propose(ctx, state, 5)
            set_text(ctx, [*ctx.tokens, token])
    drafter.propose(ctx, state, 5)
    return {old: to for (old,), (to,) in state.aligned.names.items()}


def test_two_equal_votes_rename_and_fewer_do_not() -> None:
    assert voted(Approx(), [(5, 7)]) == {}
    assert voted(Approx(), [(5, 7), (5, 8)]) == {}, "two different ones"
    assert voted(Approx(), [(5, 7), (5, 7)]) == {5: 7}
    assert voted(Approx(votes=1), [(5, 7)]) == {5: 7}
    assert voted(Approx(votes=3), [(5, 7), (5, 7)]) == {}
    assert voted(Approx(votes=0), [(5, 7)] * 4) == {}


def test_a_token_that_also_stays_as_it_is_goes_by_majority() -> None:
    assert voted(Approx(), [(5, 7), (5, 5), (5, 7)]) == {5: 7}
    assert voted(Approx(), [(5, 7), (5, 7), (5, 5), (5, 5)]) == {}
    assert voted(Approx(), [(5, 7), (5, 7), (6, 9), (6, 9)]) == {5: 7, 6: 9}


def test_ends_are_never_renamed() -> None:
    assert (
        voted(Approx(), [(5, 7)] * 3, stops=(5,)) == {} == voted(Approx(), [(5, 7)] * 3, stops=(7,))
    )


def test_a_renamed_token_is_drafted_by_its_new_name() -> None:
    source = [*range(30), 50, 30, 31, 50, 32, 33, 50, 34, 35]
    ctx = context([*source, 99, *range(30)], vocab=128)
    state = Approx().start(ctx)
    for token in [60, 30, 31, 60, 32]:
        tree = Approx().propose(ctx, state, 9)
        set_text(ctx, [*ctx.tokens, token])
        assert 60 not in tree.tokens[1:]
    assert Approx().propose(ctx, state, 5).tokens == [32, 33, 60, 34, 35]


def test_a_name_of_several_tokens_is_drafted_and_gone_on_with() -> None:
    source = [*range(30), 50, 51, 30, 31, 50, 51, 32, 33, 50, 51, 34, 35, 36]
    ctx = context([*source, 99, *range(30)], vocab=128)
    state = Approx().start(ctx)
    for token in [60, 61, 62, 30, 31, 60, 61, 62, 32, 33]:
        Approx().propose(ctx, state, 9)
        set_text(ctx, [*ctx.tokens, token])
    tree = Approx().propose(ctx, state, 20)
    assert [60, 61, 62, 34, 35] in map(list, map(tree.tokens_to, range(len(tree)))), (
        "its new name, and what follows"
    )
    set_text(ctx, [*ctx.tokens, 60])
    tree = Approx().propose(ctx, state, 20)
    assert [61, 62, 34, 35] in map(list, map(tree.tokens_to, range(len(tree)))), (
        "the rest of a name that has begun"
    )


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=120),
    st.integers(1, 30),
    st.lists(st.integers(1, 9)),
)
def test_whatever_was_learnt_drafts_are_trees(
    text: list[int], start: int, pieces: list[int]
) -> None:
    drafter, ctx = Approx(votes=1, floor=0), context(text[: min(start, len(text))], new=400)
    state, done = drafter.start(ctx), len(ctx.tokens)
    for piece in [*pieces, *[1] * len(text)]:
        tree = drafter.propose(ctx, state, 24)
        tree.check()
        assert set(tree.sources[1:]) <= {"approx"} and max(tree.depths) <= ctx.depth
        if done >= len(text):
            break
        set_text(ctx, text[: (done := done + piece)])


# --- learning


def test_it_learns_from_tested_nodes_of_both_drafts_only() -> None:
    drafter, source = Approx(), list(range(100, 140))
    ctx = context([5, 6, 50, 51, 52, *source, 99, *source[:20], 5, 6], vocab=256)
    state = drafter.start(ctx)
    tree, _ = step(drafter, ctx, state, 9, [122, 123, 7])
    assert [tree.tokens[node] for node in tree.tries[0]] == [122, 50], (
        "the lag of most matches and that of the last two"
    )
    assert state.chances.cells.keys() == {(0, 20 // 4), (1, 21 // 4), (2, 2 // 4)}
    total = [sum(cell[i] for cell in state.chances.cells.values()) for i in (0, 1)]
    assert total == [3, 2], (
        "122 and 123 were accepted and 50 refused; what stood after was not looked at"
    )
    assert not state.copies, "what has been learnt from is forgotten"
    before = {key: list(cell) for key, cell in state.chances.cells.items()}
    drafter.observe(
        ctx, state, Feedback(TokenTree(91), Reply(torch.empty(0), {}, []), Outcome([], 1), [1])
    )
    assert state.chances.cells == before, "a step without a draft"


def test_chances_follow_what_happens_and_stay_within_bounds() -> None:
    chances = State(2, frozenset()).chances
    start = chances.chance_of(0, 28)
    for _ in range(2000):
        chances.note_trial(0, 28, False)
    assert chances.chance_of(0, 28) < 0.05 < start < 1 and chances.chance_of(0, 31) < 0.1, (
        "neighbours learn with it"
    )
    assert chances.chance_of(1, 28) > 0.5, "others do not"
    for _ in range(2000):
        chances.note_trial(0, 28, True)
    assert 0.95 < chances.chance_of(0, 28) < 1
    assert chances.chance_of(1000, 1000) == chances.chance_of(32, 32)


# --- what it gains


def program(seed: int, lines: int = 160) -> list[int]:
    """A text with the repetitions of code: few forms of line, names that come back, numbers that do
    not.
    """
    draw = random.Random(seed)
    names = [100 + int(60 * draw.random() ** 2) for _ in range(4000)]
    forms = [
        [draw.choice((-1, -1, draw.randrange(20))) for _ in range(draw.randrange(4, 14))]
        for _ in range(40)
    ]
    text: list[int] = []
    for _ in range(lines):
        text += [draw.choice(names) if t < 0 else t for t in draw.choice(forms)] + [
            30,
            40 + draw.randrange(20),
        ]
    return text


def renamed(text: list[int], share: float) -> list[int]:
    draw = random.Random(1)
    new = {name: 1000 + name for name in range(100, 160) if draw.random() < share}
    return [new.get(token, token) for token in text]


def noisy(text: list[int], share: float) -> list[int]:
    draw = random.Random(2)
    return [draw.choice(text) if draw.random() < share else token for token in text]


def lines_edited(text: list[int], share: float) -> list[int]:
    draw = random.Random(3)
    cuts = [0, *(i + 1 for i, token in enumerate(text) if 40 <= token < 60), len(text)]
    lines = [text[a:b] for a, b in pairwise(cuts)]
    kept = [
        [*line, *(draw.choice(lines) if draw.random() < share else [])]
        for line in lines
        if draw.random() > share
    ]
    return [token for line in kept for token in line]


@pytest.mark.parametrize(
    ("edit", "share", "least"),
    [
        (renamed, 0.15, 1.5),
        (renamed, 0.4, 1.5),
        (noisy, 0.02, 1.5),
        (noisy, 0.08, 1.5),
        (lines_edited, 0.05, 0.9),
        (lines_edited, 0.0, 0.95),
    ],
)
def test_against_exact_lookup_at_the_same_number_of_nodes(
    edit: Callable[[list[int], float], list[int]], share: float, least: float
) -> None:
    source = program(7)
    answer = edit(source, share)
    ours, exact = tokens_a_step(Approx(), source, answer), tokens_a_step(EXACT, source, answer)
    assert ours >= least * exact, f"{ours:.2f} against {exact:.2f}"
    assert share or exact > 25


def test_a_text_that_repeats_is_copied() -> None:
    live = laws.generate(
        Speculative(Approx(), nodes=8),
        [1, 2, 3, 4] * 3,
        laws.Setting(Sampling(max_new_tokens=40)),
        {"target": Toy(8, copy=4.0)},
    )
    assert live.ctx.stats.mat > 2


RANGES = {"k": 31, "votes": 1024, "floor": 1}
