"""The fixed step that CUDA graphs hold, run on a CPU without them: the same logits, rows and tokens
as torch's.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import foretell
from foretell import LM, wrap
from foretell.backends import graphs as module
from foretell.backends.graphs import KEPT, SIZES, SPAN, SPARE, CudaGraphs, FixedCache, GraphsBackend
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.drafters.own.windowed import Windowed
from foretell.engine.cost_profile import measure_forwards, model_identity
from foretell.engine.engine import Engine
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.spec import resolve_method
from tests.backends.questions import (
    agree,
    hidden_states_are_those_of_torch,
    other_texts_stay_the_same,
    refuses_what_is_not_plain,
)
from tests.core.test_draws import Waits
from tests.models.decoder.families import WINDOW, tiny
from tests.models.decoder.test_families import (
    LOOPED,
    METHODS,
    PROMPTS,
    TREE,
    answer,
    decoder,
    same_texts,
)
from tests.tiny import CONTEXT, llama, tokenizer

eager = partial(GraphsBackend, record=None)


class Tape:
    """In place of CUDA graphs: replays by calling what it recorded, and notes both."""

    def __init__(self, device: torch.device):
        self.recorded: list[Callable[[], None]] = []
        self.replays: list[Callable[[], None]] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recorded.append(run)

        def replay() -> None:
            self.replays.append(run)
            run()

        return replay


def used(model: Decoder, make: Any = eager) -> tuple[Decoder, GraphsBackend]:
    model.use(make)
    assert isinstance(model.backend, GraphsBackend)
    return model, model.backend


@cache
def fast(family: str) -> Decoder:
    return used(Decoder(tiny(family), family, fused_blocks))[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


def parts(cache: Any) -> list[torch.Tensor]:
    return [*cache.k, *cache.v]


@pytest.mark.parametrize("family", LOOPED)
@torch.inference_mode()
def test_chains_and_trees_have_the_logits_and_rows_of_torch(family: str) -> None:
    """Windows, softcaps, sinks, two rotations, experts: what the families have."""
    quick, slow = fast(family), decoder(family)
    one, two = quick.cache(), slow.cache()
    chain = TokenTree(PROMPTS[1][-1]).chain([3, 4, 5, 6])
    asked = [
        (PROMPTS[0], TokenTree(PROMPTS[0][-1])),
        (PROMPTS[1], TREE),
        ([*PROMPTS[1], 3, 4], TokenTree(4)),
        (PROMPTS[1], chain),
    ]
    for tokens, tree in asked:
        ours, theirs = answer(quick, one, Ask(tree), tokens), answer(slow, two, Ask(tree), tokens)
        assert ours.nodes == theirs.nodes and ours.logits.dtype == theirs.logits.dtype
        assert close(ours.logits, theirs.logits)
        end = one.length + len(one.tokens)
        assert end == two.length + len(two.tokens) > WINDOW
        for mine, other in zip(parts(one), parts(two), strict=True):
            assert close(mine[:, :end], other[:, :end])
    one.drop()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@torch.inference_mode()
def test_a_tree_that_grows_sees_the_scratch_rows_it_stands_on(family: str) -> None:
    quick, slow = fast(family), decoder(family)
    one, two = quick.cache(), slow.cache()
    tokens = PROMPTS[1]
    for chain in (False, True):
        grown = TokenTree(tokens[-1]).chain([3, 4] if chain else [3, 4, 5])
        if not chain:
            grown.chain([7])
        for level in range(3):
            before = len(grown)
            for parent in range(max(0, before - 2), before) if not chain else [before - 1]:
                grown.add(parent, 10 + 7 * level + parent)
            ours, theirs = (
                answer(quick, one, Ask(grown), tokens),
                answer(slow, two, Ask(grown), tokens),
            )
            assert ours.nodes == theirs.nodes and (len(ours.nodes) < len(grown)) == (level > 0)
            assert close(ours.logits, theirs.logits)
        job, _ = one.prepare(Ask(grown.chain([1, 2], at=len(grown) - 1)), tokens, 64)
        assert job.start > one.length and (job.seen is None) == chain
        tokens = [*tokens, 3, 4, 9]
    one.drop()


@torch.inference_mode()
def test_every_size_and_rows_asked_for_and_prompts_in_pieces() -> None:
    quick, backend = used(Decoder(llama(), "tiny", fused_blocks))
    slow = Decoder(llama(), "tiny")
    tokens = [(7 * i) % 300 for i in range(20)]
    for count in range(1, SIZES[-1] + 1):
        one, two = quick.cache(), slow.cache()
        tree = TokenTree(tokens[-1])
        for i in range(1, count):
            tree.add((i * i) % len(tree), 3 * i)
        for model, kept in ((quick, one), (slow, two)):
            answer(model, kept, Ask(TokenTree(tokens[-2])), tokens[:-1])
        for rows in (None, [count - 1], sorted({0, count - 1}), []):
            for kept in (one, two):  # compute it again
                kept.synced = 0
            ours, theirs = (
                answer(m, c, Ask(tree, rows=rows), tokens) for m, c in ((quick, one), (slow, two))
            )
            assert ours.nodes == theirs.nodes and ours.logits.shape == theirs.logits.shape
            assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
        size = next(s for s in SIZES if s >= count)
        assert backend.size == quick.width == size
        one.drop()
    one, two = quick.cache(), slow.cache()
    for chunk in (5, 64):
        ours, theirs = (
            answer(m, c, Ask(TREE), PROMPTS[1], chunk) for m, c in ((quick, one), (slow, two))
        )
        assert close(ours.logits, theirs.logits)


@torch.inference_mode()
def test_what_is_not_fixed_is_torch_s_in_the_same_memory() -> None:
    quick, backend = used(Decoder(llama(), "tiny", fused_blocks))
    slow, tokens = Decoder(llama(), "tiny"), [i % 300 for i in range(SIZES[-1] + 9)]
    one, two, other = quick.cache(), slow.cache(), quick.cache()
    backend.size = 0
    for ask in (Ask(TokenTree(tokens[-1])), Ask(TokenTree(tokens[-1]).chain([2]), layers=(0,))):
        ours, theirs = answer(quick, one, ask, tokens), answer(slow, two, ask, tokens)
        assert not backend.size and close(ours.logits, theirs.logits)
    jobs = [
        kept.prepare(Ask(TokenTree(9)), text, 99)[0]
        for kept, text in ((one, [*tokens, 9]), (other, [3, 9]))
    ]
    assert all(job.rows for job in jobs)
    for reply, text in zip(quick.forward(jobs), ([*tokens, 9], [3, 9]), strict=True):
        assert not backend.size and close(reply.logits, slow.score(text))
    wide = TokenTree(9)
    for i in range(
        1, SPAN - 20
    ):  # more scratch rows than a mask tells apart: one level by torch, two more
        wide.add(0, i)
    for sized, level in ((0, SPAN - 20), (1, SPAN - 1), (0, SPAN)):
        while len(wide) < level:
            wide.add(len(wide) - 1, len(wide))
        backend.size = 0
        ours = answer(quick, other, Ask(wide, rows=[level - 1]), [3, 9])
        assert close(ours.logits, slow.score([3, 9, *wide.tokens_to(level - 1)]))
        assert bool(backend.size) == bool(sized)
    backend.size = 0
    for stranger in (
        foretell.cache.cache.Cache(quick.layout, quick.dtype, quick.device),
        used(slow)[0].cache(),
    ):
        wanted = Decoder(llama(), "tiny").score([4, 5])
        assert (
            close(answer(quick, stranger, Ask(TokenTree(5)), [4, 5]).logits, wanted)
            and not backend.size
        )


@torch.inference_mode()
def test_a_cache_that_grows_and_its_forks_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphsBackend, "start", 4)
    quick, backend = used(Decoder(tiny("gemma2"), "gemma2"))
    slow, one, text = decoder("gemma2"), quick.cache(), [5]
    seen = set()
    for i in range(40):
        text.append((i * 11) % 90)
        assert close(
            answer(quick, one, Ask(TokenTree(text[-1]).chain([1, 2])), text).logits[:1],
            slow.score(text),
        )
        seen.add(one.capacity)
        if i % 9 == 4:
            twin, other = one.fork(), [*text, 7]  # who writes first copies
            assert close(answer(quick, twin, Ask(TokenTree(7)), other).logits, slow.score(other))
            assert parts(twin)[0].data_ptr() != parts(one)[0].data_ptr()
            twin.drop()
    assert seen == {4, 8, 16, 32, 64}
    one.drop()
    assert all(
        len(backend.free_memories[c]) == backend.kept_counts[c] <= KEPT for c in backend.kept_counts
    )


@torch.inference_mode()
def test_nothing_leaks_from_rows_and_nodes_that_do_not_count() -> None:
    """The logits are the same to the last bit whatever stands in rows that nobody may see, and no
    other row changes.
    """
    for family in ("llama", "gemma2", "gpt_oss"):
        model, backend = used(Decoder(tiny(family), family, fused_blocks))
        tokens, tree = (
            PROMPTS[1],
            TokenTree(PROMPTS[1][-1]).chain([3, 4, 5]).chain([6, 7]).chain([8], at=1),
        )  # 7 of 8
        logits = []
        for junk in (0.0, 1e3, -7.0):
            one = backend.cache()
            answer(model, one, Ask(TokenTree(tokens[-2])), tokens[:-1])
            wide = TokenTree(tokens[-1]).chain(range(10, 16))
            answer(model, one, Ask(wide), tokens)
            answer(
                model, one, Ask(wide.chain(range(20, 27), at=2)), tokens
            )  # a step of the same size that saw more rows
            one.synced = 0  # and all of that is forgotten
            job, _ = one.prepare(Ask(tree), tokens, 64)
            n = len(job.tokens)
            assert job.start + n < one.length + len(wide)
            for part in parts(one):
                part[:, job.start :] = junk
            before = [part.clone() for part in parts(one)]
            logits.append(model.forward([job])[0].logits)
            assert backend.size == 8 > n
            for part, old in zip(parts(one), before, strict=True):
                assert part.shape[1] == one.capacity + SPARE
                changed = (part != old).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist()
                assert changed == [*range(job.start, job.start + n), one.capacity]
            one.drop()
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@torch.inference_mode()
def test_a_request_leaves_nothing_to_the_next_one() -> None:
    model, backend = used(Decoder(llama(), "tiny", fused_blocks))
    text, wanted = [3, 1, 4, 1, 5], None
    for _ in range(3):
        one = model.cache()
        got = answer(model, one, Ask(TokenTree(5)), text).logits
        wanted = got if wanted is None else wanted
        assert torch.equal(got, wanted)
        for part in parts(one):
            part.fill_(torch.nan)  # a request that went wrong
        one.drop()
    assert backend.kept_counts == {256: 1}


@torch.inference_mode()
def test_a_fork_that_outlives_its_origin_keeps_the_rows() -> None:
    model, _ = used(Decoder(llama(), "tiny", fused_blocks))
    one = model.cache()
    answer(model, one, Ask(TokenTree(5)), [3, 1, 4, 1, 5])
    twin = one.fork()
    del one  # not dropped: the twin takes it for a sharer, and copies
    assert close(
        answer(model, twin, Ask(TokenTree(9)), [3, 1, 4, 1, 5, 9]).logits,
        model.score([3, 1, 4, 1, 5, 9]),
    )
    assert twin.length == 5


def test_memory_comes_back_when_nobody_holds_it() -> None:
    model, backend = used(Decoder(llama(), "tiny", fused_blocks))

    def address(kept: Any) -> int:
        return int(parts(kept)[0].data_ptr())

    one = model.cache()
    first = address(one)
    twin = one.fork()
    one.drop()
    two = model.cache()
    assert address(two) != first  # the fork still holds it
    del twin  # not even dropped
    three = model.cache()
    assert address(three) == first
    many = [model.cache() for _ in range(3)]  # more than are kept
    assert len({address(c) for c in [two, three, *many]}) == 5 and backend.kept_counts == {
        256: KEPT
    }
    with torch.inference_mode():
        for kept in [two, three, *many]:
            backend.size = 0
            assert close(
                answer(model, kept, Ask(TokenTree(5)), [4, 5]).logits,
                Decoder(llama(), "t").score([4, 5]),
            )
            assert bool(backend.size) == (kept in (two, three))
            assert not any(part.is_inference() for part in parts(kept))
    del kept
    for kept in [two, three, *many]:
        kept.drop()
    assert len(backend.free_memories[256]) == KEPT
    with pytest.raises(IndexError):
        two.k[0]


@cache
def pair() -> tuple[LM, LM]:
    quick, slow = (wrap(llama(), tokenizer(), llama(1), "tiny") for _ in range(2))
    for model in quick.models.values():
        used(model)  # type: ignore[arg-type]
    return quick, slow


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_torch(method: str) -> None:
    same_texts(*pair(), method)


def test_texts_that_grow_over_several_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphsBackend, "start", 8)
    lm = wrap(llama(), tokenizer(), llama(1), "tiny")
    tapes = []
    for model in lm.models.values():
        _, backend = used(model, partial(GraphsBackend, record=Tape))  # type: ignore[arg-type]
        assert isinstance(backend.record, Tape)
        tapes.append(backend.record)
    prompts = ["def add(a, b):", "one two one two"]
    for spec in ("plain", "draft:nodes=6", "suffix+token-recycling"):
        for _ in range(2):
            for prompt in prompts:
                ours, theirs = (
                    m.generate(prompt, spec, max_new_tokens=70).tokens for m in (lm, pair()[1])
                )
                assert ours == theirs and (len(ours) > 60 or ours[-1] == 0)
    target = lm.models["target"]
    assert isinstance(target, Decoder) and isinstance(target.backend, GraphsBackend)
    gc.collect()
    made = target.backend.kept_counts
    assert {8, 16, 32, 64, CONTEXT} <= set(made)
    assert {made[c] for c in made if c < CONTEXT} == {1}, "alone, always the same memory"
    assert all(len(target.backend.free_memories[c]) == made[c] for c in made)
    steps = [memory.steps for free in target.backend.free_memories.values() for memory in free]
    assert len(tapes[0].recorded) == sum(map(len, steps)), "recorded once for each size and memory"
    assert len(tapes[0].replays) > 5 * len(tapes[0].recorded)


@torch.inference_mode()
def test_a_step_is_recorded_before_the_forward_and_replayed_from_fixed_memory() -> None:
    model, backend = used(
        Decoder(llama(), "tiny", fused_blocks), partial(GraphsBackend, record=Tape)
    )
    tape = backend.record
    assert isinstance(tape, Tape)
    tape.recorded.clear()
    tape.replays.clear()
    for memory in backend.free_memories[256]:
        memory.steps.clear()
    one, slow, addresses = model.cache(), Decoder(llama(), "tiny"), set()
    for i, (count, total) in enumerate([(1, 1), (3, 2), (4, 2), (1, 2), (2, 3)]):
        text = list(range(1, 8 + i))
        tree = TokenTree(text[-1]).chain(range(50, 49 + count))
        answer(slow, two := slow.cache(), Ask(TokenTree(text[-2])), text[:-1])
        one.length = one.base = len(text) - 1
        one.tokens, one.parents, one.synced = [], [], 0
        for mine, other in zip(parts(one), parts(two), strict=True):
            mine[:, : len(text) - 1] = other[:, : len(text) - 1]
        job, _ = one.prepare(Ask(tree), text, 64)
        assert len(tape.recorded) == total and len(tape.replays) == i, (
            "recorded by now, and not run"
        )
        assert close(model.forward([job])[0].logits, slow.score(text, tree))
        assert len(tape.recorded) == total and len(tape.replays) == i + 1
        lease = one.lease  # type: ignore[attr-defined]
        addresses |= {(size, step.table.data_ptr()) for size, step in lease.memory.steps.items()}
    assert sorted(size for size, _ in addresses) == [1, 2, 4]
    one.prepare(Ask(TokenTree(text[-1]).chain(range(9)), layers=(1,)), text, 64)
    assert len(tape.recorded) == 3, "for what torch computes nothing is recorded"


class Forbidden(TorchDispatchMode):
    """Notes what a recording on a GPU would refuse: shapes that depend on numbers, and
    transfers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"nonzero", "masked_select", "_unique2", "lift_fresh", "bincount"}:
            self.found.add(name)
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.found.add("index by truth")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", LOOPED)
@torch.inference_mode()
def test_a_step_can_be_recorded(family: str) -> None:
    model = fast(family)
    assert isinstance(model.backend, GraphsBackend)
    one = model.cache()
    job, _ = one.prepare(Ask(TREE), PROMPTS[1], 64)
    step = model.backend.find_step(job)
    assert step is not None
    step.fill_table(job)
    with Waits() as waits, Forbidden() as forbidden:
        step.run()
    one.drop()
    assert not waits.count and not forbidden.found
    with waits, forbidden:  # and it would have been noticed
        assert step.table[step.table > 0].max() > torch.tensor(0)
    assert waits.count == 1 and forbidden.found == {"index by truth", "lift_fresh"}


def test_how_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls to CUDA, in order: warm-up on another stream, capture there into the one pool,
    replay.
    """
    calls: list[Any] = []

    class Stream:
        def __init__(self, name: Any):
            self.name = "usual" if name == "usual" else "side"

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

    class CUDAGraph:
        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def within(what: Any, *_: Any, **options: Any) -> Iterator[None]:
        calls.append(
            what.name if isinstance(what, Stream) else (options["pool"], options["stream"].name)
        )
        yield
        calls.append("out")

    fakes = {
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "graph": within,
        "stream": within,
        "current_stream": lambda: Stream("usual"),
        "graph_pool_handle": lambda: "pool",
        "device": contextlib.nullcontext,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graphs = CudaGraphs(torch.device("cuda"))
    run = graphs(lambda: calls.append("run"))
    assert calls == [
        "side waits for usual",
        "side",
        *["run"] * module.WARM_RUNS,
        "out",
        "usual waits for side",
        ("pool", "side"),
        "run",
        "out",
    ]
    calls.clear()
    run()
    assert calls == ["replay"]


def test_why_it_cannot_be_is_said() -> None:
    with pytest.raises(LookupError, match="no CUDA GPU but cpu"):
        Decoder(llama(), "tiny").use(GraphsBackend)
    with pytest.raises(LookupError, match="loop over the layers"):
        Decoder(tiny("nanochat"), "tiny").use(eager)

    class Broken(Tape):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(
        LookupError, match=r"it fails: operation not permitted when stream is capturing$"
    ):
        (model := Decoder(llama(), "tiny")).use(partial(GraphsBackend, record=Broken))
    assert model.backend is None and not isinstance(model.cache(), FixedCache)

    class Forgetful(Tape):
        def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
            run()
            return lambda: None  # never runs again

    with pytest.raises(LookupError, match="differ"):
        Decoder(llama(), "tiny").use(partial(GraphsBackend, record=Forgetful))


def test_costs_are_measured_in_the_backend_s_own_memory() -> None:
    model, backend = used(
        Decoder(llama(), "tiny", fused_blocks), partial(GraphsBackend, record=Tape)
    )
    assert "graphs" in model_identity(model) and backend.sizes == SIZES
    tape = backend.record
    assert isinstance(tape, Tape)
    before = len(tape.replays)
    assert sorted(measure_forwards(model)) == [n for n in SIZES if n + 64 <= CONTEXT]
    assert len(tape.replays) - before >= 2 * 7
    gc.collect()
    assert all(len(backend.free_memories[c]) == backend.kept_counts[c] for c in backend.kept_counts)


def test_other_numbers_of_bits() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        quick = used(Decoder(llama().to(dtype), "tiny", fused_blocks))[0]
        ours, theirs = (
            quick.score(PROMPTS[1], TREE),
            Decoder(llama().to(dtype), "tiny", fused_blocks).score(PROMPTS[1], TREE),
        )
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < (
            0.03 if dtype == torch.bfloat16 else 1e-9
        )


class SameMemory(Tape):
    """Writes every replay's results where the recording's were, as a CUDA graph does."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        step: Any = run.__self__  # type: ignore[attr-defined]
        run()
        hidden, tapped = step.hidden, step.tapped

        def replay() -> None:
            run()
            hidden.copy_(step.hidden)
            for tap in tapped:
                tapped[tap].copy_(step.tapped[tap])
            step.hidden, step.tapped = hidden, tapped

        return replay


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_hidden_states_are_those_of_torch(dtype: torch.dtype) -> None:
    make = partial(GraphsBackend, record=SameMemory)
    quick, _ = used(Decoder(llama().to(dtype), "tiny", fused_blocks), make)
    slow = Decoder(llama().to(dtype), "tiny", fused_blocks)
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    hidden_states_are_those_of_torch(quick, slow, tolerance, batches=False, longest=SIZES[-1] - 4)


@pytest.mark.parametrize("family", LOOPED)
@torch.inference_mode()
def test_hidden_states_of_every_family(family: str) -> None:
    quick, slow = fast(family), decoder(family)
    taps = tuple(range(len(quick.layout) + 1))
    ask = Ask(TREE, taps=taps)
    one = quick.cache()
    ours, theirs = answer(quick, one, ask, PROMPTS[1]), answer(slow, slow.cache(), ask, PROMPTS[1])
    assert all(agree(ours.hidden[tap], theirs.hidden[tap], 1e-4) for tap in taps)
    assert quick.width > len(PROMPTS[1])
    one.drop()


@torch.inference_mode()
def test_a_step_is_recorded_again_once_for_hidden_states() -> None:
    model, backend = used(
        Decoder(llama(), "tiny", fused_blocks), partial(GraphsBackend, record=Tape)
    )
    tape = backend.record
    assert isinstance(tape, Tape)
    backend.release()
    tape.recorded.clear()
    one, text = model.cache(), [3, 1, 4]
    answer(model, one, Ask(TokenTree(4)), text)
    for taps, recorded in (((), 1), ((1,), 2), ((), 2), ((1,), 2), ((0, 1), 3), ((0,), 3)):
        text = [*text, 7]
        job, _ = one.prepare(Ask(TokenTree(7).chain([1, 2]), taps=taps), text, 64)
        before = len(tape.recorded)
        reply = model.forward([job])[0]
        assert len(tape.recorded) == before, "recorded when it was prepared, not in the forward"
        assert set(reply.hidden) == set(taps)
        steps = [run.__self__ for run in tape.recorded]  # type: ignore[attr-defined]
        assert sum(step.size == 4 for step in steps) == recorded
    one.drop()
    backend.release()
    assert not any(memory.steps for memory in backend.kept_memories)
    assert agree(model.score([4, 5]), Decoder(llama(), "tiny").score([4, 5]), 1e-4)


@torch.inference_mode()
def test_jobs_that_are_not_plain_are_refused() -> None:
    refuses_what_is_not_plain(used(Decoder(llama(), "tiny", fused_blocks))[0])


def test_texts_are_the_same_before_and_after_a_tap() -> None:
    lm = wrap(llama(), tokenizer(), name="tiny")
    used(lm.models["target"])  # type: ignore[arg-type]
    other_texts_stay_the_same(lm)


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_costs_are_those_of_who_computes_so_many_jobs(jobs: int) -> None:
    """A graph has one cache's addresses: sizes of drafts and chunks of prompts beside steps are
    decided by what torch's forwards cost as soon as two requests share one."""
    model = fast("llama")
    engine = Engine({"target": model})
    lives = []
    for number in range(jobs):
        sampling = Sampling(max_new_tokens=4, temperature=0.0)
        name, strategy = resolve_method("ngram")
        lives.append(engine.add(Request([number + 1, 5, 6], strategy, sampling, name)))
    for _ in range(3):
        engine.step()
    assert engine.running == jobs and model.computed_by == model.backend_of(jobs)
    assert model.computed_by == ("graphs" if jobs == 1 else "torch")
    for name, step in (("graphs", 1.0), ("torch", 9.0)):
        engine.costs_of(model, name).seconds = {1: step, 64: 2 * step}
    expected = (1.0 if jobs == 1 else 9.0) / jobs
    assert lives[0].ctx.shares(4)[0] == pytest.approx(expected, rel=0.1)
    assert lives[0].ctx.costs.one_token_seconds() == pytest.approx(1.0)
    for live in lives:
        engine.end(live)


def test_models_that_show_another_say_how_many_jobs_it_takes() -> None:
    model = fast("llama")
    assert Windowed(model, 1, 8).backend_of(2) == "torch"
    assert decoder("llama").backend_of(2) == "torch"
    assert model.backend_of(1) == "graphs"
