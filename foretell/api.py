"""What a user calls: `load`, and on what it returns `generate` and `stream`.

This file knows tokenizers, prompts and texts; the engine knows none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretell.drafter import Drafter
from foretell.engine import Engine, Live, Request
from foretell.errors import BadConfig, BadModel, ForetellError, UnknownMethod
from foretell.model import Model
from foretell.models.decoder import Decoder
from foretell.models.fused import blocks
from foretell.registry import resolve
from foretell.strategy import Strategy
from foretell.text import Detokenizer
from foretell.stats import Stats
from foretell.types import Sampling

Method = str | Drafter | Strategy
AUTO = "token-recycling"  # what `auto` stands for
FIELDS = {f.name for f in dataclasses.fields(Sampling)}
# Sampling arguments whose own value is a sequence or mapping; for the others a list means one value a prompt.
NESTED = {"logit_bias", "bad_words", "stop", "stop_token_ids", "logits_processors"}


@dataclass
class Output:
    """One answer. `draft`: per token who proposed it. `error` is set, and the text partial, if the request failed."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "error"
    stats: Stats
    draft: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] | None = None
    samples: list[Output] = field(default_factory=list)  # all n of them, this one first
    error: ForetellError | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text, "tokens": self.tokens, "finish_reason": self.finish_reason, "draft": self.draft,
            "logprobs": self.logprobs, "stats": self.stats.to_dict(), "error": str(self.error) if self.error else None,
        }  # fmt: skip


@dataclass
class Piece:
    """A part of an answer while it is made. `draft`: per token who proposed it; `prompt`: which prompt it answers."""

    text: str
    tokens: list[int]
    draft: list[str]
    prompt: int = 0
    finish_reason: str | None = None


class LM:
    """A language model with its engine. Stores that drafters learn live as long as it does."""

    def __init__(self, target: Model, tokenizer: PreTrainedTokenizerBase | None = None, draft: Model | None = None,
                 path: Path | None = None, eos: Sequence[int] = ()):  # fmt: skip
        self.tokenizer, self.path = tokenizer, path
        self.models = {"target": target} | ({"draft": draft} if draft else {})
        self.engine = Engine(self.models, eos)

    def generate(self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any) -> Any:
        """Generates for one prompt (text, token ids or chat messages: one Output) or for a list of them (a list).

        Every sampling argument of types.Sampling may be given, as one value or as a list with one value a prompt. A
        failed request of a list has its `error` set; a single one raises it.
        """
        groups, many = self._requests(prompt, method, sampling)
        flat = [self.engine.add(request) for group in groups for request in group] if self._check(groups) else []
        kept = {live.index: live for live in flat}
        sources: dict[int, list[str]] = {live.index: [] for live in flat}
        try:
            for event in self.engine.run():
                if event.request in kept:
                    sources[event.request] += event.sources
        finally:
            for live in flat:
                self.engine.end(live)
        outputs, position = [], 0
        for group in groups:
            samples = [self._output(live, sources[live.index]) for live in flat[position : position + len(group)]]
            position += len(group)
            samples[0].samples = samples
            outputs.append(samples[0])
        if many:
            return outputs
        if outputs[0].error:
            raise outputs[0].error
        return outputs[0]

    def stream(self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any) -> Iterator[Piece]:
        """The same, yielding Pieces as tokens become final. Closing the iterator ends the requests."""
        groups, many = self._requests(prompt, method, sampling)
        if any(len(group) > 1 for group in groups):
            raise BadConfig("n: streaming gives one sample a prompt; use generate for more")
        self._check(groups)
        return self._stream([self.engine.add(group[0]) for group in groups], many)

    def _stream(self, lives: list[Live], many: bool) -> Iterator[Piece]:
        index = {live.index: i for i, live in enumerate(lives)}
        texts = [Detokenizer(self.decode, live.ctx.request.sampling.stop) for live in lives]
        try:
            while self.engine.live:
                for event in self.engine.step():
                    if event.request not in index:
                        continue
                    i = index[event.request]
                    live = lives[i]
                    if live.error and not many:
                        raise live.error
                    text = texts[i].push(self._spoken(live, event.tokens), final=event.done is not None)
                    yield Piece(text, event.tokens, event.sources, i, event.done)
        finally:
            for live in lives:
                self.engine.end(live)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; an empty one is the tokenizer's first token, if it has one."""
        if self.tokenizer is None:
            raise BadModel("this model has no tokenizer: give token ids, or a folder that has tokenizer files")
        ids = [int(t) for t in self.tokenizer(text)["input_ids"]]
        if not ids:
            first = self.tokenizer.bos_token_id
            if first is None:
                raise BadConfig("the prompt is empty and the tokenizer has no BOS token: give some text")
            ids = [int(first)]
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        items = list(prompt)
        if items and all(isinstance(m, Mapping) for m in items):
            if self.tokenizer is None or not self.tokenizer.chat_template:
                raise BadConfig("chat messages need a model whose tokenizer has a chat template; give a text instead")
            for message in items:
                if not {"role", "content"} <= set(message):
                    raise BadConfig(f"a chat message needs `role` and `content`, not {sorted(message)}")
            ids = self.tokenizer.apply_chat_template(items, add_generation_prompt=True, return_dict=True)
            return [int(t) for t in ids["input_ids"]]  # type: ignore[call-overload,index]
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in items):
            raise BadConfig("a prompt is a text, a list of token ids or a list of chat messages")
        return items

    def _requests(self, prompt: Any, method: Any, sampling: dict[str, Any]) -> tuple[list[list[Request]], bool]:
        """One list of requests (its n samples) a prompt, and whether many prompts were given."""
        for key in sampling:
            if key not in FIELDS:
                raise UnknownMethod.near("argument", key, FIELDS | {"method"})
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        many = isinstance(prompt, list | tuple) and any(not isinstance(p, int | Mapping) for p in prompt)
        prompts = list(prompt) if many else [prompt]
        count = len(prompts)

        def each(name: str, value: Any) -> list[Any]:
            split = isinstance(value, list) and (many if name not in NESTED else many and _deep(name, value))
            if not split:
                return [value] * count
            if len(value) != count:
                raise BadConfig(f"{name}: {len(value)} values for {count} prompts; give one, or one a prompt")
            return list(value)

        methods = each("method", method)
        columns = {name: each(name, value) for name, value in sampling.items()}
        groups = []
        for i, one in enumerate(prompts):
            chosen = Sampling(**self._clean({name: values[i] for name, values in columns.items()}))
            name, strategy = resolve(AUTO if methods[i] == "auto" else methods[i])
            ids = self._encode(one)
            groups.append([
                Request(ids, strategy, dataclasses.replace(chosen, seed=chosen.seed + k, n=1), name,
                        self.decode if self.tokenizer is not None else None)
                for k in range(chosen.n)
            ])  # fmt: skip
        return groups, many

    def _clean(self, options: dict[str, Any]) -> dict[str, Any]:
        """Texts to token ids, single values to tuples."""
        for name in ("stop", "stop_token_ids", "logits_processors", "bad_words"):
            if name in options:
                value = options[name]
                options[name] = () if value is None else (value,) if isinstance(value, str | int) or callable(value) else tuple(value)
        words: list[list[int]] = []
        for word in options.get("bad_words", ()):
            if isinstance(word, str):
                # A word is meant wherever it stands: at the start of a text and behind a space.
                words += [self.encode(w) for w in dict.fromkeys((word, " " + word.lstrip(" ")))]
            else:
                words.append(list(word))
        if "bad_words" in options:
            options["bad_words"] = tuple(words)
        if "logit_bias" in options:
            options["logit_bias"] = {int(k): float(v) for k, v in (options["logit_bias"] or {}).items()}
        return options

    def _check(self, groups: list[list[Request]]) -> bool:
        """Every request is validated before the first is added, so a bad one costs nothing."""
        for group in groups:
            self.engine.end(self.engine.add(group[0]))
        return True

    def _spoken(self, live: Live, tokens: list[int]) -> list[int]:
        return [t for t in tokens if t not in live.ctx.sampler.stops]

    def _output(self, live: Live, sources: list[str]) -> Output:
        sampling, tokens = live.ctx.request.sampling, live.ctx.output
        text = Detokenizer(self.decode, sampling.stop).push(self._spoken(live, tokens), final=True)
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [
                {"token": token, "logprob": value, "top": [{"token": t, "logprob": v} for t, v in top]}
                for token, (value, top) in zip(tokens, live.logprobs, strict=True)
            ]
        error = live.error if isinstance(live.error, ForetellError) else None
        return Output(text, tokens, live.reason or "error", live.ctx.stats, sources, logprobs, error=error)


def _deep(name: str, value: list[Any]) -> bool:
    """Whether a list given for a nested argument has one entry a prompt rather than being one value."""
    if name == "bad_words":
        return any(isinstance(v, list | tuple) and any(isinstance(w, str | list | tuple) for w in v) for v in value)
    return any(isinstance(v, list | tuple | Mapping) or v is None for v in value)


def wrap(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, draft: PreTrainedModel | None = None,
         name: str | None = None, path: Path | None = None) -> LM:  # fmt: skip
    """An LM over transformers models that are already loaded."""
    title = name or getattr(hf.config, "name_or_path", "") or hf.config.model_type
    target = Decoder(hf, title, blocks)
    second = Decoder(draft, f"{title} (draft)", blocks) if draft is not None else None
    if second is not None and second.vocab != target.vocab:
        raise BadConfig(f"the draft model has {second.vocab} tokens and the target {target.vocab}: they must be the same")
    ends = hf.generation_config.eos_token_id if hf.generation_config is not None else hf.config.eos_token_id
    eos = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return LM(target, tokenizer, second, path, eos)
