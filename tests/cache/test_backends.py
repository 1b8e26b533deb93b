"""No backend computes what it cannot see: policies, prefixes, evicted rows under windows."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from foretell.backends.graphs import GraphsBackend
from foretell.backends.onnxruntime import OnnxRuntimeBackend
from foretell.backends.openvino import OpenVinoBackend
from foretell.cache.cache import Cache
from foretell.cache.job import Job
from foretell.core.model import Computed
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.errors import Unsupported
from foretell.models.backend import Backend
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.spec import build_cache_policy
from foretell.strategies.plain import Plain
from tests import laws
from tests.cache.users import Evictor, Rounded, Sparse, run
from tests.kv.policies import small
from tests.models.decoder.families import tiny

TEXT = [(11 * i + i * i) % 90 for i in range(21)]
GREEDY = Sampling(max_new_tokens=20)


def missing(*names: str) -> bool:
    return any(importlib.util.find_spec(name) is None for name in names)


MAKERS: list[Any] = [
    pytest.param(partial(GraphsBackend, record=None), id="graphs"),
    pytest.param(
        OpenVinoBackend,
        id="openvino",
        marks=pytest.mark.skipif(missing("openvino"), reason="openvino is not installed"),
    ),
    pytest.param(
        OnnxRuntimeBackend,
        id="onnxruntime",
        marks=pytest.mark.skipif(
            missing("onnx", "onnxruntime"), reason="onnx and onnxruntime are not installed"
        ),
    ),
]
makers = pytest.mark.parametrize("make", MAKERS)
families = pytest.mark.parametrize("family", ["llama", "mistral"])  # without and with windows


class Counting(Backend):
    """A backend that notes which jobs it was given, and which of them it computed."""

    def __init__(self, inner: Backend):
        self.inner = inner
        self.given: list[Job] = []
        self.computed: list[Job] = []
        self.evicted = 0  # computed below rows some of which were evicted
        self.name = inner.name
        self.sizes = inner.sizes
        self.fallback = inner.fallback

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.inner.size

    def cache(self) -> Cache:
        return self.inner.cache()

    def __call__(
        self, jobs: Sequence[Job], threads: int, taps: Sequence[int] = ()
    ) -> Computed | None:
        self.given += jobs
        computed = self.inner(jobs, threads, taps)
        if computed is not None:
            self.computed += jobs
            self.evicted += sum(job.compacted for job in jobs)
        return computed


@cache
def by_torch(family: str) -> Decoder:
    return Decoder(tiny(family, head_dim=16), family, fused_blocks)


@cache
def quick(family: str, make: Any) -> Decoder:
    model = Decoder(tiny(family, head_dim=16), family, fused_blocks)
    model.use(make)
    assert model.backend is not None
    model.backend = Counting(model.backend)
    return model


def counted(model: Decoder) -> Counting:
    assert isinstance(model.backend, Counting)
    model.backend.given, model.backend.computed = [], []
    model.backend.evicted = 0
    return model.backend


@families
@makers
@pytest.mark.parametrize("policy", [Sparse, Rounded])
def test_attention_of_its_own_is_torchs(family: str, make: Any, policy: Any) -> None:
    """Beside a plain request, which the backend goes on to compute."""
    model, slow = quick(family, make), by_torch(family)
    strategy = laws.build("suffix")
    mine = Request(TEXT, strategy, GREEDY, policy=policy())
    other = Request(TEXT[:9], strategy, GREEDY, tenant="other")
    alone = [run({"target": slow}, request)[0].ctx.output for request in (mine, other)]
    assert alone[0] != run({"target": slow}, Request(TEXT, strategy, GREEDY))[0].ctx.output
    seen = counted(model)
    lives = run({"target": model}, mine, other)
    assert [live.ctx.output for live in lives] == alone
    assert all(job.plain for job in seen.given), "it was given attention it does not know"
    assert len(seen.computed) >= lives[1].ctx.stats.steps, "plain jobs stayed with torch"


@families
@makers
def test_evicted_rows(family: str, make: Any) -> None:
    """Computed where no layer has a window, which would count rows in place of positions."""
    model, slow = quick(family, make), by_torch(family)
    for spec in ("plain", "suffix", "token-recycling"):
        request = Request(TEXT, laws.build(spec), GREEDY, policy=Evictor())
        want = run({"target": slow}, request)[0].ctx.output
        seen = counted(model)
        assert run({"target": model}, request)[0].ctx.output == want
        assert bool(seen.evicted) == (family == "llama")


@families
@makers
@torch.inference_mode()
def test_the_rows_of_trees_over_evicted_rows(family: str, make: Any) -> None:
    model, slow = quick(family, make), by_torch(family)
    caches = [model.cache(), slow.cache()]
    for held in caches:
        held.use(Evictor())
    text = list(TEXT)
    for step in range(9):
        depth = 2 - step % 3
        tree = TokenTree(text[-1])
        if depth:
            tree.chain([3, 4][:depth]).chain([5, 6][:depth])
        got = []
        for each, held in zip((model, slow), caches, strict=True):
            whole = False
            while not whole:
                job, whole = held.prepare(Ask(tree), text, 99)
                reply = each.forward([job])[0]
            got.append(reply.logits)
        assert float((got[0] - got[1]).abs().max()) <= 1e-4 * float(got[1].abs().max())
        text += [5, 11] if depth else [7]
    assert len(caches[0].row_positions()) < 10 and caches[0].length > 30


@makers
def test_a_shared_prefix_is_torchs(make: Any) -> None:
    model, slow = quick("llama", make), by_torch("llama")
    cache_ = slow.cache()
    with torch.inference_mode():
        job, _ = cache_.prepare(Ask(TokenTree(TEXT[12])), TEXT[:13], 99)
        slow.forward([job])
        segment = cache_.share_rows(TEXT[:14])
    strategy = laws.build("suffix")
    mine = Request(TEXT, strategy, GREEDY, prefix=segment)
    other = Request(TEXT[:9], strategy, GREEDY, tenant="other")
    alone = [run({"target": slow}, request)[0].ctx.output for request in (mine, other)]
    assert alone[0] == run({"target": slow}, Request(TEXT, Plain(), GREEDY))[0].ctx.output
    seen = counted(model)
    lives = run({"target": model}, mine, other)
    assert [live.ctx.output for live in lives] == alone
    assert seen.computed and all(job.plain for job in seen.given)


def test_an_backend_that_ignores_policies_would_be_noticed() -> None:
    """The slip: all jobs called plain, the backend computes them as if they had no policy."""
    model, slow = quick("llama", MAKERS[0].values[0]), by_torch("llama")
    request = Request(TEXT, Plain(), GREEDY, policy=Sparse())
    want = run({"target": slow}, request)[0].ctx.output

    class Blind(Sparse):
        plain = True

    blind = Request(TEXT, Plain(), GREEDY, policy=Blind())
    assert run({"target": model}, blind)[0].ctx.output != want


@makers
@torch.inference_mode()
def test_positions_far_beyond_the_rows(make: Any) -> None:
    """A few rows of a long text: rotations are those of positions, not of rows."""
    text = [(7 * i + i * i) % 90 for i in range(400)]
    rows = []
    for backend in (None, make):
        model = Decoder(
            tiny("llama", head_dim=16, max_position_embeddings=2048), "far", fused_blocks
        )
        if backend is not None:
            model.use(backend)
        held = model.cache()
        held.use(Evictor())
        whole = False
        while not whole:
            job, whole = held.prepare(Ask(TokenTree(text[-1]).chain([3, 4])), text, 99)
            reply = model.forward([job])[0]
        rows.append(reply.logits)
    assert float((rows[0] - rows[1]).abs().max()) <= 1e-4 * float(rows[0].abs().max())


@makers
@pytest.mark.parametrize("spec", ["snapkv:budget=10,window=3,kernel=3", "tova:budget=10,every=3"])
def test_heads_with_rows_of_their_own_stay_on_it(make: Any, spec: str) -> None:
    """Each head keeps other tokens, so many that all are read: after a change they are plain."""
    model, slow = quick("llama", make), by_torch("llama")
    request = Request(
        TEXT, laws.build("suffix"), GREEDY, policy=build_cache_policy(spec).build_named(slow)
    )
    (want,) = run({"target": slow}, request)
    seen = counted(model)
    (live,) = run({"target": model}, request)
    assert live.ctx.output == want.ctx.output
    watched = spec.startswith("tova")  # by the attention of every token, which torch computes
    assert watched or len(seen.computed) >= live.ctx.stats.steps - 1


@pytest.mark.skipif(missing("openvino"), reason="openvino is not installed")
@torch.inference_mode()
def test_openvino_hides_no_row_of_a_head_from_one_node_alone() -> None:
    """Whatever the mask is: why heads that stream, whose nodes miss other rows, are refused."""
    model = quick("llama", OpenVinoBackend)
    assert isinstance(model.backend, Counting)
    held = model.cache()
    job, _ = held.prepare(Ask(TokenTree(TEXT[-1]), rows=()), TEXT, 99)
    model.forward([job])
    held.commit(TEXT)
    tree = TokenTree(TEXT[-1]).chain([3])
    for seen in ([[1, 0], [0, 1]], [[1, 0], [1, 1]], [[1, 1], [0, 1]], [[1, 1], [1, 1]]):
        job, _ = held.prepare(Ask(tree), TEXT, 99)
        before = len(TEXT) - 1
        job.seen = torch.tensor(seen, dtype=torch.bool)
        rows = []
        for moved in (0.0, 2.0):
            held.v[0][0, 4] += moved
            computed = model.backend([job], 1)
            assert computed is not None and job.start == held.base == before
            rows.append(computed.logits.clone())
        held.v[0][0, 4] -= 2.0
        changed = (rows[0] - rows[1]).abs().amax(-1)
        assert bool((changed > 1e-3).all()), f"a node does not see a row: {changed}"
        held.finish()


@pytest.mark.parametrize("name", ["duo-attention", "lserve"])
def test_heads_that_stream_are_refused_where_they_cannot_be_computed(name: str) -> None:
    class Named(Decoder):
        usual_backend = "openvino"  # type: ignore[assignment]

    found = Named(tiny("llama", head_dim=16), "quick", fused_blocks)
    with pytest.raises(Unsupported, match=rf"kv={name} cannot run on quick: .*backend='torch'"):
        small(name).build_named(found)
    assert replace(small(name), sparsity=0.0).build_named(found).name == name  # type: ignore[call-arg]
