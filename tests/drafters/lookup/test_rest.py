"""REST: what it retrieves; its exactness is in test_laws.py, on the small datastore beside this
file.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.drafters.lookup import datastore
from foretell.drafters.lookup.datastore import Datastore
from foretell.drafters.lookup.rest import Match, Rest, frequent_prefixes
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadFile
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from tests import laws
from tests.texts import set_limit

SPECS = [
    "rest:path={here}/rest.safetensors",
    "rest:path={here}/rest.safetensors,least=1,span=3,follow=2,hits=4",
]
FILE = Path(__file__).with_name("rest.safetensors")
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=5)


def fixture(path: Path) -> Datastore:
    """Texts of the ids that every toy vocabulary has: the laws' prompt with all that can follow it,
    and a few more.
    """
    draw = np.random.default_rng(11)
    known = [
        [*laws.PROMPT, a, b, c]
        for a in range(3)
        for b in range(3)
        for c in range(3)
        if (a + b + c) % 2
    ]
    more = [draw.integers(0, 3, size).tolist() for size in (90, 7, 60)]
    return datastore.build_datastore(path, known + more, laws.spell)


def context(
    drafter: Rest, prompt: list[int], engine: Engine | None = None, **options: object
) -> Context:
    engine = engine or Engine({"target": Toy(4)})
    return Context(
        engine, Request(prompt, Speculative(drafter), Sampling(max_new_tokens=40), **options)
    )  # type: ignore[arg-type]


def retrieved(
    documents: list[list[int]], tokens: list[int], drafter: Rest
) -> tuple[Counter[tuple[int, ...]], int, int]:
    """In loops: (how often each prefix follows, how many places there are, n) of the longest n last
    tokens.
    """
    for n in range(min(drafter.span, len(tokens)), drafter.least - 1, -1):
        found = [
            d[i + n : i + n + drafter.follow]
            for d in documents
            for i in range(len(d))
            if d[i : i + n] == tokens[-n:]
        ]
        if found:
            return Counter(tuple(f[:k]) for f in found for k in range(1, len(f) + 1)), len(found), n
    return Counter(), 0, 0


def test_the_datastore_beside_this_file_is_what_the_function_builds(tmp_path: Path) -> None:
    ours, built = datastore.load_datastore(FILE), fixture(tmp_path / "x.safetensors")
    assert (
        ours.tokens.tolist() == built.tokens.tolist()
        and ours.suffixes.tolist() == built.suffixes.tolist()
    )
    assert (ours.vocab, ours.mark, ours.documents) == (
        built.vocab,
        built.mark,
        built.documents,
    ) and ours.vocab == 3


@given(
    texts,
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 14),
)
def test_the_tree_holds_the_most_frequent_continuations(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    tokens: list[int],
    span: int,
    least: int,
    follow: int,
    choices: int,
    budget: int,
) -> None:
    path = tmp_path_factory.mktemp("d") / "x.safetensors"
    datastore.build_datastore(path, documents)
    drafter = Rest(str(path), choices, span, min(least, span), 5000, follow)
    ctx = context(drafter, tokens)
    tree = drafter.propose(ctx, drafter.start(ctx), budget)
    tree.check()
    counts, places, n = retrieved(documents, tokens, drafter)
    paths = [tuple(tree.tokens_to(node)) for node in range(1, len(tree))]
    assert (
        len(set(paths)) == len(paths) == min(choices, budget - 1, len(counts))
        and not tree.has_draws
    )
    assert [counts[p] for p in paths] == sorted(counts.values(), reverse=True)[: len(paths)]
    assert tree.values[1:] == [counts[p] / places for p in paths] and set(tree.matches[1:]) <= {n}
    # Of equal counts shorter ones come first, then those of smaller tokens: the choice is not left
    # to probability.
    assert paths == sorted(counts, key=lambda p: (-counts[p], len(p), p))[: len(paths)]


@given(
    texts,
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(1, 3), max_size=20),
    st.integers(1, 4),
)
def test_the_longest_match_is_found_as_the_text_grows(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    tokens: list[int],
    steps: list[int],
    least: int,
) -> None:
    store = datastore.build_datastore(tmp_path_factory.mktemp("d") / "x.safetensors", documents)
    match, end = Match(store, 0, 6), 1
    for step in (0, *steps):
        end = min(len(tokens), end + step)
        low, high, n = match.find_longest(tokens[:end], 6, least)
        *_, places, want = retrieved(documents, tokens[:end], Rest("x", span=6, least=least))
        assert (n, high - low) == (want, places)


def test_where_nothing_matches_nothing_is_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = datastore.build_datastore(tmp_path / "x.safetensors", [[0, 1, 2, 3, 4, 5, 6, 7]])
    match, asked, find = Match(store, 0, 16), list[int](), store.find_ranks

    def counted(pattern: list[int]) -> tuple[int, int]:
        asked.append(len(pattern))
        return find(pattern)

    monkeypatch.setattr(store, "find_ranks", counted)
    tokens = [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]
    assert match.find_longest(tokens, 16, 2)[2] == 0 and len(asked) <= 5, "lengths are bisected"
    asked.clear()
    assert match.find_longest([*tokens, 3], 16, 2)[2] == 0 and asked == [2]
    asked.clear()
    assert match.find_longest([*tokens, 3, 4], 16, 2)[2] == 2 and asked == [2]
    asked.clear()
    assert match.find_longest([*tokens, 3, 4, 5], 16, 2)[2] == 3 and asked == [3]


def test_counts_over_many_places_are_those_of_loops(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    text = (draw.zipf(1.3, 6000) % 40).tolist()
    store = datastore.build_datastore(tmp_path / "x.safetensors", [text[:3000], text[3000:]])
    low, high = store.find_ranks([1])
    counts = retrieved([text[:3000], text[3000:]], [1], Rest("x", span=1, least=1))[0]
    assert high - low > 1000
    for size in (1, 16, 64, 5000):
        found = frequent_prefixes(store, store.places(low, high, 9999) + 1, 10, size)
        paths = [()]
        for parent, token, _ in found:
            paths.append((*paths[parent], token))
        want = sorted(counts, key=lambda p: (-counts[p], len(p), p))[:size]
        assert paths[1:] == want and [count for *_, count in found] == [counts[p] for p in want]


def test_of_many_places_a_share_is_counted_evenly(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    datastore.build_datastore(path, [[0, 1, 2 if i % 4 else 3] for i in range(400)])
    drafter = Rest(str(path), hits=40)
    ctx = context(drafter, [3, 0, 1])
    tree = drafter.propose(ctx, drafter.start(ctx), 9)
    assert (tree.tokens, tree.values) == ([1, 2, 3], [1.0, 0.75, 0.25])


def test_continuations_end_with_their_document(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    datastore.build_datastore(path, [[1, 2, 3], [0, 0, 0], [1, 2]])
    drafter = Rest(str(path))
    ctx = context(drafter, [1, 2])
    tree = drafter.propose(ctx, drafter.start(ctx), 50)
    assert (tree.tokens, tree.values, tree.matches) == ([2, 3], [1.0, 0.5], [0, 2])
    ctx = context(drafter, [1, 2, 3])
    assert len(drafter.propose(ctx, drafter.start(ctx), 50)) == 1, "matched, and nothing follows"


def test_obeys_budget_depth_and_choices() -> None:
    drafter = Rest(str(FILE), least=1)
    ctx = context(drafter, [0, 1])
    state = drafter.start(ctx)
    assert (
        8 < len(drafter.propose(ctx, state, 99)) <= 65 and len(drafter.propose(ctx, state, 9)) == 9
    )
    assert len(drafter.propose(ctx, state, 1)) == 1
    assert len(Rest(str(FILE), choices=3).propose(ctx, state, 99)) == 4
    for depth in range(4):
        set_limit(ctx, len(ctx.tokens) + 1 + depth)
        assert max(drafter.propose(ctx, state, 99).depths) == depth


def test_the_file_is_opened_once_for_all_requests_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, drafter, opened = Engine({"target": Toy(4)}), Rest(str(FILE)), list[str]()
    monkeypatch.setattr(
        "foretell.drafters.lookup.rest.load_datastore",
        lambda path: opened.append(path) or datastore.load_datastore(path),
    )
    a, b = (drafter.start(context(drafter, [i], engine)) for i in (0, 1))
    assert a.store is b.store and a is not b and opened == [str(FILE)]


def test_another_vocabulary_or_tokenizer_is_refused(tmp_path: Path) -> None:
    drafter = Rest(str(FILE))
    with pytest.raises(BadFile, match="token ids up to 2 and the model's end at 1"):
        drafter.start(context(drafter, [0], Engine({"target": Toy(2)})))
    with pytest.raises(BadFile, match="another tokenizer than the model's"):
        drafter.start(context(drafter, [0], text=lambda ids: "x"))
    for wrong in (tmp_path / "none.safetensors", Path(__file__)):
        engine = Engine({"target": Toy(4)})
        live = engine.add(Request([0, 1], Speculative(Rest(str(wrong)))))
        list(engine.run())
        assert isinstance(live.error, BadFile) and str(wrong) in str(live.error), (
            "the request fails with that error"
        )


def test_a_text_that_is_in_the_datastore_is_drafted(tmp_path: Path) -> None:
    toy, setting = Toy(16), laws.Setting(Sampling(max_new_tokens=60))
    plain = laws.generate(laws.build("plain"), [1, 2, 3], setting, {"target": toy}).ctx.tokens
    path = tmp_path / "x.safetensors"
    datastore.build_datastore(path, [[5, 6, 7], plain, [1, 2, 3, 3]])
    live = laws.generate(
        laws.build(f"rest:path={path}", nodes=10), [1, 2, 3], setting, {"target": toy}
    )
    assert live.ctx.tokens == plain and live.ctx.stats.calls["target"] <= 8


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"least": 17}, "rest:least=17: must be at most span=16"),
        ({"path": ""}, "rest:path is not given: build a datastore with foretell datastore TEXT"),
    ],
    ids=str,
)
def test_a_bad_value_is_told_with_field_value_and_range(
    fields: dict[str, object], said: str
) -> None:
    with pytest.raises(BadConfig, match=said):
        Rest(**{"path": str(FILE), **fields})  # type: ignore[arg-type]
