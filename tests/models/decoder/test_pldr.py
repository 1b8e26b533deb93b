"""PLDR-LLM: its rows are those of a plain computation written here, under the metric of the prompt
alone; what drafts, trees, batches and chunks do changes nothing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import foretell
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask
from foretell.errors import BadModel, ForetellError, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.pldr import MetricCache, MetricDecoder
from foretell.models.decoder.pldr_model import (
    PldrConfig,
    PldrForCausalLM,
    freeze_metrics,
    infer_metrics,
)
from foretell.ops.power_law import metric_spread
from foretell.strategies.plain import Plain
from tests import tiny

D, H, LAYERS, E = 8, 4, 2, 32
PROMPT = [(7 * i * i + 3 * i + 5) % 97 for i in range(19)]
OTHER = [(5 * i + 11) % 97 for i in range(12)]


def made(kind: str | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A tiny model with weights of some size everywhere, biases too."""
    torch.manual_seed(seed)
    config = PldrConfig(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=E,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=H,
        head_dim=D,
        max_position_embeddings=tiny.CONTEXT,
        num_reslayerA=2,
        A_dff=12,
        custom_G_type=kind,
        bos_token_id=0,
        eos_token_id=None,
    )
    hf = PldrForCausalLM(config)
    with torch.no_grad():
        for name, p in hf.named_parameters():
            scale = 0.5 if name.endswith(("lst", "weight")) else 0.2
            p += scale * torch.randn_like(p) * (0.3 if p.ndim > 1 else 1.0)
    return hf.to(dtype).requires_grad_(False).eval()


# --- the plain computation


def norm(x: torch.Tensor, w: Any, name: str) -> torch.Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    out: torch.Tensor = x * w[f"{name}.weight"] + w[f"{name}.bias"]
    return out


def linear(x: torch.Tensor, w: Any, name: str) -> torch.Tensor:
    out: torch.Tensor = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
    return out


def gated(x: torch.Tensor, w: Any, name: str) -> torch.Tensor:
    gate = linear(x, w, f"{name}.gluw1")
    inner = gate / (1 + (-gate).exp()) * linear(x, w, f"{name}.gluw2")
    return linear(inner, w, f"{name}.gluw3")


def turned(x: torch.Tensor) -> torch.Tensor:
    """x (n, H, D): channels 2 i and 2 i + 1 turn together."""
    out = torch.empty_like(x)
    for position in range(len(x)):
        for i in range(D // 2):
            angle = torch.tensor(position * 10000.0 ** (-2 * i / D), dtype=x.dtype)
            a, b = x[position, :, 2 * i], x[position, :, 2 * i + 1]
            out[position, :, 2 * i] = a * angle.cos() - b * angle.sin()
            out[position, :, 2 * i + 1] = b * angle.cos() + a * angle.sin()
    return out


def metric(q: torch.Tensor, w: Any, at: str) -> torch.Tensor:
    """G (H, D, D) of rotated queries (n, H, D)."""
    a = norm(torch.einsum("nhd,nhe->hde", q, q), w, f"{at}.layernorm1")
    for unit in range(2):
        before, name = a, f"{at}.reslayerAs.{unit}"
        for layer in range(2):
            a = gated(a, w, f"{name}.denseAs.{layer}")
        a = norm(a + before, w, f"{name}.layernormA")
    part = {k: w[f"{at}.plgatt_layer.{k}"] for k in ("Wlst", "blst", "pwlst", "alst", "balst")}
    x = part["Wlst"] @ a + part["blst"]
    positive = x * x / (1 + (-x).exp()) + 1e-9
    out: torch.Tensor = part["alst"] @ positive ** part["pwlst"] + part["balst"]
    return out


def plain(
    w: Any, ids: Sequence[int], read: int | None = None, kind: str = "net"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (n, V), and metrics (L, H, D, D) that the first `read` tokens have (None: all).

    `kind`: "net"; "none", without any metric.
    """
    count = len(ids)
    first = None
    if kind == "net" and read is not None and read < count:
        first = plain(w, ids[:read])[1]
    h = norm(w["decoder.embedding.weight"][list(ids)] * E**0.5, w, "decoder.layernorm1")
    seen = torch.ones(count, count).tril().bool()
    metrics = []
    for i in range(LAYERS):
        at = f"decoder.dec_layers.{i}"
        q, k, v = (linear(h, w, f"{at}.mha1.{n}").view(count, H, D) for n in ("wq", "wk", "wv"))
        q, k = turned(q), turned(k)
        if kind == "net":
            metrics.append(metric(q, w, f"{at}.mha1") if first is None else first[i])
            q = torch.einsum("nhd,hde->nhe", q, metrics[-1])
        scores = torch.einsum("nhd,mhd->hnm", q, k) / D**0.5
        law = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hnm,mhd->nhd", law, v).reshape(count, -1)
        h = norm(linear(out, w, f"{at}.mha1.dense") + h, w, f"{at}.layernorm1")
        h = norm(gated(h, w, f"{at}.ffn") + h, w, f"{at}.layernorm2")
    return linear(h, w, "final_layer"), torch.stack(metrics) if metrics else torch.zeros(0)


def rows(model: Any, tokens: Sequence[int], tree: TokenTree, chunk: int = 99) -> torch.Tensor:
    cache, done = model.cache(), False
    while not done:
        job, done = cache.prepare(Ask(tree), tokens, chunk)
        reply = model.forward([job])[0]
    out: torch.Tensor = reply.logits
    return out


# --- laws


def test_rows_are_those_of_the_plain_computation_under_the_prompts_metric() -> None:
    """In one piece or in pieces, at every node of a tree: later tokens never change the metric."""
    hf = made()
    w = hf.state_dict()
    model = MetricDecoder(hf, "tiny")
    assert model.loop is not None and {"layers", "taps", "tree"} <= model.caps
    torch.testing.assert_close(hf(torch.tensor([PROMPT])).logits[0], plain(w, PROMPT)[0])
    torch.testing.assert_close(infer_metrics(hf, torch.tensor(PROMPT)), plain(w, PROMPT)[1])
    tree = TokenTree(PROMPT[-1]).chain([3, 44]).chain([60]).chain([8], at=1)
    for chunk in (99, 5, 1):
        found = rows(model, PROMPT, tree, chunk)
        for node in range(len(tree)):
            path = [*PROMPT, *tree.tokens_to(node)]
            wanted, _ = plain(w, path, read=len(PROMPT))
            torch.testing.assert_close(found[node], wanted[-1], rtol=1e-7, atol=1e-7)
    # A metric of the whole path, or none, gives other rows: these would be noticed.
    path = [*PROMPT, *tree.tokens_to(2)]
    for other in (plain(w, path), plain(w, path, kind="none")):
        assert not torch.allclose(found[2], other[0][-1], atol=1e-3)


def test_the_identity_is_ordinary_attention() -> None:
    hf = made("identity")
    model = Decoder(hf, "identity")
    tree = TokenTree(PROMPT[-1]).chain([3, 44]).chain([60])
    found = rows(model, PROMPT, tree, 5)
    for node in range(len(tree)):
        wanted = plain(hf.state_dict(), [*PROMPT, *tree.tokens_to(node)], kind="none")[0][-1]
        assert float((found[node] - wanted).abs().max()) < 1e-6
    with torch.no_grad():
        hf.decoder.past_G_values[1, 2, 0, 0, 0, 1] += 0.1
    assert float((rows(model, PROMPT, tree, 5) - found).abs().max()) > 1e-4


def test_a_metric_that_is_constant_is_the_cached_one_at_any_length() -> None:
    """With W = 0 it depends on no text, and cached and computed rows are one. Where it depends on
    the text, how far metrics and rows are apart is told.
    """
    hf = made()
    with torch.no_grad():
        for layer in hf.decoder.dec_layers:
            layer.mha1.plgatt_layer.Wlst.zero_()
    texts = [PROMPT[:5], PROMPT, OTHER]
    assert metric_spread([infer_metrics(hf, torch.tensor(text)) for text in texts])["rmse"] == 0
    tree = TokenTree(PROMPT[-1]).chain([3, 44, 60])
    found = rows(MetricDecoder(hf, "tiny"), PROMPT, tree)
    whole = hf(torch.tensor([[*PROMPT, 3, 44, 60]])).logits[0, -4:]
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
    apart = metric_spread([infer_metrics(made(), torch.tensor(text)) for text in texts])
    assert apart["rmse"] > 1e-3 and apart["determinant"] > 1e-3


@pytest.fixture(scope="module")
def lm() -> foretell.LM:
    return foretell.wrap(made(dtype=torch.float32), tiny.tokenizer(), name="tiny")


def test_drafts_batches_and_policies_have_the_tokens_of_plain_decoding(lm: foretell.LM) -> None:
    target = lm.models["target"]
    assert type(target) is MetricDecoder
    prompts = [PROMPT, OTHER, PROMPT + OTHER]
    alone = [lm.generate(p, method="plain", max_new_tokens=16).tokens for p in prompts]
    w = target.hf.double().state_dict()
    wanted = list(PROMPT)
    for _ in range(16):
        wanted.append(int(plain(w, wanted, read=len(PROMPT))[0][-1].argmax()))
    target.hf.float()
    assert alone[0] == wanted[len(PROMPT) :]
    accepted = 0
    for method in ("plain", "ngram:nodes=6", "token-recycling:nodes=8"):
        outs = lm.generate(prompts, method=method, max_new_tokens=16)
        assert [out.tokens for out in outs] == alone, method
        accepted += sum(out.stats.accepted for out in outs)
    assert accepted
    kept = lm.generate(PROMPT, method="ngram", max_new_tokens=16, kv="h2o:budget=24")
    assert (
        kept.tokens
        == lm.generate(PROMPT, method="plain", max_new_tokens=16, kv="h2o:budget=24").tokens
    )


def test_a_text_that_is_computed_again_has_its_prompts_metric() -> None:
    """As after preemption: the new cache sees a longer text first."""
    model = MetricDecoder(made(), "tiny")
    request = Request(PROMPT, Plain())
    first, text = model.cache(request), [*PROMPT, 3, 44]
    job, _ = first.prepare(Ask(TokenTree(PROMPT[-1])), PROMPT, 99)
    model.forward([job])
    again = model.cache(request)
    again.prepare(Ask(TokenTree(44)), text, 99)
    assert isinstance(first, MetricCache) and isinstance(again, MetricCache)
    assert first.metric is not None and first.metric is again.metric
    assert first.fork().metric is first.metric  # type: ignore[attr-defined]
    other = model.cache()
    other.prepare(Ask(TokenTree(44)), text, 99)
    assert isinstance(other, MetricCache) and other.metric is not None
    assert not torch.allclose(other.metric, first.metric, rtol=1e-3)
    assert first.bytes - job.cache.base * model.row_bytes >= model.state_bytes == LAYERS * H * 512
    first.forget()
    assert first.metric is again.metric and not first.sharable
    assert len(model.texts) == 1
    del request, first, again, job
    assert not model.texts


def test_a_frozen_metric_is_an_ordinary_decoder_on_disk(tmp_path: Path, lm: foretell.LM) -> None:
    hf: Any = lm.models["target"].hf  # type: ignore[attr-defined]
    metrics = infer_metrics(hf, torch.tensor(PROMPT))
    fixed = freeze_metrics(hf, metrics)
    place = tiny.save(fixed, tmp_path / "frozen")
    said = json.loads((place / "config.json").read_text())
    assert said["model_type"] == "pldrllm" and said["custom_G_type"] == "external"
    loaded = foretell.load(place, backend="torch")
    model: Any = loaded.models["target"]
    assert type(model) is Decoder and model.cache().sharable
    assert torch.equal(model.hf.decoder.past_G_values[:, 2, 0], metrics)
    want = lm.generate(PROMPT, method="plain", max_new_tokens=16).tokens
    assert loaded.generate(PROMPT, method="ngram", max_new_tokens=16).tokens == want
    moved = loaded.generate(
        PROMPT, method="plain", max_new_tokens=8, kv="streaming-llm:window=10,sinks=2"
    )
    assert len(moved.tokens) == 8  # keys are turned to other positions


NAMES = """
decoder.embedding.weight decoder.layernorm1.weight decoder.layernorm1.bias
final_layer.weight final_layer.bias
""".split()
OF_LAYER = """
mha1.wq mha1.wk mha1.wv mha1.dense mha1.layernorm1 layernorm1 layernorm2
ffn.gluw1 ffn.gluw2 ffn.gluw3
""".split()
OF_UNIT = [f"denseAs.{k}.gluw{n}" for k in range(2) for n in (1, 2, 3)] + ["layernormA"]


def test_folders_have_the_published_names(tmp_path: Path) -> None:
    """A folder as on the hub is read, with settings that say nothing here."""
    hf = made(dtype=torch.float32)
    wanted = {*NAMES}
    for i in range(LAYERS):
        at = f"decoder.dec_layers.{i}"
        parts = [*OF_LAYER, *(f"mha1.reslayerAs.{j}.{n}" for j in range(2) for n in OF_UNIT)]
        wanted |= {f"{at}.{part}.{kind}" for part in parts for kind in ("weight", "bias")}
        net = ("Wlst", "blst", "pwlst", "alst", "balst")
        wanted |= {f"{at}.mha1.plgatt_layer.{name}" for name in net}
    assert hf.state_dict().keys() == wanted
    place = tiny.save(hf, tmp_path / "model")
    raw = json.loads((place / "config.json").read_text())
    raw |= {"rope_scaling": None, "reference_rope": True, "auto_map": {"AutoConfig": "x.Y"}}
    raw |= {"architectures": ["PldrllmForCausalLM"], "cache_first_G": False, "use_cache": True}
    (place / "config.json").write_text(json.dumps(raw))
    with warnings.catch_warnings():  # transformers' own, of the setting that is null
        warnings.simplefilter("ignore", FutureWarning)
        model: Any = foretell.load(place).models["target"]
    assert type(model) is MetricDecoder
    torch.testing.assert_close(
        model.score(PROMPT)[0].double(), plain(hf.double().state_dict(), PROMPT)[0][-1],
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip
    assert {*made("random").state_dict()} - wanted == {
        "decoder.past_G_values",
        "decoder.past_G_values_status",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reference_rope": False}, "reference_rope"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"custom_G_type": "other"}, "custom_G_type"),
        ({"head_dim": 16}, "head_dim=16"),
        ({"custom_G_type": "external"}, "past_G_values"),
        ({"num_reslayerA": 3}, "reslayerAs.2"),
    ],
)
def test_other_settings_are_refused_in_a_line(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    place = tiny.save(made(dtype=torch.float32), tmp_path / "model")
    raw = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(BadModel) as caught:
        foretell.load(place)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_needs_a_metric_that_stays_is_refused(tmp_path: Path, lm: foretell.LM) -> None:
    place = tiny.save(made(dtype=torch.float32), tmp_path / "model")
    for options in ({"backend": "openvino"}, {"dtype": "int8"}, {"exact_bits": True}):
        with pytest.raises(ForetellError, match="freeze the metric"):
            foretell.load(place, **options)  # type: ignore[arg-type]
    model: Any = lm.models["target"]
    for ask in (
        lambda: model.layer_parallel(2),
        lambda: model.retrieving_model(8, 4),
        lambda: model.learning(),
        lambda: model.adapted("folder"),
    ):
        with pytest.raises(Unsupported, match="freeze it"):
            ask()
    # A plain adapter around the same modules has caches without metrics.
    with pytest.raises(Unsupported, match="caches that keep it"):
        Decoder(model.hf, "bare")
