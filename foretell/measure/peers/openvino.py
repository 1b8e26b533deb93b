"""OpenVINO GenAI: plain, with its prompt lookup, and with a draft model where there is one.

Models are exported by optimum-intel's command, with 16 or 8 bits for weights. Drafts have the sizes
of its examples; attention and the cache's number format are its defaults.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from foretell.errors import Unsupported
from foretell.measure.peers import Peer, Place, Run
from foretell.measure.peers._environment import environment
from foretell.measure.peers._worker import Worker

NAME = "openvino"
FORMATS = {
    "bfloat16": "fp16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "int8",
}  # of the weights
PRECISION = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
}  # of arithmetic; its own choice with int8
LOOKUP, NGRAM, DRAFT = 5, 3, 5  # tokens a step, and what is looked up at most


def contenders(place: Place) -> list[Peer]:
    where = environment(NAME, ["openvino_genai", "optimum"], place)
    if place.dtype not in FORMATS:
        raise Unsupported.missing(
            NAME, place.dtype, f"one of {', '.join(FORMATS)}", "choose another --dtype"
        )
    kind, precision = FORMATS[place.dtype], PRECISION.get(place.dtype)
    name = f"{NAME} {'int8' if place.dtype == 'int8' else place.dtype}"
    about = (
        f"openvino-genai {where.version('openvino-genai')}, {kind} weights, "
        f"{precision or 'its own'} arithmetic, latency hint, {place.threads} threads, "
        "its default cache; "
    )
    common = {
        "model": str(where.converted(place.model, kind, {"kind": kind})),
        "precision": precision,
        "threads": place.threads,
        "eos": place.eos,
    }
    said = f"prompt_lookup, num_assistant_tokens={LOOKUP}, max_ngram_size={NGRAM}"
    found: list[Peer] = [
        Worker(name, about + "LLMPipeline.generate", where, common | {"way": "plain"}),
        Worker(f"{name} prompt lookup", about + said, where, common | {"way": "lookup"}),
    ]
    if place.draft is not None:
        said = f"draft_model, num_assistant_tokens={DRAFT}"
        small = {"way": "draft", "draft": str(where.converted(place.draft, kind, {"kind": kind}))}
        found.append(Worker(f"{name} draft", about + said, where, common | small))
    return found


def start(options: dict[str, Any]) -> Callable[..., Run]:
    import numpy
    import openvino
    import openvino_genai as genai

    class Clock(genai.StreamerBase):
        """Notes what is put out and when; a step's tokens come together."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens: list[int] = []
            self.times: list[float] = []
            self.counts: list[int] = []

        def write(self, token: Any) -> Any:
            tokens = [token] if isinstance(token, int) else list(token)
            if tokens:
                self.times.append(time.perf_counter())
                self.counts.append(len(tokens))
                self.tokens += tokens
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    how: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": options["threads"],
    }
    if options["precision"]:
        how["INFERENCE_PRECISION_HINT"] = options["precision"]
    way, drafts = options["way"], {"lookup": LOOKUP, "draft": DRAFT}
    more: dict[str, Any] = {"prompt_lookup": True} if way == "lookup" else {}
    if way == "draft":
        more = {"draft_model": genai.draft_model(options["draft"], "CPU", **how)}
    pipe = genai.LLMPipeline(options["model"], "CPU", **how, **more)

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        sampled = (
            {"do_sample": True, "temperature": temperature, "rng_seed": seed} if temperature else {}
        )
        config = genai.GenerationConfig(max_new_tokens=max_new_tokens, **sampled)
        config.stop_token_ids = set(options["eos"])
        if way in drafts:
            config.num_assistant_tokens = drafts[way]
        if way == "lookup":
            config.max_ngram_size = NGRAM
        prompt, clock = numpy.array([ids], dtype=numpy.int64), Clock()
        inputs = genai.TokenizedInputs(
            openvino.Tensor(prompt), openvino.Tensor(numpy.ones_like(prompt))
        )
        began = time.perf_counter()
        pipe.generate(inputs, config, clock)
        return Run(clock.tokens, [at - began for at in clock.times], clock.counts)

    return run


def convert(options: dict[str, Any]) -> None:
    command = [
        "export",
        "openvino",
        "--model",
        options["source"],
        "--task",
        "text-generation-with-past",
        "--weight-format",
        options["kind"],
        options["out"],
    ]
    subprocess.run([sys.executable, "-m", "optimum.commands.optimum_cli", *command], check=True)
