"""drafters/model/reader.py: what a drafter sees of a draft model whose vocabulary has another
size."""

from __future__ import annotations

import pytest
import torch

from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.types import Reply, Sampling
from foretell.drafters.model.reader import DraftReader
from foretell.engine.engine import Engine
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy


def context(draft: Toy, prompt: tuple[int, ...] = (0, 1)) -> Context:
    engine = Engine({"target": Toy(5), "draft": draft})
    return Context(engine, Request(prompt, Plain(), Sampling(max_new_tokens=6)))


def test_a_text_is_read_as_long_as_every_token_is_known() -> None:
    reader = DraftReader(context(Toy(4)))
    assert reader.can_read([0, 1])
    assert reader.can_read([0, 1, 3])
    assert not reader.can_read([0, 1, 3, 4])
    assert not reader.can_read([0, 1, 3, 4, 0])


@pytest.mark.parametrize("size", [3, 5, 7])
def test_rows_have_the_width_of_the_target(size: int) -> None:
    reader = DraftReader(context(Toy(size)))
    logits = torch.arange(2.0 * size).reshape(2, size)
    rows = reader.resized_rows(Reply(logits, {}, [0, 1]))
    for row, given in zip(rows, logits, strict=True):
        assert row.tolist() == (given.tolist() + [-torch.inf] * 5)[:5]


def test_a_tree_ends_where_the_draft_model_has_no_more_room() -> None:
    draft = Toy(5)
    ctx = context(draft)
    assert DraftReader(ctx).max_depth(ctx) == ctx.depth == 5
    draft.context = 4
    assert DraftReader(ctx).max_depth(ctx) == 2
