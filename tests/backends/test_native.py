"""The step in the C library: torch's logits up to rounding, and each row by itself to the last bit,
in trees, batches and pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

import foretell
from foretell.audit.bits import compare_steps
from foretell.backends import native
from foretell.backends.native import NativeBackend
from foretell.cache.cache import Cache
from foretell.core.masked_text import MASKED, make_look
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.decoder.packed import PackedLinear, pack_layers
from foretell.models.diffusion.canvas import Denoiser
from foretell.native import library
from foretell.native.packing import unpack_matrix
from tests.backends.questions import agree, hidden_states_are_those_of_torch
from tests.diffusion.worlds import filled
from tests.kv import policies
from tests.models.decoder import families
from tests.models.decoder.families import WINDOW
from tests.models.decoder.test_families import PROMPTS, TREE, answer

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C library is not built")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
FORMATS = ("bfloat16", "int8", "int4")
NEAR = {"bfloat16": 0.03, "int8": 0.06, "int4": 0.06}  # of a row's length: what rounding makes


def small(family: str, format: str) -> Any:
    hf = families.tiny(family, dtype=torch.bfloat16, **SIZES)
    with torch.no_grad():  # milder than other tests want: rounding stays rounding
        for p in hf.parameters():
            if p.ndim > 1:
                p.mul_(0.4)
    pack_layers(hf, format)
    return hf


@cache
def quick(family: str, format: str) -> Decoder:
    model = Decoder(small(family, format), family, fused_blocks)
    model.use(NativeBackend)
    return model


@cache
def slow(family: str, format: str) -> Decoder:
    """The same numbers in float32, by transformers' own modules."""
    hf = small(family, format)
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                linear = torch.nn.Linear(child.in_features, child.out_features)
                linear.weight = torch.nn.Parameter(unpack_matrix(child.packed).float())
                linear.bias = None if child.bias is None else torch.nn.Parameter(child.bias.float())
                setattr(parent, name, linear)
    hf.set_input_embeddings(hf.get_input_embeddings())
    return Decoder(hf.float(), family)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_are_those_of_torch_up_to_rounding(family: str, format: str) -> None:
    ours, theirs = quick(family, format), slow(family, format)
    one, two = ours.cache(), theirs.cache()
    wide = TokenTree(3).chain([4, 5]).chain([6, 7]).chain([8], at=1)
    for tokens, tree in (
        (PROMPTS[0][:-1], TokenTree(PROMPTS[0][-2])),
        (PROMPTS[1], TREE),
        ([*PROMPTS[1], 3], wide),
    ):
        a, b = answer(ours, one, Ask(tree), tokens), answer(theirs, two, Ask(tree), tokens)
        assert a.computed_by == "native" and a.nodes == b.nodes
        assert agree(a.logits, b.logits, NEAR[format])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_depend_on_no_other_row(family: str, format: str) -> None:
    model = quick(family, format)
    assert model.exact_bits
    assert compare_steps(model, 12, max_length=40) == (12, "")


def test_one_that_looks_at_its_neighbours_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder(small("llama", "int8"), "llama", fused_blocks)
    model.use(NativeBackend)
    states = NativeBackend._entry_states

    def leaning(self: Any, jobs: Any) -> torch.Tensor:
        entering = states(self, jobs)
        return entering + 1e-6 * entering.mean(0)

    monkeypatch.setattr(NativeBackend, "_entry_states", leaning)
    same, first = compare_steps(model, 12, max_length=40)
    assert same < 12 and first


@pytest.mark.parametrize("threads", [1, 2, 3])
@torch.inference_mode()
def test_threads_change_nothing(threads: int) -> None:
    model = quick("llama", "int8")
    model.threads_wanted = 1
    before = model.score(PROMPTS[1], TREE)
    model.threads_wanted = threads
    try:
        assert torch.equal(model.score(PROMPTS[1], TREE), before)
    finally:
        model.threads_wanted = 0


@torch.inference_mode()
def test_hidden_states() -> None:
    model = Decoder(small("llama", "bfloat16"), "llama", fused_blocks)
    model.use(NativeBackend)
    assert model.backend is not None
    model.backend.dtype = torch.float32  # type: ignore[attr-defined]
    hidden_states_are_those_of_torch(model, slow("llama", "bfloat16"), tolerance=0.03)


@torch.inference_mode()
def test_parts_of_the_layers_and_given_states() -> None:
    model, reference = quick("llama", "bfloat16"), slow("llama", "bfloat16")
    text = PROMPTS[1]
    count = len(model.layout)
    for decoder in (model, reference):
        decoder.model_layers = tuple(range(count))  # type: ignore[attr-defined]
    replies = []
    for decoder in (model, reference):
        cache = decoder.cache()
        answer(decoder, cache, Ask(TokenTree(text[-1])), text)
        tree = TokenTree(text[-1]).chain([3, 4])
        first = answer(decoder, cache, Ask(tree, layers=(0,), taps=(1,), rows=[]), text)
        states = first.hidden[1]
        rest = answer(decoder, cache, Ask(tree, layers=tuple(range(1, count)), states=states), text)
        replies.append(rest)
        assert rest.computed_by == ("native" if decoder is model else "torch")
    assert agree(replies[0].logits, replies[1].logits, 0.03)
    whole = answer(model, model.cache(), Ask(tree), text)
    assert torch.equal(replies[0].logits, whole.logits), "a state lost bits between two forwards"


@torch.inference_mode()
def test_windows_count_positions() -> None:
    model, reference = quick("mistral", "bfloat16"), slow("mistral", "bfloat16")
    assert WINDOW in model.loop.windows  # type: ignore[union-attr]
    text = [(11 * i) % 90 for i in range(3 * WINDOW)]
    tree = TokenTree(text[-1]).chain([3, 4, 7]).chain([5, 6], at=0).chain([8], at=2)
    ours = answer(model, model.cache(), Ask(tree), text)
    theirs = answer(reference, reference.cache(), Ask(tree), text)
    assert ours.computed_by == "native"
    assert agree(ours.logits, theirs.logits, 0.03)


# --- a chain in one call


@cache
def tied(family: str, format: str) -> Decoder:
    """A model whose head holds its embeddings: then one call knows what enters for a token."""
    hf = families.tiny(family, dtype=torch.bfloat16, tie_word_embeddings=True, **SIZES)
    pack_layers(hf, format)
    model = Decoder(hf, family, fused_blocks)
    model.use(NativeBackend)
    return model


def one_by_one(
    model: Decoder, text: Sequence[int], count: int
) -> tuple[list[tuple[int, float]], Cache]:
    """The best tokens after a text with their probabilities, by a forward each."""
    cache, tree, found = model.cache(), TokenTree(text[-1]), []
    for node in range(count):
        row = answer(model, cache, Ask(tree, rows=[node]), text).logits[0]
        token = int(row.argmax())
        found.append((token, float(row.softmax(-1)[token])))
        tree.add(node, token)
    return found, cache


def following(model: Decoder, cache: Cache, text: Sequence[int], count: int, **more: Any) -> Any:
    return answer(model, cache, Ask(TokenTree(text[-1]), rows=[0], follow=count, **more), text)


def same_rows(one: Cache, other: Cache) -> bool:
    """Whether both hold the same numbers of the same tokens."""
    if (one.tokens, one.parents, one.base) != (other.tokens, other.parents, other.base):
        return False
    end = one.base + len(one.tokens)
    pairs = zip((*one.k, *one.v), (*other.k, *other.v), strict=True)
    return all(torch.equal(a[:, :end], b[:, :end]) for a, b in pairs)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_what_follows_is_what_a_forward_a_token_gives(family: str, format: str) -> None:
    model = tied(family, format)
    for text in (PROMPTS[0], PROMPTS[1], PROMPTS[1] * 3):
        for count in (1, 2, 7):
            wanted, slow_cache = one_by_one(model, text, count)
            cache = model.cache()
            followed = following(model, cache, text, count).followed
            assert [token for token, _, _ in followed] == [token for token, _ in wanted]
            for (_, chance, _), (_, known) in zip(followed, wanted, strict=True):
                assert chance == pytest.approx(known, rel=1e-4)
            assert same_rows(cache, slow_cache)
            # What was accepted of it is kept, and goes on as from an empty cache.
            longer = [*text, *(token for token, _, _ in followed[:2]), 5]
            again = following(model, cache, longer, 3)
            assert torch.equal(
                again.logits, answer(model, model.cache(), last(longer), longer).logits
            )
            assert len(again.new) == (2 if count <= 2 else 1)  # the last one was not computed


def last(text: Sequence[int]) -> Ask:
    return Ask(TokenTree(text[-1]), rows=[0])


@torch.inference_mode()
def test_several_texts_go_on_side_by_side() -> None:
    model = tied("llama", "int8")
    texts = PROMPTS[0], PROMPTS[1]
    caches = [model.cache() for _ in texts]
    jobs = []
    for held, text in zip(caches, texts, strict=True):
        ask = Ask(TokenTree(text[-1]), rows=[0], follow=4)
        jobs.append(held.prepare(ask, text, 512)[0])
    for reply, held, text in zip(model.forward(jobs), caches, texts, strict=True):
        wanted, slow_cache = one_by_one(model, text, 4)
        assert [token for token, _, _ in reply.followed] == [token for token, _ in wanted]
        assert same_rows(held, slow_cache)


@torch.inference_mode()
def test_nothing_follows_where_one_call_cannot_do_it() -> None:
    model, text = tied("llama", "int8"), PROMPTS[1]
    assert not following(model, model.cache(), text, 3, taps=(1,)).followed
    branching = Ask(TokenTree(text[-1]).chain([3]).chain([4]), rows=[2], follow=3)
    assert not answer(model, model.cache(), branching, text).followed
    inner = Ask(TokenTree(text[-1]).chain([3]), rows=[0], follow=3)
    assert not answer(model, model.cache(), inner, text).followed
    assert not following(
        tied("mistral", "int8"), tied("mistral", "int8").cache(), text, 99
    ).followed
    by_torch = slow("llama", "int8")
    assert not following(by_torch, by_torch.cache(), text, 3).followed


@pytest.mark.parametrize(
    "spec", ["draft:length=5,nodes=5", "draft:length=5,confidence=0.3,nodes=5"]
)
def test_a_greedy_chain_is_the_same_in_one_call(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = foretell.load("demo", dtype="int8")
    prompts = ["def add(a, b):\n    return", "import os\n\nfor name in os"]
    quickly = lm.generate(prompts, spec, max_new_tokens=40)
    monkeypatch.setattr(NativeBackend, "_count_follows", lambda self, jobs: 0)
    slowly = lm.generate(prompts, spec, max_new_tokens=40)
    for one, other in zip(quickly, slowly, strict=True):
        assert (one.tokens, one.draft) == (other.tokens, other.draft)
        assert one.stats.calls["target"] == other.stats.calls["target"]
        assert one.stats.accepted == other.stats.accepted


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_the_embedded_model_drafts_what_it_would_have_written(dtype: str) -> None:
    lm = foretell.load("demo", dtype=dtype)
    assert lm.models["target"].usual_backend == "native"
    prompts = ["def add(a, b):\n    return", "class Point:\n    def __init__(self, x, y):"]
    wanted = lm.generate(prompts, "plain", max_new_tokens=40)
    for method in ("ngram:nodes=6", "suffix+token-recycling", "draft:nodes=6"):
        for prompt, plain in zip(prompts, wanted, strict=True):
            assert lm.generate(prompt, method, max_new_tokens=40).tokens == plain.tokens
        together = lm.generate(prompts, method, max_new_tokens=40)
        assert [out.tokens for out in together] == [out.tokens for out in wanted]


def test_what_it_cannot_compute_is_refused_with_the_reason() -> None:
    cases = (
        (families.tiny("llama", **SIZES), "bfloat16, int8 and int4"),
        (families.tiny("gemma2", **SIZES), "another build"),
        (small("llama", "int8"), "another build"),
    )
    for hf, reason in cases:
        accelerate = None if reason == "another build" else fused_blocks
        model = Decoder(hf, "tiny", accelerate)
        with pytest.raises(LookupError, match=reason):
            model.use(NativeBackend)
    with pytest.raises(Unsupported, match="backend='native' cannot run on demo"):
        foretell.load("demo", backend="native", dtype="float32")


def test_where_it_is_not_built_auto_says_so_and_torch_computes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("foretell.api.diagnosis._shown_notices", set())
    names = "foretell.models.backend_registry.backend_names"
    monkeypatch.setattr(names, lambda kind=None: ["native"])
    monkeypatch.setitem(sys.modules, "foretell.native._library", None)
    library.find_library.cache_clear()
    try:
        lm = foretell.load("demo")
        with pytest.raises(Unsupported, match="not built here: install foretell again"):
            foretell.load("demo", backend="native")
    finally:
        monkeypatch.undo()
        library.find_library.cache_clear()
    (refusal,) = lm.refusals["target"]
    assert refusal[0] == "native" and refusal[1].startswith("the C library is not built")
    said = capsys.readouterr().err
    assert "is computed by torch: native does not take it (the C library is not built" in said
    target = lm.models["target"]
    assert isinstance(target, Decoder) and target.backend is None
    packed = [part for part in target.hf.modules() if isinstance(part, PackedLinear)]
    assert not packed, "weights are packed for the library alone"
    assert lm.generate("def add(a, b):", "plain", max_new_tokens=4).tokens


def test_auto_leaves_it_alone_where_it_does_not_suit() -> None:
    assert native.suits_model(families.tiny("llama", dtype=torch.bfloat16, **SIZES))
    assert not native.suits_model(families.tiny("llama", **SIZES))
    assert native.suits_model(families.tiny("gemma2", dtype=torch.bfloat16, **SIZES))
    assert not native.suits_model(families.tiny("apertus", dtype=torch.bfloat16, **SIZES))


WATCHED = ("h2o:budget=12,every=3", "tova:budget=12,every=4")


def greedy(model: Decoder, kv: str | None, strategy: Any = None, tokens: int = 12) -> Any:
    """A text and who computed it."""
    (live,) = policies.run(
        model,
        [[3, *range(30, 50)]],
        kv and policies.build_cache_policy(kv),
        strategy,
        tokens=tokens,
    )
    return live


@pytest.mark.parametrize("format", ("bfloat16", "int8"))
@pytest.mark.parametrize("kv", WATCHED)
@torch.inference_mode()
def test_watched_steps_are_those_of_torch(kv: str, format: str) -> None:
    """Layer by layer the library computes what lies between the policies' attention."""
    ours = quick("qwen3", format)
    theirs = Decoder(small("qwen3", format), "qwen3", fused_blocks)
    replies = []
    for model in (ours, theirs):
        cache = model.cache()
        cache.use(policies.build_cache_policy(kv).build_policy(model), 20)
        tokens = [3, *range(30, 50)]
        wide = TokenTree(tokens[-1]).chain([7, 8][: cache.policy.room_left(20) - 1])
        found = []
        for tree in (wide, TokenTree(9)):
            found.append(answer(model, cache, Ask(tree, taps=(0, 1, 2)), tokens))
            tokens = [*tokens[:-1], tokens[-1], 9]
        replies.append(found)
    for a, b in zip(*replies, strict=True):
        assert a.computed_by == "native" and b.computed_by == "torch"
        assert agree(a.logits, b.logits, NEAR[format])
        for tap in (0, 1, 2):
            assert agree(a.hidden[tap], b.hidden[tap], NEAR[format])


# --- canvases


@cache
def filler(format: str, block: int = 0) -> Denoiser:
    model = Denoiser(small("llama", format), "llama", 399, block=block, accelerate=fused_blocks)
    model.use(NativeBackend)
    return model


def on_torch(model: Denoiser) -> Denoiser:
    """The same model, whose layers torch computes, in float32."""
    return Denoiser(slow("llama", format_of(model)).hf, "llama", 399, block=model.block)


def format_of(model: Denoiser) -> str:
    return model.matrices or "bfloat16"


def looked(model: Denoiser, cache: Cache, canvas: Sequence[int], **parts: Any) -> Any:
    """Rows of all masked positions among the computed ones."""
    computed = parts.get("computed") or range(len(canvas))
    wanted = [place for place in computed if canvas[place] == MASKED]
    job, _ = cache.prepare(
        make_look(canvas[0], canvas, wanted, parts.get("computed"), parts.get("attended")),
        canvas[:1],
        len(canvas),
    )
    return model.forward([job])[0]


CANVAS = [5, 9, 31, MASKED, 77, MASKED, MASKED, 3, 12, MASKED, 200, MASKED, 8, 8, MASKED, 1, 40]
# Positions that are computed, and those that are read; None: all.
PARTS: list[tuple[list[int] | None, list[int] | None]] = [
    (None, None),
    ([3, 5, 6], None),
    ([9, 11, 14], [0, 1, 2, 9, 10, 11, 14, 16]),
    ([14, 15], list(range(4, 17))),
    ([3], [3]),
]


@pytest.mark.parametrize("format", FORMATS)
@torch.inference_mode()
def test_canvases_are_those_of_torch_up_to_rounding(format: str) -> None:
    """All positions, then some of them beside rows that were computed before."""
    ours = filler(format)
    theirs = on_torch(ours)
    one, two = ours.cache(), theirs.cache()
    for computed, attended in PARTS:
        parts = {"computed": computed, "attended": attended}
        a, b = looked(ours, one, CANVAS, **parts), looked(theirs, two, CANVAS, **parts)
        assert a.computed_by == "native"
        assert agree(a.logits, b.logits, NEAR[format])
    for mine, its in zip([*one.k, *one.v], [*two.k, *two.v], strict=True):
        far = (mine[:, :17].float() - its[:, :17]).norm() / its[:, :17].norm()
        assert far < NEAR[format]


@torch.inference_mode()
def test_positions_of_a_canvas_depend_on_no_other_request() -> None:
    model = filler("int8")
    other, again = [7, MASKED, 6, 5, MASKED], [*CANVAS[:3], *[MASKED] * 40]
    texts = [CANVAS, other, again]
    alone = [looked(model, model.cache(), canvas).logits for canvas in texts]
    jobs = []
    for canvas in texts:
        wanted = [place for place, token in enumerate(canvas) if token == MASKED]
        jobs.append(model.cache().prepare(make_look(canvas[0], canvas, wanted), canvas[:1], 99)[0])
    for threads in (1, 3):
        model.threads_wanted = threads
        together = model.forward(jobs)
        assert all(torch.equal(a, b.logits) for a, b in zip(alone, together, strict=True))
    model.threads_wanted = None


@torch.inference_mode()
def test_blocks_that_hide_some_are_left_to_torch() -> None:
    """A block after others that are cached is the library's; several at once are not."""
    ours = filler("bfloat16", block=6)
    theirs = on_torch(ours)
    one, two = ours.cache(), theirs.cache()
    by = []
    for computed, attended in ((None, None), (range(6, 12), range(12)), ([2, 4], range(6))):
        parts = {"computed": computed, "attended": attended}
        a, b = looked(ours, one, CANVAS, **parts), looked(theirs, two, CANVAS, **parts)
        by.append(a.computed_by)
        assert agree(a.logits, b.logits, NEAR["bfloat16"])
    assert by == ["torch", "native", "native"]
    unread = looked(ours, one, CANVAS, computed=[6, 9], attended=[0, 1, 6])
    assert unread.computed_by == "torch"


def test_rows_that_are_kept_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of canvases never fall back to torch, and switched off they change nothing."""
    model = filler("int8")

    def never(*_: Any) -> Any:
        raise AssertionError("torch computed a canvas")

    monkeypatch.setattr(model, "_by_torch", never)

    def text(method: str, kv: str | None) -> list[int]:
        live = filled(model, method, (5, 6, 7), max_new_tokens=12, kv=kv)[0]
        assert live.error is None and len(live.ctx.output) == 12
        return list(live.ctx.output)

    whole, blocked = "confidence:block=0", "confidence:block=4"
    assert text(blocked, "dkv:every=1") == text(blocked, None)
    assert text(whole, "window:refresh=1") == text(whole, None)
    for kv in ("prefix", "dual", "dkv"):
        text(blocked, kv)
    text(whole, "window:active=3,window=6")


@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_packed_weights_count_as_bytes_that_are_held(format: str) -> None:
    """Of a model's weights, and so in budgets: below them nothing can run."""
    model = quick("llama", format)
    packed = [part.packed for part in model.hf.modules() if isinstance(part, PackedLinear)]
    assert model.weight_bytes >= sum(one.nbytes for one in packed) > 0
    wide = Decoder(small("llama", "bfloat16"), "llama", fused_blocks).weight_bytes
    assert model.weight_bytes <= {"bfloat16": 1.0, "int8": 0.75, "int4": 0.6}[format] * wide


def test_a_budget_below_packed_weights_is_refused() -> None:
    lm = foretell.load("demo", dtype="int8")
    held = lm.models["target"].weight_bytes
    assert held > 5_000_000
    with pytest.raises(BadConfig, match=r"budget=\d+"):
        lm.limit(budget=held - 1)
    lm.limit(budget=2 * held)
