"""ONNX Runtime GenAI: plain, and with its lookup of n-grams in the text, in 8 and 4 bits.

Its model builder reads a folder in transformers' layout. Weights are in blocks of 32 with a scale
each, and products take activations in 8 bits: its quickest way on a CPU, where it has no 16 bits.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretell.bench.peers import Peer, Place, Run
from foretell.bench.peers._conversion import convert_model
from foretell.bench.peers._environment import find_environment
from foretell.bench.peers._worker import Worker
from foretell.errors import Unsupported

NAME = "onnxruntime.genai"
FORMATS = {"float32": "fp32", "int8": "int8", "int4": "int4"}
BLOCK = 32  # weights that share a scale
ACCURACY = 4  # of MatMulNBits: its sums are of 8-bit integers
NGRAM = 3  # tokens that are looked up, as OpenVINO's lookup does beside it
DRAFTED = 5  # tokens a step, at most


def contenders(place: Place) -> list[Peer]:
    peer_environment = find_environment(NAME, ["onnxruntime_genai", "onnx_ir"], place)
    if place.dtype not in FORMATS:
        requirement = f"one of {', '.join(FORMATS)}"
        raise Unsupported.missing_capability(
            NAME, place.dtype, requirement, "choose another --dtype"
        )
    number_format = FORMATS[place.dtype]
    builder_script = _find_builder(peer_environment.packages)
    conversion_options = {"kind": number_format, "builder": builder_script}
    common_options = {
        "model": str(
            convert_model(
                peer_environment, place.model, number_format, conversion_options, here=True
            )
        ),
        "threads": place.threads,
        "eos": place.eos,
    }
    name = f"{NAME} {place.dtype}"
    description = (
        f"onnxruntime-genai {peer_environment.version('onnxruntime-genai')}, {number_format}, "
    )
    if number_format != "fp32":
        description += f"blocks of {BLOCK}, accuracy_level={ACCURACY}, "
    description += f"intra_op_num_threads={place.threads}; Generator.generate_next_token"
    lookup_description = f"{description}, ngram_size={NGRAM}, max_draft_tokens={DRAFTED}"
    return [
        Worker(name, description, peer_environment, common_options | {"ngram": 0}),
        Worker(
            f"{name} ngram", lookup_description, peer_environment, common_options | {"ngram": NGRAM}
        ),
    ]


def _find_builder(packages: list[str]) -> str:
    """Finds the model builder's script, among packages elsewhere or those of this process."""
    for folder in packages or sys.path:
        script = Path(folder) / "onnxruntime_genai" / "models" / "builder.py"
        if script.is_file():
            return str(script)
    raise Unsupported(f"{NAME}: its package holds no model builder; set it up again")


def start(options: dict[str, Any]) -> Callable[..., Run]:
    import numpy
    import onnxruntime_genai as genai

    config = genai.Config(options["model"])
    session = {"intra_op_num_threads": options["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = genai.Model(config)

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        search_options: dict[str, Any] = {
            "max_length": len(ids) + max_new_tokens,
            "do_sample": False,
        }
        if temperature:
            search_options |= {
                "do_sample": True,
                "temperature": temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
            search_options["random_seed"] = seed
        generator_params = genai.GeneratorParams(model)
        generator_params.set_search_options(**search_options)
        if options["ngram"]:
            generator_params.set_speculative_options(
                ngram_size=options["ngram"], max_draft_tokens=DRAFTED
            )
        result = Run([], [], [])
        start_time = time.perf_counter()
        generator = genai.Generator(model, generator_params)
        generator.append_tokens(numpy.array([ids], dtype=numpy.int32))
        buffered_tokens = 0  # tokens of the last step that it has not handed out yet
        while not generator.is_done():
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            elapsed = time.perf_counter() - start_time
            if buffered_tokens:
                buffered_tokens -= 1
                result.times[-1] = elapsed
                result.counts[-1] += 1
            else:
                result.times.append(elapsed)
                result.counts.append(1)
                if options["ngram"]:
                    buffered_tokens = generator.get_speculative_stats()["tokens_buffered"]
            result.tokens.append(token)
            if token in options["eos"] or len(result.tokens) == max_new_tokens:
                break
        return result

    return run


def convert(options: dict[str, Any]) -> None:
    """Runs its builder, a script beside the modules that it imports."""
    script = Path(options["builder"])
    sys.path.insert(0, str(script.parent))
    extra_options = [f"block_size={BLOCK}", f"accuracy_level={ACCURACY}"]
    sys.argv = ["", "--input", options["source"], "--output", options["out"]]
    sys.argv += ["--precision", options["kind"], "--execution_provider", "cpu"]
    sys.argv += ["--cache_dir", f"{options['out']}/cache"]
    if options["kind"] != "fp32":
        sys.argv += ["--extra_options", *extra_options]
    runpy.run_path(str(script), run_name="__main__")
