"""Folders of heads as others publish them, written by hand, and what a loaded head says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.heads.formats.reading import load_any_head
from foretell.drafters.heads.networks.folder import save_head
from foretell.drafters.heads.networks.model import HeadModel
from foretell.engine.engine import Engine
from foretell.models.decoder.decoder import Decoder
from foretell.spec import resolve_method
from tests.models.decoder import families

TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
Tensors = dict[str, torch.Tensor]


@cache
def target() -> Decoder:
    model = Decoder(families.tiny("llama"), "llama")
    model.tokenizer = None
    return model


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """Norms about 1, matrices that keep lengths."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=draw)
        found[name] = 1 + 0.2 * value if len(shape) == 1 else value * shape[-1] ** -0.5
    return found


def layer_shapes(config: dict[str, Any], prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = (config[f"num_{name}_heads"] * width for name in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def written(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def change(config: dict[str, Any], tensors: Tensors, changes: dict[str, Any]) -> None:
    """Damages a folder: names with a dot are tensors, and None stands for what is to be missing."""
    for name, value in changes.items():
        part: dict[str, Any] = tensors if "." in name else config
        part.pop(name, None)
        if value is not None:
            part[name] = value


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean() + eps).rsqrt() * weight


def states_of(model: Decoder, taps: Sequence[int], text: Sequence[int] = TEXT) -> torch.Tensor:
    """Of the text's tokens (n, F), after a row of zeros that stands before the first."""
    tree = TokenTree(text[0]).chain(text[1:])
    job, _ = model.cache().prepare(Ask(tree, rows=(), taps=tuple(sorted(set(taps)))), text[:1], 1)
    (reply,) = model.forward([job])
    found = torch.cat([reply.hidden[tap].float() for tap in taps], -1)
    return torch.cat([torch.zeros_like(found[:1]), found])


def logits_of(head: HeadModel, states: torch.Tensor, below: Sequence[int]) -> list[torch.Tensor]:
    """What a head says after the text, and after each of these tokens drafted below it."""
    beside = SimpleNamespace(
        settle=lambda tokens: None,
        states=SimpleNamespace(read_states=lambda feeds, a, b: states[a + 1 : b + 1]),
    )
    tree = TokenTree(TEXT[-1])
    given: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for token in (*below, 0):
        cache = head.cache(beside=beside)  # type: ignore[arg-type]
        features = torch.stack(given) if given else None
        row = len(tree) - 1
        ask = Ask(tree, "head", rows=[row], taps=(0,), features=features)
        job, done = cache.prepare(ask, TEXT, 512)
        assert done
        (reply,) = head.forward([job])
        found.append(reply.logits[-1].float())
        given.append(reply.hidden[0][-1].float())
        tree.add(row, token)
    return found


def check_greedy(model: Decoder, method: str, folder: Path) -> None:
    """With the head of a folder the tokens are those of plain decoding, and the head is asked."""
    texts = []
    for spec in ("plain", f"{method}:head={folder}"):
        _, strategy = resolve_method(spec)
        engine = Engine({"target": model})
        live = engine.add(
            Request(list(TEXT), strategy, Sampling(max_new_tokens=12, temperature=0.0))
        )
        for _ in engine.run():
            pass
        assert live.error is None, live.error
        texts.append(live.ctx.tokens)
    assert texts[0] == texts[1] and len(texts[0]) == len(TEXT) + 12
    assert live.ctx.stats.calls["head"] > 2


@torch.inference_mode()
def said(model: Decoder, folder: Path, method: str, below: Sequence[int]) -> list[torch.Tensor]:
    """The logits of a folder's head, after the text and after each token below it."""
    head, kept = load_any_head(folder, model, method)
    return logits_of(HeadModel(head, kept, model), states_of(model, head.taps), below)


def check_our_layout(model: Decoder, folder: Path, method: str, own: Path) -> None:
    """A head says the same when it was written down in foretell's layout, up to the rounding of its
    weights to bfloat16.
    """
    head, kept = load_any_head(folder, model, method)
    save_head(head, kept, own, model, {})
    before, after = (said(model, place, method, [7, 50]) for place in (folder, own))
    for a, b in zip(before, after, strict=True):
        assert 0 < (a - b).abs().max() + 1e-9 < 0.05 * a.abs().max()
