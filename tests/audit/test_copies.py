"""The audited models are those that are served, backends and their fallbacks included."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy as copied
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.api.lm import LM
from foretell.audit.copies import backend_names, float32_copy, served_copy
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.tree import TokenTree
from foretell.loading.wrap import wrap
from foretell.models import backend_registry as registry
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.packed import PackedLinear, pack_layers
from foretell.testing.toy import Toy
from tests import tiny


class Plain:
    """A backend that leaves every step to torch."""

    name = "plain"
    size = 0
    sizes: tuple[int, ...] = ()
    exact_bits = False
    takes_layers = False
    takes_segments = False
    takes_watched = False
    takes_canvases = False
    most_jobs = 0

    def __init__(
        self, loop: Any, layout: Any, dtype: torch.dtype, vocab: int, fallback: Any = None
    ):
        self.layout = layout
        self.dtype = dtype
        self.fallback = fallback

    def cache(self) -> Cache:
        return Cache(self.layout, self.dtype, torch.device("cpu"))

    def warm(self, job: Job, taps: Sequence[int] = ()) -> None:
        pass

    def release(self) -> None:
        pass

    def __call__(self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()) -> None:
        return None


class Narrow(Plain):
    """One that takes bfloat16 only."""

    name = "narrow"

    def __init__(
        self, loop: Any, layout: Any, dtype: torch.dtype, vocab: int, fallback: Any = None
    ):
        super().__init__(loop, layout, dtype, vocab, fallback)
        if dtype != torch.bfloat16:
            raise LookupError(f"it does not compute in {dtype}")


class Exact(Narrow):
    """One whose rows hang on no other row, in bfloat16 only."""

    name = "exact"
    exact_bits = True


class First(Plain):
    """One that leaves to another backend what it does not compute."""

    name = "first"


@pytest.fixture(autouse=True)
def runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry knows these backends."""
    makers = {
        kind.name: SimpleNamespace(make_backend=kind) for kind in (Plain, Narrow, Exact, First)
    }
    monkeypatch.setattr(registry, "load_backend", makers.__getitem__)


def served(*, fallback: bool, draft: bool = False) -> LM:
    """A bfloat16 model on First, after it Plain or torch."""
    second = tiny.relative(tiny.llama()).bfloat16() if draft else None
    lm = wrap(tiny.llama().bfloat16(), tiny.tokenizer(), second, "tiny")
    for model in lm.models.values():
        assert isinstance(model, Decoder)
        if fallback:
            model.use(Plain)
        make: Any = First
        model.use(partial(make, fallback=model.backend))
    return lm


@pytest.mark.parametrize("fallback", [True, False])
def test_the_copy_has_the_backends_and_their_fallback(fallback: bool) -> None:
    lm = served(fallback=fallback, draft=True)
    copy = float32_copy(lm)
    assert copy.dtype == torch.float32
    for name, model in copy.models.items():
        assert isinstance(model, Decoder) and model.dtype == torch.float32
        backend: Any = model.backend
        assert type(backend) is First and backend.dtype == torch.float32
        assert backend is not lm.models[name].backend  # type: ignore[attr-defined]
        assert type(backend.fallback) is (Plain if fallback else type(None))
    names = "first, else plain, else torch" if fallback else "first, else torch"
    assert copy.backend == served_copy(lm).backend == names


def test_a_model_on_torch_stays_there() -> None:
    lm = tiny.lm(torch.bfloat16)
    assert float32_copy(lm).backend == served_copy(lm).backend == "torch"


def test_an_backend_that_refuses_float32_is_named_with_its_reason() -> None:
    lm = wrap(tiny.llama().bfloat16(), tiny.tokenizer(), name="tiny")
    lm.models["target"].use(Narrow)  # type: ignore[attr-defined]
    copy = float32_copy(lm)
    assert copy.models["target"].backend is None  # type: ignore[attr-defined]
    assert copy.backend == (
        "torch; narrow refuses the target model in float32: it does not compute in torch.float32"
    )


def test_exact_bits_of_an_backend_are_not_asked_of_torch_in_its_place() -> None:
    """Its copy is an ordinary decoder: what is exact in torch needs weights of 8 or 4 bits."""
    lm = served(fallback=False, draft=True)
    for model in lm.models.values():
        assert isinstance(model, Decoder)
        model.use(Exact)
        assert model.exact_bits
    copy = float32_copy(lm)
    for model in copy.models.values():
        assert isinstance(model, Decoder) and model.dtype == torch.float32
        assert model.backend is None and not model.exact_bits
    assert copy.backend == (
        "torch; exact refuses the target model in float32: it does not compute in torch.float32"
        "; exact refuses the draft model in float32: it does not compute in torch.float32"
    )


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_of_16_bits_are_widened_like_others(tied: bool) -> None:
    """A packed product rounds what it reads to 16 bits, whatever format the model has."""
    hf = tiny.llama(tie_word_embeddings=tied, attention_bias=True).bfloat16()
    wide = wrap(copied(hf).float()).models["target"]
    pack_layers(hf, "bfloat16")
    model = float32_copy(wrap(hf)).models["target"]
    tree = TokenTree(5).chain([7, 2]).chain([9])
    assert torch.equal(model.score([3, 1, 5], tree), wide.score([3, 1, 5], tree))
    assert isinstance(model, Decoder)
    assert not [part for part in model.hf.modules() if isinstance(part, PackedLinear)]
    narrow = tiny.llama().bfloat16()
    pack_layers(narrow, "int8")
    model = float32_copy(wrap(narrow)).models["target"]
    assert isinstance(model, Decoder) and model.matrices == "int8"


def test_a_copy_keeps_name_tokenizer_and_other_models() -> None:
    second = tiny.relative(tiny.llama()).bfloat16()
    judge = tiny.llama().bfloat16()
    lm = wrap(tiny.llama().bfloat16(), tiny.tokenizer(), second, models={"judge": judge})
    copy = float32_copy(lm)
    assert copy.models.keys() == lm.models.keys() == {"target", "draft", "judge"}
    for name, model in lm.models.items():
        assert copy.models[name].dtype == torch.float32
        assert copy.models[name].name == model.name
        assert copy.models[name].tokenizer is model.tokenizer


def test_a_model_of_another_runtime_is_named_by_itself() -> None:
    assert backend_names(Toy(name="other")) == "other"


def test_a_draft_model_without_weights_to_widen_is_kept() -> None:
    lm = wrap(tiny.llama().bfloat16(), tiny.tokenizer(), name="tiny")
    lm.models["draft"] = draft = Toy(lm.models["target"].vocab)
    assert float32_copy(lm).models["draft"] is draft
