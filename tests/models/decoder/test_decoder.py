"""What is measured when a model is loaded, and what is refused: by name, with the reason, before
the first forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from foretell import wrap
from foretell.core.model import Model
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Steps
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder import decoder, fused, probing
from foretell.models.decoder.decoder import PROVEN, Decoder
from foretell.models.decoder.loop import Block, Loop, StockBlock
from foretell.models.families.description import SkeletonDescription
from foretell.ops.memory import SIZES
from foretell.speculation.strategy import Strategy
from tests.models.decoder.families import WINDOW, config, tiny

PROMPT = list(range(1, 25))
OTHERS = {"arcee", "seed_oss", "apertus", "helium", "ernie4_5", "olmo3", "phi"}
UNKNOWN = sorted(OTHERS - PROVEN)  # until somebody proves one of them
REFUSED = {
    "rwkv": "layers 0, 1, 2 do not use",  # a recurrent layer of a kind we do not know
    # with ALiBi, which none of them gives to transformers' interface
    "bloom": "layers 0, 1, 2 do not use",
    "falcon": "layers 0, 1, 2 do not use",
    "mpt": "layers 0, 1, 2 do not use",
    "gptj": "layers 0, 1, 2 do not use",
    # it attends in chunks
    "llama4_text": "a causal mask or a sliding window, and layer 0 has another",
    # it has the window in the mask alone
    "qwen2_moe": "the window of 8 positions, which layer 0 keeps to itself",
}


def greedy(hf: PreTrainedModel, new: int = 16) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def refusal(hf: PreTrainedModel) -> str:
    """The one line; asserts that the model is left as it was."""
    before = hf.config._attn_implementation
    with pytest.raises(Unsupported) as caught:
        wrap(hf, name="tiny")
    assert hf.config._attn_implementation == before
    line = str(caught.value)
    assert "\n" not in line and f"(family {hf.config.model_type})" in line and "generate" in line
    return line


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_that_cannot_be_right_are_refused(family: str) -> None:
    hf = tiny(family)
    alone = greedy(hf, 4) if family in ("bloom", "gptj", "llama4_text") else None
    assert REFUSED[family] in refusal(hf)
    assert alone is None or greedy(hf, 4) == alone


def test_a_bias_of_the_family_s_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 and inkling hand one to attention, which would leave it out."""
    record = probing._record_attention
    biased = partial(record, position_bias=torch.zeros(1, 4, 7, 7))
    monkeypatch.setitem(AttentionInterface._global_mapping, "foretell-probe", biased)
    assert "scores without a bias by position, which layer 0 adds" in refusal(tiny("llama"))


def test_models_that_are_no_decoders_are_refused() -> None:
    bert = BertModel(
        BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    )
    assert "language model head" in refusal(bert)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    with pytest.raises(Unsupported, match="language model head"):
        Decoder(t5, "t5")
    assert "a causal mask" in refusal(tiny("bert"))


@pytest.mark.parametrize("family", UNKNOWN)
def test_unknown_families_are_right_once_the_self_test_passed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    test = Decoder.self_test
    monkeypatch.setattr(Decoder, "self_test", lambda self: (ran.append(family), test(self)))
    hf = tiny(family)
    expected = greedy(hf)
    lm = wrap(hf)
    assert ran
    for method in ("plain", "token-recycling:nodes=8", "ngram:nodes=6"):
        assert lm.generate(PROMPT, method, max_new_tokens=16).tokens == expected
    assert greedy(hf) == expected  # the model is still usable by itself


def blind(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention that ignores the step's mask: a node sees the packed row before it."""
    q, k, v = args[:3]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=kwargs.get("scaling")
    )
    return out.transpose(1, 2).contiguous(), None


def mixing(
    original: Callable[..., Any], module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any
) -> Any:
    """A token's key is mixed with its neighbour's in the row, as a convolution would."""
    return original(module, q, k + 0.2 * k.roll(1, 2), v, *args, **kwargs)


@pytest.mark.parametrize("slip", [blind, mixing])
def test_the_self_test_catches_attention_that_goes_its_own_way(
    slip: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = decoder._attend_packed
    monkeypatch.setitem(
        AttentionInterface._global_mapping,
        "foretell",
        lambda module, *args, **kwargs: slip(original, module, *args, **kwargs),
    )
    hf = tiny("apertus")  # computed by its own modules
    assert "a self-test found" in refusal(hf)


def test_the_self_test_catches_positions_of_its_own() -> None:
    """A model that counts the row instead of reading its positions."""
    hf = tiny("apertus")
    rotary = hf.get_decoder().rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    assert "a self-test found" in refusal(hf)


def test_a_loop_that_differs_from_the_model_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra step between the layers and the head, which the usual skeleton does not have."""
    hf = tiny("llama")
    hf.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert Decoder(hf).loop is not None  # the hook runs in the loop as well
    hf = tiny("llama")
    hf.model.register_forward_hook(
        lambda module, args, out: out.__setitem__("last_hidden_state", out[0].flip(-1))
    )
    model = Decoder(hf)
    assert model.loop is None and model.caps == Model.caps
    assert model.loop_refused == "its layers, called one by one, give other rows"
    elsewhere = SkeletonDescription(layers="h")
    monkeypatch.setattr("foretell.models.decoder.loop.find_skeleton", lambda config: elsewhere)
    made = Decoder(tiny("llama"))
    assert made.loop_refused == "its parts are not those of the usual skeleton"


class Identity:
    """A layer that does nothing."""

    takes_padding = False

    def __call__(self, hidden: torch.Tensor, rotary: Any, positions: torch.Tensor) -> torch.Tensor:
        return hidden


def test_faster_layers_are_used_only_if_they_agree() -> None:
    def wrong(loop: Loop) -> list[Block]:
        return [Identity() for _ in loop.layers]

    def right(loop: Loop) -> list[Block]:
        return [*loop.blocks]

    slow = Decoder(tiny("llama")).score(PROMPT)
    for blocks, reason in (
        (wrong, "they give other rows than the model's own layers"),
        (right, None),
        (lambda loop: None, "its layers are of another build"),
    ):
        model = Decoder(tiny("llama"), "tiny", blocks)
        torch.testing.assert_close(model.score(PROMPT), slow)
        assert model.blocks_refused == reason and model.loop_refused is None


def test_below_32_bits_most_rows_say_whether_two_computations_agree() -> None:
    """A text's first rows may be off by more than any limit, by rounding alone."""
    exact = Decoder(tiny("llama"))
    coarse = Decoder(tiny("llama").to(torch.bfloat16))
    rows = torch.randn(7, 30)
    first, most = rows.clone(), rows.clone()
    first[:2] += 9
    most[:4] += 9
    assert coarse.agrees(first, rows) and not coarse.agrees(most, rows)
    assert not exact.agrees(first, rows) and exact.agrees(rows.clone(), rows)
    assert not coarse.agrees(most[0], rows[0]), "a row alone decides itself"


def test_windows_hold_in_faster_layers() -> None:
    """mistral keeps its window in the configuration, so faster layers must take the measured
    one.
    """
    hf = tiny("mistral")
    expected = greedy(hf)
    model = wrap(hf).models["target"]
    assert isinstance(model, Decoder) and model.loop is not None
    assert not any(isinstance(block, StockBlock) for block in model.loop.blocks)
    assert wrap(tiny("mistral")).generate(PROMPT, "plain", max_new_tokens=16).tokens == expected


def test_the_context_ends_where_frequencies_would_change() -> None:
    rope = {"rope_theta": 1e4, "factor": 2.0}
    assert Decoder(tiny("llama")).context == 128
    dynamic = tiny("llama", rope_parameters={**rope, "rope_type": "dynamic"})
    assert Decoder(dynamic).context == 128
    long = {
        **rope,
        "rope_type": "longrope",
        "original_max_position_embeddings": 48,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    assert (
        Decoder(tiny("phi3", rope_parameters=long, original_max_position_embeddings=48)).context
        == 48
    )
    both = {
        "full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 64, **rope},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    hf = tiny("gemma3_text")
    hf.config.rope_parameters = both
    assert Decoder(hf).context == 64


def test_frequencies_inside_the_original_range_are_those_of_transformers() -> None:
    long = {
        "rope_theta": 1e4,
        "factor": 2.0,
        "rope_type": "longrope",
        "original_max_position_embeddings": 48,
        "short_factor": [1.0, 1.5, 1.0, 1.0],
        "long_factor": [2.0] * 4,
    }
    hf = tiny("phi3", rope_parameters=long, original_max_position_embeddings=48)
    expected = greedy(hf)
    assert (
        wrap(hf).generate(PROMPT, "token-recycling:nodes=8", max_new_tokens=16).tokens == expected
    )


def test_a_method_that_needs_layers_is_refused_where_there_are_none() -> None:
    class Taps(Strategy):
        needs = ("layers",)

        def run(self, ctx: Any) -> Steps:
            raise AssertionError("it must not start")
            yield

    with pytest.raises(Unsupported, match="'layers'") as caught:
        wrap(tiny("nanochat"), name="small").generate(PROMPT, Taps())
    assert "small" in str(caught.value) and "\n" not in str(caught.value)


@torch.inference_mode()
def test_rows_come_in_the_order_they_are_asked_in() -> None:
    model, tree = Decoder(tiny("llama"), "small"), TokenTree(5).chain([7])
    for rows in ([0, 1], [1, 0], [1, 1]):
        job, _ = model.cache().prepare(Ask(tree, rows=rows), [5], 8)
        reply = model.forward([job])[0]
        assert reply.nodes == rows
        torch.testing.assert_close(reply.logits, model.score([5], tree)[rows])


def test_the_same_model_can_be_target_and_draft() -> None:
    hf = tiny("qwen3")
    expected = greedy(hf)
    out = wrap(hf, draft=hf).generate(PROMPT, "draft:nodes=4", max_new_tokens=16)
    assert out.tokens == expected and out.stats.accepted == out.stats.drafted > 0


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"the draft model has 64 tokens.* the target 97"):
        wrap(tiny("llama"), draft=tiny("llama", vocab_size=64))


def test_the_tiny_models_are_what_they_say() -> None:
    assert config("mistral").sliding_window == WINDOW < len(PROMPT)


def test_padding_changes_nothing() -> None:
    """Trees of many sizes, alone and together, with hidden states."""
    model = Decoder(tiny("qwen3").bfloat16(), "tiny", fused.fused_blocks)
    assert model.loop is not None and all(block.takes_padding for block in model.loop.blocks)  # type: ignore[attr-defined]

    def step(size: int) -> list[torch.Tensor]:
        one = Ask(TokenTree(5).chain(range(6, 5 + size)).chain([3, 4], at=0))
        jobs = [model.cache().prepare(one, [*PROMPT, 5], 99)[0] for _ in range(3)]
        for job, taps in zip(jobs, ((0, 1), (0, 1), (0, 2)), strict=True):
            job.taps = taps
        replies = model.forward(jobs[:2]) + model.forward(jobs[2:])
        return [*(r.logits for r in replies), *(h for r in replies for h in r.hidden.values())]

    with torch.inference_mode():
        for size in (1, 2, 3, 6, 9, 23):
            with_padding = step(size)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("foretell.models.decoder.loop.round_row_count", lambda n: n)
                without = step(size)
            assert len(with_padding) == len(without) == 9
            for padded, plain in zip(with_padding, without, strict=True):
                assert padded.shape == plain.shape
                torch.testing.assert_close(padded.float(), plain.float(), atol=0.02, rtol=0.02)


def test_products_have_few_sizes_whatever_is_asked() -> None:
    """oneDNN keeps a kernel for each of them."""
    seen = set[int]()

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is F.linear:
                seen.add(args[0].numel() // args[0].shape[-1])
            return func(*args, **kwargs or {})

    lm = wrap(tiny("qwen3").bfloat16())
    with lm.driver.exclusive(), Watch():  # on this thread, whose functions are watched
        for n in range(1, 60):
            lm.generate(
                [(7 * n + i) % 90 for i in range(n)],
                "ngram" if n % 2 else "suffix",
                max_new_tokens=4,
            )
        lm.generate([[1] * n for n in (3, 5, 9)], "plain", max_new_tokens=2)
    assert len(seen) > 10 and seen <= {*SIZES}


def test_rows_agree_as_well_as_products_in_float32_are_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Decoder(tiny("llama"), "tiny")
    rows = torch.randn(3, 5)
    assert model.agrees(rows, rows) and not model.agrees(rows * 1.01, rows)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")  # TF32 on a GPU
    assert model.agrees(rows * 1.01, rows) and not model.agrees(rows * 1.1, rows)
