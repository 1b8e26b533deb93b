"""infllm: against plain loops, with drafts, beyond the context, and with its blocks on disk."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cache.buffers import row_bytes
from foretell.cache.cache import Cache
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadFile, RequestFailed, Unsupported
from foretell.kv.select import blocks as remembering
from foretell.kv.select.infllm import Infllm, InfllmPolicy
from foretell.kv.store.spilling import DiskBlocks
from foretell.ops.attention import LayerQuery
from foretell.spec import build_cache_policy
from foretell.strategies.plain import Plain
from foretell.testing.toy import Toy
from tests.cache.users import by_chunks
from tests.kv import driving
from tests.kv.blocks import SMALL, Twin, differs, made
from tests.kv.driving import SCALE, Full, drive, text_of
from tests.kv.policies import PROMPT, target

# What laws of all policies use, see tests/kv/policies.py.
SMALL_SPEC = "infllm:initial=1,local=6,block=3,blocks=2,representatives=2,every=4,alone=3"
LARGE_SPEC = "infllm:local=400"

WHOLE = text_of(46, seed=5)
OTHERS = [
    replace(SMALL, initial=0, block=4, representatives=4, every=3, alone=1),
    replace(SMALL, local=3, block=1, representatives=1, blocks=5, every=40, alone=9),
]


@pytest.mark.parametrize("kv", [SMALL, *OTHERS])
def test_it_is_the_loop(kv: Infllm) -> None:
    assert differs(made(InfllmPolicy, kv), Twin(kv, 30), WHOLE) < 1e-9


@pytest.mark.parametrize(("depth", "wrong", "chunk"), [(4, False, 7), (5, True, 1), (3, True, 50)])
def test_it_is_the_loop_in_pieces_and_with_trees(depth: int, wrong: bool, chunk: int) -> None:
    policy = made(InfllmPolicy, SMALL)
    assert differs(policy, Twin(SMALL, 30), WHOLE, depth, wrong, chunk) < 1e-9


@pytest.mark.parametrize(
    ("where", "name", "slip"),
    [
        # Keys stay where they were cached.
        (InfllmPolicy, "turn", staticmethod(lambda keys, by: keys)),
        # The least attended tokens stand for a block.
        (remembering, "top_rows", lambda scores, count: scores.argsort(-1)[..., :count]),
        # A span asks with its first queries alone.
        (InfllmPolicy, "digest_queries", lambda self, queries: queries[:, :1]),
        # What rejected nodes gave counts.
        (remembering.Watching, "keep_nodes", lambda self, cache, nodes: None),
    ],
)
def test_the_loop_catches_slips(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, slip: Any
) -> None:
    policy = made(InfllmPolicy, SMALL)
    if name == "turn":
        policy.turn = slip
    else:
        monkeypatch.setattr(where, name, slip)
    try:
        assert differs(policy, Twin(SMALL, 30), WHOLE, 4, True, 7) > 1e-6
    except KeyError:  # nothing was ever noted
        assert name == "keep_nodes"


def spread(kv: Infllm, length: int, prompt: int) -> tuple[list[float], Any]:
    """Of each token what it gets where all see alike and each place has a value of its own; and the
    cache in the end. Queries of nothing, so all that is read weighs the same.
    """
    cache = Cache(driving.LAYOUT, torch.float64, torch.device("cpu"))
    cache.use(made(InfllmPolicy, kv), prompt)
    sums = []
    for place in range(length):
        job, _ = cache.prepare(Ask(TokenTree(1)), [1] * (place + 1), 1)
        for layer in range(driving.LAYERS):
            q, k = (torch.zeros(n, 1, 8, dtype=torch.float64) for n in (4, 2))
            out = job.attend(LayerQuery(layer, q, k, torch.full_like(k, 2.0**place), SCALE))
        sums.append(float(out[0, 0, 0]))
        cache.finish()
    cache.commit([1] * (length + 1))
    return sums, cache


@pytest.mark.parametrize("prompt", [1, 20, 40])
def test_each_token_is_in_one_place(prompt: int) -> None:
    """With room for all blocks every token sees every one before it, once."""
    kv = replace(SMALL, blocks=50)
    sums, cache = spread(kv, 40, prompt)
    for place, found in enumerate(sums):
        assert found * (place + 1) == pytest.approx(2.0 ** (place + 1) - 1, rel=1e-12)
    policy = cache.policy
    blocks = len(policy.slots)
    assert kv.initial + blocks * kv.block + cache.base == cache.length
    assert blocks == (40 - kv.initial - kv.local) // kv.block


def test_memory_is_that_of_blocks_and_of_what_finds_them(tmp_path: Path) -> None:
    _, cache = spread(SMALL, 40, 20)
    policy = cache.policy
    rows = SMALL.initial + len(policy.slots) * SMALL.block
    found = len(policy.slots) * driving.LAYERS * 2 * 8 * 8  # two heads of eight numbers of 8 bytes
    assert policy.bytes == rows * row_bytes(driving.LAYOUT, torch.float64) + found
    assert cache.bytes == policy.bytes + cache.base * row_bytes(driving.LAYOUT, torch.float64)
    _, cache = spread(replace(SMALL, dir=str(tmp_path), cached=3), 40, 20)
    near = SMALL.initial + 3 * SMALL.block
    assert cache.policy.bytes == near * row_bytes(driving.LAYOUT, torch.float64) + found


def test_the_order_of_blocks_is_irrelevant() -> None:
    kv = replace(SMALL, blocks=3)
    outputs = []
    for shuffled in (False, True):
        _, cache = spread(kv, 40, 10)
        policy = cache.policy
        if shuffled:
            order = torch.randperm(len(policy.slots), generator=torch.Generator().manual_seed(1))
            policy.slots = policy.slots[order]
            policy.block_keys = {layer: found[order] for layer, found in policy.block_keys.items()}
        random = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(n, 1, 8, generator=random).double() for n in (4, 2, 2))
        policy.block_keys = {0: torch.randn(len(policy.slots), 2, 8, generator=random).double()}
        if shuffled:
            policy.block_keys = {0: policy.block_keys[0][order]}
        job, _ = cache.prepare(Ask(TokenTree(1)), [1] * 41, 1)
        outputs.append(job.attend(LayerQuery(0, q, k, v, SCALE)))
    assert torch.allclose(*outputs, atol=1e-12)


def test_with_room_for_everything_it_is_the_full_cache_bit_by_bit() -> None:
    kv = Infllm(local=len(WHOLE))
    policy = made(InfllmPolicy, kv)

    class InPieces(Full):
        def room_left(self, length: int) -> int:
            policy.prompt = self.prompt
            return int(policy.room_left(length))

    ours = drive(policy, 30, WHOLE, 3)
    for (_, _, got), (_, _, want) in zip(ours, drive(InPieces(), 30, WHOLE, 3), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dir_", [False, True])
def test_positions_stay_within_the_context(dir_: bool, tmp_path: Path) -> None:
    """Rows move back once in a while; what is read is the same as if they never did."""
    kv = replace(SMALL, dir=str(tmp_path) if dir_ else "", cached=2)
    outputs = []
    for context in (26, 1 << 30):
        most = 0

        class Positions(InfllmPolicy):
            def attend_job(self, job: Any, asked: Any) -> torch.Tensor:
                nonlocal most
                most = max(most, *job.positions)
                q = self.turn(asked.q, torch.tensor(job.positions))
                keys = asked.keys.clone()
                new = keys[:, job.start :]
                keys[:, job.start :] = self.turn(new, torch.tensor(job.positions))
                job.cache.k[asked.layer][:, job.start : keys.shape[1]] = keys[:, job.start :]
                return super().attend_job(job, remembering.replace(asked, q=q, keys=keys))

        policy = made(Positions, kv, context)
        assert policy.endless
        outputs.append([got for *_, got in drive(policy, 30, WHOLE * 2, 3)])
        assert (most < 26) == (context == 26)
    for got, want in zip(*outputs, strict=True):
        assert torch.allclose(got, want, atol=1e-9)
    assert not [*tmp_path.iterdir()]


def test_a_text_may_outgrow_the_context_of_its_model() -> None:
    model = target("llama", torch.float64)
    kv = build_cache_policy("infllm:initial=2,local=40,block=8,every=16,alone=4")
    policy = kv.build_policy(model)
    assert policy.endless
    prompt = [(7 * i + i * i) % 90 for i in range(150)]
    texts = []
    for chunk in (1000, 9):
        engine = Engine({"target": model}, plan=by_chunks(chunk))
        sampling = Sampling(temperature=0.0, max_new_tokens=30)
        live = engine.add(Request(list(prompt), Plain(), sampling, policy=policy))
        for _ in engine.run():
            pass
        assert live.error is None
        texts.append(live.ctx.output)
    assert texts[0] == texts[1] and len(texts[0]) == 30


# --- blocks on disk


def requests(kv: Infllm, count: int = 2) -> tuple[Engine, list[Any]]:
    engine = Engine({"target": target()})
    sampling = Sampling(temperature=0.0, max_new_tokens=24)
    policy = kv.build_policy(target())
    prompts = (PROMPT, PROMPT[4:])[:count]
    return engine, [engine.add(Request(list(p), Plain(), sampling, policy=policy)) for p in prompts]


def test_blocks_on_disk_give_the_same_text_and_are_removed(tmp_path: Path) -> None:
    want = [live.ctx.output for live in finished(requests(SMALL))]
    engine, lives = requests(replace(SMALL, dir=str(tmp_path), cached=1))
    folders = 0
    while engine.live:
        engine.step()
        folders = max(folders, len([*tmp_path.iterdir()]))
    assert [live.ctx.output for live in lives] == want
    assert folders == 2 and not [*tmp_path.iterdir()]


def finished(run: tuple[Engine, list[Any]]) -> list[Any]:
    for _ in run[0].run():
        pass
    return run[1]


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_block_ends_its_request_alone(tmp_path: Path, cut: bool) -> None:
    engine, lives = requests(replace(SMALL, dir=str(tmp_path), cached=1))
    want = [live.ctx.output for live in finished(requests(SMALL))]
    while len([*tmp_path.rglob("rows")]) < 2 or len(lives[0].ctx.output) < 2:
        engine.step()
    store = lives[0].caches["target", 0].policy.store.store
    assert isinstance(store, DiskBlocks)
    path = store.spill.path
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 9] if cut else bytes([data[0] ^ 1, *data[1:-1], 0]))
    for _ in engine.run():
        pass
    assert isinstance(lives[0].error, BadFile) and "\n" not in str(lives[0].error)
    assert "damaged" in str(lives[0].error)
    assert lives[1].error is None and lives[1].ctx.output == want[1]
    assert not [*tmp_path.iterdir()]


def test_a_full_folder_ends_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, real = [], os.pwrite

    def full(file: int, data: Any, place: int) -> int:
        written.append(file)
        if len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[: max(1, len(data) // 2)], place)  # a system may write a part

    want = [live.ctx.output for live in finished(requests(SMALL))]
    monkeypatch.setattr(os, "pwrite", full)
    engine, lives = requests(replace(SMALL, dir=str(tmp_path)))
    for _ in engine.run():
        pass
    failed = [live for live in lives if live.error is not None]
    assert len(failed) == 1 and isinstance(failed[0].error, RequestFailed)
    assert "No space left on device" in str(failed[0].error)
    other = lives.index(*[live for live in lives if live.error is None])
    assert lives[other].ctx.output == want[other]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("block=2", "infllm:representatives=4: must be at most block=2"),
        ("dir=/nowhere/at/all", "infllm:dir='/nowhere/at/all': must be a folder that exists"),
    ],
)
def test_what_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        build_cache_policy(f"infllm:{spec}")


def test_models_without_rotation_are_refused() -> None:
    with pytest.raises(Unsupported, match="infllm"):
        Infllm().build_policy(Toy(9))
