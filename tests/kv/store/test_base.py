"""Rows that are stored beside a cache are read as if they had stayed in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.kv.store.base import Code, Form, LayerForm, Rows, Shelf, Stored, bytes_of
from foretell.strategies.plain import Plain
from tests import laws
from tests.kv.policies import PROMPT, drafted, target

TOKENS = 24


class Counted(Shelf):
    """Takes note of what is put on it."""

    def __init__(self) -> None:
        self.put_bytes: list[int] = []

    def put_codes(self, codes: Any) -> Any:
        self.put_bytes.append(bytes_of(codes))
        return codes


@dataclass(frozen=True)
class Halves(LayerForm):
    """Rows in half the bits, so that something is lost."""

    def encode_layer(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, place: int
    ) -> Code:
        return {"k": keys.bfloat16(), "v": values.bfloat16()}

    def decode_layer(self, code: Code) -> Rows:
        return code["k"].double(), code["v"].double()


class Shared(Form):
    """All layers' rows lie under the first one."""

    def encode_rows(self, keys: Any, values: Any, place: int) -> Any:
        return {0: {"k": torch.stack(keys), "v": torch.stack(values)}}

    def decode_rows(self, code: Code, layer: int) -> Rows:
        return code["k"][layer], code["v"][layer]

    def code_layer(self, layer: int) -> int:
        return 0


def text(policy: Stored | None, strategy: Any = None, forgets: tuple[int, ...] = ()) -> list[int]:
    engine = Engine({"target": target("llama", torch.float64)})
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    live = engine.add(Request(list(PROMPT), strategy or Plain(), sampling, policy=policy))
    while engine.live:
        engine.step()
        if engine.live and len(live.ctx.output) in forgets:
            live.caches["target", 0].forget()
    laws.finish(engine, live)
    return list(live.ctx.output)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("form", [None, Shared()])
def test_rows_as_they_are_lose_nothing(first: int, form: Form | None) -> None:
    policy = Stored(first, recent=3, block=4)
    if form is not None:
        policy.form = form
    assert text(policy) == text(None)


def rows_read(policy: Stored | None) -> torch.Tensor:
    """The last row of logits of a text."""
    engine = Engine({"target": target("llama", torch.float32)})
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS, logprobs=5)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy))
    laws.finish(engine, live)
    return torch.tensor([row[0] for row in live.logprobs])


def test_bit_by_bit() -> None:
    assert torch.equal(rows_read(Stored(1, recent=3, block=4)), rows_read(None))


@pytest.mark.parametrize("wrong", [0, 3, 10])
def test_drafts_leave_the_text_of_lossy_forms_as_it_is(wrong: int) -> None:
    policy = Stored(0, recent=0, block=5, form=Halves())
    want = text(policy)
    assert text(policy, drafted(want, wrong)) == want


def test_a_cache_that_is_computed_anew_stores_the_same() -> None:
    policy = Stored(0, recent=0, block=5, form=Halves())
    assert text(policy, forgets=(5, 14)) == text(policy)


def test_bytes_are_those_of_all_codes() -> None:
    shelf = Counted()
    engine = Engine({"target": target("llama", torch.float64)})
    sampling = Sampling(temperature=0.0, max_new_tokens=TOKENS)
    policy = Stored(1, 2, 4, form=Halves(), shelf=shelf)
    live = engine.add(Request(list(PROMPT), Plain(), sampling, policy=policy))
    while engine.live:
        engine.step()
        cache = live.caches.get(("target", 0))
        if cache is not None:
            held = cache.policy
            of_a_row = 3 * 2 * 8 * 2 * 2  # layers, heads, width, keys and values, bytes
            assert held.bytes == held.held_bytes == sum(shelf.put_bytes) == held.rows * of_a_row
            own = (cache.base + len(cache.tokens)) * 3 * 2 * 8 * 2 * 8
            assert cache.bytes == own + held.bytes, "admission and status count both"
            assert cache.length - held.rows == cache.base < 1 + 2 + 4 or cache.length <= len(PROMPT)
            for tensor in (
                t for codes in held.held_codes for code in codes.values() for t in code.values()
            ):
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert len(shelf.put_bytes) > 4
    assert policy.held_codes == (), "the request's own policy is a pattern only"
