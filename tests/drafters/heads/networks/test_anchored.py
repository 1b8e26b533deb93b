"""Rows through the target, on a tiny transformer: what training computes is what the engine does,
and nodes never notice.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretell
from foretell.core.drafter import Drafter, Reading
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Sampling
from foretell.drafters.heads.hidden_transfer import HiddenTransfer as MapsDrafter
from foretell.drafters.heads.networks.anchored import Anchored, Rows
from foretell.drafters.heads.networks.folder import build_head, load_head, save_head, target_shape
from foretell.drafters.heads.ppd import Ppd as PpdDrafter
from foretell.errors import BadConfig, BadModel
from foretell.models.decoder.decoder import Decoder
from foretell.native import library
from foretell.speculation.strategy import Speculative
from foretell.strategies.plain import Plain
from foretell.train.heads.anchored import Through
from tests.cache.users import run
from tests.models.decoder.families import tiny

TEXT = [(11 * i + i * i) % 90 for i in range(15)]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("ppd", {}),
    ("hidden-transfer", {}),
    ("hidden-transfer", {"entry": 0, "rows": 2}),
    ("hidden-transfer", {"entry": 3}),
]
kinds = pytest.mark.parametrize(("kind", "options"), KINDS)


@cache
def target(family: str = "llama") -> Any:
    return Decoder(tiny(family), "tiny")


def head_of(kind: str, **options: Any) -> Any:
    """Such a head with random numbers; they survive bfloat16."""
    made = build_head(kind, target_shape(target()), options)
    made.take_weights(target())
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_((weight + 0.1 * torch.randn_like(weight)).bfloat16())
    return made


def folder_of(kind: str, where: Path, **options: Any) -> str:
    save_head(head_of(kind, **options), None, where, target(), {})
    return str(where)


def drafter_of(kind: str, head: str, **fields: Any) -> Drafter:
    made: Any = PpdDrafter if kind == "ppd" else MapsDrafter
    drafter: Drafter = made(head=head, **fields)
    return drafter


def rows_said(drafter: Any, model: Any, **sampling: Any) -> tuple[list[Any], list[int]]:
    """Of each step the text, the tree, and what the rows below its nodes said; and all tokens."""
    seen: list[Any] = []

    class Spy(type(drafter)):  # type: ignore[misc]
        def target_rows(
            self, ctx: Any, state: Any, tree: TokenTree, taps: Any, rows_of: Any
        ) -> Reading:
            reply = yield from super().target_rows(ctx, state, tree, taps, rows_of)
            seen.append((list(ctx.tokens), tree, list(state.below)))
            return reply

    fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    options = Sampling(max_new_tokens=8, **{"temperature": 0.0, **sampling})
    (live,) = run({"target": model}, Request(TEXT, Speculative(Spy(**fields), nodes=8), options))
    return seen, live.ctx.output


@kinds
def test_the_engines_rows_are_those_of_training(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    seen, output = rows_said(drafter_of(kind, folder_of(kind, tmp_path, **options)), target())
    head, _ = load_head(tmp_path, target(), kind)
    assert isinstance(head, Anchored)
    through = Through(target())
    compared = 0
    for text, tree, below in seen:
        for node, rows in enumerate(below):
            path = torch.tensor([*text, *tree.tokens_to(node)])
            # Anchors before it run beside it and change nothing.
            anchors = torch.tensor([len(path) - 4, len(path) - 1])
            with torch.no_grad():
                _, states = through(head, path, anchors)
                wanted = through.output.logits(states[1, : len(rows)])
            assert torch.allclose(rows, wanted, atol=1e-4), (node, (rows - wanted).abs().max())
            compared += len(rows)
    assert compared > 20 and len(output) == 8


def test_the_comparison_has_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows one place off are noticed."""
    right = Rows.entering

    def shifted(self: Rows, places: Any, *rest: Any) -> torch.Tensor:
        return right(self, [max(0, place - 1) for place in places], *rest)

    monkeypatch.setattr(Rows, "entering", shifted)
    with pytest.raises(AssertionError):
        test_the_engines_rows_are_those_of_training("ppd", {}, tmp_path)


@kinds
def test_the_texts_own_states_are_the_targets(kind: str, options: dict[str, Any]) -> None:
    tokens = torch.tensor(TEXT)
    with torch.no_grad():
        finals, _ = Through(target())(head_of(kind, **options), tokens, torch.tensor([2, 9]))
        logits = target().hf(tokens[None]).logits[0]
    assert torch.allclose(finals @ Through(target()).weight.T, logits, atol=1e-5)


def test_windows_and_kinds_of_layers_are_kept() -> None:
    """Of a family with both, where rows follow more than a window of text."""
    model = target("gemma3_text")
    made = build_head("ppd", target_shape(target()), {})
    made.take_weights(model)
    through = Through(model)
    tokens = torch.tensor([*TEXT, *TEXT[::-1]])
    with torch.no_grad():
        finals, states = through(made, tokens, torch.tensor([4, len(tokens) - 1]))
        # The rows as tokens of a text of their own: their embeddings are those of tokens 0 to 2.
        longer = torch.tensor([*tokens.tolist(), 0, 1, 2])
        alone, _ = through(made, longer, torch.tensor([0]))
    assert torch.allclose(states[1], alone[-3:], atol=1e-4)
    assert torch.allclose(finals, alone[:-3], atol=1e-4)


def test_ppd_is_hidden_transfer_from_layer_0_with_constant_rows() -> None:
    ppd = head_of("ppd")
    maps = head_of("hidden-transfer", entry=0)
    with torch.no_grad():
        maps.maps.zero_()
        maps.vectors.copy_(ppd.vectors)
    tokens, anchors = torch.tensor(TEXT), torch.tensor([3, 8, 14])
    through = Through(target())
    (_, one), (_, other) = through(ppd, tokens, anchors), through(maps, tokens, anchors)
    assert torch.equal(one, other)


def test_identities_behind_the_last_layer_repeat_the_nodes_law(tmp_path: Path) -> None:
    made = build_head("hidden-transfer", target_shape(target()), {"entry": 3})
    save_head(made, None, tmp_path, target(), {})
    seen, _ = rows_said(MapsDrafter(head=str(tmp_path)), target())
    for text, tree, below in seen:
        for node, rows in enumerate(below):
            path = torch.tensor([[*text, *tree.tokens_to(node)]])
            with torch.no_grad():
                law = target().hf(path).logits[0, -1]
            assert torch.allclose(rows, law.expand_as(rows), atol=1e-5)


@kinds
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_of_plain_decoding_alone_and_beside_others(
    kind: str, options: dict[str, Any], temperature: float, tmp_path: Path
) -> None:
    strategy = Speculative(drafter_of(kind, folder_of(kind, tmp_path, **options)), nodes=8)
    models = {"target": target()}
    texts = (TEXT, TEXT[:4])
    sampling = Sampling(max_new_tokens=8, temperature=temperature, seed=2)
    plain = [run(models, Request(text, Plain(), sampling))[0].ctx.output for text in texts]
    for settings in ({"chunk": 4}, {"preempt": 5}):
        lives = run(models, *(Request(text, strategy, sampling) for text in texts), **settings)
        assert [live.ctx.output for live in lives] == plain
        assert all(live.ctx.stats.drafted for live in lives)


@pytest.mark.skipif(not library.is_available(), reason="the C library is not there")
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", ["ppd", "hidden-transfer"])
def test_nodes_keep_their_bits_in_the_library(kind: str, dtype: str, tmp_path: Path) -> None:
    """Also where their layers run in two forwards: the state in between is not rounded."""
    model: Any = foretell.load("demo", dtype=dtype).models["target"]
    assert model.usual_backend == "native" and model.exact_bits
    made = build_head(kind, target_shape(model))
    made.take_weights(model)
    save_head(made, None, tmp_path, model, {})
    compared = 0

    class Spy(PpdDrafter if kind == "ppd" else MapsDrafter):  # type: ignore[misc]
        def target_rows(
            self, ctx: Any, state: Any, tree: TokenTree, taps: Any, rows_of: Any
        ) -> Reading:
            nonlocal compared
            reply = yield from super().target_rows(ctx, state, tree, taps, rows_of)
            if tree.beside:
                assert torch.equal(reply.logits, model.score(ctx.tokens, tree))
                compared += len(tree)
            return reply

    strategy = Speculative(Spy(head=str(tmp_path), limit=24), nodes=10)
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    run({"target": model}, Request(TEXT, strategy, sampling))
    assert compared > 30


def test_rows_see_what_stands_before_them_alone() -> None:
    """Later tokens, and rows of other anchors, change nothing of what a row says."""
    through, head = Through(target()), head_of("ppd")
    tokens, anchors = torch.tensor(TEXT), torch.tensor([3, 8])
    other = tokens.clone()
    other[9:] = (other[9:] + 7) % 90
    _, states = through(head, tokens, anchors)
    _, changed = through(head, other, anchors)
    assert torch.allclose(states, changed, atol=1e-5)
    _, first = through(head, tokens, anchors[:1])
    assert torch.allclose(states[:1], first, atol=1e-5)
    # A row sees those before it: another first row is noticed in the third, and not conversely.
    with torch.no_grad():
        head.vectors[1] += 1
    _, moved = through(head, tokens, anchors)
    assert torch.allclose(states[:, 0], moved[:, 0], atol=1e-5)
    assert not torch.allclose(states[:, 2], moved[:, 2], atol=1e-3)


def test_gradients_reach_the_rows_and_nothing_else() -> None:
    head = head_of("hidden-transfer")
    _, states = Through(target())(head, torch.tensor(TEXT), torch.tensor([3, 8]))
    states.sum().backward()  # type: ignore[no-untyped-call]
    for weight in head.parameters():
        assert weight.grad is not None and all(part.abs().sum() > 0 for part in weight.grad)
    assert all(weight.grad is None for weight in target().hf.parameters())


def test_rows_begin_as_tokens_and_maps_as_identities() -> None:
    shape = target_shape(target())
    rows, maps = build_head("ppd", shape), build_head("hidden-transfer", shape)
    rows.take_weights(target())
    assert torch.equal(rows.state_dict()["vectors"], target().embed([0, 1, 2]))
    made: Any = maps
    places = torch.tensor([0, 2])
    states = torch.randn(2, shape.hidden)
    assert torch.equal(made.rows(places, states), states)
    assert made.entry == 1 and sum(w.numel() for w in rows.parameters()) == 3 * shape.hidden


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("ppd", {"rows": 0}, "ppd:rows=0"),
        ("ppd", {"rows": 2.5}, "ppd:rows=2.5"),
        ("ppd", {"entry": 1}, "has no option 'entry'"),
        ("hidden-transfer", {"rows": 17}, "hidden-transfer:rows=17"),
        ("hidden-transfer", {"entry": 4}, "hidden-transfer:entry=4"),
        ("hidden-transfer", {"entry": True}, "hidden-transfer:entry=True"),
    ],
)
def test_options_out_of_range_are_refused(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        build_head(kind, target_shape(target()), options)


@pytest.mark.parametrize("kind", ["ppd", "hidden-transfer"])
def test_damaged_folders_are_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    method = drafter_of(kind, folder_of(kind, folder))
    models = {"target": target()}
    assert isinstance(method.bring(models)["head"], Rows)
    whole = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for tensors, words in (
        ({}, "lacks"),
        ({**whole, "more": torch.zeros(1)}, "has more"),
        ({**whole, "vectors": torch.zeros(2, 32)}, r"vectors is \(2, 32\)"),
    ):
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(BadModel, match=words):
            method.bring(models)
    save_file(whole, folder / "model.safetensors")
    for fields, words in (
        ({"ranks": [[2.0]]}, "ranks must be shares"),
        ({"kind": "medusa"}, "is a head for medusa"),
        ({"options": {"rows": 99}}, "rows=99"),
        ({"target": {**config["target"], "hidden": 64}}, "hidden=64"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(BadModel, match=words):
            method.bring(models)
