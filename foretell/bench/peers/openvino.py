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
from foretell.bench.peers._conversion import convert_model
from foretell.bench.peers._environment import find_environment
from foretell.bench.peers._worker import Worker
from foretell.errors import Unsupported

NAME = "openvino"
# Of the weights:
FORMATS = {"bfloat16": "fp16", "float16": "fp16", "float32": "fp32", "int8": "int8", "int4": "int4"}
BLOCK = 32  # weights of 4 bits that share a scale, as in the formats that it is measured beside
# Of arithmetic; with int8 and int4 it chooses for itself:
PRECISION = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
DRAFTED = 5  # tokens a step, of the lookup and of the draft model
NGRAM = 3  # tokens that are looked up, at most


def contenders(place: Place) -> list[Peer]:
    peer_environment = find_environment(NAME, ["openvino_genai", "optimum"], place)
    if place.dtype not in FORMATS:
        requirement = f"one of {', '.join(FORMATS)}"
        raise Unsupported.missing_capability(
            NAME, place.dtype, requirement, "choose another --dtype"
        )
    weight_format = FORMATS[place.dtype]
    precision = PRECISION.get(place.dtype)
    name = f"{NAME} {place.dtype}"
    version = peer_environment.version("openvino-genai")
    arithmetic = precision or "its own"
    description = f"openvino-genai {version}, {weight_format} weights, {arithmetic} arithmetic, "
    description += f"latency hint, {place.threads} threads, its default cache; "
    common_options = {
        "model": str(
            convert_model(peer_environment, place.model, weight_format, {"kind": weight_format})
        ),
        "precision": precision,
        "threads": place.threads,
        "eos": place.eos,
    }
    draft_description = f"prompt_lookup, num_assistant_tokens={DRAFTED}, max_ngram_size={NGRAM}"
    workers: list[Peer] = [
        Worker(
            name,
            description + "LLMPipeline.generate",
            peer_environment,
            common_options | {"way": "plain"},
        ),
        Worker(
            f"{name} prompt lookup",
            description + draft_description,
            peer_environment,
            common_options | {"way": "lookup"},
        ),
    ]
    if place.draft is not None:
        draft_description = f"draft_model, num_assistant_tokens={DRAFTED}"
        draft = convert_model(peer_environment, place.draft, weight_format, {"kind": weight_format})
        options = common_options | {"way": "draft", "draft": str(draft)}
        workers.append(
            Worker(f"{name} draft", description + draft_description, peer_environment, options)
        )
    return workers


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

    runtime_options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": options["threads"]}
    if options["precision"]:
        runtime_options["INFERENCE_PRECISION_HINT"] = options["precision"]
    decoding_way = options["way"]
    draft_options: dict[str, Any] = {"prompt_lookup": True} if decoding_way == "lookup" else {}
    if decoding_way == "draft":
        draft_options = {
            "draft_model": genai.draft_model(options["draft"], "CPU", **runtime_options)
        }
    pipeline = genai.LLMPipeline(options["model"], "CPU", **runtime_options, **draft_options)

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        sampling_options: dict[str, Any] = {}
        if temperature:
            sampling_options = {"do_sample": True, "temperature": temperature, "rng_seed": seed}
        generation_config = genai.GenerationConfig(
            max_new_tokens=max_new_tokens, **sampling_options
        )
        generation_config.stop_token_ids = set(options["eos"])
        if decoding_way != "plain":
            generation_config.num_assistant_tokens = DRAFTED
        if decoding_way == "lookup":
            generation_config.max_ngram_size = NGRAM
        prompt = numpy.array([ids], dtype=numpy.int64)
        attention_mask = numpy.ones_like(prompt)
        inputs = genai.TokenizedInputs(openvino.Tensor(prompt), openvino.Tensor(attention_mask))
        clock = Clock()
        start_time = time.perf_counter()
        pipeline.generate(inputs, generation_config, clock)
        return Run(
            clock.tokens, [token_time - start_time for token_time in clock.times], clock.counts
        )

    return run


def convert(options: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", options["source"], "--task", "text-generation-with-past"]
    command += ["--weight-format", options["kind"]]
    if options["kind"] == "int4":
        command += ["--group-size", str(BLOCK), "--ratio", "1.0"]
    command.append(options["out"])
    subprocess.run(command, check=True)
