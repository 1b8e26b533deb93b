"""Classifiers: packed and in trees they give the scores that transformers' own forward gives."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import Unsupported
from foretell.models.decoder.fused import fused_blocks
from foretell.models.decoder.packed import pack_layers
from foretell.models.decoder.scoring import Classifier
from tests.models.decoder.families import VOCAB, config, tiny
from tests.models.decoder.test_families import PROMPTS, TREE, answer

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "starcoder2", "gpt2")
PROMPT = PROMPTS[1]
families = pytest.mark.parametrize("family", FAMILIES)


def classifier(family: str, labels: int = 3) -> PreTrainedModel:
    """Random, with weights large enough that scores differ."""
    torch.manual_seed(0)
    hf = AutoModelForSequenceClassification.from_config(config(family, num_labels=labels)).eval()
    with torch.no_grad():
        for p in hf.parameters():
            p.copy_(0.3 * torch.randn_like(p) if p.ndim > 1 else p + 0.1 * torch.randn_like(p))
    return hf


@cache
def model(family: str) -> Classifier:
    return Classifier(classifier(family), family, fused_blocks)


def scores(hf: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """(k,) at the last token, by transformers. Its padding token is 0, which no text ends with."""
    assert tokens[-1] != 0
    with torch.inference_mode():
        return hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@families
def test_rows_are_the_scores_of_transformers(family: str) -> None:
    ours, hf = model(family), classifier(family)
    assert "scores" in ours.caps and "rows" not in ours.caps
    assert (ours.vocab, ours.row_size) == (VOCAB, 3)
    reply = answer(ours, ours.cache(), Ask(TREE), PROMPT, chunk=5)
    assert reply.logits.shape == (len(TREE), 3)
    for node, row in enumerate(reply.logits):
        theirs = scores(hf, [*PROMPT, *TREE.tokens_to(node)])
        assert float((row - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_those_with_the_usual_skeleton_have_layers_and_faster_blocks() -> None:
    assert all("layers" in model(family).caps for family in FAMILIES)
    assert {"llama", "qwen2", "qwen3", "mistral"} <= {f for f in FAMILIES if model(f).fused}


@pytest.mark.parametrize("text", [PROMPT, PROMPTS[0]])
def test_texts_in_one_forward_have_their_own_scores(text: list[int]) -> None:
    ours, other = model("llama"), PROMPTS[0] + PROMPTS[1]
    jobs = [
        ours.cache().prepare(Ask(TokenTree(tokens[-1])), tokens, 512)[0] for tokens in (text, other)
    ]
    with torch.inference_mode():
        replies = ours.forward(jobs)
    for reply, tokens in zip(replies, (text, other), strict=True):
        theirs = scores(classifier("llama"), tokens)
        torch.testing.assert_close(reply.logits[0], theirs, atol=1e-4, rtol=0)


def test_a_body_with_a_head_of_its_own() -> None:
    """As value models are: a language model's body, and one number a token."""
    torch.manual_seed(0)
    head = nn.Linear(32, 1)
    hf = tiny("gemma2")
    value = Classifier(hf, "value", score_head=head)
    assert value.row_size == 1 and value.loop is not None and value.loop.logit_cap is None
    row = value.score(PROMPT)[0]
    with torch.inference_mode():
        states = hf.get_decoder()(input_ids=torch.tensor([PROMPT])).last_hidden_state[0]
        torch.testing.assert_close(row, head(states)[-1], atol=1e-5, rtol=1e-5)
    bare = AutoModel.from_config(config("llama")).eval()
    assert Classifier(bare, "bare", score_head=head).score(PROMPT).shape == (1, 1)


def test_weights_of_8_bits() -> None:
    hf = classifier("llama")
    pack_layers(hf, "int8")
    theirs = model("llama").score(PROMPT, TREE)
    ours = Classifier(hf, "narrow", fused_blocks).score(PROMPT, TREE)
    assert (ours - theirs).abs().max() <= 0.1 * theirs.abs().max()


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        Classifier(tiny("llama"), "tiny")
    assert "tiny (family llama)" in str(caught.value)
    assert "a `score` head over its last states" in str(caught.value)
