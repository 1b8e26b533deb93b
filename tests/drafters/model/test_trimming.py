"""A trimmed draft model: its rows are the whole one's where tokens were kept, no law changes, and
fewer rows are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foretell
from foretell.backends import native
from foretell.core.model import Computed
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.model import vocabulary as trimming
from foretell.drafters.model.trimming import NEVER, Trimmed, cut_head, head_share, trim_head
from foretell.engine.cost_profile import model_identity
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadFile, Unsupported
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.packed import PackedLinear, pack_layers
from foretell.native.packing import unpack_matrix
from foretell.native.rounding import DTYPES, quantize_matrix
from foretell.testing.toy import Toy, ToyParallel
from tests import laws, tiny
from tests.models.decoder.families import VOCAB
from tests.models.decoder.families import tiny as family
from tests.native.machines import built

SPECS = ("draft:length=2", "draft:drafts=2,length=2", "rsd-s", "rsd-c", "dyspec")
PARALLEL = ("easyspec:length=2", "easyspec:drafts=2,length=2")
PROMPT = [3, 1, 4, 1, 5]


class Few(Toy):
    """A toy that computes rows of some of its tokens alone."""

    def __init__(self, kept: Sequence[int], *args: Any, **fields: Any):
        super().__init__(*args, **fields)
        self.kept = list(kept)

    def compute(self, jobs: Any, taps: Any) -> Computed:
        computed = Toy.compute(self, jobs, taps)
        computed.logits = computed.logits[:, self.kept]
        return computed

    def layer_parallel(self, size: int) -> FewParallel:
        return FewParallel(self, size)


class FewParallel(ToyParallel):
    """The same for a toy that is rough below the root of a tree."""

    kept: list[int]
    compute: Any = Few.compute


def trimmed_world(spec: str, kept: Sequence[int], vocab: int) -> dict[str, Any]:
    models: dict[str, Any] = laws.world(laws.build(spec), vocab)
    whole = models["draft"]
    few = Few(kept, vocab, whole.seed, whole.noise, copy=whole.copy, name="few")
    models |= {"draft": Trimmed(few, kept, vocab)}
    return models | dict(laws.build(spec).bring(models))


# --- laws


def test_rows_have_all_tokens_again() -> None:
    whole = Toy(6, 2)
    view = Trimmed(Few([1, 4, 5], 6, 2), [1, 4, 5], 6)
    rows, want = view.score([1, 2, 3]), whole.score([1, 2, 3])
    assert rows.shape == want.shape and torch.equal(rows[:, [1, 4, 5]], want[:, [1, 4, 5]])
    assert bool((rows[:, [0, 2, 3]] == NEVER).all())
    assert view.name == "toy[3 of 6 tokens]"


def test_what_keeps_all_tokens_is_the_model_itself() -> None:
    whole, view = Toy(5, 2), Trimmed(Few(range(5), 5, 2), range(5), 5)
    tree = TokenTree(3).chain([1, 2]).chain([4])
    assert torch.equal(view.score([1, 2, 3], tree), whole.score([1, 2, 3], tree))


@pytest.mark.parametrize("spec", SPECS + PARALLEL)
def test_the_law_is_the_targets_for_any_kept_tokens(spec: str) -> None:
    draw = np.random.default_rng(3)
    settings = ("plain", "top-p", "penalties", "grammar", "form, ends")
    for i, name in enumerate(settings):
        vocab = 3 if name.startswith("form") else 4
        kept = sorted(draw.choice(vocab, 1 + i % 3, replace=False).tolist())
        setting = laws.SETTINGS[name]
        sampling = replace(setting.sampling, max_new_tokens=2)
        setting = replace(setting, sampling=sampling)
        models = trimmed_world(spec, kept, vocab)
        law = laws.enumerate_law(laws.build(spec), laws.PROMPT, setting, models)
        want = laws.reference(models["target"], laws.PROMPT, setting)
        assert law.distance(want) < laws.EXACT, f"{name}, {kept}"
        assert law.drafted


def test_rough_rows_of_a_trimmed_model_that_are_kept_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Power: what a rough forward wrote stands in the cache, and other rows follow from it."""
    models = trimmed_world("easyspec", [0, 1, 2], 3)
    rough = models["easyspec"]
    tokens = [1, 2]

    def rows() -> torch.Tensor:
        cache, tree = rough.cache(), TokenTree(tokens[-1])
        job, _ = cache.prepare(Ask(tree), tokens, 9)
        rough.forward([job])
        tree.add(0, 1)
        job, _ = cache.prepare(Ask(tree, rows=[1]), tokens, 9)
        rough.forward([job])
        job, _ = cache.prepare(Ask(TokenTree(0)), [*tokens, 1, 0], 9)
        return rough.forward([job])[0].logits

    ordinary = models["draft"].score([*tokens, 1, 0])
    assert torch.equal(rows(), ordinary)
    monkeypatch.setattr("foretell.drafters.model.trimming.distrust_drafts", lambda job: None)
    assert not torch.equal(rows(), ordinary)


def test_a_law_that_is_not_the_declared_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: drafts drawn from the kept tokens, but declared with the whole model's law."""
    from foretell.core.tree import Law
    from foretell.drafters.model import chains

    models = trimmed_world("draft", [0, 2], 3)
    whole = laws.world(laws.build("draft"), 3)["draft"]
    law = whole.score(list(laws.PROMPT))[0].softmax(-1)
    monkeypatch.setattr(chains, "Law", lambda q: Law(law))
    setting = laws.Setting(Sampling(temperature=1.0, max_new_tokens=2))
    found = laws.enumerate_law(laws.build("draft:length=1"), laws.PROMPT, setting, models)
    assert found.distance(laws.reference(models["target"], laws.PROMPT, setting)) > 1e-3


def test_the_declared_law_is_filtered_after_trimming() -> None:
    """With top-p 0.6 the whole model would keep other tokens than it does of those left."""
    kept = [1, 3, 4]
    models = trimmed_world("draft", kept, 6)
    sampling = Sampling(temperature=1.0, top_p=0.6, max_new_tokens=9)
    engine = Engine(models)
    strategy: Any = laws.build("draft:length=1")
    live = engine.add(Request(laws.PROMPT, strategy, sampling))
    trees: list[TokenTree] = []
    spy = type(strategy.drafter).steps

    def steps(self: Any, *args: Any) -> Any:
        tree = yield from spy(self, *args)
        trees.append(tree)
        return tree

    try:
        type(strategy.drafter).steps = steps
        laws.finish(engine, live)
    finally:
        type(strategy.drafter).steps = spy
    law = trees[0].laws[1]
    assert law is not None
    row = Toy(6, 3, noise=0.6, copy=0.5).score(list(laws.PROMPT))[0]
    alone = torch.full_like(row, -torch.inf)
    alone[kept] = row[kept]
    wanted = live.ctx.sampler.laws(alone[None])[0]
    assert law.probs.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
    assert float(law.probs.sum()) == pytest.approx(1.0) and not law.probs[[0, 2, 5]].any()


def test_a_grammar_that_allows_no_kept_token_ends_nothing() -> None:
    models = trimmed_world("draft", [0], 3)
    for temperature in (0.0, 1.0):
        setting = laws.formed("(bc)*", 3, temperature=temperature, max_new_tokens=6)
        for spec in SPECS:
            live = laws.generate(laws.build(spec), [1, 2], setting, models)
            assert laws.spell(live.ctx.output) == "bcbcbc"


@pytest.mark.parametrize("kept", [(), (2, 1), (1, 1), (-1, 2), (1, 6)])
def test_wrong_ids_are_refused(kept: tuple[int, ...]) -> None:
    with pytest.raises(BadConfig, match="kept tokens"):
        Trimmed(Toy(6), kept, 6)


# --- real layers


def rows_of(model: Any) -> torch.Tensor:
    tree = TokenTree(PROMPT[-1]).chain([7, 2]).chain([9])
    rows: torch.Tensor = model.score(PROMPT, tree)
    return rows


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_neox", "cohere2"])
def test_kept_rows_are_the_whole_heads(name: str) -> None:
    kept = [0, 5, 6, 31, 64, 96]
    whole = foretell.wrap(family(name), name=name).models["target"]
    want = rows_of(whole)
    second = foretell.wrap(copy.deepcopy(family(name)), name=name).models["target"]
    assert isinstance(second, Decoder)
    view = trim_head(second, kept)
    assert view.vocab == VOCAB and second.head.weight.shape[0] == len(kept)
    rows = rows_of(view)
    assert float((rows[:, kept] - want[:, kept]).abs().max()) <= 1e-5
    left_out = [token for token in range(VOCAB) if token not in kept]
    assert bool((rows[:, left_out] == NEVER).all())


def test_tied_embeddings_stay_whole_on_the_side_of_the_input() -> None:
    model = tiny.llama(tie_word_embeddings=True)
    want = rows_of(foretell.wrap(model).models["target"])
    second = foretell.wrap(copy.deepcopy(model)).models["target"]
    assert isinstance(second, Decoder)
    share = head_share(second)
    hf: Any = second.hf
    weights = sum(p.numel() for p in hf.parameters())
    assert share == pytest.approx(32 / weights)
    view = trim_head(second, [0, 9, 200])
    assert hf.get_input_embeddings().weight.shape[0] == second.known_ids == view.vocab
    assert float((rows_of(view)[:, [0, 9, 200]] - want[:, [0, 9, 200]]).abs().max()) <= 1e-5
    untied = foretell.wrap(tiny.llama()).models["target"]
    assert isinstance(untied, Decoder) and head_share(untied) == pytest.approx(share)


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("count", [1, 16, 37])
def test_a_packed_matrix_gives_up_rows(format: str, count: int) -> None:
    torch.manual_seed(4)
    whole = quantize_matrix(torch.randn(53, 64), format)
    rows = torch.randperm(53)[:count]
    few = whole.take(rows)
    assert few.outputs == count and torch.equal(unpack_matrix(few), unpack_matrix(whole)[rows])
    assert len(few.weights) * whole.blocks == len(whole.weights) * few.blocks
    layer = PackedLinear(whole, torch.randn(53), 64)
    x = torch.randn(3, 64)
    assert torch.equal(layer.take(rows)(x), layer(x)[:, rows])


@torch.inference_mode()
def goes_on_by_kept_tokens(view: Trimmed, kept: list[int], tied: bool) -> None:
    """A chain of one call names tokens, and what enters for them is what entered before."""
    text, found = [5, 9, 3], []
    for _ in range(4):
        job, _ = view.cache().prepare(Ask(TokenTree([*text, *found][-1])), [*text, *found], 99)
        found.append(int(view.forward([job])[0].logits[0].argmax()))
    job, _ = view.cache().prepare(Ask(TokenTree(3), rows=[0], follow=4), text, 99)
    followed = [token for token, _, _ in view.forward([job])[0].followed]
    assert followed == (found if tied else [])
    assert set(followed) <= set(kept)


@pytest.mark.parametrize("format", ["int8", "bfloat16"])
def test_a_packed_head_on_the_c_library(format: str) -> None:
    """Its backend computes the rows that are left, to the last bit those it computed before."""
    if not built():
        pytest.skip("the C library is not built")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    more: dict[str, Any] = {"num_key_value_heads": 1, "initializer_range": 0.1}
    more["tie_word_embeddings"] = format == "int8"
    hf = tiny.llama(**sizes, **more).to(torch.bfloat16)
    pack_layers(hf, format)
    model = foretell.wrap(hf).models["target"]
    assert isinstance(model, Decoder)
    model.use(native.make_backend)
    want = rows_of(model)
    before = model_identity(model)
    kept = [*range(3, 40), 300]
    view = trim_head(model, kept)
    rows = rows_of(view)
    assert torch.equal(rows[:, kept], want[:, kept])
    assert view.usual_backend == "native" and view.computed_by == "native" and view.exact_bits
    goes_on_by_kept_tokens(view, kept, tied=format == "int8")
    computed: Any = model.backend
    assert computed.vocab == len(kept) and computed.loop.head.packed.outputs == len(kept)
    assert model_identity(view) != before


def test_a_head_that_is_no_matrix_is_refused() -> None:
    model = foretell.wrap(tiny.llama()).models["target"]
    assert isinstance(model, Decoder)
    model.head = torch.nn.Sequential(model.head)
    with pytest.raises(Unsupported, match="a head that is one matrix"):
        cut_head(model, torch.tensor([1, 2]))


# --- loading


def test_a_draft_model_is_loaded_with_its_tokens(tmp_path: Path) -> None:
    target = tiny.save(tiny.llama(), tmp_path / "target")
    draft = tiny.save(tiny.relative(tiny.llama()), tmp_path / "draft")
    words = tiny.tokenizer()
    kept = [token for token in range(len(words)) if token % 3]

    def decode(ids: Sequence[int]) -> str:
        return str(words.decode(list(ids), skip_special_tokens=True))

    trimming.save_kept_tokens(tmp_path / "kept.json", kept, len(words), decode, [])
    options: dict[str, Any] = {"draft": draft, "backend": "torch"}
    lm = foretell.load(target, draft_vocab=tmp_path / "kept.json", **options)
    small = lm.models["draft"]
    assert isinstance(small, Trimmed) and small.kept.tolist() == [0, *kept]  # with the end
    plain = lm.generate("def add", "plain", max_new_tokens=24)
    for method in ("draft:nodes=4", "rsd-s:nodes=6", "dyspec:nodes=6"):
        out = lm.generate("def add", method, max_new_tokens=24)
        assert out.tokens == plain.tokens and out.stats.accepted
    with pytest.raises(BadConfig, match="there is no draft model"):
        foretell.load(target, draft_vocab=tmp_path / "kept.json")
    trimming.save_kept_tokens(tmp_path / "other.json", kept, len(words), lambda ids: "?", [])
    with pytest.raises(BadFile, match="another tokenizer"):
        foretell.load(target, draft_vocab=tmp_path / "other.json", **options)
