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
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedModel
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
    """A way of calling generate. `lookup`: tokens of prompt lookup; `assistant`: a draft
    model.
    """

    def __init__(
        self,
        name: str,
        description: str,
        hf: PreTrainedModel,
        lookup: int | None = None,
        assistant: PreTrainedModel | None = None,
    ):
        self.name, self.about, self.hf = name, description, hf
        self.more = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        self.more |= {"assistant_model": assistant} if assistant is not None else {}

    def run(self, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        """`ids` -> the new tokens, and when they came."""
        sampling_options = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        inputs, clock = torch.tensor([ids], device=self.hf.device), Clock()
        torch.manual_seed(seed)
        start_time = time.perf_counter()
        output_ids = self.hf.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=clock,
            max_new_tokens=max_new_tokens,
            **sampling_options,
            **self.more,
        )
        return Run(
            output_ids[0, len(ids) :].tolist(),
            [token_time - start_time for token_time in clock.times[1:]],
            clock.counts[1:],
        )


def contenders(place: Place) -> list[Peer]:
    """Loads weights of its own, so that nothing of ours is in its modules."""
    name = NAME
    if place.dtype == "int8":
        place, name = replace(place, dtype="bfloat16"), "transformers bfloat16"
    hf = _load_model(place.model, place)
    peers: list[Peer] = [
        Generate(name, "generate, one request, its default attention and cache", hf),
        Generate(
            f"{name} prompt lookup",
            f"generate(prompt_lookup_num_tokens={LOOKUP})",
            hf,
            lookup=LOOKUP,
        ),
    ]
    if place.draft is not None:
        draft_model = _load_model(place.draft, place)
        peers.append(
            Generate(
                f"{name} assisted",
                f"generate(assistant_model={Path(place.draft).name!r})",
                hf,
                assistant=draft_model,
            )
        )
    return peers


def separate_workers(place: Place) -> list[Worker]:
    """Peers of the ways that need no draft model, each in a process of its own."""
    peer_environment = Environment(NAME, sys.executable, False)
    common_options = {
        "place": dataclasses.asdict(replace(place, draft=None)),
        "threads": place.threads,
    }
    plain_description = "generate, one request, its default attention and cache"
    lookup_description = f"generate(prompt_lookup_num_tokens={LOOKUP})"
    return [
        Worker(NAME, plain_description, peer_environment, common_options | {"way": 0}),
        Worker(
            f"{NAME} prompt lookup",
            lookup_description,
            peer_environment,
            common_options | {"way": 1},
        ),
    ]


def start(options: dict[str, Any]) -> Callable[..., Run]:
    torch.set_num_threads(options["threads"])
    peer = contenders(Place(**options["place"]))[options["way"]]

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        result = peer.run(ids, max_new_tokens, temperature, seed)
        surplus_tokens = sum(result.counts) - len(
            result.tokens
        )  # put out, and then not in the answer
        while surplus_tokens > 0:
            dropped_tokens = min(surplus_tokens, result.counts[-1])
            surplus_tokens -= dropped_tokens
            result.counts[-1] -= dropped_tokens
            if not result.counts[-1]:
                del result.counts[-1], result.times[-1]
        return result

    return run


def _load_model(source: str, place: Place) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": getattr(torch, place.dtype), "use_safetensors": True}
    location: str | Path = source
    if source.endswith(".gguf"):  # it has no products in the formats of one, and unpacks it
        location = Path(source).parent
        unpacking = GgufConfig(dequantize=True)
        options |= {"gguf_file": Path(source).name, "quantization_config": unpacking}
    hf = AutoModelForCausalLM.from_pretrained(location, **options)
    stored_config = hf.generation_config
    end_token = (
        stored_config.eos_token_id
        if stored_config.eos_token_id is not None
        else hf.config.eos_token_id
    )
    # The sampling that a model's authors advise is left out on both sides: the same distribution is
    # measured.
    pad_token = end_token[0] if isinstance(end_token, list) else end_token
    hf.generation_config = GenerationConfig(
        eos_token_id=end_token, pad_token_id=0 if pad_token is None else pad_token
    )
    return hf.to(place.device).eval()
