"""transformers' own generate: plain, with its prompt lookup, and assisted where there is a draft
model.

It is measured through a streamer, which it hands each step's tokens; no setting is changed but
those of sampling. Its ways to 8 bits are other packages, so beside our int8 it stays at bfloat16.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from foretell.bench.peers import Peer, Place, Run
from foretell.bench.peers._environment import Environment
from foretell.bench.peers._worker import Worker

NAME = "transformers"
LOOKUP = 10  # tokens of its prompt lookup, the number its documentation uses


class Clock(BaseStreamer):
    """Notes when tokens were put out; the first call holds the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Generate:
    """One way of calling generate. `lookup`: tokens of prompt lookup; `assistant`: a draft
    model.
    """

    def __init__(
        self,
        name: str,
        about: str,
        hf: PreTrainedModel,
        lookup: int | None = None,
        assistant: PreTrainedModel | None = None,
    ):
        self.name, self.about, self.hf = name, about, hf
        self.more = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        self.more |= {"assistant_model": assistant} if assistant is not None else {}

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        """`ids` -> the new tokens, and when they came."""
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        inputs, clock = torch.tensor([ids], device=self.hf.device), Clock()
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = self.hf.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=clock,
            max_new_tokens=max_new_tokens,
            **how,
            **self.more,
        )
        return Run(
            out[0, len(ids) :].tolist(), [t - start for t in clock.times[1:]], clock.counts[1:]
        )


def contenders(place: Place) -> list[Peer]:
    """Loads weights of its own, so that nothing of ours is in its modules."""
    name = NAME
    if place.dtype == "int8":
        place, name = replace(place, dtype="bfloat16"), "transformers bfloat16"
    hf = _load(place.model, place)
    found: list[Peer] = [
        Generate(name, "generate, one request, its default attention and cache", hf),
        Generate(
            f"{name} prompt lookup",
            f"generate(prompt_lookup_num_tokens={LOOKUP})",
            hf,
            lookup=LOOKUP,
        ),
    ]
    if place.draft is not None:
        small = _load(place.draft, place)
        found.append(
            Generate(
                f"{name} assisted",
                f"generate(assistant_model={Path(place.draft).name!r})",
                hf,
                assistant=small,
            )
        )
    return found


def apart(place: Place) -> list[Worker]:
    """The same ways but for a draft model's, in processes of their own."""
    where = Environment(NAME, sys.executable, False)
    given = {"place": dataclasses.asdict(replace(place, draft=None)), "threads": place.threads}
    plain = "generate, one request, its default attention and cache"
    lookup = f"generate(prompt_lookup_num_tokens={LOOKUP})"
    return [
        Worker(NAME, plain, where, given | {"way": 0}),
        Worker(f"{NAME} prompt lookup", lookup, where, given | {"way": 1}),
    ]


def start(options: dict[str, Any]) -> Callable[..., Run]:
    torch.set_num_threads(options["threads"])
    way = contenders(Place(**options["place"]))[options["way"]]

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        found = way.run(ids, max_new_tokens, temperature, seed)
        beyond = sum(found.counts) - len(found.tokens)  # put out, and then not in the answer
        while beyond > 0:
            cut = min(beyond, found.counts[-1])
            beyond -= cut
            found.counts[-1] -= cut
            if not found.counts[-1]:
                del found.counts[-1], found.times[-1]
        return found

    return run


def _load(source: str, place: Place) -> PreTrainedModel:
    hf = AutoModelForCausalLM.from_pretrained(
        source, dtype=getattr(torch, place.dtype), use_safetensors=True
    )
    stored = hf.generation_config
    end = stored.eos_token_id if stored.eos_token_id is not None else hf.config.eos_token_id
    # The sampling that a model's authors advise is left out on both sides: the same law is
    # measured.
    pad = end[0] if isinstance(end, list) else end
    hf.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=0 if pad is None else pad
    )
    return hf.to(place.device).eval()
