"""The world that a method is run in: toys, settings, grammars, and how a request is run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretell.constraints.grammars import Grammars
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.source import Direct, Source
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.speculation.strategy import Speculative, Strategy
from foretell.testing.toy import Toy
from foretell.testing.toy_canvas import ToyCanvas
from foretell.testing.toy_layers import ToyLayers
from foretell.testing.toy_learning import ToyLearning

EXACT = 1e-9


DIRECT = Direct()


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def spell(tokens: Sequence[int]) -> str:
    """A tokenizer's part: one letter a token."""
    return "".join(LETTERS[t] for t in tokens)


class Grammar:
    """A processor that depends on the path: the token that is (sum of all tokens so far) modulo V
    is forbidden.
    """

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[0, int(ids.sum()) % scores.shape[-1]] = -torch.inf
        return scores


class Refusing:
    """A processor, as of a grammar, that has no answer after what ends a text.

    `length`: of the prompt.
    """

    def __init__(self, length: int, tokens: Sequence[int], texts: Sequence[str] = ()):
        self.length = length
        self.tokens = tokens
        self.texts = texts

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, self.length :].tolist()
        if set(self.tokens) & set(output) or any(text in spell(output) for text in self.texts):
            raise AssertionError(f"asked for what follows {output}")
        return scores


@cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one letter a token, as `spell` has them."""
    words = {letter: token for token, letter in enumerate(LETTERS)}
    bpe = Tokenizer(models.BPE(vocab={**words, "<end>": len(words)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@cache
def grammars(vocab: int) -> Grammars:
    return Grammars(letters(), vocab)


PROMPT = (0, 1, 2, 0, 1, 2, 0)


REACH = 2  # letters at most that a text of a form lacks for being whole


@dataclass(frozen=True)
class Setting:
    """A sampling with the ends of the texts."""

    sampling: Sampling
    eos: tuple[int, ...] = ()
    form: str = ""  # the regex that the output's letters have to match; none: any text
    vocab: int = 0  # V of the models that the form's constraint is made for

    def follows(self, output: Sequence[int], vocab: int) -> list[int]:
        """The tokens after which a text that began with `output` can still match the form."""
        return [token for token in range(vocab) if can_match(self.form, vocab, *output, token)]

    def in_time(self, output: Sequence[int], vocab: int, token: int) -> bool:
        """Whether a text that began with these can still match the form at the length limit."""
        text = *output, token
        return can_match(self.form, vocab, *text, within=self.sampling.max_new_tokens - len(text))

    def whole(self, output: Sequence[int]) -> bool:
        """Whether the text may end here."""
        return re.fullmatch(self.form, spell(output)) is not None

    @property
    def text(self) -> Callable[[Sequence[int]], str]:
        return spell


@cache
def can_match(form: str, vocab: int, *output: int, within: int = REACH) -> bool:
    """Whether a text that matches the form begins with `output`, by trying all endings."""
    for length in range(min(within, REACH) + 1):
        for rest in itertools.product(range(vocab), repeat=length):
            if re.fullmatch(form, spell([*output, *rest])):
                return True
    return False


def formed(form: str, vocab: int, eos: tuple[int, ...] = (), **options: Any) -> Setting:
    """A setting whose outputs have to match a regex."""
    constraint = grammars(vocab).compile_form({"regex": form})
    return Setting(Sampling(regex=form, constraint=constraint, **options), eos, form, vocab)


SETTINGS = {
    "plain": Setting(Sampling(temperature=1.0)),
    "temperature": Setting(Sampling(temperature=0.6)),
    "top-p": Setting(Sampling(temperature=1.3, top_p=0.8)),
    "top-k, min-p": Setting(Sampling(temperature=1.0, top_k=2, min_p=0.2)),
    "penalties": Setting(
        Sampling(temperature=1, repetition_penalty=1.7, presence_penalty=0.8, frequency_penalty=0.4)
    ),
    "grammar": Setting(Sampling(temperature=1.0, logits_processors=(Grammar(),))),
    "bias, ends": Setting(
        Sampling(temperature=1.0, logit_bias={1: 0.75, 2: -0.5}, min_new_tokens=2), eos=(2,)
    ),
    "end": Setting(
        Sampling(
            temperature=1.0,
            stop=("ab",),
            stop_token_ids=(2,),
            logits_processors=(Refusing(len(PROMPT), (2,), ("ab",)),),
        )
    ),
    "form": formed("(b(a|cb)|c|ab?)+", 3, temperature=1.0, frequency_penalty=0.3),
    "form, ends": formed("[ab](a|b[ab])?", 3, eos=(2,), temperature=1.0),
}


def world(
    strategy: Strategy,
    vocab: int = 3,
    seed: int = 3,
    copy: float = 0.5,
    noise: float = 0.6,
    source: Source = DIRECT,
    **toy: Any,
) -> dict[str, Model]:
    """A target, and for every other model that the strategy or the source asks a relative that
    agrees with it in part.

    With this seed second and third tries of a node have probabilities other than 0 and 1, which
    most seeds do not give.
    """
    kind = ToyLayers if "layers" in {*strategy.needs, *source.needs} else Toy
    models: dict[str, Model] = {"target": kind(vocab, seed, copy=copy, **toy)}
    learns = isinstance(strategy, Speculative) and getattr(strategy.drafter, "online", 0)
    relative: Callable[..., Model] = ToyLearning if learns else Toy
    needed = getattr(getattr(strategy, "drafter", None), "draft_needs", ())
    if "layers" in needed:
        relative = ToyLayers
    if "canvas" in needed:
        relative = masked
    for i, name in enumerate((*strategy.models, *source.models)):
        shown = "layers" in source.needs and name in source.models
        models[name] = (ToyLayers if shown else relative)(
            vocab, seed, noise=noise + 0.2 * i, copy=copy, name=f"toy-{name}", **toy
        )
    return {**models, **strategy.bring(models)}


def masked(vocab: int, seed: int, **toy: Any) -> ToyCanvas:
    """A toy that fills masks, which are one more token."""
    return ToyCanvas(vocab + 1, seed, **toy)


def joint_world(strategies: Sequence[Strategy], vocab: int, **options: Any) -> dict[str, Model]:
    """One world for all of them: its target can do what any of them needs."""
    ordered = sorted(strategies, key=lambda strategy: len({*strategy.needs} - {"tree"}))
    worlds = [world(strategy, vocab, **options) for strategy in ordered]
    return {name: model for models in worlds for name, model in models.items()}


def finish(engine: Engine, *lives: Live) -> None:
    """Runs the engine dry and raises what went wrong in these requests."""
    for _ in engine.run():
        pass
    for live in lives:
        if live.error is not None:
            raise live.error.__cause__ or live.error


def generate(
    strategy: Strategy, prompt: Sequence[int], setting: Setting, models: Mapping[str, Model]
) -> Live:
    engine = Engine(models, setting.eos)
    live = engine.add(Request(prompt, strategy, setting.sampling, text=setting.text))
    finish(engine, live)
    return live
