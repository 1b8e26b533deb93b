"""Encoder-decoders: a text is written as transformers writes it, whatever drafts, alone and in
batches; the encoder runs once a request; what cannot be right is refused by name.
"""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedModel

import foretell
from foretell import LM, cli, wrap
from foretell.api.diagnosis import diagnose
from foretell.api.prompts import Text
from foretell.api.unsaid import Unsaid
from foretell.cache.job import Job
from foretell.cache.policy import Segment
from foretell.core.random import Door
from foretell.core.request import Request
from foretell.core.tree import TokenTree
from foretell.core.types import Ask, Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, PromptTooLong, Unsupported
from foretell.models.encoder_decoder import crossing, source
from foretell.models.encoder_decoder.seq2seq import EncoderDecoder
from foretell.models.encoder_decoder.source import SourceRows
from foretell.spec import resolve_method
from foretell.testing.outcomes import Enumerator
from tests import laws, tiny
from tests.models.decoder.seq2seq import CONTEXT, FAMILIES, HALVES, VOCAB, seq2seq

NEW = 16
DRAW = torch.Generator().manual_seed(3)
SOURCES = [torch.randint(3, VOCAB, (size,), generator=DRAW).tolist() for size in (1, 2, 5, 9, 13)]
SOURCES += [[7, 8, 9] * 4, [7, 8, 9] * 4, torch.randint(3, VOCAB, (30,), generator=DRAW).tolist()]
TREE = TokenTree(9).chain([3, 4, 5]).chain([6, 7]).chain([8], at=1).chain([9, 10], at=2)
METHODS = ("plain", "token-recycling:nodes=8", "ngram:nodes=6", "draft:length=3,nodes=4")
every_family = pytest.mark.parametrize("family", sorted(FAMILIES))


@cache
def model(family: str) -> PreTrainedModel:
    return seq2seq(family)


@cache
def lm(family: str) -> LM:
    return wrap(model(family), draft=seq2seq(family, noise=0.03), name=family)


@cache
def expected(family: str) -> list[list[int]]:
    """transformers' own greedy tokens, one source at a time."""
    answers = []
    for tokens in SOURCES:
        ids = torch.tensor([tokens])
        out = model(family).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
        )
        answers.append(out[0, 1:].tolist())
    return answers


@torch.inference_mode()
def stock(hf: PreTrainedModel, tokens: Sequence[int], text: Sequence[int], **more: Any) -> Any:
    """What the model alone gives for a source and a text."""
    ids = torch.tensor([list(text)])
    given = {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
    asked = torch.tensor([list(tokens)])
    return hf(
        input_ids=asked, attention_mask=torch.ones_like(asked), use_cache=False, **given, **more
    )


def request(
    tokens: Sequence[int], method: str = "plain", begin: Sequence[int] = (1,), **more: Any
) -> Request:
    strategy = resolve_method(method)[1]
    sampling = Sampling(**{"max_new_tokens": NEW, **more})
    return Request(list(begin), strategy, sampling, inputs={"source": tuple(tokens)})


# --- the tokens and rows of transformers


@pytest.mark.parametrize("method", METHODS)
@every_family
def test_greedy_tokens_are_those_of_transformers(family: str, method: str) -> None:
    outs = lm(family).generate(SOURCES, method, max_new_tokens=NEW)
    assert [out.tokens for out in outs] == expected(family)
    assert len({tuple(answer) for answer in expected(family)}) >= 6, "the source has no say"
    assert len({token for answer in expected(family) for token in answer}) > 5, "texts hardly vary"
    if method.startswith("draft"):
        drafted, accepted = (
            sum(getattr(out.stats, name) for out in outs) for name in ("drafted", "accepted")
        )
        assert 0 < accepted < drafted, "rows kept and rows forgotten, both should have occurred"


@torch.inference_mode()
def rows_of(
    adapter: EncoderDecoder, tokens: Sequence[int], text: Sequence[int], chunk: int, **ask: Any
) -> Any:
    held = adapter.cache(request(tokens))
    whole = False
    while not whole:
        job, whole = held.prepare(Ask(TREE, **ask), text, chunk)
        reply = adapter.forward([job])[0]
    return reply


@every_family
def test_rows_of_a_packed_tree_are_those_of_its_paths(family: str) -> None:
    text = [1, *range(20, 38), TREE.tokens[0]]  # longer than a window
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-5)):
        hf = seq2seq(family, dtype=dtype)
        adapter = EncoderDecoder(hf, family)
        for chunk in (4, 99):
            rows = rows_of(adapter, SOURCES[3], text, chunk, rows=range(len(TREE))).logits
            assert rows.dtype == dtype
            for node in range(len(TREE)):
                row = stock(hf, SOURCES[3], [*text, *TREE.tokens_to(node)]).logits[0, -1]
                assert float((row - rows[node]).abs().max()) <= tolerance, (dtype, chunk, node)


@every_family
def test_hidden_states_are_those_of_transformers(family: str) -> None:
    adapter = lm(family).models["target"]
    assert isinstance(adapter, EncoderDecoder)
    text = [1, 20, 21, 9]
    taps = tuple(range(len(adapter.layout) + 1))
    reply = rows_of(adapter, SOURCES[2], text, 99, taps=taps, rows=[0])
    theirs = stock(model(family), SOURCES[2], text, output_hidden_states=True)
    if family == "t5gemma":  # which reports the last state for all of them
        return
    for i in range(len(adapter.layout)):
        ours = reply.hidden[i][: len(text)]
        torch.testing.assert_close(ours, theirs.decoder_hidden_states[i][0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["t5", "t5gemma"])
def test_layers_can_be_left_out_and_entered_in_the_middle(family: str) -> None:
    adapter = lm(family).models["target"]
    assert isinstance(adapter, EncoderDecoder) and "layers" in adapter.caps
    held = adapter.cache(request(SOURCES[2]))
    text = [1, 9]
    with torch.inference_mode():
        whole = adapter.forward([held.prepare(Ask(TREE), text, 99)[0]])[0].logits
        held = adapter.cache(request(SOURCES[2]))
        ask = Ask(TREE, rows=[], taps=(1,), layers=(0,))
        below = adapter.forward([held.prepare(ask, text, 99)[0]])[0]
        ask = Ask(TREE, layers=(1, 2), states=below.hidden[1])
        above = adapter.forward([held.prepare(ask, text, 99)[0]])[0]
        assert held.done == held.all_layers
        torch.testing.assert_close(above.logits, whole, atol=1e-4, rtol=0)
        entered = adapter.embed(TREE.tokens)
        held = adapter.cache(request(SOURCES[2]))
        held.commit([1, 9])
        some = adapter.forward([held.prepare(Ask(TREE, layers=(0, 2)), text, 99)[0]])[0]
    assert entered.shape == (len(TREE), 32)
    assert float((some.logits - whole).abs().max()) > 1e-2


def test_where_positions_enter_with_the_tokens_layers_are_not_offered() -> None:
    for family in ("bart", "marian", "pegasus"):
        assert "layers" not in lm(family).models["target"].caps


# --- the encoder runs once


class Counted:
    """How often a model's encoder ran."""

    def __init__(self, hf: PreTrainedModel):
        self.runs = 0
        hf.get_encoder().register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self.runs += 1


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_encoder_runs_once_for_each_source(family: str) -> None:
    hf = seq2seq(family)
    own = wrap(hf, name=family)
    counted = Counted(hf)
    own.generate(SOURCES[3], "ngram:nodes=6", max_new_tokens=NEW)
    assert counted.runs == 1
    own.generate(SOURCES[4], "plain", max_new_tokens=4, n=5, temperature=1.0)
    assert counted.runs == 2
    own.generate(SOURCES, "plain", max_new_tokens=4)
    assert counted.runs == 2 + len({tuple(tokens) for tokens in SOURCES})
    assert own.models["target"].calls


def test_forks_share_the_source_and_it_goes_with_the_last_cache() -> None:
    adapter = EncoderDecoder(seq2seq("t5"), "t5")
    gc.collect()
    assert not len(adapter.sources)
    held = adapter.cache(request(SOURCES[3]))
    other = adapter.cache(request(SOURCES[3]))
    with torch.inference_mode():
        adapter.forward([held.prepare(Ask(TREE), [1, 9], 99)[0]])
    twin = held.fork()
    assert twin.source is held.source is other.source and held.source.layers is not None
    assert held.bytes > other.source.bytes > 0
    stranger = request(SOURCES[3])
    stranger.tenant = "another"
    assert adapter.cache(stranger).source is not held.source
    del held, other
    gc.collect()
    assert len(adapter.sources) == 1
    del twin
    gc.collect()
    assert not len(adapter.sources)


def test_rows_of_a_text_are_not_lent_to_another_source() -> None:
    adapter = lm("t5").models["target"]
    first = adapter.cache(request(SOURCES[3]))
    with torch.inference_mode():
        adapter.forward([first.prepare(Ask(TokenTree(9)), [1, 5, 9], 99)[0]])
    segment = first.share_rows([1, 5, 9, 4])
    assert isinstance(segment, Segment) and segment.tokens == (1, 5, 9)
    assert not adapter.cache(request(SOURCES[4])).adopt_segment(segment)
    own = wrap(seq2seq("t5"), name="t5")
    own.limit(prefixes=1 << 20)
    long = [1, *range(30, 90)]
    engine = own.engine
    for tokens in (SOURCES[3], SOURCES[4]):
        asked = request(tokens, begin=long)
        live = engine.add(asked)
        list(engine.run())
        alone = Engine({"target": own.models["target"]})
        other = alone.add(request(tokens, begin=long))
        list(alone.run())
        assert live.ctx.output == other.ctx.output


def test_requests_that_are_paused_and_go_on_give_the_same() -> None:
    own = wrap(seq2seq("t5"), name="t5")
    size = own.models["target"].row_bytes
    own.limit(memory=160 * size)
    outs = own.generate(SOURCES, "ngram:nodes=6", max_new_tokens=NEW)
    assert [out.tokens for out in outs] == expected("t5") and own.engine.admission.preempted
    assert outs[3].stats.prompt_tokens == 1 + len(SOURCES[3])


# --- slips, each of which must be caught


def test_reading_another_requests_source_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = source.source_attention

    def first_source(layer: int, q: torch.Tensor, *terms: Any) -> torch.Tensor:
        jobs: Sequence[Job] = source.STEP.get()
        k, v = jobs[0].cache.source.layers[layer]
        return source.attend(q, k, v, None, *(terms[0] or q.shape[-1] ** -0.5, terms[1]))

    assert right is crossing.source_attention
    monkeypatch.setattr(crossing, "source_attention", first_source)
    outs = lm("t5").generate(SOURCES, "plain", max_new_tokens=NEW)
    assert [out.tokens for out in outs] != expected("t5")


def test_a_bias_by_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = crossing.RelativeBias.__call__

    def by_rows(self: Any, here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return right(self, here, torch.arange(len(there)))

    monkeypatch.setattr(crossing.RelativeBias, "__call__", by_rows)
    with pytest.raises(Unsupported, match=r"family t5.*a self-test found"):
        EncoderDecoder(model("t5"), "t5")


def test_a_lost_end_of_the_source_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: SourceRows, name: str, value: Any) -> None:
        if name == "layers" and value is not None:
            value = [(k[:, :-1], v[:, :-1]) for k, v in value]
        object.__setattr__(self, name, value)

    monkeypatch.setattr(SourceRows, "__setattr__", cut)
    with pytest.raises(Unsupported, match="a self-test found"):
        EncoderDecoder(model("bart"), "bart")


# --- samples


def test_samples_are_those_of_plain_decoding_seed_by_seed() -> None:
    for family in ("t5", "marian"):
        for more in ({"temperature": 0.9, "n": 3}, {"repetition_penalty": 1.3}):
            outs = [
                lm(family).generate(SOURCES[:4], method, max_new_tokens=NEW, seed=5, **more)
                for method in ("plain", "token-recycling:nodes=8")
            ]
            for plain, drafted in zip(*outs, strict=True):
                texts = [[sample.tokens for sample in out.samples] for out in (plain, drafted)]
                assert texts[0] == texts[1]


SMALL: dict[str, Any] = {"vocab_size": 4, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2}


@pytest.mark.parametrize(
    "method", ["draft:length=2,nodes=3", "ngram:nodes=3", "token-recycling:nodes=4"]
)
def test_the_law_of_two_tokens_is_the_targets(method: str) -> None:
    """By enumeration, against rows that the model alone gives."""
    hf = seq2seq("t5", dtype=torch.float64, **SMALL)
    models = {
        "target": EncoderDecoder(hf, "t5"),
        "draft": EncoderDecoder(seq2seq("t5", 0.5, torch.float64, **SMALL), "near"),
    }
    begin, tokens = [1, 2, 3, 1, 2, 3, 1], (3, 1, 2, 2)
    want: dict[tuple[int, ...], float] = {}
    first = stock(hf, tokens, begin).logits[0, -1].softmax(-1)
    for a, p in enumerate(first.tolist()):
        for b, q in enumerate(stock(hf, tokens, [*begin, a]).logits[0, -1].softmax(-1).tolist()):
            want[a, b] = p * q
    got: dict[tuple[int, ...], float] = {}
    counts = {"drafted": 0, "accepted": 0}

    def once(door: Door) -> tuple[int, ...]:
        engine = Engine(models)
        asked = request(tokens, method, begin, max_new_tokens=2, temperature=1.0)
        asked.rng = door
        live = engine.add(asked)
        laws.finish(engine, live)
        for name in counts:
            counts[name] += getattr(live.ctx.stats, name)
        return tuple(live.ctx.output)

    for weight, output in Enumerator.walk_outcomes(once):
        got[output] = got.get(output, 0.0) + weight
    assert max(abs(got.get(key, 0.0) - want[key]) for key in want) < 1e-9
    assert method.startswith("token") or 0 < counts["accepted"] < counts["drafted"]


# --- what is refused, in one line


def test_long_and_wrong_sources_are_refused_before_the_first_forward() -> None:
    bart = lm("bart")
    with pytest.raises(PromptTooLong, match="the prompt has 65 tokens and the encoder of bart"):
        bart.generate([3] * (CONTEXT + 1), "plain")
    assert bart.generate([3] * CONTEXT, "plain", max_new_tokens=2).tokens
    for wrong in ([], [VOCAB], [-1]):
        with pytest.raises(BadConfig, match="at least one token, all of the vocabulary"):
            bart.generate([wrong], "plain")
    mixed = bart.generate([[3, 4], [3] * 99], "plain", max_new_tokens=2)
    assert mixed[0].error is None and isinstance(mixed[1].error, PromptTooLong)
    with pytest.raises(BadConfig, match="bart reads a source beside its text"):
        bart.engine.add(Request([1], resolve_method("plain")[1]))
    out = bart.generate(SOURCES[3], "plain", max_new_tokens=500)
    assert len(out.tokens) == CONTEXT - 1 and out.finish_reason == "length"


def test_an_encoder_decoder_may_not_draft_for_a_decoder() -> None:
    both = wrap(tiny.llama(), draft=model("t5"), name="llama")
    with pytest.raises(BadConfig, match=r"llama \(draft\) reads a source"):
        both.generate([3, 4], "draft:nodes=3")
    assert both.generate([3, 4], "plain", max_new_tokens=2).tokens


REFUSED = {
    "m2m_100": "unexpected keyword argument 'position_ids'",
    "blenderbot-small": "a self-test found",
}


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_families_that_cannot_be_right_are_refused_by_name(family: str) -> None:
    hf = seq2seq(family, **HALVES)
    before = hf.config._attn_implementation
    with pytest.raises(Unsupported) as caught:
        wrap(hf, name="tiny")
    line = str(caught.value)
    assert REFUSED[family] in line and f"(family {family})" in line and "\n" not in line
    assert hf.config._attn_implementation == before


def test_a_model_without_a_start_is_refused() -> None:
    hf = seq2seq("t5")
    hf.generation_config.decoder_start_token_id = hf.generation_config.bos_token_id = None
    with pytest.raises(Unsupported, match="one token that every text begins with"):
        wrap(hf, name="tiny")


def test_what_the_models_own_settings_forbid_and_force() -> None:
    hf = seq2seq("marian")
    top = expected("marian")[3][0]
    hf.generation_config.bad_words_ids = [[top]]
    own = wrap(hf, name="marian")
    ids = torch.tensor([SOURCES[3]])
    want = hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    assert (
        own.generate(SOURCES[3], "ngram:nodes=4", max_new_tokens=NEW).tokens == want[0, 1:].tolist()
    )
    assert top not in want[0, 1:]
    hf.generation_config.bad_words_ids = [[top, 5]]
    with pytest.raises(Unsupported, match="forbid sequences of several tokens"):
        wrap(hf, name="marian")
    hf.generation_config.bad_words_ids = None
    hf.generation_config.forced_bos_token_id = 17
    forced = wrap(hf, name="marian")
    want = hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    out = forced.generate(SOURCES[3], "plain", max_new_tokens=NEW - 1)
    assert [17, *out.tokens] == want[0, 1:].tolist()


def test_banned_words_are_read_without_the_end_of_a_source() -> None:
    """Tokenizers of such models put an end after every text, also one that is only banned."""
    words = copy.deepcopy(tiny.tokenizer())
    ends = processors.TemplateProcessing(single=f"$A {tiny.EOS}", special_tokens=[(tiny.EOS, 0)])
    words.backend_tokenizer.post_processor = ends
    text = Text(words, VOCAB, (0,))
    assert text.encode("no")[-1] == 0
    (banned,) = text.sampling({"bad_words": ["no"]}).bad_words
    assert isinstance(banned, Unsaid) and banned.text == b"no"


# --- folders and the command line


@pytest.mark.parametrize("family", ["t5", "bart", "t5gemma", "marian"])
def test_a_folder_is_loaded(family: str, tmp_path: Path) -> None:
    folder = tiny.save(model(family), tmp_path / family)
    own = foretell.load(folder)
    text = "def add(a, b):"
    plain = own.generate(text, "plain", max_new_tokens=NEW)
    assert plain.tokens == lm(family).generate(own.encode(text), "plain", max_new_tokens=NEW).tokens
    (report,) = diagnose(own)
    assert (report.family, report.backend, report.loop) == (family, "torch", True)
    if family != "t5":
        return
    for wrong, what in (({"dtype": "int8"}, "dtype='int8'"), ({"exact_bits": True}, "exact_bits")):
        with pytest.raises(Unsupported, match=f"{what}.*a decoder only"):
            foretell.load(folder, **wrong)
    with pytest.raises(Unsupported, match=r"backend='native'.*a decoder only"):
        foretell.load(folder, backend="native")
    softer = seq2seq("t5")
    with torch.no_grad():
        for p in softer.parameters():
            p.mul_(0.5)
    half = foretell.load(tiny.save(softer, tmp_path / "softer"), dtype="bfloat16")
    assert half.generate(text, "ngram:nodes=4", max_new_tokens=4).tokens


def test_the_command_line_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.save(model("t5"), tmp_path / "t5")
    own = foretell.load(folder)
    want = own.generate("def add(a, b):", "plain", max_new_tokens=NEW)
    base = ["generate", "--model", str(folder), "--max-new-tokens", str(NEW)]
    for method in ("plain", "input-guided:nodes=6"):
        assert cli.run([*base, "--method", method, "--json", "def add(a, b):"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["tokens"] == want.tokens
    folder = tiny.save(model("bart"), tmp_path / "bart")
    assert cli.run(["generate", "--model", str(folder), "--method", "plain", "word " * 99]) == 2
    line = capsys.readouterr().err
    assert "the encoder of" in line and "shorten it" in line and "Traceback" not in line
