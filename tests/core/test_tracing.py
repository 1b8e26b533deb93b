"""Traces as text, and the place where two generations part."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from foretell.core import tracing
from foretell.core.tracing import TraceStep
from foretell.core.tree import TokenTree

NAMES = ["<end>", "a", "b", "c", "d", "\ufffd"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(NAMES[token] for token in tokens)


def step(position: int, *tokens: int, margin: float = 1.0, source: str = "target") -> TraceStep:
    """A step without drafts."""
    count = len(tokens)
    return TraceStep(
        position,
        TokenTree(0),
        [],
        [],
        list(tokens),
        [source] * count,
        [margin] * count,
        "torch",
        0.002,
    )


def drafted() -> TraceStep:
    """Four nodes: one accepted at each of two depths, one refused, one that nobody looked at."""
    tree = TokenTree(1)
    accepted = tree.add(0, 2, source="ngram")
    tree.add(0, 3, source="suffix")
    refused = tree.add(accepted, 4, source="ngram")
    second = tree.add(accepted, 5, source="suffix")
    tested = [(accepted, True), (refused, False), (second, True)]
    return TraceStep(
        position=7,
        tree=tree,
        tested=tested,
        path=[accepted, second],
        tokens=[2, 5, 1],
        sources=["ngram", "suffix", "target"],
        margins=[3.25, 0.001, 0.5],
        backend="openvino",
        seconds=0.0042,
    )


def test_a_step_shows_its_tree_and_what_became_final() -> None:
    assert tracing.render_steps([drafted()], decode).splitlines() == [
        "+ accepted   - tested and refused   . not tested",
        "",
        "step 1 at position 7: 4 drafted, 3 tested, 2 accepted; openvino, 4.2 ms",
        "  + 'b' (2) ngram",
        "    - 'd' (4) ngram",
        "    + '\ufffd' (5) suffix",
        "  . 'c' (3) suffix",
        "  committed 'b' (2) from ngram, margin 3.25",
        "  committed '\ufffd' (5) from suffix, margin 0.001",
        "  committed 'a' (1) from target, margin 0.5",
    ]


def test_a_node_drawn_twice_is_shown_once() -> None:
    one = drafted()
    one.tree.tries[0].append(1)
    assert tracing.render_steps([one], decode).count("'b' (2) ngram") == 1


def test_plain_steps_need_no_legend() -> None:
    text = tracing.render_steps([step(3, 1), step(4, 2)], decode)
    assert text.startswith("step 1 at position 3: 0 drafted, 0 tested, 0 accepted; torch, 2.0 ms\n")
    assert "\n\nstep 2 at position 4" in text


def test_equal_tokens_in_other_steps_are_identical() -> None:
    plain = [step(7, 2), step(8, 5), step(9, 1)]
    assert tracing.first_divergence([drafted()], plain) is None
    assert tracing.first_divergence([], []) is None
    text = tracing.render_divergence(None, 3, "ngram", decode)
    assert text == "identical to plain decoding: 3 tokens"


def test_the_first_difference_is_found_with_both_margins() -> None:
    plain = [step(7, 2), step(8, 4, margin=0.002), step(9, 1)]
    divergence = tracing.first_divergence([drafted()], plain)
    assert divergence is not None and divergence.index == 1
    left, right = divergence.left, divergence.right
    assert left == tracing.Place(0, 8, 5, "suffix", 0.001)
    assert right == tracing.Place(1, 8, 4, "target", 0.002)
    first, *rest, last = tracing.render_divergence(divergence, 3, "ngram", decode).splitlines()
    assert first == "first divergence from plain decoding: output token 2, position 8, step 1"
    assert rest == [
        "  ngram  '\ufffd' (5) from suffix, margin 0.001",
        "  plain  'd' (4) from target, margin 0.002",
    ]
    assert "foretell audit --method ngram" in last


@pytest.mark.parametrize("longer", ["left", "right"])
def test_an_output_that_ends_early_differs_where_it_ends(longer: str) -> None:
    short, long = [step(7, 2)], [step(7, 2), step(8, 3)]
    pair = (long, short) if longer == "left" else (short, long)
    divergence = tracing.first_divergence(*pair)
    assert divergence is not None and divergence.index == 1
    assert (divergence.left is None) == (longer == "right")
    text = tracing.render_divergence(divergence, 1, "suffix", decode)
    assert "output token 2, position 8" in text and "has ended" in text


def test_a_step_as_json() -> None:
    document = json.loads(json.dumps(tracing.to_dict(drafted())))
    assert document["tree"]["parents"] == [-1, 0, 0, 1, 1]
    assert document["tested"] == [[1, True], [3, False], [4, True]] and document["path"] == [1, 4]
    assert document["margins"] == [3.25, 0.001, 0.5] and document["executor"] == "openvino"
