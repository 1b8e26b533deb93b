"""The distribution of a method's outputs on a toy model, computed by enumerating every draw."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from foretell.audit.report import FAILED, NO_CLAIM, Check, Drafts
from foretell.core.distribution import Sampler
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.stats import Stats
from foretell.core.stores import Stores
from foretell.core.text import TokenIds
from foretell.core.types import Sampling
from foretell.drafters.lookup import datastore
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, BadFile, RequestFailed, Unsupported
from foretell.speculation.strategy import Speculative, Strategy
from foretell.testing.outcomes import Enumerator, NotEnumerable
from foretell.testing.toy import Toy

LARGEST_ERROR = 1e-9  # of a probability
VOCABULARY = 3  # tokens of the toy model
PROMPT = (0, 1, 2, 0, 1, 2, 0)
LONG_PROMPT = (*PROMPT[:-1] * 6, 0)  # for methods that draft only after long repetitions
WIDE = 64  # outcomes of two tokens above which enumerating three would take too long
LONGEST_OPTION = 64  # tokens of an option that are kept
NODES = 8
SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5),
)


class AskedBehindEnd(Exception):
    """A method asked for the probabilities of a text that has already ended."""


class RefusesBehindEnd:
    """A logits processor that has no answer for a text with an end in it, as a grammar has none."""

    def __init__(self, prompt_size: int, end: int):
        self.prompt_size = prompt_size
        self.end = end

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, self.prompt_size :].tolist()
        if self.end in output:
            raise AskedBehindEnd(f"asked what follows {output}, where {self.end} ends a text")
        return scores


@dataclass
class EnumeratedLaw:
    """The largest error of an output's probability, and the statistics of every outcome."""

    error: float = 0.0
    stats: list[Stats] = field(default_factory=list)

    def add(self, other_law: EnumeratedLaw) -> None:
        self.error = max(self.error, other_law.error)
        self.stats += other_law.stats


def enumerate_law(
    strategy: Strategy, sampling: Sampling, tokens: int, prompt: Sequence[int] = PROMPT
) -> EnumeratedLaw:
    """Compares the distribution of outputs of at most `tokens` toy tokens with plain decoding's.

    Plain decoding's distribution comes from the toy model's rows by the chain rule, without the
    engine. The method's shared stores have learnt from two texts before. Raises what the method
    raises.
    """
    models: dict[str, Model] = {"target": Toy(VOCABULARY, 3, copy=0.5)}
    for model_index, name in enumerate(strategy.models):
        models[name] = Toy(
            VOCABULARY, 3, noise=0.6 + 0.2 * model_index, copy=0.5, name=f"toy-{name}"
        )
    if isinstance(strategy, Speculative) and not strategy.models:
        # A size chosen by measured time would differ between the outcomes.
        strategy = replace(strategy, nodes=strategy.nodes or NODES)
    sampling = replace(sampling, max_new_tokens=tokens)
    stores = _learnt_stores(models, strategy)
    stats: list[Stats] = []

    def generate(door: Enumerator) -> tuple[int, ...]:
        engine = Engine(models)
        engine.stores = copy.deepcopy(stores)
        live = engine.add(Request(prompt, strategy, sampling, rng=door))
        for _ in engine.run():
            pass
        if live.error is not None:
            cause = live.error.__cause__ if isinstance(live.error, RequestFailed) else None
            raise cause or live.error
        stats.append(live.ctx.stats)
        return tuple(live.ctx.output)

    output_probabilities: Counter[tuple[int, ...]] = Counter()
    for weight, output in Enumerator.walk_outcomes(generate):
        output_probabilities[output] += weight  # type: ignore[assignment]
    expected = plain_law(models["target"], sampling, prompt)
    error = max(
        abs(output_probabilities[output] - expected.get(output, 0.0))
        for output in {*output_probabilities, *expected}
    )
    return EnumeratedLaw(error, stats)


def plain_law(
    model: Model, sampling: Sampling, prompt: Sequence[int]
) -> dict[tuple[int, ...], float]:
    """The probability of every finished output, by the chain rule over the model's rows."""
    sampler = Sampler(sampling, prompt, (), model.vocab)
    finished_outputs: dict[tuple[int, ...], float] = {}
    unfinished: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while unfinished:
        output, weight = unfinished.pop()
        has_ended = bool(output) and output[-1] in sampler.stops
        if has_ended or len(output) == sampling.max_new_tokens:
            finished_outputs[output] = weight
            continue
        next_probs = sampler.law(model.score([*prompt, *output])[0], output)
        for token, probability in enumerate(next_probs.tolist()):
            if probability > 0:
                unfinished.append(((*output, token), weight * probability))
    return finished_outputs


def _learnt_stores(models: dict[str, Model], strategy: Strategy) -> Stores:
    """Returns the engine's shared stores, with what they learnt from two texts."""
    engine = Engine(models)
    for seed in range(2):
        sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=seed)
        engine.add(Request(PROMPT[: 3 + seed], strategy, sampling))
    for _ in engine.run():
        pass
    return engine.stores


# --- options that name tokens or files of the real model


def with_toy_options(strategy: Strategy, folder: Path) -> Strategy:
    """Returns the strategy with its options in the toy vocabulary.

    Token ids are taken modulo its size, and a datastore is replaced by a small one in `folder`.
    Raises Unsupported for any other file.
    """
    return _with_toy_options(strategy, folder)  # type: ignore[no-any-return]


def _with_toy_options(config: Any, folder: Path) -> Any:
    hints = get_type_hints(type(config), include_extras=True)
    changes: dict[str, Any] = {}
    for option in fields(config):
        value = getattr(config, option.name)
        if hints[option.name] == TokenIds:
            changes[option.name] = tuple(token % VOCABULARY for token in value[:LONGEST_OPTION])
        elif hints[option.name] is str and value and Path(value).expanduser().exists():
            changes[option.name] = _toy_datastore(option.name, value, folder)
        elif is_dataclass(value):
            changes[option.name] = _with_toy_options(value, folder)
        elif isinstance(value, tuple) and any(is_dataclass(part) for part in value):
            changes[option.name] = tuple(_with_toy_options(part, folder) for part in value)
    return replace(config, **changes)


def _toy_datastore(option: str, value: str, folder: Path) -> str:
    """Builds a datastore of the toy prompt with some of its continuations, in place of a real
    one.
    """
    try:
        datastore.load_datastore(value)
    except BadFile as error:
        raise Unsupported(f"{option}={value} is a file of the real model") from error
    documents = []
    for first_token in range(VOCABULARY):
        for second_token in range(VOCABULARY):
            for third_token in range(VOCABULARY):
                if (
                    first_token + second_token + third_token
                ) % 2:  # so that some continuations are more frequent
                    documents.append([*PROMPT, first_token, second_token, third_token])
    path = folder / f"{option}.safetensors"
    datastore.build_datastore(path, documents)
    return str(path)


# --- the checks


def check_law(strategy: Strategy, exact: bool) -> Check:
    """Checks the distribution under several samplings, of two tokens and, if that is quick, of
    three.
    """
    return _check_on_toy("law", strategy, exact, _law_under_samplings)


def check_ends(strategy: Strategy, exact: bool) -> Check:
    """Checks the distribution of two and three tokens where each token in turn ends a text; asking
    what follows an end fails whatever the guarantee: the request would die where plain decoding
    works.
    """
    return _check_on_toy("ends", strategy, exact, _law_with_ends)


def _law_under_samplings(strategy: Strategy, prompt: Sequence[int]) -> EnumeratedLaw:
    combined_law = EnumeratedLaw()
    for sampling in SAMPLINGS:
        short_law = enumerate_law(strategy, sampling, 2, prompt)
        combined_law.add(short_law)
        if len(short_law.stats) <= WIDE:
            combined_law.add(enumerate_law(strategy, sampling, 3, prompt))
    return combined_law


def _law_with_ends(strategy: Strategy, prompt: Sequence[int]) -> EnumeratedLaw:
    combined_law = EnumeratedLaw()
    for end_token in range(VOCABULARY):
        processor = RefusesBehindEnd(len(prompt), end_token)
        sampling = Sampling(
            temperature=1.0, stop_token_ids=(end_token,), logits_processors=(processor,)
        )
        short_law = enumerate_law(strategy, sampling, 2, prompt)
        combined_law.add(short_law)
        if len(short_law.stats) <= WIDE or end_token == 0:
            combined_law.add(enumerate_law(strategy, sampling, 3, prompt))
    return combined_law


def _check_on_toy(name: str, strategy: Strategy, is_exact: bool, experiment: Any) -> Check:
    """Runs the experiment; says why where it cannot be run."""
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            toy_strategy = with_toy_options(strategy, Path(folder))
            toy_law: EnumeratedLaw = experiment(toy_strategy, PROMPT)
            if not Drafts.count_drafts(strategy, toy_law.stats).was_tested:
                toy_law = experiment(toy_strategy, LONG_PROMPT)
            drafts = Drafts.count_drafts(
                strategy, toy_law.stats, "choose options with which it drafts"
            )
    except (BadConfig, BadFile, Unsupported, NotEnumerable) as reason:
        return Check(name, NO_CLAIM, f"not enumerated: {reason}")
    except AskedBehindEnd as error:
        return Check(name, FAILED, str(error))
    except Exception as error:  # a method that breaks where plain decoding works has failed
        detail = f"failed on the toy model: {type(error).__name__}: {error}"
        return Check(name, FAILED if is_exact else NO_CLAIM, detail)
    numbers = {
        "error": toy_law.error,
        "outcomes": len(toy_law.stats),
        "settings": len(SAMPLINGS) if name == "law" else VOCABULARY,
    }
    detail = (
        f"error {toy_law.error:.0e} over {len(toy_law.stats)} outcomes of the toy model, {drafts}"
    )
    return Check(name, drafts.verdict(is_exact, toy_law.error <= LARGEST_ERROR), detail, numbers)
