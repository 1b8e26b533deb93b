"""Runs of a method on the audited models, and of plain decoding for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foretell.api.lm import LM
from foretell.audit.copies import Copy
from foretell.cache.cache import Cache
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.models.decoder.decoder import Decoder
from foretell.spec import resolve_method
from foretell.speculation.strategy import Strategy


class KeepingEngine(Engine):
    """An engine that keeps a copy of the target's cache of every request that has ended."""

    def __init__(self, models: dict[str, Model], eos: Sequence[int]):
        super().__init__(models, eos)
        self.kept_caches: dict[int, Cache] = {}

    def end(self, live: Live) -> None:
        cache = live.caches.get(("target", live.result))
        if cache is not None:
            self.kept_caches[live.index] = cache.fork()
        super().end(live)


@dataclass
class Runs:
    """The models, prompts and outputs that the checks of all methods share."""

    lm: LM
    prompts: list[list[int]]
    copies: list[Copy]  # of the models, by number format; float32 first where it can be had
    length: int  # tokens of a comparison
    samples: int  # sampled texts of each prompt
    plain_outputs: dict[tuple[int, float], list[list[int]]] = field(default_factory=dict)

    def run_requests(
        self,
        models: dict[str, Model],
        name: str,
        strategy: Strategy,
        samplings: Sequence[Sampling],
        prompts: Sequence[list[int]],
    ) -> tuple[KeepingEngine, list[Live]]:
        """Runs a request for each sampling and prompt in one batch. Raises the first error."""
        engine = KeepingEngine(models, self.lm.engine.eos)
        return engine, run_batch(engine, name, strategy, samplings, prompts)

    def plain_tokens(self, index: int, temperature: float) -> list[list[int]]:
        """Plain decoding's tokens for each prompt with seed 0, of the models copies[index].

        One prompt at a time: the reference is what forwards of a single row give.
        """
        output_key = (index, temperature)
        if output_key not in self.plain_outputs:
            sampling = Sampling(max_new_tokens=self.length, temperature=temperature)
            models = self.copies[index].models
            strategy = resolve_method("plain")[1]
            outputs = []
            for prompt in self.prompts:
                _, lives = self.run_requests(models, "plain", strategy, [sampling], [prompt])
                outputs.append(lives[0].ctx.output)
            self.plain_outputs[output_key] = outputs
        return self.plain_outputs[output_key]


def run_batch(
    engine: Engine,
    name: str,
    strategy: Strategy,
    samplings: Sequence[Sampling],
    prompts: Sequence[list[int]],
) -> list[Live]:
    """Runs one request for each sampling and prompt to its end. Raises the first error."""
    lives = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        lives.append(engine.add(Request(prompt, strategy, sampling, name)))
    for _ in engine.run():
        pass
    for live in lives:
        if live.error is not None:
            raise live.error
    return lives


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_exact_bits(model: Model) -> bool:
    return isinstance(model, Decoder) and model.exact_bits


def has_coarse_activations(model: Model) -> bool:
    """Whether products round activations, in ways that depend on the rows of a forward."""
    return getattr(model, "narrow", False) and not has_exact_bits(model)
