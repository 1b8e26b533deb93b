"""What a user calls: `load`, and on what it returns `generate` and `stream`.

This file knows tokenizers, prompts and texts; the engine knows none of them.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from foretell import profiles, stores
from foretell.core.context import Event, Request
from foretell.core.drafter import Drafter
from foretell.core.engine import Engine
from foretell.core.live import Live
from foretell.core.model import Model
from foretell.core.strategy import Speculative, Strategy
from foretell.core.types import Sampling
from foretell.errors import BadConfig, BadModel, ForetellError, UnknownMethod
from foretell.measure.profiling import ROWS, identity, profile
from foretell.policy.costs import SIZES
from foretell.spec import AUTO, QUICK, STEP, resolve
from foretell.stats import Stats
from foretell.text import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Method = str | Drafter | Strategy
COLUMNS = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
FIELDS = {f.name for f in dataclasses.fields(Sampling)}
# Sampling arguments whose own value is a sequence or mapping; for the others a list means one value
# a prompt.
NESTED = {"logit_bias", "bad_words", "stop", "stop_token_ids", "logits_processors"}


@dataclass
class Output:
    """One answer. `draft`: per token who proposed it. `error` is set, and the text partial, if the
    request failed.
    """

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "error"
    stats: Stats
    draft: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    samples: list[Output] = field(
        default_factory=list
    )  # all answers of the n samples, this one first
    score: float | None = None  # of this answer, where a method finds several
    error: ForetellError | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "draft": self.draft,
            "logprobs": self.logprobs,
            "stats": self.stats.to_dict(),
            "error": str(self.error) if self.error else None,
            "score": self.score,
        }


@dataclass
class Piece:
    """A part of an answer while it is made. `draft`: per token who proposed it; `prompt`: which
    prompt it answers.

    `parts`: the text that became certain with each token; `text` is all of them, and at the end
    what was held back.
    """

    text: str
    tokens: list[int]
    draft: list[str]
    prompt: int = 0
    finish_reason: str | None = None
    parts: list[str] = field(default_factory=list)
    error: ForetellError | None = None
    stats: Stats | None = None  # with the last piece


class LM:
    """A language model with its engine. Stores that drafters learn live as long as it does."""

    def __init__(
        self,
        target: Model,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft: Model | None = None,
        path: Path | None = None,
        eos: Sequence[int] = (),
    ):
        self.tokenizer, self.path = tokenizer, path
        self.models = {"target": target} | ({"draft": draft} if draft else {})
        self.engine = Engine(self.models, eos)
        self.measured, self._default = False, AUTO
        # see `auto`; the number of threads it was looked up with
        self._auto: tuple[int, str] | None = None
        self._inbox: dict[int, deque[Event]] = {}  # of each request that somebody waits for

    def generate(
        self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any
    ) -> Any:
        """Generates for one prompt (text, token ids or chat messages: one Output) or for a list of
        them (a list).

        Every sampling argument of types.Sampling may be given, as one value or as a list with one
        value a prompt. A failed request of a list has its `error` set; a single one raises it.
        """
        groups, many = self._requests(prompt, method, sampling)
        flat = [
            self.engine.add(request)
            for group in groups
            if isinstance(group, list)
            for request in group
        ]
        sources: dict[int, list[str]] = {live.index: [] for live in flat}
        for event in self._drive(flat):
            sources[event.request] += event.sources
        outputs, rest = [], iter(flat)
        for group in groups:
            if isinstance(group, ForetellError):
                outputs.append(Output("", [], "error", Stats(), error=group))
                continue
            lives = [live for _, live in zip(group, rest, strict=False)]
            samples = [
                output for live in lives for output in self._outputs(live, sources[live.index])
            ]
            samples[0].samples = samples
            outputs.append(samples[0])
        if many:
            return outputs
        if error := next((sample.error for sample in outputs[0].samples if sample.error), None):
            raise error
        return outputs[0]

    def stream(
        self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any
    ) -> Iterator[Piece]:
        """The same, yielding Pieces as tokens become final. Closing the iterator ends the requests.

        Arguments are checked at once; the requests begin with the first piece asked for.
        """
        groups, many = self._requests(prompt, method, sampling)
        if any(isinstance(group, list) and len(group) > 1 for group in groups):
            raise BadConfig("n: streaming gives one sample a prompt; use generate for more")
        return self._stream(groups, many)

    def _stream(self, groups: list[list[Request] | ForetellError], many: bool) -> Iterator[Piece]:
        lives = {}
        for i, group in enumerate(groups):
            if isinstance(group, ForetellError):
                yield Piece("", [], [], i, "error", error=group)
            else:
                live = self.engine.add(group[0])
                lives[live.index] = i, live, Detokenizer(self.decode, group[0].sampling.stop)
        for event in self._drive([live for _, live, _ in lives.values()]):
            i, live, text = lives[event.request]
            if live.error and not many:
                raise live.error
            parts = [text.push(self._spoken(live, [token])) for token in event.tokens]
            tail = text.push([], final=True) if event.done else ""
            error = live.error if isinstance(live.error, ForetellError) else None
            yield Piece(
                "".join(parts) + tail,
                event.tokens,
                event.sources,
                i,
                event.done,
                parts,
                error,
                live.ctx.stats if event.done else None,
            )

    def _drive(self, lives: list[Live]) -> Iterator[Event]:
        """The events of these requests until all are done, however this is left.

        Requests of other open streams move on with them; their events wait until they are asked
        for.
        """
        box: deque[Event] = deque()
        self._inbox |= {live.index: box for live in lives}
        left = len(lives)
        try:
            while left and (box or self.engine.live or self.engine.events):
                if not box:
                    for event in self.engine.step():
                        if event.request in self._inbox:
                            self._inbox[event.request].append(event)
                    continue
                event = box.popleft()
                left -= event.done is not None
                yield event
        finally:
            for live in lives:
                self.engine.end(live)
                del self._inbox[live.index]

    @property
    def default(self) -> str:
        """What `auto` stands for without a profile, which a plain step's time decides: spec.AUTO,
        or spec.QUICK.
        """
        if not self.measured:
            self.measure()
        return self._default

    @property
    def auto(self) -> str:
        """What `auto` stands for: the method that `foretell tune` found best for this model here,
        else `default`.

        A profile that is damaged or of another place is left aside, with a warning.
        """
        threads = torch.get_num_threads()
        if self._auto is None or self._auto[0] != threads:
            profile, trouble = profiles.kept(self.models, self.path)
            if trouble:
                warnings.warn(trouble, stacklevel=2)
            self._auto = threads, profile["chosen"] if profile else self.default
        return self._auto[1]

    def resolve(self, method: Method) -> tuple[str, Strategy]:
        """(name, strategy) of a spec or a config object on this model. Raises UnknownMethod or
        BadConfig.
        """
        return resolve(
            self.auto if isinstance(method, str) and method == "auto" else method,
            lambda text: self.encode(text, special=False),
        )

    def measure(self, fresh: bool = False) -> dict[str, Any]:
        """What this model's forwards cost here, which decides how much is drafted; returns what was
        found, for people.

        Read from the user's cache folder, or measured (a few seconds) and kept there; `fresh`
        measures in any case.
        """
        target, console = self.models["target"], Console(stderr=True)
        # Off a terminal rich would write an empty line.
        with Progress(
            *COLUMNS, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            bar = progress.add_task(f"measuring {target.name}", visible=False, total=None)

            def tell(done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total, visible=True)

            costs, where = profile(target, fresh, tell)
        self.engine.costs["target"], self.measured = costs, True
        self._default = (
            QUICK if costs.single() < STEP else AUTO
        )  # now: what is measured later must not change it
        return {
            "about": identity(target),
            "file": str(where),
            "seconds": {
                rows: dict(
                    zip(
                        SIZES,
                        costs.curve(SIZES[-1], rows)[[n - 1 for n in SIZES]].tolist(),
                        strict=True,
                    )
                )
                for rows in ROWS
            },
        }

    def save_stores(self, folder: str | Path) -> list[Path]:
        """Writes what drafters have learnt into a folder; returns the files."""
        return stores.save(self.engine, Path(folder))

    def load_stores(self, folder: str | Path) -> list[Path]:
        """Takes in what `save_stores` wrote. Raises BadFile for a damaged or foreign file and then
        takes in nothing.
        """
        return stores.load(self.engine, Path(folder))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; an empty one is the tokenizer's first token, if it has one.

        `special`: with the tokens that the tokenizer puts around a prompt.
        """
        if self.tokenizer is None:
            raise BadModel(
                "this model has no tokenizer: give token ids, or a folder that has tokenizer files"
            )
        ids = [int(t) for t in self.tokenizer(text, add_special_tokens=special)["input_ids"]]
        if not ids:
            first = self.tokenizer.bos_token_id
            if first is None:
                raise BadConfig(
                    "the prompt is empty and the tokenizer has no BOS token: give some text"
                )
            ids = [int(first)]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        items: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [None]
        if items and all(isinstance(m, Mapping) for m in items):
            if self.tokenizer is None or not self.tokenizer.chat_template:
                raise BadConfig(
                    "chat messages need a model whose tokenizer has a chat template; give a text instead"
                )
            for message in items:
                if not {"role", "content"} <= set(message):
                    raise BadConfig(
                        f"a chat message needs `role` and `content`, not {sorted(message)}"
                    )
            ids = self.tokenizer.apply_chat_template(
                items, add_generation_prompt=True, return_dict=True
            )
            return [int(t) for t in ids["input_ids"]]  # type: ignore[call-overload,index]
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in items):
            raise BadConfig("a prompt is a text, a list of token ids or a list of chat messages")
        return items

    def _requests(
        self, prompt: Any, method: Any, sampling: dict[str, Any]
    ) -> tuple[list[list[Request] | ForetellError], bool]:
        """One list of requests (its n samples) a prompt, and whether many prompts were given.

        Everything is checked before anything runs. A wrong argument raises; of many prompts one
        that cannot be used is returned as its error, unless none can.
        """
        for key in sampling:
            if key not in FIELDS:
                raise UnknownMethod.near("argument", key, FIELDS | {"method"})
        if hasattr(prompt, "tolist"):  # a tensor or an array
            prompt = prompt.tolist()
        many = isinstance(prompt, list | tuple) and any(
            not isinstance(p, int | Mapping) for p in prompt
        )
        prompts = list(prompt) if many else [prompt]
        count = len(prompts)

        def each(name: str, value: Any) -> list[Any]:
            split = isinstance(value, list) and (
                many if name not in NESTED else many and _deep(name, value)
            )
            if not split:
                return [value] * count
            if len(value) != count:
                raise BadConfig(
                    f"{name}: {len(value)} values for {count} prompts; give one, or one a prompt"
                )
            return list(value)

        methods = each("method", method)
        columns = {name: each(name, value) for name, value in sampling.items()}
        groups: list[list[Request] | ForetellError] = []
        for i, one in enumerate(prompts):
            chosen = Sampling(**self._clean({name: values[i] for name, values in columns.items()}))
            if not isinstance(methods[i], str | Drafter | Strategy):
                raise BadConfig.field(
                    "method", methods[i], "a spec like 'ngram:n=3', or a config object"
                )
            name, strategy = self.resolve(methods[i])
            try:
                ids = self._encode(one)
                self.engine.end(self.engine.add(Request(ids, resolve("plain")[1])))
            except ForetellError as error:
                groups.append(error)
                continue
            text = self.decode if self.tokenizer is not None else None
            requests = [
                Request(
                    ids,
                    strategy,
                    dataclasses.replace(chosen, seed=chosen.seed + k, n=1),
                    name,
                    text,
                )
                for k in range(chosen.n)
            ]
            self.engine.end(self.engine.add(requests[0]))
            groups.append(requests)
            if isinstance(strategy, Speculative) and not strategy.nodes and not self.measured:
                self.measure()
        errors = [group for group in groups if isinstance(group, ForetellError)]
        if errors and len(errors) == len(groups):
            raise errors[0]
        return groups, many

    def _clean(self, options: dict[str, Any]) -> dict[str, Any]:
        """Texts to token ids, single values to tuples. Raises BadConfig for what is neither."""
        for name in NESTED & set(options):
            value = options[name]
            if name == "logit_bias":
                options[name] = _bias({} if value is None else value)
                continue
            if value is None or isinstance(value, str | int) or callable(value):
                value = () if value is None else (value,)
            if not isinstance(value, Iterable) or isinstance(value, Mapping):
                raise BadConfig.field(name, value, "a list")
            options[name] = tuple(value)
        if not all(callable(p) for p in options.get("logits_processors", ())):
            raise BadConfig.field(
                "logits_processors", options["logits_processors"], "a list of callables"
            )
        words: list[list[int]] = []
        for word in options.get("bad_words", ()):
            if isinstance(word, str):
                # A word is meant wherever it stands: at the start of a text and behind a space.
                words += (
                    [self.encode(w) for w in dict.fromkeys((word, " " + word.lstrip(" ")))]
                    if word
                    else [[]]
                )
            elif isinstance(word, list | tuple):
                words.append(list(word))
            else:
                raise BadConfig.field("bad_words", word, "a text or a list of token ids")
        if "bad_words" in options:
            options["bad_words"] = tuple(words)
        return options

    def _spoken(self, live: Live, tokens: list[int]) -> list[int]:
        return [t for t in tokens if t not in live.ctx.sampler.stops]

    def _text(self, live: Live, tokens: list[int]) -> str:
        return Detokenizer(self.decode, live.ctx.request.sampling.stop).push(
            self._spoken(live, tokens), final=True
        )

    def _outputs(self, live: Live, sources: list[str]) -> list[Output]:
        """A request's result, and behind it what else its method found."""
        result, stats = self._output(live, sources), live.ctx.stats
        if not live.answers:
            return [result]
        result.score = live.answers[0][1]
        others = [
            Output(
                self._text(live, tokens),
                tokens,
                reason,
                stats,
                ["target"] * len(tokens),
                score=score,
            )
            for tokens, score, reason in live.answers[1:]
        ]
        return [result, *others]

    def _output(self, live: Live, sources: list[str]) -> Output:
        sampling, tokens = live.ctx.request.sampling, live.ctx.output
        text = self._text(live, tokens)
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [
                {
                    "token": token,
                    "logprob": value,
                    "top": [{"token": t, "logprob": v} for t, v in top],
                }
                for token, (value, top) in zip(tokens, live.logprobs, strict=True)
            ]
        error = live.error if isinstance(live.error, ForetellError) else None
        return Output(
            text, tokens, live.reason or "error", live.ctx.stats, sources, logprobs, error=error
        )


def _bias(value: Any) -> dict[int, float]:
    try:
        bias = {int(token): float(number) for token, number in value.items()}
    except (AttributeError, TypeError, ValueError):
        bias = {0: math.nan}
    if not all(number < math.inf for number in bias.values()):
        raise BadConfig.field(
            "logit_bias", value, "a mapping of token ids to numbers below infinity"
        )
    return bias


def _deep(name: str, value: list[Any]) -> bool:
    """Whether a list given for a nested argument has one entry a prompt rather than being one
    value.
    """
    if (
        name == "bad_words"
    ):  # itself a list of lists; one of texts and lists is meant for one prompt
        return any(
            v is None or v == [] or (isinstance(v, list | tuple) and not isinstance(v[0], int))
            for v in value
        )
    return any(isinstance(v, list | tuple | Mapping) or v is None for v in value)


def wrap(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft: PreTrainedModel | None = None,
    name: str | None = None,
    path: Path | None = None,
    exact_bits: bool = False,
) -> LM:
    """An LM over transformers models that are already loaded. `exact_bits`: as of load; linear
    layers of 8 bits.
    """
    from foretell.families.decoder import Decoder
    from foretell.families.exact import ExactDecoder
    from foretell.families.fused import blocks

    title = name or getattr(hf.config, "name_or_path", "") or hf.config.model_type
    build = ExactDecoder if exact_bits else partial(Decoder, accelerate=blocks)
    second = build(draft, f"{title} (draft)") if draft is not None else None
    return pair(build(hf, title), tokenizer, second, path, ends(hf))


def pair(
    target: Model,
    tokenizer: PreTrainedTokenizerBase | None,
    second: Model | None,
    path: Path | None,
    eos: Sequence[int],
) -> LM:
    """An LM over adapters. Raises BadConfig where the draft model's tokens cannot be the
    target's.
    """
    known = (
        len(tokenizer)
        if tokenizer is not None
        else max(target.vocab, second.vocab if second else 0)
    )
    if second is not None and min(second.vocab, target.vocab) < known:
        raise BadConfig(
            f"the draft model has {second.vocab} tokens and the target {target.vocab}: they need one tokenizer"
        )
    return LM(target, tokenizer, second, path, eos)


def ends(hf: PreTrainedModel) -> list[int]:
    """The ids that end a text."""
    found = (
        hf.generation_config.eos_token_id
        if hf.generation_config is not None
        else hf.config.eos_token_id
    )
    return [] if found is None else [found] if isinstance(found, int) else list(found)
