"""Heads as others publish them: tiny folders of each layout, written by hand, against a twin of
their forward that computes one node at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.backends.native import NativeBackend
from foretell.drafters.heads.attach import head_model
from foretell.drafters.heads.formats.reading import check_taps, list_formats, load_any_head
from foretell.drafters.heads.networks.folder import build_head, save_head, target_shape
from foretell.drafters.heads.networks.model import HeadModel
from foretell.drafters.heads.networks.tree_shape import TreeShape
from foretell.errors import BadConfig, BadModel, Unsupported
from foretell.models.decoder import packed
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.native import library
from foretell.testing.toy import ToyRecurrent
from tests.drafters.heads.networks.published import (
    TEXT,
    Tensors,
    check_greedy,
    drawn,
    layer_shapes,
    logits_of,
    rms,
    states_of,
    target,
    written,
)
from tests.models.decoder import families


@cache
def packed_target() -> Decoder:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400}
    hf = families.tiny("llama", dtype=torch.bfloat16, tie_word_embeddings=True, **sizes)
    packed.pack_layers(hf, "int8")
    model = Decoder(hf, "llama", fused_blocks)
    model.use(NativeBackend)
    return model


def layer_config(model: Decoder, **more: Any) -> dict[str, Any]:
    """Of a layer of other widths than the target's."""
    config: Any = model.config
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-4,
        "rope_theta": 500.0,
        "vocab_size": model.vocab,
        **more,
    }


def eagle(model: Decoder, bias: bool = True) -> tuple[dict[str, Any], Tensors]:
    """The folder of an EAGLE-1 head."""
    config = layer_config(model, model_type="llama", bias=bias)
    hidden = config["hidden_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes(config, "layers.0.", hidden)}
    tensors = drawn(shapes)
    if bias:
        tensors["fc.bias"] = torch.linspace(-1, 1, hidden)
    table = model.embedded(torch.arange(model.vocab)).float()
    return config, {**tensors, "embed_tokens.weight": table.clone()}


def eagle3(
    model: Decoder, prefix: str = "midlayer.", norms: str = "", kept: int = 40, **more: Any
) -> tuple[dict[str, Any], Tensors]:
    """The folder of an EAGLE-3 head."""
    config = layer_config(model, architectures=["LlamaForCausalLMEagle3"], **more)
    config["draft_vocab_size"] = kept
    hidden = config["hidden_size"]
    shapes = {"fc.weight": (hidden, 3 * hidden), **layer_shapes(config, prefix, 2 * hidden)}
    shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (kept, hidden)}
    if norms == "each":
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(3)}
    elif norms == "all":
        shapes |= {"input_norm.weight": (3 * hidden,)}
    ids = torch.randperm(model.vocab, generator=torch.Generator().manual_seed(5))[:kept].sort()[0]
    marks = torch.zeros(model.vocab, dtype=torch.bool)
    marks[ids] = True
    return config, {**drawn(shapes), "d2t": ids - torch.arange(kept), "t2d": marks}


def speculators(model: Decoder, **more: Any) -> tuple[dict[str, Any], Tensors]:
    """The same as speculators has it."""
    config, tensors = eagle3(model, "layers.0.")
    told = {"speculators_model_type": "eagle3", "transformer_layer_config": config}
    return {**told, "draft_vocab_size": config["draft_vocab_size"], **more}, tensors


class Twin:
    """A published forward, a node at a time over a list of keys and values."""

    def __init__(self, config: dict[str, Any], tensors: Tensors):
        self.config = config.get("transformer_layer_config", config)
        told = config
        self.t = {}
        for name, value in tensors.items():
            plain = name.removeprefix("model.").removeprefix("midlayer.").removeprefix("layers.0.")
            self.t[plain.removesuffix(".weight")] = value.float()
        self.third = "hidden_norm" in self.t
        self.before = told.get("norm_before_residual", False)
        producer = "speculators_model_type" in told
        self.feeds_normed = producer and told.get("norm_output", False)
        self.normed_out = producer or told.get("norm_output", True)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def turn(self, x: torch.Tensor, place: int) -> torch.Tensor:
        width = x.shape[-1]
        powers = torch.arange(0, width, 2).double() / width
        angles = place * self.config.get("rope_theta", 10_000.0) ** -powers
        a, b = x[..., : width // 2].double(), x[..., width // 2 :].double()
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).float()

    def taken(self, features: torch.Tensor) -> torch.Tensor:
        """The state of the target's own taps."""
        if not self.third:
            return features
        eps = self.config["rms_norm_eps"]
        if "input_norm" in self.t:
            features = rms(features, self.t["input_norm"], eps)
        if "fc_norm.0" in self.t:
            thirds = features.chunk(3)
            features = torch.cat(
                [rms(p, self.t[f"fc_norm.{i}"], eps) for i, p in enumerate(thirds)]
            )
        return self.t["fc"] @ features

    def __call__(
        self, embedded: torch.Tensor, state: torch.Tensor, place: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the output matrix reads, and the state of the node below."""
        t, eps, width = self.t, self.config["rms_norm_eps"], self.config["head_dim"]
        if self.third:
            normed = rms(state, t["hidden_norm"], eps)
            read = torch.cat([rms(embedded, t["input_layernorm"], eps), normed])
            stream = normed if self.before else state
        else:
            stream = t["fc"] @ torch.cat([embedded, state])
            stream = read = stream + t["fc.bias"] if "fc.bias" in t else stream
        q, k, v = ((t[f"self_attn.{part}_proj"] @ read).unflatten(0, (-1, width)) for part in "qkv")
        self.keys.append(self.turn(k, place))
        self.values.append(v)
        q, mixed = self.turn(q, place), []
        for head in range(len(q)):
            own = head * len(k) // len(q)
            keys = torch.stack([key[own] for key in self.keys])
            weights = (keys @ q[head] * width**-0.5).softmax(0)
            mixed.append(weights @ torch.stack([value[own] for value in self.values]))
        stream = stream + t["self_attn.o_proj"] @ torch.cat(mixed)
        inner = rms(stream, t["post_attention_layernorm"], eps)
        gate = torch.nn.functional.silu(t["mlp.gate_proj"] @ inner) * (t["mlp.up_proj"] @ inner)
        out = stream + t["mlp.down_proj"] @ gate
        if not self.third:
            return out, out
        normed = rms(out, t["norm"], eps)
        return normed if self.normed_out else out, normed if self.feeds_normed else out


def twin_logits(
    model: Decoder, twin: Twin, states: torch.Tensor, below: Sequence[int]
) -> list[torch.Tensor]:
    table = model.embedded(torch.arange(model.vocab)).float()
    matrix = twin.t.get("lm_head")
    if matrix is None:
        matrix = model.head.weight.float()
    norm: Any = model.loop.norm  # type: ignore[union-attr]
    for place, token in enumerate(TEXT):
        state = states[place]
        if not twin.third:
            state = norm(state)
        read, left = twin(table[token], twin.taken(state), place)
    found = [matrix @ read]
    for depth, token in enumerate(below):
        read, left = twin(table[token], left, len(TEXT) + depth)
        found.append(matrix @ read)
    return found


LAYOUTS: dict[str, Any] = {
    "eagle": lambda model: eagle(model),
    "eagle without bias": lambda model: eagle(model, bias=False),
    "eagle3": lambda model: eagle3(model),
    "eagle3 of vllm": lambda model: eagle3(model, "layers.0."),
    "eagle3 with other taps": lambda model: eagle3(
        model, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    ),
    "specforge without a norm": lambda model: eagle3(model, norm_output=False),
    "a norm a tap": lambda model: eagle3(model, norms="each"),
    "a norm before fc": lambda model: eagle3(model, norms="all"),
    "speculators": lambda model: speculators(model),
    "norm before residual": lambda model: speculators(model, norm_before_residual=True),
    "norm handed on": lambda model: speculators(model, norm_output=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_a_published_head_says_what_its_own_code_says(layout: str, tmp_path: Path) -> None:
    config, tensors = LAYOUTS[layout](target())
    head, kept = load_any_head(written(tmp_path, config, tensors), target())
    assert (kept is None) == (head.kind == "eagle")
    states = states_of(target(), head.taps)
    said = logits_of(HeadModel(head, kept, target()), states, [7, 50, 7])
    wanted = twin_logits(target(), Twin(config, tensors), states, [7, 50, 7])
    for ours, twins in zip(said, wanted, strict=True):
        torch.testing.assert_close(ours, twins, rtol=2e-4, atol=2e-4)


@torch.inference_mode()
def test_the_twin_tells_the_variants_apart() -> None:
    """What the comparison rests on: every setting of a layout changes what is said."""
    states = states_of(target(), (2, 1, 0))
    told = []
    for more in ({}, {"norm_before_residual": True}, {"norm_output": True}, {"rope_theta": 9e3}):
        config, tensors = speculators(target(), **more)
        config["transformer_layer_config"] |= more
        told.append(torch.cat(twin_logits(target(), Twin(config, tensors), states, [7, 50])))
    for i, one in enumerate(told):
        for other in told[:i]:
            assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize("layout", ["eagle", "eagle3", "norm before residual"])
def test_greedy_tokens_are_those_of_plain_decoding(layout: str, tmp_path: Path) -> None:
    folder = written(tmp_path, *LAYOUTS[layout](target()))
    check_greedy(target(), "eagle" if layout == "eagle" else "eagle3", folder)


@pytest.mark.skipif(not library.is_available(), reason="the C library is not built")
@pytest.mark.parametrize("layout", ["eagle", "eagle3", "norm before residual", "norm handed on"])
@torch.inference_mode()
def test_the_library_says_what_torch_says(layout: str, tmp_path: Path) -> None:
    model = packed_target()
    config, tensors = LAYOUTS[layout](model)
    head, kept = load_any_head(written(tmp_path, config, tensors), model)
    quick = HeadModel(head, kept, model, TreeShape(3, 2, 6))
    assert quick.native is not None
    assert ("grows" in quick.caps) == (layout != "norm before residual")
    states = states_of(model, head.taps)
    below = [7, 50, 7]
    said = logits_of(quick, states, below)
    quick.native = None
    slow = logits_of(quick, states, below)
    for ours, torchs in zip(said, slow, strict=True):
        # Caches are bfloat16 and activations are rounded to 8 bits, in both.
        assert (ours - torchs).abs().max() < 0.02 * torchs.abs().max()
        assert int(ours.argmax()) == int(torchs.argmax())


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    config, tensors = eagle3(target())
    whole, _ = load_any_head(written(tmp_path / "whole", config, tensors), target())
    names = sorted(tensors)
    folder = written(tmp_path / "parts", config, {name: tensors[name] for name in names[:5]})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    rest = {f"model.{name}": tensors[name].contiguous() for name in names[5:]}
    save_file(rest, folder / "model-00002-of-00002.safetensors")
    parts, _ = load_any_head(folder, target())
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name])


def test_rows_of_a_matrix_follow_its_tokens_in_any_order(tmp_path: Path) -> None:
    config, tensors = eagle3(target())
    ids = tensors["d2t"] + torch.arange(40)
    turned = {**tensors, "lm_head.weight": tensors["lm_head.weight"].flip(0)}
    turned["d2t"] = ids.flip(0) - torch.arange(40)
    one: Any
    other: Any
    one, kept = load_any_head(written(tmp_path / "one", config, tensors), target())
    other, same = load_any_head(written(tmp_path / "other", config, turned), target())
    assert kept is not None and same is not None and torch.equal(kept, same)
    assert torch.equal(one.matrix.weight, other.matrix.weight)


def test_a_matrix_that_is_missing_is_the_targets_alone(tmp_path: Path) -> None:
    config, tensors = eagle3(target())
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    del config["draft_vocab_size"]
    head, kept = load_any_head(written(tmp_path, config, tensors), target())
    assert kept is None and head.matrix is None
    assert HeadModel(head, kept, target()).output.matrix is target().head


# What is wrong -> how the configuration and the tensors are changed, and what the error names.
WRONG: dict[str, tuple[Any, str]] = {
    "width": (lambda c, t: c.update(hidden_size=64), "hidden_size=64"),
    "target's width": (lambda c, t: c.update(target_hidden_size=64), "target_hidden_size=64"),
    "vocabulary": (lambda c, t: c.update(vocab_size=98), "vocab_size=98"),
    "marks": (lambda c, t: t.update(t2d=torch.ones(98, dtype=torch.bool)), "t2d has 98"),
    "depth": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
        r"layer_ids=\[2, 16, 29\]",
    ),
    "layers": (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
    "activation": (lambda c, t: c.update(hidden_act="gelu"), "hidden_act='gelu'"),
    "rotation": (
        lambda c, t: c.update(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "rope_scaling='llama3'",
    ),
    "missing": (lambda c, t: t.pop("midlayer.mlp.up_proj.weight"), "lacks midlayer.mlp.up_proj"),
    "missing norm": (lambda c, t: t.pop("norm.weight"), "lacks norm.weight"),
    "missing matrix": (lambda c, t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
    "missing map": (lambda c, t: t.pop("d2t"), "lacks d2t"),
    "unknown": (lambda c, t: t.update(lstm=torch.ones(2)), "has lstm, which"),
    "shape": (lambda c, t: t.update({"norm.weight": torch.ones(31)}), r"norm.weight is \(31,\)"),
    "rows": (
        lambda c, t: t.update({"lm_head.weight": torch.ones(39, 32)}),
        "lm_head.weight has 39 rows",
    ),
    "map": (lambda c, t: t.update(d2t=t["d2t"] + 90), "d2t: must lead to"),
    "two maps": (lambda c, t: t.update(t2d=~t["t2d"]), "t2d and d2t"),
    "table": (
        lambda c, t: t.update({"embed_tokens.weight": torch.randn(97, 32)}),
        "embed_tokens.weight is not the table",
    ),
    "size of the table": (
        lambda c, t: t.update({"embed_tokens.weight": torch.randn(97, 64)}),
        r"embed_tokens.weight is \(97, 64\)",
    ),
    "no number": (lambda c, t: c.update(num_attention_heads="many"), "config.json is damaged"),
    "layout": (lambda c, t: t.pop("fc.weight"), "none of the layouts"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    change, said = WRONG[wrong]
    config, tensors = eagle3(target())
    load_any_head(written(tmp_path / "right", config, tensors), target())
    change(config, tensors)
    with pytest.raises(BadModel, match=said):
        load_any_head(written(tmp_path / "wrong", config, tensors), target())


def test_folders_without_safetensors_are_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(eagle(target())[0]), "utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadModel, match=r"pytorch_model\.bin.*safetensors"):
        load_any_head(tmp_path, target())


def test_another_kind_and_another_algorithm_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "eagle", *eagle(target()))
    with pytest.raises(BadModel, match="is a head for eagle, not for eagle3; use --method eagle"):
        head_model(target(), "eagle3", "eagle3", str(folder), None)
    folder = written(tmp_path / "peagle", *speculators(target(), speculators_model_type="peagle"))
    with pytest.raises(BadModel, match="speculators_model_type='peagle'"):
        load_any_head(folder, target())
    folder = written(tmp_path / "cut", *eagle(target()))
    config = {**eagle(target())[0], "truncated_vocab_size": 50}
    with pytest.raises(BadModel, match="truncated_vocab_size=50"):
        load_any_head(written(folder, config, eagle(target())[1]), target())


def test_a_tokenizer_in_the_folder_must_be_the_targets(tmp_path: Path) -> None:
    folder = written(tmp_path, *eagle3(target()))
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<s>", "id": 2}]}
    (folder / "tokenizer.json").write_text(json.dumps(words), "utf-8")
    model = Decoder(families.tiny("llama"), "llama")
    model.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "<s>": 2})  # type: ignore[assignment]
    load_any_head(folder, model)
    model.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 1, "b": 0, "<s>": 2})  # type: ignore[assignment]
    with pytest.raises(BadModel, match="tokenizer is not that of"):
        load_any_head(folder, model)


def test_a_model_that_shows_no_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="hidden states"):
        load_any_head(written(tmp_path, *eagle3(target())), ToyRecurrent())


LONG = torch.randperm(97, generator=torch.Generator().manual_seed(2))[:24].tolist()


def knowing(folder: Path, ids: list[int], taps: tuple[int, ...]) -> Path:
    """A head that knows the text LONG by heart, if its taps are these."""
    config, tensors = eagle3(target(), eagle_aux_hidden_state_layer_ids=ids)
    for name in ("d2t", "t2d"):
        del tensors[name]
    config["draft_vocab_size"] = target().vocab
    twin, table = Twin(config, tensors), target().embedded(torch.arange(97)).float()
    states = states_of(target(), taps, LONG)
    pairs = enumerate(zip(LONG[:-1], states, strict=False))
    reads = [twin(table[token], twin.taken(state), place)[0] for place, (token, state) in pairs]
    wanted = torch.nn.functional.one_hot(torch.tensor(LONG[1:]), 97).float()
    tensors["lm_head.weight"] = (torch.linalg.pinv(torch.stack(reads)) @ wanted).T
    return written(folder, config, tensors)


@torch.inference_mode()
def test_how_layers_are_counted_is_measured(tmp_path: Path) -> None:
    folder = knowing(tmp_path / "output", [1, 0, 2], (2, 1, 3))
    with pytest.raises(BadModel, match=r"by their output .*--taps output"):
        check_taps(folder, target(), LONG)
    shares = check_taps(folder, target(), LONG, "output")
    assert shares["output"] == 1.0 and shares["input"] < 0.5
    folder = knowing(tmp_path / "input", [1, 0, 3], (1, 0, 3))
    assert check_taps(folder, target(), LONG) == {"input": 1.0}
    with pytest.raises(BadModel, match="has 3 layers"):
        load_any_head(folder, target(), taps="output")
    with pytest.raises(BadConfig, match="taps='both'"):
        load_any_head(folder, target(), taps="both")
    with pytest.raises(BadConfig, match="3 tokens"):
        check_taps(folder, target(), LONG[:2])


def test_the_taps_of_specforge_are_known_at_sight(tmp_path: Path) -> None:
    deep = Decoder(families.tiny("llama", num_hidden_layers=8), "llama")
    for ids, taps in (([1, 3, 4], (2, 4, 5)), ([2, 4, 5], (2, 4, 5)), ([0, 1, 2], (0, 1, 2))):
        config, tensors = eagle3(deep, eagle_aux_hidden_state_layer_ids=ids)
        head, _ = load_any_head(written(tmp_path / str(ids[1]), config, tensors), deep)
        assert head.taps == taps


EXPORTED = ["eagle3", "a norm a tap", "a norm before fc", "norm before residual", "norm handed on"]


@pytest.mark.parametrize("layout", EXPORTED)
@torch.inference_mode()
def test_what_is_exported_says_the_same_when_it_is_loaded(layout: str, tmp_path: Path) -> None:
    config, tensors = LAYOUTS[layout](target())
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    head, kept = load_any_head(written(tmp_path / "in", config, tensors), target())
    list_formats()["speculators"].write_head(head, kept, target(), tmp_path / "out")
    save_head(head, kept, tmp_path / "own", target(), {})
    states = states_of(target(), head.taps)
    said = logits_of(HeadModel(head, kept, target()), states, [7, 50])
    for name in ("out", "own"):
        again, tokens = load_any_head(tmp_path / name, target(), "eagle3")
        assert torch.equal(tokens, kept) and again.taps == head.taps  # type: ignore[arg-type]
        back = logits_of(HeadModel(again, tokens, target()), states, [7, 50])
        assert all(torch.equal(a, b) for a, b in zip(said, back, strict=True))
    found = load_file(tmp_path / "out" / "model.safetensors")
    names = {name.replace("midlayer.", "layers.0."): t.shape for name, t in tensors.items()}
    assert {name: t.shape for name, t in found.items()} == names
    assert found["d2t"].dtype == torch.int64 and found["t2d"].dtype == torch.bool
    told = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert told["speculators_model_type"] == "eagle3" and told["draft_vocab_size"] == 40
    assert told["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert told["eagle_aux_hidden_state_layer_ids"] == [2, 1, 0]


@torch.inference_mode()
def test_a_head_that_borrows_the_targets_matrix_is_exported_with_its_rows(tmp_path: Path) -> None:
    head: Any = build_head("eagle3", target_shape(target()))
    kept = torch.tensor([1, 5, 7, 90])
    list_formats()["speculators"].write_head(head, kept, target(), tmp_path)
    again: Any
    again, tokens = load_any_head(tmp_path, target())
    assert torch.equal(tokens, kept)  # type: ignore[arg-type]
    rows = target().head.weight[kept].bfloat16().float()
    assert torch.equal(again.matrix.weight, rows)


def test_what_a_layout_cannot_hold_is_not_written(tmp_path: Path) -> None:
    writer = list_formats()["speculators"]
    with pytest.raises(BadConfig, match="holds no eagle head"):
        writer.write_head(build_head("eagle", target_shape(target())), None, target(), tmp_path)
    bare = build_head("eagle3", target_shape(target()), {"last_norm": False})
    with pytest.raises(BadConfig, match="without a last norm"):
        writer.write_head(bare, None, target(), tmp_path)
    with pytest.raises(BadConfig, match="cannot be written"):
        list_formats()["eagle3"].write_head(bare, None, target(), tmp_path)
    assert not list(tmp_path.iterdir())
