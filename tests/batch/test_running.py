"""Batches on a tiny model: every answer as alone, in groups, within limits."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import foretell
from foretell.batch.prefixes import Group
from foretell.batch.requests import Item, Prepared, prepare_item
from foretell.batch.running import (
    Lengths,
    Limits,
    Order,
    Room,
    expected_claim,
    group_batch,
    run_batch,
    split_memory,
)
from foretell.errors import BadFile
from foretell.serve.errors import ApiError
from foretell.serve.served import Served
from tests import tiny
from tests.batch.files import SHARED, chat, completion

PLENTY = Limits(10**9, 16)


def batch_of(lm: foretell.LM, *documents: dict[str, Any], method: str = "plain") -> list[Prepared]:
    served = Served(lm, "tiny")
    batch = []
    for line, one in enumerate(documents, 1):
        item = Item(line, one["custom_id"], one["url"], one["body"])
        batch.append(prepare_item(item, served, method))
    return batch


def answers(lm: foretell.LM, batch: list[Prepared], limits: Limits = PLENTY) -> dict[str, Any]:
    """Of each request, by its custom_id, the body of its answer or its error."""
    found: dict[str, Any] = {}

    def deliver(one: Prepared, answer: Any) -> None:
        assert one.item.custom_id not in found
        found[one.item.custom_id] = answer

    asyncio.run(run_batch(lm, batch, limits, deliver))
    return found


def told(body: Any) -> Any:
    """What an answer says: its choices, without numbers that rounding may change."""
    choices = []
    for choice in body["choices"]:
        logprobs = choice["logprobs"] or {}
        tokens = logprobs.get("tokens", [one["bytes"] for one in logprobs.get("content", ())])
        said = choice.get("text") or choice.get("message")
        choices.append((said, tokens, choice["finish_reason"]))
    return choices, body["usage"]


def mixed(count: int) -> list[dict[str, Any]]:
    """Chats that share a long beginning, texts, several prompts and samples, greedy and drawn."""
    documents = []
    for i in range(count):
        draws = {"temperature": 0.9 * (i % 2), "max_tokens": 6 + i % 5}
        documents.append(chat(f"chat{i}", f"question {i}", logprobs=True, **draws))
        documents.append(completion(f"text{i}", f"{i} foxes", logprobs=0, **draws))
    documents.append(completion("many", ["The fox", SHARED], n=2, seed=3, max_tokens=4))
    documents.append(completion("echo", "The fox", echo=True, logprobs=1, max_tokens=0))
    return documents


@pytest.mark.parametrize("method", ["plain", "suffix+token-recycling"])
def test_every_answer_is_that_of_the_request_alone(method: str) -> None:
    lm = tiny.lm(draft=False)
    batch = batch_of(lm, *mixed(5), method=method)
    before = lm.engine.status()["prefix_tokens_reused"]
    found = answers(lm, batch)
    assert lm.engine.status()["prefix_tokens_reused"] - before > 4 * 30, "nothing was shared"
    assert lm.check_integrity() == []
    alone = tiny.lm(draft=False)
    for one in batch_of(alone, *mixed(5)):
        if one.item.custom_id == "echo":
            continue
        outputs = alone.generate(one.call.prompts, one.call.method, **one.call.arguments)
        assert told(found[one.item.custom_id]) == told(one.answer.full_answer(outputs))
    echo = found["echo"]["choices"][0]
    assert echo["text"] == "The fox"
    values = echo["logprobs"]["token_logprobs"]
    assert values[0] is None and all(value < 0 for value in values[1:])


def test_a_request_fails_alone() -> None:
    lm = tiny.lm(draft=False)
    documents = [
        completion("late", "The fox", max_tokens=100, timeout=1e-6),
        completion("bias", "The fox", logit_bias={"99999": 1}),
        completion("fine", "The fox", max_tokens=3),
    ]
    found = answers(lm, batch_of(lm, *documents))
    assert isinstance(found["late"], ApiError) and found["late"].status == 408
    assert isinstance(found["bias"], ApiError) and found["bias"].status == 400
    assert found["fine"]["usage"]["completion_tokens"] == 3


def test_a_fault_of_ours_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny.lm(draft=False)
    batch = batch_of(lm, *(completion(name, "The fox", max_tokens=2) for name in "ab"))

    def broken(*_: Any) -> None:
        raise KeyError("choices")

    monkeypatch.setattr(batch[0].answer, "full_answer", broken)
    found = answers(lm, batch)
    assert found["a"].status == 500 and "KeyError: 'choices'" in found["a"].message
    assert found["b"]["choices"]


def test_where_results_cannot_be_written_everything_ends() -> None:
    lm = tiny.lm(draft=False)
    batch = batch_of(lm, *(completion(str(i), f"{i}", max_tokens=2 + 9 * i) for i in range(9)))
    delivered = []

    def deliver(one: Prepared, _: Any) -> None:
        delivered.append(one)
        raise BadFile("the disk is full")

    with pytest.raises(BadFile, match="the disk is full"):
        asyncio.run(run_batch(lm, batch, Limits(10**9, 2), deliver))
    assert 1 <= len(delivered) <= 2
    until = time.monotonic() + 30
    while lm.engine.live:  # they end between two steps
        assert time.monotonic() < until, "something runs on"
        time.sleep(0.002)


# --- limits


def test_rows_stay_within_the_memory() -> None:
    """Also where every answer becomes longer than answers were on average."""
    lm = tiny.lm(draft=False)
    documents = [completion(f"short{i}", "The fox", max_tokens=2) for i in range(4)]
    documents += [completion(f"long{i}", f"{i} dogs", max_tokens=60) for i in range(8)]
    row = lm.models["target"].row_bytes
    limits = Limits(200 * row, 16)
    step, held = lm.engine.step, []

    def watched() -> Any:
        events = step()
        held.append(lm.engine.status()["cache_bytes"])
        return events

    lm.engine.step = watched  # type: ignore[method-assign]
    found = answers(lm, batch_of(lm, *documents), limits)
    assert len(found) == len(documents)
    assert all(body["usage"]["completion_tokens"] for body in found.values())
    # Rows are counted before a step, which adds one to each text.
    assert 100 * row < max(held) <= limits.memory + 16 * row


@pytest.mark.parametrize("rows", [300, 100_000])
def test_every_prefix_is_computed_once(rows: int) -> None:
    """Also where memory holds two texts and little more."""
    lm = tiny.lm(draft=False)
    documents = []
    for i in range(30):
        beginning = [20 + i % 3] * 20 + [30 + i % 3] * 50
        prompt = [*beginning, 100 + i, 200 + i]
        documents.append(completion(f"{i}", prompt, max_tokens=3 + i % 4, temperature=0))
    batch = batch_of(lm, *documents)
    planned = sum(one.saved for one in group_batch(batch))
    assert planned == 3 * 9 * 70
    answers(lm, batch, Limits(rows * lm.models["target"].row_bytes, 8))
    assert lm.engine.status()["prefix_tokens_reused"] == planned


def test_room_is_taken_and_given_back() -> None:
    async def scene() -> None:
        room = Room(Limits(100, 3))
        await room.take(60, 1)
        await room.take(40, 1)
        waiting = asyncio.create_task(room.take(10, 1))
        await asyncio.sleep(0)
        assert not waiting.done(), "the memory is full"
        room.give(60, 1)
        await waiting
        waiting = asyncio.create_task(room.take(1, 2))
        await asyncio.sleep(0)
        assert not waiting.done(), "three may run"
        room.give(40, 1)
        await waiting
        large = asyncio.create_task(room.take(1000, 1))
        await asyncio.sleep(0)
        assert not large.done(), "it runs alone"
        room.give(10, 1)
        room.give(1, 2)
        await large
        assert (room.memory, room.requests) == (1000, 1)

    asyncio.run(scene())


def test_a_claim_is_what_the_rows_will_take() -> None:
    lm = tiny.lm()
    (one,) = batch_of(lm, completion("a", [[1] * 10, [2] * 20], max_tokens=30))
    row = lm.models["target"].row_bytes
    lengths = Lengths()
    assert expected_claim(lm, one, 0, lengths) == ((30 + 2 * 30) * row, 2)
    lengths.add(4)
    lengths.add(7)
    assert expected_claim(lm, one, 8, lengths) == ((14 + 2 * 6) * row, 2)
    one.call.method = "draft"
    assert expected_claim(lm, one, 8, lengths) == ((14 + 2 * 6) * row * 2, 2), (
        "the draft model has rows"
    )


def test_memory_is_set_aside_for_prefixes_where_some_are_shared() -> None:
    lm = tiny.lm(draft=False)
    row = lm.models["target"].row_bytes
    apart = batch_of(lm, *(completion(str(i), f"{i}", max_tokens=3) for i in range(3)))
    assert split_memory(lm, apart, group_batch(apart), PLENTY) == PLENTY
    assert lm.engine.status()["prefix_limit"] == 0
    together = batch_of(lm, *(chat(str(i), f"{i}", max_tokens=3) for i in range(3)))
    rest = split_memory(lm, together, group_batch(together), PLENTY)
    kept = lm.engine.status()["prefix_limit"]
    assert kept == 4 * row * max(len(one.call.prompts[0]) + 3 for one in together)
    assert rest.memory + kept == PLENTY.memory
    small = split_memory(lm, together, group_batch(together), Limits(1000, 2))
    assert small == Limits(500, 2)


# --- order


def test_groups_with_long_answers_come_first_and_priorities_before_them() -> None:
    lm = tiny.lm(draft=False)
    documents = [
        completion("short", "The fox jumps over", max_tokens=2),
        completion("long", "The fox", max_tokens=90),
        completion("urgent", "The fox jumps over", max_tokens=1, priority=1),
        *(chat(f"chat{i}", f"{i}", max_tokens=10 + i) for i in range(3)),
    ]
    batch = batch_of(lm, *documents)
    groups = group_batch(batch)
    assert sorted(map(len, (one.group_members for one in groups))) == [1, 1, 1, 3]
    order = Order(groups, batch, Lengths())
    names = [[one.item.custom_id for one in order.group_members(group)] for group in order]
    assert names == [["urgent"], ["long"], ["chat2", "chat1", "chat0"], ["short"]]


def test_the_order_follows_what_answers_turn_out_to_be() -> None:
    """The prompts of the first group are shorter, and the answers of the second may be longer."""
    lm = tiny.lm(draft=False)
    batch = batch_of(
        lm,
        completion("first", [1] * 40, max_tokens=100),
        completion("a", [2] * 10, max_tokens=20),
        completion("b", [3] * 30, max_tokens=50),
    )
    groups = [Group(0, (i,)) for i in range(3)]
    lengths = Lengths()
    order = iter(Order(groups, batch, lengths))
    assert next(order).group_members == (0,)
    assert next(iter(Order(groups[1:], batch, Lengths()))).group_members == (1,)
    batch[1].call.arguments["max_new_tokens"] = [15]
    assert next(iter(Order(groups[1:], batch, Lengths()))).group_members == (2,), (
        "50/30 is above 15/10"
    )
    lengths.add(6)
    assert next(order).group_members == (1,), "6/10 is above 6/30"
