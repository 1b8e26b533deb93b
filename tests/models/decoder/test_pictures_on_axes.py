"""Pictures whose tokens have a time, a row and a column: texts are those of transformers, trees and
pieces of prompts have the rows of the model's own forward, and a slip in the axes is caught.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from foretell import LM, wrap
from foretell.core.model import STEP
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine import scheduler as schedule
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder.axes import Axes, token_kinds
from foretell.models.decoder.pictures import PictureCache, Pictured, pictures_of
from foretell.spec import resolve_method
from foretell.testing.views import Skipped
from tests.models.decoder.test_pictures import NEW, TEXT, TOKEN, drawn

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm_ocr")
# Frequencies that tell nearby positions apart, in every section.
ROTATION = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
WORDS: dict[str, Any] = {**TEXT, "rope_parameters": ROTATION}
SPECIAL = {"image_token_id": TOKEN, "video_token_id": TOKEN - 1}
SEES: dict[str, Any] = {"hidden_size": 16, "depth": 2, "num_heads": 2, "patch_size": 4}
OUT = {"out_hidden_size": 32, "intermediate_size": 24}


def model(family: str = "qwen2_vl") -> Any:
    torch.manual_seed(0)
    if family == "qwen2_vl":
        sees = {**SEES, "embed_dim": 16, "hidden_size": 32}
        config: Any = Qwen2VLConfig(text_config=WORDS, vision_config=sees, **SPECIAL)
        return drawn(Qwen2VLForConditionalGeneration(config))
    if family == "qwen2_5_vl":
        sees = {**SEES, **OUT, "window_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=WORDS, vision_config=sees, **SPECIAL)
        return drawn(Qwen2_5_VLForConditionalGeneration(config))
    if family == "qwen3_vl":
        sees = {**SEES, **OUT, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        words = {**WORDS, "head_dim": 8}
        config = Qwen3VLConfig(text_config=words, vision_config=sees, **SPECIAL)
        return drawn(Qwen3VLForConditionalGeneration(config))
    sees = {**SEES, **OUT, "image_size": 24}
    if family == "glm_ocr":
        config = GlmOcrConfig(text_config={**WORDS, "head_dim": 8}, vision_config=sees, **SPECIAL)
        return drawn(GlmOcrForConditionalGeneration(config))
    config = Glm4vConfig(text_config=WORDS, vision_config=sees, **SPECIAL)
    return drawn(Glm4vForConditionalGeneration(config))


def photos(seed: int, *sizes: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """What a processor gives of pictures of these sizes in patches; a token stands for four."""
    grid = torch.tensor(sizes)
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator)
    return {"pixel_values": 3 * wide, "image_grid_thw": grid}


ONE = photos(1, (1, 4, 6))
TWO = photos(2, (1, 8, 2), (1, 4, 4))
WITH_ONE = [1, 5, *[TOKEN] * 6, 7, 8]
WITH_TWO = [1, *[TOKEN] * 4, 9, 8, *[TOKEN] * 4, 5, 6, 7, 5, 6]
PLAIN = [5, 6, 7]
PROMPTS = [WITH_ONE, PLAIN, WITH_TWO]
PHOTOS = [ONE, None, TWO]


@cache
def wrapped(family: str) -> LM:
    return wrap(model(family), name=family)


def lm(family: str = "qwen2_vl") -> LM:
    return wrapped(family)


def target(family: str = "qwen2_vl") -> Pictured:
    found = lm(family).models["target"]
    assert isinstance(found, Pictured)
    return found


def picture_places(prompt: list[int]) -> list[int]:
    return [i for i, token in enumerate(prompt) if token == TOKEN]


def greedy(family: str, prompt: list[int], given: Any) -> list[int]:
    """transformers' own tokens."""
    hf: Any = target(family).hf
    ids = torch.tensor([prompt])
    terms: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    if given is not None:
        terms |= {**given, "mm_token_type_ids": token_kinds(ids, picture_places(prompt))}
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), **terms)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@cache
def theirs(family: str) -> list[list[int]]:
    return [greedy(family, *both) for both in zip(PROMPTS, PHOTOS, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    want = theirs(family)
    for method in ("plain", "ngram:nodes=6", "token-recycling:nodes=8"):
        outs = lm(family).generate(PROMPTS, method, max_new_tokens=NEW, pictures=PHOTOS)
        assert [out.tokens for out in outs] == want, method
    alone = lm(family).generate(
        WITH_TWO, "token-recycling:nodes=8", max_new_tokens=NEW, pictures=TWO
    )
    assert alone.tokens == want[2]
    ids = torch.tensor([WITH_TWO])  # a processor's answer has all of this
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    types = {"mm_token_type_ids": token_kinds(ids, picture_places(WITH_TWO))}
    whole = {**text, **types, **TWO}
    assert (
        lm(family).generate(WITH_TWO, "plain", max_new_tokens=NEW, pictures=whole).tokens == want[2]
    )
    other = photos(3, (1, 6, 4))  # as many tokens in another form
    turned = lm(family).generate(WITH_ONE, "plain", max_new_tokens=NEW, pictures=other)
    assert turned.tokens != want[0], "the picture has no say"


def test_a_prompt_in_pieces_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "CHUNK", 4)
    found = target()
    calls = found.calls
    outs = lm().generate(PROMPTS, "ngram:nodes=6", max_new_tokens=NEW, pictures=PHOTOS)
    assert [out.tokens for out in outs] == theirs("qwen2_vl")
    pieces = -(-sum(len(prompt) - 1 for prompt in PROMPTS) // 4)
    assert found.calls - calls > pieces, "the prompts went in at once"


def test_samples_are_those_of_plain_decoding() -> None:
    more = {"max_new_tokens": NEW, "temperature": 0.9, "n": 3, "pictures": TWO}
    outs = [lm().generate(WITH_TWO, m, **more) for m in ("plain", "token-recycling:nodes=8")]
    texts = [[sample.tokens for sample in out.samples] for out in outs]
    assert texts[0] == texts[1] and len({tuple(text) for text in texts[0]}) > 1


def test_pictures_that_enter_several_layers_are_refused() -> None:
    own = wrap(model("qwen3_vl"), name="deep")
    assert len(own.generate(PLAIN, "ngram:nodes=4", max_new_tokens=4).tokens) == 4
    with pytest.raises(Unsupported, match="has other rows than the model gives it"):
        own.generate(WITH_ONE, "plain", pictures=ONE)


def stock(found: Pictured, path: list[int], places: list[int], given: Any) -> torch.Tensor:
    """The last row by the model's own forward."""
    ids = torch.tensor([path])
    more = {} if given is None else {**given, "mm_token_type_ids": token_kinds(ids, places)}
    with torch.inference_mode():
        rows: torch.Tensor = found.hf(input_ids=ids, use_cache=False, **more).logits[0]
    return rows[-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_trees_behind_prompts_in_pieces_have_the_rows_of_their_paths(
    family: str, chunk: int
) -> None:
    found = target(family)
    asks, caches = [], []
    for prompt, given in zip(PROMPTS, PHOTOS, strict=True):
        asks.append(Ask(TokenTree(prompt[-1]).chain([1, 2]).chain([3, 0]).chain([0, 9], at=1)))
        places = picture_places(prompt)
        none = given is None
        caches.append(
            found.cache()
            if none
            else found._cache_with(found._build_pictures(given, prompt, places))
        )
    replies: dict[int, Any] = {}
    while len(replies) < len(asks):
        numbers = [i for i in range(len(asks)) if i not in replies]
        made = [caches[i].prepare(asks[i], PROMPTS[i], chunk) for i in numbers]
        with torch.inference_mode():
            answers = found.forward([job for job, _ in made])
        replies |= {
            i: answer for i, (_, done), answer in zip(numbers, made, answers, strict=True) if done
        }
    for i, (prompt, given) in enumerate(zip(PROMPTS, PHOTOS, strict=True)):
        tree = asks[i].tree
        for node, row in enumerate(replies[i].logits):
            path = [*prompt, *tree.tokens_to(node)]
            want = stock(found, path, picture_places(prompt), given)
            assert torch.allclose(row, want, atol=1e-4), (i, node)


def test_texts_in_a_batch_with_pictures_turn_by_the_same_bits() -> None:
    found = target()
    assert found.loop is not None
    h = torch.zeros(1, 1, TEXT["hidden_size"])
    with_pictures = found._cache_with(
        found._build_pictures(ONE, WITH_ONE, picture_places(WITH_ONE))
    )
    caches = [found.cache(), with_pictures, found.cache()]
    texts = [PLAIN, WITH_ONE, [9, 8, 7, 6, 5]]
    jobs = [
        cache.prepare(Ask(TokenTree(text[-1])), text, 64)[0]
        for cache, text in zip(caches, texts, strict=True)
    ]

    def turned(jobs: list[Any]) -> list[torch.Tensor]:
        assert found.loop is not None
        before = STEP.set(jobs)
        try:
            positions = torch.tensor([[p for job in jobs for p in job.positions]])
            parts: tuple[torch.Tensor, ...] = found.loop.rotation(h, positions)
        finally:
            STEP.reset(before)
        return [part[0] for part in parts]

    together = turned(jobs)
    first, last = turned([jobs[0]]), turned([jobs[2]])
    own = turned([jobs[1]])
    for whole, *alone in zip(together, first, own, last, strict=True):
        assert torch.equal(whole, torch.cat(alone))
    plain = found.loop.rotation(h, torch.tensor([jobs[1].positions]))
    assert [torch.equal(a, b[0]) for a, b in zip(own, plain, strict=True)] == [False, False]


def test_a_copy_of_the_model_drafts_with_its_eyes() -> None:
    own = wrap(model(), draft=model(), name="pair")
    view = "view:kv=quest:budget=4096,length=4,nodes=4"
    others = ("draft:length=4,nodes=4", "easyspec:length=4,nodes=4", "triforce:nodes=4")
    for method in (*others, view):
        outs = own.generate(PROMPTS, method, max_new_tokens=NEW, pictures=PHOTOS)
        assert [out.tokens for out in outs] == theirs("qwen2_vl"), method
        for stats in [out.stats for out in outs]:
            if method.startswith("triforce"):  # the whole model drafts from a part of the rows
                assert stats.calls["triforce"] > 0
            else:
                assert stats.accepted == stats.drafted > 4, "the draft model sees something else"


def test_a_view_drafts_for_the_whole() -> None:
    found = target()
    engine = Engine({"target": found, "draft": Skipped(found, range(2))})
    strategy = resolve_method("draft:length=3,nodes=3")[1]
    wanted = Sampling(max_new_tokens=NEW)
    live = engine.add(Request(WITH_TWO, strategy, wanted, inputs={"pictures": TWO}))
    for _ in engine.run():
        pass
    assert live.error is None and live.ctx.output == theirs("qwen2_vl")[2]
    assert live.ctx.stats.drafted > 0


def test_rows_that_are_retrieved_keep_their_axes() -> None:
    found = target()
    beside = found._cache_with(found._build_pictures(ONE, WITH_ONE, picture_places(WITH_ONE)))
    cache = found.retrieving_model(64, 4).cache(None, beside)
    assert isinstance(beside, PictureCache) and beside.pictures is not None
    assert pictures_of(cache) is beside.pictures


def test_one_answer_of_a_processor_may_be_for_several_prompts() -> None:
    prompts = [WITH_ONE, [9, 9, *WITH_ONE], [1, 5, *[TOKEN] * 6, 4]]
    outs = lm().generate(prompts, "ngram:nodes=6", max_new_tokens=NEW, pictures=ONE)
    assert [out.tokens for out in outs] == [greedy("qwen2_vl", prompt, ONE) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_right_behind_a_picture_goes_on_as_the_model_says(family: str) -> None:
    """Where nothing of a prompt follows its picture, the model's forward, not its generate, is the
    law: that one goes on from the last part's row and column in place of the picture's end.
    """
    prompt = [1, 5, *[TOKEN] * 6]
    out = lm(family).generate(prompt, "ngram:nodes=6", max_new_tokens=6, pictures=ONE)
    for end, token in enumerate(out.tokens):
        path = [*prompt, *out.tokens[:end]]
        row = stock(target(family), path, picture_places(prompt), ONE)
        assert token == int(row.argmax())


@pytest.mark.parametrize("slip", ["delta", "swapped", "one number", "places"])
def test_slips_are_caught_when_a_model_is_loaded(
    slip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, made = Axes.of, Axes.__init__

    def off(self: Axes, prompt: torch.Tensor, delta: int) -> None:
        made(self, prompt, delta + 1)

    def swapped(self: Axes, positions: Any) -> torch.Tensor:
        return right(self, positions)[[0, 2, 1]]

    def one(self: Axes, positions: Any) -> torch.Tensor:
        return right(self, positions)[:1].expand(3, -1)

    def in_the_text(self: Axes, positions: Any) -> torch.Tensor:
        return torch.tensor(positions).expand(3, -1)

    if slip == "delta":
        monkeypatch.setattr(Axes, "__init__", off)
    else:
        wrong = {"swapped": swapped, "one number": one, "places": in_the_text}[slip]
        monkeypatch.setattr(Axes, "of", wrong)
    own = wrap(model(), name="qwen")
    assert "pictures" not in own.models["target"].caps
    with pytest.raises(Unsupported, match="has other rows than the model gives it"):
        own.generate(WITH_ONE, "plain", pictures=ONE)


def test_what_does_not_fit_is_refused_before_the_first_forward() -> None:
    calls = target().calls
    for prompt, given in [
        ([1, *[TOKEN] * 5, 7], ONE),
        ([1, *[TOKEN] * 8, 7], TWO),  # no token between the two
        (WITH_TWO, ONE),
        (WITH_ONE, {"pixel_values": ONE["pixel_values"]}),
    ]:
        with pytest.raises(BadConfig, match="picture tokens do not fit image_grid_thw"):
            lm().generate(prompt, "plain", pictures=given)
    for more in ("pixel_values_videos", "video_grid_thw"):
        with pytest.raises(Unsupported, match="needs a model that reads videos"):
            lm().generate(WITH_ONE, "plain", pictures={**ONE, more: torch.ones(1, 3)})
    assert target().calls == calls
    out = lm().generate([WITH_ONE], "plain", max_new_tokens=4, pictures={**TWO, **PHOTOS[0]})[0]
    assert out.tokens == theirs("qwen2_vl")[0][:4]


def test_loading_leaves_the_model_as_it_was() -> None:
    hf = model()
    hf.model.rope_deltas = kept = torch.tensor([[3]])
    wrap(hf, name="qwen")
    assert hf.model.rope_deltas is kept
