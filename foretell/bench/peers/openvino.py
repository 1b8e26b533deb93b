"""OpenVINO GenAI: plain, with its prompt lookup, and with a draft model where there is one.

Models are exported by optimum-intel's command, with 16, 8 or 4 bits for weights. Drafts have the
sizes of its examples; attention and the cache's number format are its defaults.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from foretell.bench.peers import Peer, Place, Run
from foretell.bench.peers._conversion import converted
from foretell.bench.peers._environment import environment
from foretell.bench.peers._worker import Worker
from foretell.errors import Unsupported

NAME = "openvino"
# Of the weights:
FORMATS = {
    "bfloat16": "fp16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "int8",
    "int4": "int4",
}
BLOCK = 32  # weights of 4 bits that share a scale, as in the formats that it is measured beside
# Of arithmetic; with int8 and int4 it chooses for itself:
PRECISION = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
DRAFTED = 5  # tokens a step, of the lookup and of the draft model
NGRAM = 3  # tokens that are looked up, at most


def contenders(place: Place) -> list[Peer]:
    where = environment(NAME, ["openvino_genai", "optimum"], place)
    if place.dtype not in FORMATS:
        need = f"one of {', '.join(FORMATS)}"
        raise Unsupported.missing(NAME, place.dtype, need, "choose another --dtype")
    kind = FORMATS[place.dtype]
    precision = PRECISION.get(place.dtype)
    name = f"{NAME} {place.dtype}"
    version = where.version("openvino-genai")
    arithmetic = precision or "its own"
    about = f"openvino-genai {version}, {kind} weights, {arithmetic} arithmetic, latency hint, "
    about += f"{place.threads} threads, its default cache; "
    common = {
        "model": str(converted(where, place.model, kind, {"kind": kind})),
        "precision": precision,
        "threads": place.threads,
        "eos": place.eos,
    }
    said = f"prompt_lookup, num_assistant_tokens={DRAFTED}, max_ngram_size={NGRAM}"
    found: list[Peer] = [
        Worker(name, about + "LLMPipeline.generate", where, common | {"way": "plain"}),
        Worker(f"{name} prompt lookup", about + said, where, common | {"way": "lookup"}),
    ]
    if place.draft is not None:
        said = f"draft_model, num_assistant_tokens={DRAFTED}"
        draft = converted(where, place.draft, kind, {"kind": kind})
        options = common | {"way": "draft", "draft": str(draft)}
        found.append(Worker(f"{name} draft", about + said, where, options))
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

    how = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": options["threads"]}
    if options["precision"]:
        how["INFERENCE_PRECISION_HINT"] = options["precision"]
    way = options["way"]
    more: dict[str, Any] = {"prompt_lookup": True} if way == "lookup" else {}
    if way == "draft":
        more = {"draft_model": genai.draft_model(options["draft"], "CPU", **how)}
    pipe = genai.LLMPipeline(options["model"], "CPU", **how, **more)

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        sampled: dict[str, Any] = {}
        if temperature:
            sampled = {"do_sample": True, "temperature": temperature, "rng_seed": seed}
        config = genai.GenerationConfig(max_new_tokens=max_new_tokens, **sampled)
        config.stop_token_ids = set(options["eos"])
        if way != "plain":
            config.num_assistant_tokens = DRAFTED
        if way == "lookup":
            config.max_ngram_size = NGRAM
        prompt = numpy.array([ids], dtype=numpy.int64)
        mask = numpy.ones_like(prompt)
        inputs = genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(mask))
        clock = Clock()
        began = time.perf_counter()
        pipe.generate(inputs, config, clock)
        return Run(clock.tokens, [at - began for at in clock.times], clock.counts)

    return run


def convert(options: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", options["source"], "--task", "text-generation-with-past"]
    command += ["--weight-format", options["kind"]]
    if options["kind"] == "int4":
        command += ["--group-size", str(BLOCK), "--ratio", "1.0"]
    command.append(options["out"])
    subprocess.run(command, check=True)
