"""Toy models with different tokenizers, and a second tokenizer for the demo's draft model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import foretell
from foretell.core.model import Model
from foretell.core.tokenizer_bytes import Words
from foretell.loading.fetch import fetch_shipped
from foretell.testing.toy import Toy

# Of the target and of the draft model. Parts of each other, the same in another order, tokens that
# only one of them has, special ones, and halves of a character.
PAIRS = {
    "merged": (Words([b"a", b"b", b"ab"]), Words([b"b", b"a"])),
    "split": (Words([b"a", b"b", b"c"]), Words([b"c", b"ab", b"b", b"a", b"bc"])),
    "partial": (Words([b"a", b"b", b"c"]), Words([b"a", b"c", b"x", b"cc"])),
    "special": (
        Words([b"a", b"b", None], {"<end>": 2}, end=2),
        Words([None, b"b", b"a", b"ba"], {"</s>": 0}, start=(0,), end=0),
    ),
    "sequences": (Words([b"a", b"ab", b"b", b"abb", b"ba"]), Words([b"a", b"b"])),
    "bytes": (Words([b"a", b"\xc3", b"\xa9"]), Words([b"a", b"\xc3\xa9", b"\xc3"])),
}
PROMPTS = {"bytes": (0, 1, 2, 0)}  # that end with a whole character
LEFT_OUT = 40  # merges of the demo's tokenizer that the second one lacks


def pair(name: str, seed: int = 3, copy: float = 0.5) -> dict[str, Model]:
    """A target and a draft model of these tokenizers, whose laws have nothing in common."""
    ours, theirs = PAIRS[name]
    target = Toy(len(ours.pieces), seed, copy=copy)
    draft = Toy(len(theirs.pieces), seed + 2, copy=copy, name="draft")
    target.tokenizer, draft.tokenizer = ours, theirs
    return {"target": target, "draft": draft}


@cache
def other_demo() -> tuple[PreTrainedTokenizerFast, Any]:
    """The demo's draft model with a tokenizer that has other ids and lacks the last merges."""
    folder = fetch_shipped("demo-draft")
    words = AutoTokenizer.from_pretrained(folder)
    draft: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    document = json.loads(words.backend_tokenizer.to_str())
    model = document["model"]
    parts = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    gone = {"".join(pair) for pair in parts[-LEFT_OUT:]}
    model["merges"] = model["merges"][:-LEFT_OUT]
    added = {entry["content"]: entry["id"] for entry in document["added_tokens"]}
    old = dict(model["vocab"]) | added
    kept = sorted((piece for piece in old if piece not in gone), key=lambda piece: -old[piece])
    place = {piece: token for token, piece in enumerate(kept)}
    model["vocab"] = {piece: place[piece] for piece in model["vocab"] if piece in place}
    for entry in document["added_tokens"]:
        entry["id"] = place[entry["content"]]
    document["post_processor"] = None
    rows = torch.tensor([old[piece] for piece in kept])
    with torch.no_grad():
        embedded = draft.get_input_embeddings().weight[rows].clone()
        head = draft.get_output_embeddings().weight[rows].clone()
    draft.resize_token_embeddings(len(kept))
    with torch.no_grad():
        draft.get_input_embeddings().weight.copy_(embedded)
        draft.get_output_embeddings().weight.copy_(head)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(document)),
        eos_token=words.eos_token,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer, draft.eval()


@cache
def demo() -> foretell.LM:
    """The demo with that draft model, in float32."""
    tokenizer, draft = other_demo()
    folder = fetch_shipped("demo")
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)
    return foretell.wrap(target, words, draft, "demo", tokenizers={"draft": tokenizer})
