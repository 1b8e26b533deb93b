"""Decoders that read pictures: texts are those of transformers, whatever drafts, alone and in
batches; pictures are looked at once; what cannot be right is refused by name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import foretell
from foretell import LM, wrap
from foretell.errors import BadConfig, Unsupported
from foretell.models.decoder import pictures
from foretell.models.decoder.pictures import Pictured
from tests import tiny

VOCAB = len(tiny.tokenizer())
SIZE, PARTS = 8, 4  # pixels of a side, tokens of a picture
TOKEN = VOCAB - 1
NEW = 14
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 4,
    "projection_dim": 16,
}
DRAW = torch.Generator().manual_seed(0)
PHOTOS = [{"pixel_values": 3 * torch.randn(1, 3, SIZE, SIZE, generator=DRAW)} for _ in range(3)]
PROMPTS = [
    [1, *[TOKEN] * PARTS, 5, 6, 7],
    [1, 9, 8, *[TOKEN] * PARTS, 5, 6, 7, 5, 6],
    [1, 30, *[TOKEN] * PARTS],
]


def drawn(hf: Any) -> Any:
    weights = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in hf.parameters():
            made = torch.randn(p.shape, generator=weights)
            p.copy_(0.3 * made if p.ndim > 1 else p + 0.1 * made)
    hf.generation_config.eos_token_id = None
    return hf.eval()


def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT),
        image_token_index=TOKEN,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return drawn(LlavaForConditionalGeneration(config))


@cache
def lm() -> LM:
    return wrap(llava(), name="llava")


def theirs(prompt: list[int], given: dict[str, torch.Tensor]) -> list[int]:
    """transformers' own greedy tokens."""
    target = lm().models["target"]
    assert isinstance(target, Pictured)
    hf: Any = target.hf
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = hf.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **given)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["plain", "ngram:nodes=6", "token-recycling:nodes=8"])
def test_greedy_tokens_are_those_of_transformers(method: str) -> None:
    want = [theirs(prompt, given) for prompt, given in zip(PROMPTS, PHOTOS, strict=True)]
    outs = lm().generate(
        [*PROMPTS, [5, 6, 7]], method, max_new_tokens=NEW, pictures=[*PHOTOS, None]
    )
    assert [out.tokens for out in outs[:3]] == want
    other = lm().generate(PROMPTS[0], method, max_new_tokens=NEW, pictures=PHOTOS[1])
    assert other.tokens == theirs(PROMPTS[0], PHOTOS[1]) != want[0], "the picture has no say"
    assert outs[3].tokens == theirs([5, 6, 7], {})
    both = lm().generate(PROMPTS[:2], method, max_new_tokens=NEW, pictures=PHOTOS[0])
    assert [out.tokens for out in both] == [theirs(prompt, PHOTOS[0]) for prompt in PROMPTS[:2]]


def test_a_picture_is_looked_at_once() -> None:
    own = wrap(llava(), name="llava")
    target = own.models["target"]
    assert isinstance(target, Pictured) and {"pictures", "layers"} <= target.caps
    hf: Any = target.hf
    runs: list[int] = []
    hf.model.vision_tower.register_forward_hook(lambda *_: runs.append(1))
    own.generate(PROMPTS[0], "ngram:nodes=6", max_new_tokens=NEW, pictures=PHOTOS[0])
    assert len(runs) == 1
    own.generate(PROMPTS[0], "plain", max_new_tokens=4, pictures=PHOTOS[0], n=4, temperature=1.0)
    assert len(runs) == 2
    own.generate([5, 6, 7], "plain", max_new_tokens=4)
    assert len(runs) == 2


def test_samples_are_those_of_plain_decoding() -> None:
    more = {"max_new_tokens": NEW, "temperature": 0.9, "n": 3, "pictures": PHOTOS[0]}
    outs = [lm().generate(PROMPTS[1], m, **more) for m in ("plain", "token-recycling:nodes=8")]
    texts = [[sample.tokens for sample in out.samples] for out in outs]
    assert texts[0] == texts[1] and len({tuple(text) for text in texts[0]}) > 1


def test_parts_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip: rows of a picture that are not those of its tokens."""
    right = pictures.Pictures.__init__

    def turned(self: Any, given: Any, places: Any, axes: Any = None) -> None:
        right(self, given, list(places)[::-1], axes)

    monkeypatch.setattr(pictures.Pictures, "__init__", turned)
    own = wrap(llava(), name="llava")
    assert "pictures" not in own.models["target"].caps
    with pytest.raises(Unsupported, match="has other rows than the model gives it"):
        own.generate(PROMPTS[0], "plain", pictures=PHOTOS[0])


def test_pictures_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(Unsupported, match="it has no part that sees"):
        wrap(tiny.llama(), name="llama").generate([1, 2], "plain", pictures=PHOTOS[0])
    for wrong in ({"pixels": 3}, 5, "cat.png"):
        with pytest.raises(BadConfig, match="what the processor gives"):
            lm().generate(PROMPTS[0], "plain", pictures=wrong)
    short = [1, *[TOKEN] * (PARTS - 1), 5]
    outs = lm().generate([PROMPTS[0], short], "plain", max_new_tokens=NEW, pictures=PHOTOS[0])
    assert outs[0].tokens == theirs(PROMPTS[0], PHOTOS[0])
    assert "3 picture tokens and its pictures take 4" in str(outs[1].error)


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    own = foretell.load(tiny.save(llava(), tmp_path / "llava"))
    out = own.generate(PROMPTS[0], "ngram:nodes=6", max_new_tokens=NEW, pictures=PHOTOS[0])
    assert out.tokens == theirs(PROMPTS[0], PHOTOS[0])
