"""Rows of an edited text against a list of its tokens, each with what was computed for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cache.edited import Edited, join_layers, part_of
from foretell.cache.policy import Segment

Token = tuple[int, int]  # it, and the position at which its rows were computed
SHAPES = ((2, 3), (1, 5), (2, 3))  # of each layer: heads, width


def rows(tokens: Sequence[Token]) -> list[torch.Tensor]:
    """Of every layer (KV, n, D), with each token and its position in the rows."""
    layers = []
    for layer, (heads, width) in enumerate(SHAPES):
        made = torch.zeros(heads, len(tokens), width)
        for place, (token, at) in enumerate(tokens):
            made[:, place] = 1000 * layer + token
            made[:, place, 0] = at
        layers.append(made)
    return layers


def segment(tokens: Sequence[int], start: int) -> Segment:
    """As a model computes it at these positions."""
    made = [(token, start + place) for place, token in enumerate(tokens)]
    states = {1: torch.tensor(tokens, dtype=torch.float32)[:, None]}
    return Segment(tuple(tokens), start, rows(made), rows(made), states)


def move(layers: Sequence[torch.Tensor], at: torch.Tensor, to: torch.Tensor) -> list[torch.Tensor]:
    """Keys name their position in their first column, which has to be the one given."""
    moved = []
    for keys in layers:
        assert torch.equal(keys[..., 0], at.float().expand(len(keys), -1))
        moved.append(torch.cat([to.float().expand(len(keys), -1)[..., None], keys[..., 1:]], -1))
    return moved


def check(held: Edited, tokens: Sequence[Token]) -> None:
    """That these are the rows of the tokens, as computed and where they stand now."""
    assert held.tokens == tuple(token for token, _ in tokens)
    assert held.at.tolist() == [at for _, at in tokens]
    now = [(token, place) for place, (token, _) in enumerate(tokens)]
    shown = held.to_segment(move)
    for got, want in ((held.k, tokens), (held.v, tokens), (shown.k, now), (shown.v, tokens)):
        assert all(map(torch.equal, got, rows(want)))
    assert shown.states[1][:, 0].tolist() == [token for token, _ in tokens]
    assert shown.start == 0 and shown.tokens == held.tokens


edits = st.tuples(st.integers(0, 12), st.integers(0, 4), st.lists(st.integers(0, 9), max_size=4))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), max_size=8), st.lists(edits, max_size=5))
def test_any_edits_are_those_of_a_list(
    text: list[int], changes: list[tuple[int, int, list[int]]]
) -> None:
    held = Edited.from_segment(segment(text, 0))
    tokens = [(token, place) for place, token in enumerate(text)]
    undos = []
    for start, length, new in changes:
        start = min(start, len(tokens))
        stop = min(start + length, len(tokens))
        undos.append((list(tokens), start, start + len(new), held.copy_part(start, stop)))
        held = held.replace_tokens(start, stop, Edited.from_segment(segment(new, start)))
        tokens[start:stop] = [(token, start + place) for place, token in enumerate(new)]
        check(held, tokens)
    for before, start, stop, removed in reversed(undos):
        held = held.replace_tokens(start, stop, removed)
        check(held, before)


def test_an_edit_leaves_what_was_shown_before() -> None:
    held = Edited.from_segment(segment([3, 4, 5], 0))
    shown = held.to_segment(move)
    later = held.replace_tokens(0, 1, Edited.from_segment(segment([7, 7], 0)))
    later.to_segment(move)
    check(held, [(3, 0), (4, 1), (5, 2)])
    assert all(map(torch.equal, shown.k, rows([(3, 0), (4, 1), (5, 2)])))


def test_rows_that_stand_where_they_were_made_are_not_copied() -> None:
    held = Edited.from_segment(segment([3, 4, 5], 0))
    assert held.to_segment(move).k is held.k


def test_what_is_removed_has_memory_of_its_own() -> None:
    held = Edited.from_segment(segment(list(range(9)) * 9, 0))
    removed = held.copy_part(2, 4)
    assert removed.k[0].untyped_storage().nbytes() < held.k[0].untyped_storage().nbytes() / 4


def test_a_part_of_a_segment_is_a_view() -> None:
    whole = segment([3, 4, 5, 6], 2)
    part = part_of(whole, 3, 5)
    assert part.tokens == (4, 5) and (part.start, part.end) == (3, 5)
    assert all(map(torch.equal, part.k, rows([(4, 3), (5, 4)])))
    assert part.v[1].data_ptr() == whole.v[1][:, 1:].data_ptr()
    assert part.states[1][:, 0].tolist() == [4, 5]


def test_layers_of_one_shape_lie_in_one_tensor() -> None:
    first, second, third = join_layers([rows([(1, 0)]), rows([(2, 1), (3, 2)])])
    assert torch.equal(third, rows([(1, 0), (2, 1), (3, 2)])[2])
    same = [part.untyped_storage().data_ptr() for part in (first, second, third)]
    assert same[0] == same[2] != same[1]
