"""foretell inside transformers' generate: the same ids as without it, or a refusal that names what
is in the way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import foretell
from foretell.errors import BadConfig, ForetellError, RequestFailed, Unsupported
from tests import tiny

METHODS = ["plain", "ngram", "token-recycling", "draft:drafts=2"]
TEXTS = ["def add(a, b):\n    return a", "The dog", "x" * 20]
MODELS: list[Callable[[], PreTrainedModel]] = [tiny.llama, tiny.gpt2]


def ids(*texts: str) -> dict[str, torch.Tensor]:
    return dict(
        tiny.tokenizer()(list(texts), return_tensors="pt", padding=True, padding_side="left")
    )


def hook(method: str, model: PreTrainedModel) -> Any:
    return foretell.hf(method, draft=tiny.relative(model) if method.startswith("draft") else None)


def both(
    model: PreTrainedModel, method: str, inputs: dict[str, torch.Tensor], **options: Any
) -> torch.Tensor:
    """Asserts that `generate` gives the same with and without foretell; returns it."""
    stock = model.generate(**inputs, **{"max_new_tokens": 24, **options})
    mine = model.generate(
        **inputs, **{"max_new_tokens": 24, **options}, custom_generate=hook(method, model)
    )
    assert torch.equal(mine, stock) and mine.dtype == stock.dtype
    assert model.config._attn_implementation == "sdpa" and not model.training
    return mine


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_is_the_same(model: Callable[[], PreTrainedModel], method: str) -> None:
    for inputs in (ids(TEXTS[0]), ids(*TEXTS), {"input_ids": ids(TEXTS[0])["input_ids"]}):
        both(model(), method, inputs)


class OnlyEven(LogitsProcessor):
    """A user's own, which looks at the path: no odd token after an even one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, tokens in enumerate(input_ids):
            if tokens[-1] % 2 == 0:
                scores[row, 1::2] = -torch.inf
        return scores


class Sum(StoppingCriteria):
    """A user's own: ends where the sum of the tokens divides by 5."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return (input_ids.sum(1) % 5 == 0) & (input_ids.shape[1] > 28)


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 1.7, "max_new_tokens": None, "max_length": 40},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9, 10]},
    {"eos_token_id": [0, *range(100, 160)]},
    {"eos_token_id": [0, *range(100, 160)], "min_new_tokens": 9},
    {"eos_token_id": [0, *range(100, 160)], "min_length": 25},
    {"sequence_bias": [[[12], 4.0], [[13, 14], -3.0]], "forced_eos_token_id": 0},
    {"exponential_decay_length_penalty": (5, 1.5)},
    {"max_new_tokens": 1},
    {"logits_processor": [OnlyEven()]},
    {"stopping_criteria": [Sum()], "eos_token_id": [0, *range(100, 120)]},
    {"stopping_criteria": [StopStringCriteria(tiny.tokenizer(), ["qu", "the "])]},
    {"prefix_allowed_tokens_fn": lambda row, tokens: range(20 + 30 * row, 70 + 30 * row)},
    {"num_return_sequences": 1, "renormalize_logits": True, "remove_invalid_values": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options))
@pytest.mark.parametrize("method", ["ngram", "draft:drafts=2"])
def test_every_option_means_the_same(method: str, options: dict[str, Any]) -> None:
    model = tiny.llama()
    both(model, method, ids(*TEXTS), **options)
    both(model, method, ids(TEXTS[1]), **options)


def test_sampling_has_the_law_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of the first token is what transformers' processors make of the stock row, filters
    included.
    """
    from foretell.core.distribution import Sampler

    model, inputs = tiny.llama(), ids(*TEXTS)
    options = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.3,
    }
    laws: list[torch.Tensor] = []
    law = Sampler.law
    monkeypatch.setattr(Sampler, "law", lambda *args: (laws.append(law(*args)), laws[-1])[1])
    model.generate(**inputs, **options, max_new_tokens=1, custom_generate=foretell.hf("plain"))
    stock = model.generate(
        **inputs, **options, max_new_tokens=1, return_dict_in_generate=True, output_scores=True
    )
    for mine, scores in zip(laws, stock.scores[0], strict=True):
        assert torch.allclose(mine, scores.softmax(-1), atol=1e-6)


def test_seeds_come_from_torch() -> None:
    model, inputs = tiny.llama(), ids(TEXTS[0])
    options: dict[str, Any] = {
        "do_sample": True,
        "max_new_tokens": 16,
        "num_return_sequences": 3,
        "eos_token_id": None,
    }
    results = []
    for method in ("plain", "ngram", "token-recycling"):
        for seed in (0, 1):
            torch.manual_seed(seed)
            results.append(model.generate(**inputs, **options, custom_generate=foretell.hf(method)))
    assert all(torch.equal(results[i], results[i % 2]) for i in range(6))
    assert (
        not torch.equal(results[0], results[1])
        and len({tuple(row.tolist()) for row in results[0]}) == 3
    )
    state = torch.get_rng_state()
    model.generate(
        **inputs, max_new_tokens=4, do_sample=False, custom_generate=foretell.hf("ngram")
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_the_output_object_has_the_sequences() -> None:
    model, inputs = tiny.llama(), ids(*TEXTS)
    out = model.generate(
        **inputs,
        max_new_tokens=5,
        return_dict_in_generate=True,
        custom_generate=foretell.hf("ngram"),
    )
    assert torch.equal(out.sequences, model.generate(**inputs, max_new_tokens=5))


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_what_it_always_gets() -> None:
    model = tiny.llama()
    for inputs in (ids(TEXTS[0]), ids(*TEXTS)):
        for method in METHODS:
            stock, mine = Recorder(), Recorder()
            options = {"max_new_tokens": 12, "eos_token_id": [0, *range(100, 140)]}
            model.generate(**inputs, **options, streamer=stock)
            model.generate(**inputs, **options, streamer=mine, custom_generate=hook(method, model))
            assert mine.values == stock.values and mine.ended == stock.ended == 1
    text = TextIteratorStreamer(tiny.tokenizer(), skip_prompt=True)
    out = model.generate(
        **ids(TEXTS[0]), max_new_tokens=8, streamer=text, custom_generate=foretell.hf("ngram")
    )
    assert "".join(text) == tiny.tokenizer().decode(out[0, -8:])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty"),
        ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"assistant_model": tiny.llama()}, "assistant_model"),
        (
            {
                "position_ids": torch.arange(5, 5 + len(tiny.tokenizer()("The dog")["input_ids"]))[
                    None
                ]
            },
            "position_ids",
        ),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_named(options: dict[str, Any], named: str) -> None:
    model = tiny.llama()
    with pytest.raises(Unsupported, match=named):
        model.generate(
            **ids("The dog"), max_new_tokens=4, **options, custom_generate=foretell.hf("ngram")
        )
    assert model.config._attn_implementation == "sdpa"


def test_padding_must_be_on_the_left() -> None:
    model, inputs = tiny.llama(), ids("The dog", "The")
    options: dict[str, Any] = {"max_new_tokens": 3, "custom_generate": foretell.hf("ngram")}
    for mask in (
        torch.tensor([[1] * inputs["input_ids"].shape[1]] * 2),
        inputs["attention_mask"].flip(1),
    ):
        mask[0, 1] = 0
        with pytest.raises(Unsupported, match="attention_mask"):
            model.generate(inputs["input_ids"], attention_mask=mask, **options)


class Sure(StoppingCriteria):
    """A user's own: ends where the model is sure of its token."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return scores[-1].softmax(-1).max(-1).values > 0.9


class Broken(StoppingCriteria):
    """A user's own, with a mistake."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        raise ZeroDivisionError("oh")


def test_a_criterion_that_reads_scores_is_named() -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "custom_generate": foretell.hf("ngram")}
    model = tiny.llama()
    with pytest.raises(Unsupported, match=r"Sure, which reads `scores`.*leave custom_generate out"):
        model.generate(**ids("The dog"), **options, stopping_criteria=[Sure()])
    with pytest.raises(
        RequestFailed, match=r"stopping criterion Broken failed \(ZeroDivisionError"
    ):
        model.generate(**ids("The dog"), **options, stopping_criteria=[Broken()])
    assert model.config._attn_implementation == "sdpa"


def test_two_threads_may_use_one_model() -> None:
    model = tiny.llama()
    inputs = [ids(text) for text in TEXTS]
    expected = [model.generate(**one, max_new_tokens=24) for one in inputs]

    def generate(number: int) -> bool:
        method = METHODS[number % 3]
        mine = model.generate(
            **inputs[number % 3], max_new_tokens=24, custom_generate=foretell.hf(method)
        )
        return torch.equal(mine, expected[number % 3])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(generate, range(12)))


def test_embeddings_and_old_caches_are_refused() -> None:
    model, inputs = tiny.llama(), ids("The dog")
    with pytest.raises(Unsupported, match="inputs_embeds"):
        model.generate(
            inputs_embeds=torch.randn(1, 3, 32),
            max_new_tokens=3,
            custom_generate=foretell.hf("ngram"),
        )
    cache = model(inputs["input_ids"][:, :-1], use_cache=True).past_key_values
    with pytest.raises(Unsupported, match="past_key_values"):
        model.generate(
            **inputs, past_key_values=cache, max_new_tokens=3, custom_generate=foretell.hf("ngram")
        )


def test_an_error_gives_the_model_its_attention_back() -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("oh")

    model, inputs = tiny.llama(), ids(*TEXTS)
    model.train()
    before = model(**inputs).logits
    with pytest.raises(ForetellError, match="oh"):
        model.generate(
            **inputs,
            logits_processor=[broken],
            max_new_tokens=4,
            custom_generate=foretell.hf("ngram"),
        )
    with pytest.raises(Unsupported, match="draft"):
        model.generate(**inputs, max_new_tokens=4, custom_generate=foretell.hf("draft"))
    assert model.training and torch.equal(model(**inputs).logits, before)
    model.eval()
    both(model, "ngram", inputs)


def test_the_context_is_the_end() -> None:
    model, inputs = tiny.llama(), {"input_ids": torch.full((1, tiny.CONTEXT - 4), 5)}
    stock = model.generate(**inputs, max_new_tokens=4, eos_token_id=None)
    with pytest.warns(UserWarning, match="context"):
        mine = model.generate(
            **inputs, max_new_tokens=9, eos_token_id=None, custom_generate=foretell.hf("ngram")
        )
    assert torch.equal(mine, stock)


def test_a_method_is_checked_at_once() -> None:
    with pytest.raises(BadConfig, match="did you mean ngram"):
        foretell.hf("ngrm")
    with pytest.raises(BadConfig, match="method=3"):
        foretell.hf(3)  # type: ignore[arg-type]
    assert callable(foretell.hf("plain")) and foretell.hf.__name__ == "hf"
