"""llama.cpp after the adapter against the same float32 weights in transformers, and the laws on
it.

Several rows of one forward are summed in another order than one, and near-ties may fall either way;
in float32 with these spread laws none is near enough.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llama_cpp", reason="needs foretell[gguf]")
pytest.importorskip("gguf", reason="needs the package gguf, to write files")

import foretell
from foretell import audit
from foretell.backends import llama_cpp as gguf
from foretell.backends.llama_branch import Branch, SequenceId
from foretell.backends.llama_cpp import GGUF
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Reply
from foretell.engine import cost_profile as profiling
from foretell.errors import BadModel, ForetellError, PromptTooLong, Unsupported
from foretell.loading.load import load_tokenizer
from tests import tiny
from tests.models.decoder.families import tiny as family

CODE = "def add(a, b):\n    return a"
PROMPTS = [CODE, "The quick brown fox", "def sub(a, b):\n    return a - b\n\n\ndef sub"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.gguf(tiny.llama(), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def second(file: Path) -> Path:
    return tiny.gguf(tiny.relative(tiny.llama()), file.parent / "draft.gguf")


@pytest.fixture(scope="module")
def model(file: Path) -> GGUF:
    return GGUF(file)


@pytest.fixture
def lm(file: Path, second: Path) -> foretell.LM:
    return foretell.load(file, draft=second)


@torch.inference_mode()
def ask(
    model: GGUF,
    cache: Any,
    tokens: list[int],
    tree: TokenTree,
    rows: list[int] | None = None,
    chunk: int = 512,
) -> Reply:
    """As the engine does: in parts while too much is pending."""
    while True:
        job, whole = cache.prepare(Ask(tree, rows=rows), tokens, chunk)
        reply = model.forward([job])[0]
        if whole:
            return reply


def grown(tree: TokenTree, size: int, source: random.Random, vocab: int = 20) -> TokenTree:
    for _ in range(size):
        tree.add(source.randrange(len(tree)), source.randrange(1, vocab))
    return tree


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


# --- the same numbers


@torch.inference_mode()
def test_logits_are_those_of_transformers(model: GGUF) -> None:
    reference = foretell.wrap(tiny.llama(), tiny.tokenizer()).models["target"]
    tokens = tiny.tokenizer()(CODE)["input_ids"]
    tree = grown(TokenTree(tokens[-1]), 12, random.Random(0))
    assert (
        model.dtype == torch.float32
        and model.vocab == reference.vocab
        and model.context == tiny.CONTEXT
    )
    assert close(model.score(tokens, tree), reference.score(tokens, tree))


@torch.inference_mode()
@pytest.mark.parametrize("name", sorted(gguf.PROVEN - {"llama"}))
def test_other_families(name: str, tmp_path: Path) -> None:
    more = {"vocab_size": len(tiny.tokenizer()), "bos_token_id": 0}
    hf = family(
        name,
        **more,
        **({"use_sliding_window": False, "layer_types": None} if name == "qwen2" else {}),
    )
    ours, theirs = (
        GGUF(tiny.gguf(hf, tmp_path / f"{name}.gguf")),
        foretell.wrap(hf).models["target"],
    )
    tokens = list(range(3, 30))
    tree = grown(TokenTree(tokens[-1]), 12, random.Random(1))
    assert ours.family == name and close(ours.score(tokens, tree), theirs.score(tokens, tree))


def expected(model: GGUF, tokens: list[int], tree: TokenTree, node: int) -> torch.Tensor:
    """A node's logits from its way alone, one token after the other."""
    return model.score([*tokens, *tree.tokens_to(node)])[0]


@torch.inference_mode()
@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_any_history_leaves_the_rows_of_the_branch(model: GGUF, seed: int) -> None:
    """Several branches in one forward: asked, grown, committed, forked, dropped, interrupted."""
    source = random.Random(seed)
    text = [source.randrange(1, 20) for _ in range(source.randrange(1, 9))]
    pairs: list[tuple[Any, list[int]]] = [(model.cache(), text), (model.cache(), [*text, 3])]
    trees: dict[int, TokenTree] = {}
    for _ in range(8):
        some = source.sample(range(len(pairs)), source.randrange(1, len(pairs) + 1))
        action = source.choice("ask ask ask grow commit fork drop break".split())
        if action in ("ask", "grow"):
            jobs, wanted = [], []
            for i in some:
                cache, tokens = pairs[i]
                tree = trees[i] if action == "grow" and i in trees else TokenTree(tokens[-1])
                trees[i] = grown(tree, source.randrange(8), source)
                rows = (
                    None
                    if source.random() < 0.6
                    else [source.randrange(len(tree)) for _ in range(2)]
                )
                whole = False
                while not whole:
                    job, whole = cache.prepare(Ask(tree, rows=rows), tokens, 4)
                    if not whole:
                        model.forward([job])
                jobs.append(job)
                wanted.append((tokens, tree))
            for reply, (tokens, tree) in zip(model.forward(jobs), wanted, strict=True):
                for row, node in zip(reply.logits, reply.nodes, strict=True):
                    assert close(row, expected(model, tokens, tree, node)), (node, tree.parents)
        elif action == "commit":
            for i in some:
                tree = trees.pop(i, TokenTree(pairs[i][1][-1]))
                pairs[i][1].extend(
                    [*tree.tokens_to(source.randrange(len(tree))), source.randrange(1, 20)]
                )
        elif action == "fork":
            pairs.append((pairs[some[0]][0].fork(), list(pairs[some[0]][1])))
        elif action == "drop" and len(pairs) > 1:
            pairs.pop(some[0])[0].drop()
            trees = {i - (i > some[0]): tree for i, tree in trees.items() if i != some[0]}
        elif action == "break":
            cache, tokens = pairs[some[0]]
            trees.pop(some[0], None)
            job, _ = cache.prepare(Ask(grown(TokenTree(tokens[-1]), 5, source)), tokens, 512)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                stop(patch, model)
                model.forward([job])
    for cache, _ in pairs:
        cache.drop()
    assert sorted(model.free_ids) == list(range(model.id_count)), "an id was lost"


def stop(patch: pytest.MonkeyPatch, model: GGUF) -> None:
    """Interrupts the next call once llama.cpp has stored its rows."""
    before = model._decode_batch

    def broken(*args: Any) -> None:
        before(*args)
        raise KeyboardInterrupt

    patch.setattr(model, "_decode_batch", broken)


@torch.inference_mode()
def test_growing_a_tree_computes_its_new_nodes_only(model: GGUF) -> None:
    cache, text, tree, sizes = model.cache(), [1, 2, 9, 4], TokenTree(4), []
    for shape in ([], [(0, 1), (0, 2)], [(1, 5), (2, 6), (2, 7)], [(3, 1), (0, 8)]):
        for parent, token in shape:
            tree.add(parent, token)
        job, _ = cache.prepare(Ask(tree), text, 99)
        sizes.append(len(job.tokens))
        reply = model.forward([job])[0]
        for row, node in zip(reply.logits, reply.nodes, strict=True):
            assert close(row, expected(model, text, tree, node))
    assert sizes == [4, 2, 3, 2]


@torch.inference_mode()
def test_a_chain_needs_one_sequence_and_a_tree_one_a_leaf(model: GGUF) -> None:
    cache, text = model.cache(), [1, 2, 3]
    ask(model, cache, text, TokenTree(3).chain([4, 5, 6]))
    assert len(cache.sequences) == 1
    tree = TokenTree(3).chain([4, 5]).chain([6, 7]).chain([8], at=1)
    ask(model, cache, text, tree)
    assert len(cache.sequences) == 3
    row = ask(model, cache, [*text, 6, 7, 2], TokenTree(2)).logits[0]
    assert cache.length == 6 - 1 and close(row, model.score([*text, 6, 7, 2])[0])


# --- limits


@torch.inference_mode()
def test_more_leaves_than_sequences_is_refused_and_fewer_make_room(file: Path) -> None:
    model, text = GGUF(file), [1, 2, 3]
    cache = model.cache()
    ask(model, cache, text, TokenTree(3).chain([4]))
    wide = TokenTree(3)
    for token in range(1, 200):
        wide.add(0, token)
    reply = ask(model, cache, text, wide, chunk=512)
    assert model.id_count == 256 and close(
        reply.logits[reply.nodes.index(150)], expected(model, text, wide, 150)
    )
    for token in range(200, 300):
        wide.add(0, token)
    with pytest.raises(Unsupported, match="fewer than 256 leaves"):
        ask(model, cache, text, wide)
    assert close(ask(model, cache, text, TokenTree(3)).logits, model.score(text)), (
        "a refusal breaks nothing"
    )


@torch.inference_mode()
def test_more_branches_than_sequences_take_turns(file: Path) -> None:
    model = GGUF(file)
    caches = [(model.cache(), [1 + i % 50, 2 + i % 7, 3]) for i in range(300)]
    for _ in range(2):
        jobs = [cache.prepare(Ask(TokenTree(text[-1])), text, 99)[0] for cache, text in caches]
        replies = model.forward(jobs)
        for i in (0, 3, 255, 299):
            assert close(replies[i].logits, model.score(caches[i][1]))
        for i, (_, text) in enumerate(caches):
            text.append(1 + i % 11)


@torch.inference_mode()
def test_rows_grow_and_then_the_idle_give_theirs_up(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "START_ROWS", 256)
    monkeypatch.setattr(gguf, "REQUESTS", 4)
    model = GGUF(file)
    assert model.row_count == 256
    model.most_rows = 512
    text = [1 + i % 50 for i in range(100)]
    caches = [model.cache() for _ in range(7)]
    for turn in range(2):
        for i, cache in enumerate(caches):
            mine = [*text, i + 1, *range(1, turn + 1)]
            assert close(
                ask(model, cache, mine, TokenTree(mine[-1])).logits, foretell_row(file, mine)
            )
    assert model.row_count == 512, "five of them fit, so others were evicted"
    fresh = [model.cache() for _ in caches]
    jobs = [cache.prepare(Ask(TokenTree(9)), [*text, 9, 9, 9, 9], 512)[0] for cache in fresh]
    with pytest.raises(PromptTooLong, match="7 requests at once"):
        model.forward(jobs)


def foretell_row(file: Path, tokens: list[int]) -> torch.Tensor:
    """From a model of its own."""
    return GGUF(file).score(tokens)


@torch.inference_mode()
def test_long_batches_go_in_parts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GGUF(file)
    tree = grown(TokenTree(3), 60, random.Random(5))
    whole = model.score([1, 2, 3], tree)
    monkeypatch.setattr(model, "call_tokens", 7)
    assert close(model.score([1, 2, 3], tree), whole)
    monkeypatch.setattr(model, "call_tokens", 2048)
    for value in (5, 1):
        monkeypatch.setattr(gguf, "CALL_ROWS", value)
        assert close(model.score([1, 2, 3], tree), whole)


def test_a_cache_that_is_collected_gives_its_sequences_back(model: GGUF) -> None:
    cache = model.cache()
    with torch.inference_mode():
        ask(model, cache, [1, 2], TokenTree(2).chain([3]).chain([4]))
    assert len(model.free_ids) == model.id_count - 2
    del cache
    gc.collect()
    assert len(model.free_ids) == model.id_count


# --- the laws, through what users call


METHODS = [
    "ngram:nodes=8",
    "token-recycling:nodes=12",
    "suffix:nodes=8",
    "draft",
    "draft:drafts=3,length=3",
    "ngram+suffix:nodes=9",
    "auto",
]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_plain_decoding(lm: foretell.LM, method: str) -> None:
    plain = [lm.generate(p, "plain", max_new_tokens=40).tokens for p in PROMPTS]
    assert plain == [tiny.lm().generate(p, "plain", max_new_tokens=40).tokens for p in PROMPTS], (
        "as transformers"
    )
    alone = [lm.generate(p, method, max_new_tokens=40) for p in PROMPTS]
    together = lm.generate(PROMPTS, method, max_new_tokens=40)
    assert [o.tokens for o in alone] == plain and [o.tokens for o in together] == plain
    if method != "auto":  # without a number of nodes it may find that drafting does not pay here
        assert sum(o.stats.drafted for o in alone) > 0
    target = lm.models["target"]
    assert isinstance(target, GGUF) and len(target.free_ids) == target.id_count, (
        "a request kept its sequences"
    )


@pytest.mark.parametrize("method", ["ngram", "token-recycling:nodes=12", "suffix:nodes=6"])
def test_seeds_give_the_tokens_of_plain_decoding(lm: foretell.LM, method: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": [1, 2, 3]}
    plain = lm.generate(PROMPTS, "plain", **options)
    assert [o.tokens for o in lm.generate(PROMPTS, method, **options)] == [o.tokens for o in plain]
    assert len({tuple(o.tokens) for o in plain}) == 3


def test_samples_of_one_prompt(lm: foretell.LM) -> None:
    many = lm.generate(
        CODE, "token-recycling:nodes=8", n=3, temperature=1.0, seed=5, max_new_tokens=16
    )
    alone = [
        lm.generate(CODE, "plain", temperature=1.0, seed=5 + k, max_new_tokens=16).tokens
        for k in range(3)
    ]
    assert [s.tokens for s in many.samples] == alone


def test_the_audit_holds_and_looks_at_the_rows(
    lm: foretell.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> audit.Report:
        return audit.audit(
            lm, ["token-recycling:nodes=8"], PROMPTS[:2], max_new_tokens=12, samples=32
        )

    report = run()
    assert report.all_held and "tiny.gguf" in report.model and report.dtype == "float32"
    lm.models["target"].dtype = torch.float16
    rounded = {check.name: check for check in run().methods[0].checks}
    assert rounded["seeds"].verdict == "no claim" and "rounding" in rounded["seeds"].detail
    lm.models["target"].dtype = torch.float32
    keep = Branch.keep_nodes

    def slip(self: Branch, nodes: Any) -> int:  # the right number of rows, of another token each
        kept = keep(self, nodes)
        if nodes and self.length > 20:
            self.memory.cut_rows(self.sequences[0].number, self.length)
            self.memory._fill_batch(
                [7] * len(nodes),
                [self.length + i for i in range(len(nodes))],
                [[self.sequences[0].number]] * len(nodes),
                [],
            )
            self.memory._decode_batch(set(), 1)
        return kept

    monkeypatch.setattr(Branch, "keep_nodes", slip)
    checks = {check.name: check.verdict for check in run().methods[0].checks}
    assert checks["cache"] == "failed", "wrong rows went unnoticed"


def test_costs_are_measured_and_kept_for_this_file(
    lm: foretell.LM, file: Path, second: Path
) -> None:
    found = lm.measure()
    assert "tiny.gguf" in found["about"] and set(found["seconds"]) == set(profiling.ROWS)
    assert (
        foretell.load(file).measure()["file"]
        == found["file"]
        != foretell.load(second).measure()["file"]
    )


def test_threads_follow_torch(model: GGUF) -> None:
    before = torch.get_num_threads()
    try:
        for n in (2, 1):
            torch.set_num_threads(n)
            model.score([1, 2])
            assert model.lib.llama_n_threads(model.context_handle) == n
    finally:
        torch.set_num_threads(before)


def test_streams_and_stops(lm: foretell.LM) -> None:
    out = lm.generate(CODE, "plain", max_new_tokens=30)
    assert "".join(p.text for p in lm.stream(CODE, "ngram", max_new_tokens=30)) == out.text
    word = out.text[5:8]
    assert (
        lm.generate(CODE, "suffix", max_new_tokens=30, stop=word).text
        == out.text[: out.text.find(word)]
    )


# --- what cannot be


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(ForetellError) as caught:
        foretell.load(source, **options)
    line = str(caught.value)
    assert "\n" not in line and caught.value.exit_code == 2
    return line


def test_damaged_files(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = file.read_bytes()
    for name, content in {
        "cut": data[: len(data) // 2],
        "head": data[:200],
        "other": b"PK\3\4" + data[4:],
        "empty": b"",
        "noise": data[:64] + bytes(range(256)) * 40,
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        line = refusal(path)
        assert str(path) in line and "fetch it again" in line
    assert "no such file" in refusal(tmp_path / "nowhere.gguf")
    assert "no such file" in refusal(file, draft=tmp_path / "nowhere.gguf")
    with pytest.raises(BadModel, match="fetch it again"):
        load_tokenizer(tmp_path / "cut.gguf")
    foretell.load(file).generate(CODE, "plain", max_new_tokens=2)
    assert capfd.readouterr() == ("", ""), "llama.cpp printed something"


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_weights_are_unpacked_for_an_backend_by_name(
    backend: str, file: Path, lm: foretell.LM
) -> None:
    if backend == "openvino":
        pytest.importorskip("openvino")
    reference = foretell.wrap(tiny.llama(), tiny.tokenizer()).models["target"]
    other = foretell.load(file, backend=backend, dtype="float32")
    model = other.models["target"]
    tokens = other.encode(CODE)
    tree = grown(TokenTree(tokens[-1]), 12, random.Random(0))
    assert tokens == lm.encode(CODE) and close(
        model.score(tokens, tree), reference.score(tokens, tree)
    )
    ours, theirs = (x.generate(PROMPTS, "suffix", max_new_tokens=24) for x in (other, lm))
    assert [o.text for o in ours] == [o.text for o in theirs]
    assert foretell.load(file, backend="torch").models["target"].dtype == torch.bfloat16


def test_an_unknown_family(file: Path, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(file.read_bytes().replace(b"llama", b"lamma"))
    assert "lamma" in refusal(tmp_path / "x.gguf")


def test_options_without_a_meaning_are_refused_by_name(file: Path) -> None:
    assert "dtype='bfloat16'" in refusal(file, dtype="bfloat16")
    assert "backend='fast': must be one of" in refusal(file, backend="fast")
    assert "revision='main'" in refusal(file, revision="main", backend="torch")
    assert "device='cuda'" in refusal(file, device="cuda")
    assert "exact_bits=True" in refusal(file, exact_bits=True)
    assert "revision='main'" in refusal(file, revision="main")
    assert foretell.load(file, device="cpu").models["target"].device.type == "cpu"


def test_methods_that_need_layers_are_refused(lm: foretell.LM) -> None:
    with pytest.raises(Unsupported, match="layers"):
        lm.generate(CODE, "superposed")


def test_a_file_drafts_for_a_folder_and_the_other_way_round(file: Path, tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    expected_tokens = tiny.lm().generate(CODE, "plain", max_new_tokens=20).tokens
    for target, draft in ((folder, file), (file, folder)):
        out = foretell.load(target, draft=draft).generate(CODE, "draft", max_new_tokens=20)
        assert out.tokens == expected_tokens and out.stats.accepted == out.stats.drafted > 9


def test_a_prompt_beyond_the_context(lm: foretell.LM) -> None:
    with pytest.raises(PromptTooLong, match="the prompt has 128 tokens"):
        lm.generate([1] * tiny.CONTEXT, "plain")
    assert (
        len(
            lm.generate(
                [1] * (tiny.CONTEXT - 4), "plain", max_new_tokens=50, ignore_eos=True
            ).tokens
        )
        == 4
    )


def test_a_family_that_is_not_proven_is_tested(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "PROVEN", frozenset())
    GGUF(file)
    monkeypatch.setattr(
        Branch,
        "place",
        lambda self, parents, shared, fresh, chain: one_sequence(self, parents, shared, fresh),
    )
    with pytest.raises(Unsupported, match="self-test"):
        GGUF(file)


def one_sequence(
    self: Branch, parents: list[int], shared: int, fresh: list[int]
) -> list[list[int]]:
    """What a memory that knows no trees would see: all nodes in each other's way."""
    self.sequences += [SequenceId(i) for i in fresh]
    self.changing = True
    for sequence in self.sequences:
        sequence.path = list(range(len(parents)))
    return [[self.sequences[0].number]] * (len(parents) - shared)
