"""The tree of shared prefixes against a plain list of the texts it was given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cache.policy import Segment
from foretell.cache.prefix_tree import (
    MOST_PARTS,
    PrefixTree,
    common_length,
    cut_segment,
    digest_of,
    join_segments,
)

ROW = 2 * 3 * 2 * 8  # bytes of a token's rows below: 2 layers, keys and values of 2 numbers
MUCH = 1 << 30


def segment(tokens: list[int], start: int = 0, taps: Iterable[int] = ()) -> Segment:
    """Rows that say which token stands where, in each of two layers; states that say so too."""
    positions = torch.arange(start, start + len(tokens), dtype=torch.float64)
    rows = torch.stack([torch.tensor(tokens, dtype=torch.float64), positions, positions], 1)[None]
    layers = [rows.clone(), rows + 1000]
    states = {tap: rows[0] + tap for tap in taps}
    return Segment(tuple(tokens), start, layers, [layer.clone() for layer in layers], states)


def says(segments: list[Segment], taps: Iterable[int] = ()) -> list[int]:
    """The tokens of segments, each of which is checked to have its own rows and states."""
    tokens: list[int] = []
    for part in segments:
        assert part.start == len(tokens)
        want = segment(list(part.tokens), part.start, part.states.keys())
        assert part.has_states(taps)
        assert all(torch.equal(held, want.states[tap]) for tap, held in part.states.items())
        for layers, wanted in ((part.k, want.k), (part.v, want.v)):
            assert all(map(torch.equal, layers, wanted))
        tokens += part.tokens
    return tokens


texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(texts, st.sampled_from("ab")), max_size=8), texts)
def test_a_text_finds_its_longest_known_beginning(
    known: list[tuple[list[int], str]], asked: list[int]
) -> None:
    tree = PrefixTree(MUCH)
    for text, tenant in known:
        tree.insert_text(tenant, [segment(text)])
        assert not tree.find_troubles()
    for tenant in "ab":
        told = [text for text, teller in known if teller == tenant]
        longest = max((common_length(text, asked) for text in told), default=0)
        assert tree.count_known(tenant, asked) == longest
        assert says(tree.match_prefix(tenant, asked)) == asked[:longest]
        assert not tree.find_troubles()
    held = {(tenant, tuple(text[:n])) for text, tenant in known for n in range(1, len(text) + 1)}
    assert tree.bytes == len(held) * ROW


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(texts, st.sampled_from([(), (1,), (1, 2)])), max_size=8), texts)
def test_states_are_found_as_far_as_some_text_kept_them(
    known: list[tuple[list[int], tuple[int, ...]]], asked: list[int]
) -> None:
    """Also where another text had brought the rows without them, or only some of them."""
    tree = PrefixTree(MUCH)
    for text, taps in known:
        tree.insert_text("", [segment(text, taps=taps)])
        assert not tree.find_troubles()
    for taps in ((), (1,), (2,), (1, 2)):
        told = [text for text, held in known if {*taps} <= {*held}]
        longest = max((common_length(text, asked) for text in told), default=0)
        assert tree.count_known("", asked, taps) == longest
        assert says(tree.match_prefix("", asked, taps), taps) == asked[:longest]
    assert not tree.find_troubles()


@settings(deadline=None, max_examples=80)
@given(st.lists(texts, min_size=1, max_size=12), st.integers(0, 30))
def test_the_tree_never_holds_more_than_it_may(known: list[list[int]], rows: int) -> None:
    tree = PrefixTree(rows * ROW)
    for text in known:
        tree.insert_text("", [segment(text)])
        assert tree.bytes <= rows * ROW
        assert not tree.find_troubles()
        assert says(tree.match_prefix("", text)) == text[: tree.count_known("", text)]


def test_a_text_in_very_many_parts_is_known_as_far_as_is_read() -> None:
    tree = PrefixTree(MUCH)
    text = [0] * (MOST_PARTS + 20)
    tree.insert_text("", [segment(text)])
    for end in range(1, len(text)):  # every one goes on in its own way, and cuts a node in two
        tree.insert_text("", [segment([*text[:end], 1])])
        assert not tree.find_troubles()
    assert says(tree.match_prefix("", text)) == text[:MOST_PARTS]


def test_what_was_used_last_stays_and_what_is_read_goes_last() -> None:
    tree = PrefixTree(8 * ROW)
    first, second, third = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]
    tree.insert_text("", [segment(first)])
    tree.insert_text("", [segment(second)])
    tree.match_prefix("", first)
    tree.insert_text("", [segment(third)])
    assert [tree.count_known("", text) for text in (first, second, third)] == [4, 0, 4]
    tree.match_prefix("", first)[0].readers = 1
    tree.match_prefix("", third)
    tree.insert_text("", [segment(second)])
    assert [tree.count_known("", text) for text in (first, second, third)] == [4, 4, 0]


def test_the_parts_of_a_segment_are_copies_that_join_to_the_whole() -> None:
    whole = segment([5, 6, 7, 8, 9])
    parts = [cut_segment(whole, 0, 2), cut_segment(whole, 2, 5)]
    assert says(parts) == [5, 6, 7, 8, 9]
    whole.k[0].fill_(0)
    assert says(parts) == [5, 6, 7, 8, 9]
    again = join_segments(*parts)
    assert says([again]) == [5, 6, 7, 8, 9] and again.bytes == 5 * ROW
    assert digest_of(again) == digest_of(segment([5, 6, 7, 8, 9]))


def test_changed_rows_and_wrong_counts_are_found() -> None:
    tree = PrefixTree(MUCH)
    tree.insert_text("", [segment([1, 2, 3])])
    assert not tree.find_troubles()
    node = next(tree.iterate_nodes())
    node.segment.v[1][0, 2, 0] += 1
    assert tree.find_troubles() == ["rows 0 to 2 of a prefix have changed"]
    assert not tree.find_troubles()
    tree.bytes += 1
    assert len(tree.find_troubles()) == 1
