"""Blocks of masked tokens: what is asked, what is drafted, and the drafter's own block rows; its
exactness is in test_laws.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretell import wrap
from foretell.core.context import Context
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply, Sampling
from foretell.drafters.masked.gad import Gad
from foretell.engine.engine import Engine
from foretell.errors import Unsupported
from foretell.models.encoder_decoder.seq2seq import EncoderDecoder
from foretell.models.encoder_decoder.source import BlockCache, SourceCache
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative
from foretell.testing.toy import Toy
from foretell.verification.relaxed import Relaxed
from tests import laws
from tests.models.decoder.seq2seq import seq2seq

SPECS = ["gad:k=3"]
MASK = 4
SOURCE = (5, 6, 7, 5, 6, 7, 9, 11)


def drive(
    drafter: Gad, sampling: Sampling, budget: int = 64, eos: tuple[int, ...] = ()
) -> tuple[TokenTree, list[Ask]]:
    """Runs the drafting of one step, answering each ask with a toy's rows."""
    toy = Toy(6, seed=2, sharpness=6.0)
    engine = Engine({"target": toy, "draft": toy}, eos)
    ctx = Context(engine, Request([1, 2, 3], Speculative(drafter), sampling))
    steps = drafter.steps(ctx, drafter.start(ctx), budget)
    asks: list[Ask] = []
    value = None
    while True:
        try:
            ask: Any = steps.send(value)
        except StopIteration as end:
            end.value.check()
            return end.value, asks
        asks.append(ask)
        value = Reply(toy.score([1, 2, 3], ask.tree)[list(ask.rows)], {}, list(ask.rows))


def test_the_best_of_every_masked_place_is_drafted() -> None:
    tree, asks = drive(Gad(k=4), Sampling())
    assert len(asks) == 1 and asks[0].tree.tokens == [3, 5, 5, 5, 5] and asks[0].model == "draft"
    rows = Toy(6, seed=2, sharpness=6.0).score([1, 2, 3], asks[0].tree)[1:]
    assert tree.tokens == [3, *rows.argmax(-1).tolist()] and tree.is_chain and not tree.has_draws
    chances = rows.softmax(-1).amax(-1).cumprod(0)
    assert tree.values[1:] == pytest.approx(chances.tolist())
    assert drive(Gad(k=4), Sampling(temperature=1.0, seed=4))[0].tokens == tree.tokens


def test_size_depth_and_ends_bound_the_draft() -> None:
    assert len(drive(Gad(), Sampling(max_new_tokens=99))[0]) == 26
    assert len(drive(Gad(), Sampling(), budget=3)[0]) == 3
    assert len(drive(Gad(), Sampling(max_new_tokens=3))[0]) == 3
    assert drive(Gad(), Sampling(max_new_tokens=1))[1] == []
    whole = drive(Gad(k=6), Sampling())[0].tokens
    cut = drive(Gad(k=6), Sampling(), eos=(whole[3],))[0].tokens
    assert cut == whole[: whole.index(whole[3], 1) + 1]
    banned = drive(Gad(k=6), Sampling(bad_words=[[whole[1]]]))[0].tokens[1:]
    assert whole[1] not in banned


# --- drafters of transformers


def filler(**more: Any) -> EncoderDecoder:
    hf = seq2seq("t5", **more)
    hf.config.mask_token_id, hf.config.fills_blocks = MASK, True
    return EncoderDecoder(hf, "filler")


def by_hand(hf: Any, text: Sequence[int], block: Sequence[int]) -> torch.Tensor:
    """Rows of a block after a text by the model's own forward, with a mask over all of it."""
    tokens = [*text, *block]
    first = len(text) - 1
    sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    sees[first:, first:] = True
    added = torch.where(sees, 0.0, -1e9).to(hf.dtype)[None, None]
    with torch.inference_mode():
        out = hf(
            input_ids=torch.tensor([SOURCE]),
            decoder_input_ids=torch.tensor([tokens]),
            decoder_attention_mask=added,
            use_cache=False,
        )
    return out.logits[0, len(text) :]  # type: ignore[no-any-return]


def request(method: Any = "plain", source: Sequence[int] = SOURCE, **more: Any) -> Request:
    strategy = laws.build(method) if isinstance(method, str) else method
    sampling = Sampling(**{"max_new_tokens": 12, **more})
    return Request([1], strategy, sampling, inputs={"source": tuple(source)})


@torch.inference_mode()
def test_a_block_sees_itself_and_the_text_before_it() -> None:
    """Step by step, while the text grows by what was not in the block."""
    model = filler(dtype=torch.float64)
    held = model.cache(request())
    text = [1]
    for fresh in ([20], [21, 22, 23], [MASK], [24, 25]):
        block = TokenTree(text[-1]).chain([MASK] * 5)
        done = False
        while not done:
            job, done = held.prepare(Ask(block, rows=range(1, 6)), text, 2)
            reply = model.forward([job])[0]
        want = by_hand(model.hf, text, [MASK] * 5)
        assert float((reply.logits - want).abs().max()) < 1e-6
        text += fresh
    assert held.length == 4, "rows of the text are kept"


def test_kept_rows_of_a_block_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip: rows that depend on the masks serve the text that follows."""
    monkeypatch.setattr(BlockCache, "finish", SourceCache.finish)
    with pytest.raises(AssertionError):
        test_a_block_sees_itself_and_the_text_before_it()


def test_one_that_writes_from_left_to_right_is_told_from_it() -> None:
    """The slip: the block's tokens see what stands before them alone."""
    hf = seq2seq("t5", dtype=torch.float64)
    causal = EncoderDecoder(hf, "causal")
    held = causal.cache(request())
    block = TokenTree(1).chain([MASK] * 5)
    with torch.inference_mode():
        rows = causal.forward([held.prepare(Ask(block, rows=range(1, 6)), [1], 9)[0]])[0].logits
    assert float((rows - by_hand(hf, [1], [MASK] * 5)).abs().amax(-1).min()) > 1e-3


def test_a_filler_drafts_and_the_text_stays() -> None:
    models = {"target": EncoderDecoder(seq2seq("t5"), "t5"), "draft": filler(noise=0.02)}
    sources = (SOURCE, (9,))
    outputs = []
    for method in ("plain", "gad:k=6,nodes=6", "gad:k=6,nodes=6,rule=relaxed,beta=1,tau=0"):
        engine = Engine(models)
        lives = [engine.add(request(resolve_method(method)[1], source)) for source in sources]
        laws.finish(engine, *lives)
        outputs.append([live.ctx.output for live in lives])
        drafted = sum(live.ctx.stats.drafted for live in lives)
        assert method == "plain" or drafted
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_filler_is_no_target_and_others_are_no_fillers() -> None:
    own = wrap(filler().hf, name="filler")
    with pytest.raises(Unsupported, match="it needs a model that writes from left to right"):
        own.generate(list(SOURCE), "plain")
    pair = wrap(seq2seq("t5"), draft=seq2seq("t5", 0.1), name="t5")
    with pytest.raises(Unsupported, match=r"gad cannot run on.*a mask token.*foretell train gad"):
        pair.generate(list(SOURCE), "gad:nodes=4")


def test_with_the_relaxed_rule_a_seed_gives_its_tokens_again() -> None:
    """Sizes that a clock decided would decide about the text as well."""
    live = laws.generate(
        Speculative(Gad(k=3), Relaxed()),
        [1, 2, 3],
        laws.Setting(Sampling(max_new_tokens=30)),
        laws.world(Speculative(Gad()), 8),
    )
    again = laws.generate(
        Speculative(Gad(k=3), Relaxed()),
        [1, 2, 3],
        laws.Setting(Sampling(max_new_tokens=30)),
        laws.world(Speculative(Gad()), 8),
    )
    assert live.ctx.output == again.ctx.output
