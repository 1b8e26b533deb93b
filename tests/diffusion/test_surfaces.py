"""What users meet: models, texts with gaps, streams, refusals."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from foretell.api.lm import LM
from foretell.api.outputs import Piece
from foretell.core.masked_text import NOISE
from foretell.diffusion.block_filter import SCHEMA, BlockFilter
from foretell.errors import BadConfig, BadFile, ForetellError, Unsupported
from foretell.models.diffusion.canvas import Denoiser
from foretell.ops.fingerprint import norm_mark
from foretell.testing.toy_canvas import Oracle, ToyCanvas
from tests import tiny
from tests.diffusion.test_every import every, fills, toy
from tests.diffusion.worlds import LISTS, UNEVEN, calls, filled, text


@cache
def lm() -> LM:
    hf = tiny.llama()
    words: Any = tiny.tokenizer()
    return LM(Denoiser(hf, "tiny", mask_id=len(words) - 9), words, eos=(0,))


def test_auto_fills_canvases() -> None:
    answer = lm().generate("The quick", max_new_tokens=12, ignore_eos=True)
    again = lm().generate("The quick", method="threshold", max_new_tokens=12, ignore_eos=True)
    assert answer.tokens == again.tokens and len(answer.tokens) == 12


def test_a_stream_brings_the_finished_beginning() -> None:
    pieces = list(
        lm().stream("The", method="confidence:block=4", max_new_tokens=8, ignore_eos=True)
    )
    answer = lm().generate("The", method="confidence:block=4", max_new_tokens=8, ignore_eos=True)
    assert "".join(piece.text for piece in pieces) == answer.text


def test_gaps_are_filled() -> None:
    answer = lm().fill(["The quick", 3, " jumps over", 2], temperature=0.7)
    given = lm().encode(" jumps over", special=False)
    assert len(answer.tokens) == 5 + len(given) and answer.tokens[3 : 3 + len(given)] == given


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([3, "a"], "begins with a gap"),
        (["a", "b"], "no gap"),
        (["a", 0], "1 or more"),
        ("a", "gap"),
    ],
)
def test_bad_gaps_are_named(parts: Any, said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        lm().fill(parts)


def test_it_takes_a_model_that_fills_canvases() -> None:
    ordinary = tiny.lm()
    with pytest.raises(Unsupported, match="fills canvases"):
        ordinary.fill(["The", 3])
    with pytest.raises(Unsupported, match="canvas"):
        ordinary.generate("The", method="threshold")
    with pytest.raises(Unsupported, match="fills canvases"):
        lm().generate("The", method="suffix")


# --- streams


def replayed(pieces: list[Piece]) -> list[int | None]:
    """The canvas as the pieces tell of it. Whatever is final stands there, and stays."""
    canvas: list[int | None] = []
    final: list[int] = []
    for piece in pieces:
        if piece.length is not None:
            canvas += [None] * (piece.length - len(canvas))
            del canvas[piece.length :]
        for place, token in piece.placed:
            assert canvas[place] != token and place >= len(final)
            canvas[place] = token
        final += piece.tokens
        assert canvas[: len(final)] == final
    return canvas


@pytest.mark.parametrize("method", ["threshold:block=4", "freedave:block=4", "ete:block=4", "rcr"])
def test_a_stream_tells_what_stands_where(method: str) -> None:
    options = {"max_new_tokens": 10, "temperature": 0.9, "ignore_eos": True}
    pieces = list(lm().stream("The", method, **options))
    answer = lm().generate("The", method, **options)
    assert pieces[0].length == 10 and not pieces[0].placed
    assert replayed(pieces) == answer.tokens
    rounds = [piece for piece in pieces if piece.placed]
    assert len(rounds) <= answer.stats.calls["target"]
    assert any(place >= 4 for piece in rounds[:-1] for place, _ in piece.placed)


def test_a_stream_tells_what_was_taken_back() -> None:
    method = "remdm:block=8,count=3"
    pieces = list(lm().stream("The", method, max_new_tokens=8, ignore_eos=True))
    back = [place for piece in pieces for place, token in piece.placed if token is None]
    assert len(back) >= 2  # of the three at most one was committed in the same step
    assert None not in replayed(pieces)


def test_what_was_given_is_told_at_once() -> None:
    canvas = [-1, 5, -1, 7]
    pieces = list(lm().stream("The", canvas=canvas, max_new_tokens=4, ignore_eos=True))
    assert (pieces[0].placed, pieces[0].length) == ([(1, 5), (3, 7)], 4)
    assert [token for token in replayed(pieces) if token in (5, 7)] == [5, 7]


def test_an_ordinary_stream_tells_nothing_of_it() -> None:
    pieces = list(tiny.lm(draft=False).stream("The", max_new_tokens=4))
    assert all(piece.length is None and not piece.placed for piece in pieces)


def test_a_stream_that_is_left_leaves_nothing_behind() -> None:
    model = lm()
    for method in ("freedave:block=0", "ete:block=0", "threshold:block=4"):
        pieces = model.stream("The quick", method, max_new_tokens=12, ignore_eos=True)
        next(pieces), next(pieces)
        pieces.close()
        status = model.engine.status()
        assert (status["running"], status["waiting"], status["cache_bytes"]) == (0, 0, 0)
        assert model.check_integrity() == []
    assert len(model.generate("The", max_new_tokens=4, ignore_eos=True).tokens) == 4


# --- log-probabilities


@pytest.mark.parametrize("name", ["confidence", "margin", "entropy", "random"])
def test_log_probabilities_add_up_to_the_texts(name: str) -> None:
    """Of a model with exact conditionals, one token a step: the chain rule, in any order."""
    for texts in (*LISTS.values(), UNEVEN):
        for seed in range(4):
            options = {"max_new_tokens": len(next(iter(texts))), "seed": seed, "temperature": 1.0}
            (live,) = filled(Oracle(texts, vocab=6), f"{name}:block=0", logprobs=2, **options)
            total = sum(value for value, _ in live.logprobs)
            assert math.exp(total) == pytest.approx(texts[tuple(live.ctx.output)], rel=1e-5)


@every
def test_each_token_has_its_log_probability(name: str) -> None:
    """Taken back or not, it is that of the row which it was committed by."""
    model, options = toy(name), {"max_new_tokens": 8, "temperature": 0.8}
    (live,) = filled(model, f"{name}:block=4", logprobs=3, **options)
    assert list(live.ctx.output) == text(model, f"{name}:block=4", **options)
    assert len(live.logprobs) == 8
    for token, (value, best) in zip(live.ctx.output, live.logprobs, strict=True):
        values = [number for _, number in best]
        assert value is not None and value <= values[0] and values == sorted(values, reverse=True)
        assert dict(best).get(token, value) == value
        assert fills(name) == NOISE or model.mask_id not in dict(best)


def test_the_mask_is_not_among_the_best() -> None:
    model = ToyCanvas()
    (live,) = filled(model, "threshold", logprobs=99, max_new_tokens=4)
    for _, best in live.logprobs:
        assert {token for token, _ in best} == {*range(model.vocab)} - {model.mask_id}


def test_a_given_token_has_no_log_probability() -> None:
    answer = lm().fill(["The", 2, " fox", 1], logprobs=1)
    assert answer.logprobs is not None
    known = [entry["logprob"] for entry in answer.logprobs]
    given = len(lm().encode(" fox", special=False))
    assert known[2 : 2 + given] == [None] * given and None not in (*known[:2], known[-1])


# --- options


@every
def test_filters_are_honoured(name: str) -> None:
    """What leaves one token is greedy, whichever of them it is."""
    method, options = f"{name}:block=4", {"max_new_tokens": 8, "seed": 5}
    if name == "ete":  # which else chooses among several at temperature 0, too
        method += ",explore=commit"
    greedy = text(toy(name), method, **options)
    hot = {"temperature": 3.0, **options}
    free = text(toy(name), method, **hot)
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert text(toy(name), method, **hot, **one) == greedy
    assert free == text(toy(name), method, **hot) and free != greedy
    assert free != text(toy(name), method, **{**hot, "seed": 6})


@every
def test_biases_and_ends_are_honoured(name: str) -> None:
    method, options = f"{name}:block=4", {"max_new_tokens": 8}
    assert text(toy(name), method, logit_bias={2: 90.0}, **options) == [2] * 8
    assert 2 not in text(toy(name), method, logit_bias={2: -90.0}, **options)
    ends = {"logit_bias": {2: 90.0}, "stop_token_ids": (2,), **options}
    assert text(toy(name), method, **ends) == [2]
    late = text(toy(name), method, min_new_tokens=3, **ends)
    assert 2 not in late[:3] and late[3:] == [2]


@every
def test_forwards_that_may_be_spent_are_a_limit(name: str) -> None:
    if fills(name) == NOISE:
        pytest.skip("the model is one of masks")
    spec = {"method": f"{name}:block=2", "max_new_tokens": 12, "ignore_eos": True}
    answer = lm().generate("The", budget="forwards=3", **spec)
    assert sum(answer.stats.calls.values()) == 3 and answer.finish_reason == "budget"
    whole = lm().generate("The", **spec)
    assert whole.tokens[: len(answer.tokens)] == answer.tokens and len(whole.tokens) == 12


def test_samples_and_stops_are_honoured() -> None:
    options = {"max_new_tokens": 10, "temperature": 1.0, "ignore_eos": True}
    answer = lm().generate("The", n=3, seed=4, **options)
    for k, sample in enumerate(answer.samples):
        assert sample.tokens == lm().generate("The", seed=4 + k, **options).tokens
    assert len({tuple(sample.tokens) for sample in answer.samples}) == 3
    stop = answer.text[2:4]
    cut = lm().generate("The", seed=4, stop=stop, **options)
    assert cut.text == answer.text[: answer.text.index(stop)] and cut.finish_reason == "stop"
    least = len(cut.tokens)
    later = lm().generate("The", seed=4, stop=stop, min_new_tokens=least, **options)
    assert later.tokens[:least] == cut.tokens and len(later.tokens) > least
    assert later.text.startswith(answer.text[:4])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
    ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
    ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2"),
    ({"bad_words": ["fox"]}, "bad_words="),
    ({"logits_processors": [lambda ids, scores: scores]}, "logits_processors="),
    ({"processor": "momentum"}, "processor="),
    ({"json_schema": {"type": "object"}}, "json_schema="),
    ({"regex": "a+"}, "regex="),
    ({"guidance": "cfg:g=2"}, "reads the target itself"),
    ({"guidance": "dola"}, "dola"),
    ({"kv": "snapkv"}, "kv=snapkv"),
    ({"kv": "streaming-llm"}, "kv=streaming-llm"),
    ({"reward": "keywords:words=dog"}, "reward"),
    ({"method": "best-of", "reward": "keywords:words=dog"}, "fills canvases"),
    ({"method": "plain"}, "fills canvases"),
    ({"method": "beam"}, "fills canvases"),
    ({"method": "draft"}, "fills canvases"),
    ({"canvas": [-1] * 9}, "canvas has 9 positions"),
    ({"canvas": [-1, 999]}, "canvas: 999"),
    ({"canvas": [-1, "x"]}, "canvas: 'x'"),
    ({"canvas": "abc"}, "canvas='abc'"),
    ({"canvas": []}, "nothing to fill"),
    ({"canvas": [5, 5]}, "nothing to fill"),
    ({"method": "freedave", "kv": "window"}, "kv=dual"),
    ({"method": "confidence", "kv": "dkv:variant=no"}, "variant"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_cannot_be_honoured_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ForetellError) as caught:
        lm().stream("The quick", **{"max_new_tokens": 8, **options})
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_mask_in_a_prompt_is_refused() -> None:
    mask: Any = lm().models["target"]
    with pytest.raises(BadConfig, match=r"LM\.fill"):
        lm().stream([5, mask.mask_id, 6])


def test_a_canvas_has_no_trace() -> None:
    with pytest.raises(Unsupported, match="watch it with stream"):
        lm().trace("The quick", max_new_tokens=4)
    assert len(lm().generate("The", max_new_tokens=4, trace=True, ignore_eos=True).tokens) == 4


def test_noise_is_not_for_methods_of_masks() -> None:
    class Noise(ToyCanvas):
        caps = frozenset({"canvas", NOISE})

    for method in ("threshold", "freedave"):
        with pytest.raises(Unsupported, match=r"uniform noise; choose a method.*renoise"):
            text(Noise(), method)


def test_filters_of_others_are_refused_at_once(tmp_path: Path) -> None:
    def made(block: int, norm: str) -> str:
        file = tmp_path / f"{block}{norm[:4]}.safetensors"
        about = {"schema": SCHEMA, "block": str(block), "norm": norm}
        save_file(BlockFilter(block).state_dict(), file, about)
        return f"learn2pd:filter={file},block=8"

    own = norm_mark(lm().models["target"])
    with pytest.raises(BadConfig, match="learn2pd:block=8"):
        lm().stream("The", made(4, own))
    with pytest.raises(BadFile, match="another model"):
        lm().stream("The", made(8, "0" * 16))
    with pytest.raises(BadConfig, match="names no file"):
        lm().stream("The", "learn2pd")
    assert len(lm().generate("The", made(8, own), max_new_tokens=8, ignore_eos=True).tokens) == 8


def test_fewer_forwards_may_be_more_rows() -> None:
    model = ToyCanvas(seed=2, sharpness=9.0)
    (ours,) = filled(model, "freedave:block=0,drafts=4", max_new_tokens=8)
    (static,) = filled(model, "confidence:block=0", max_new_tokens=8)
    assert calls(ours) < calls(static) == 8
    assert static.ctx.stats.rows == {"target": 8 * 9}  # every forward computes all positions
    assert ours.ctx.stats.rows["target"] > static.ctx.stats.rows["target"]
