"""The order in which contenders take turns, on invented times."""

from __future__ import annotations

import dataclasses
from typing import Any

from foretell.bench.figures import group_cells
from foretell.bench.turns import interleave, warm_up_batches
from tests.bench.fakes import SMALL, Broken, Fake


def test_contenders_take_turns_prompt_by_prompt_in_shuffled_order() -> None:
    log: list[tuple[str, Any]] = []
    contenders = [Fake(name, 1.0, log) for name in "abc"]
    interleave(contenders, [[[i]] for i in range(8)], SMALL, 0.0)
    names = [n for n, what in log if what != "forget"]
    triples = [tuple(names[i : i + 3]) for i in range(0, len(names), 3)]
    assert len(triples) == 8 * (SMALL.rounds + 1)
    assert all(sorted(t) == ["a", "b", "c"] for t in triples)
    assert len(set(triples)) > 3, "the order is never shuffled"
    prompts = [what for _, what in log if what != "forget"]
    assert prompts == [i for _ in range(3) for i in range(8) for _ in range(3)]
    assert [i for i, (_, what) in enumerate(log) if what == "forget"] == [
        turn * 27 + k for turn in range(3) for k in range(3)
    ]
    again: list[tuple[str, Any]] = []
    interleave([Fake(name, 1.0, again) for name in "abc"], [[[i]] for i in range(8)], SMALL, 0.0)
    assert again == log


def test_a_warm_up_may_take_a_few_prompts_only() -> None:
    log: list[tuple[str, Any]] = []
    batches = [[[0], [1]], [[2], [3]]]
    settings = dataclasses.replace(SMALL, warm_up=3, rounds=1)
    assert (
        warm_up_batches(batches, 3) == [[[0], [1]], [[2]]]
        and warm_up_batches(batches, 0) == batches
    )
    interleave([Fake("a", 1.0, log)], batches, settings, 0.0)
    assert [what for _, what in log].count("forget") == 2
    assert len(log) - 2 == 2 + 2
    log.clear()
    interleave([Fake("a", 1.0, log)], batches, dataclasses.replace(settings, warm_up=1), 0.0)
    assert len(log) - 2 == 1 + 2


def test_who_fails_is_out_and_the_others_go_on() -> None:
    log: list[tuple[str, Any]] = []
    contenders = [Fake("plain", 1, log), Broken("b", 1, log)]
    good, bad = group_cells(
        contenders, interleave(contenders, [[[1]], [[2]]], SMALL, 0.0), {}, None
    )
    assert good["status"] == "ok"
    assert bad["status"] == "failed"
    assert bad["reason"] == "ArithmeticError: overflow at length"
    assert sum(name == "b" and what != "forget" for name, what in log) == 1
    base, other = group_cells(
        contenders[::-1], interleave(contenders[::-1], [[[1]]], SMALL, 0.0), {}, None
    )
    assert base["status"] == "failed"
    assert other["status"] == "ok"
    assert other["ratio"] is None
    assert other["ratio_to_plain"]["median"] == 1
