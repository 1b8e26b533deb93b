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
from foretell.bench.peers._conversion import converted
from foretell.bench.peers._environment import environment
from foretell.bench.peers._worker import Worker
from foretell.errors import Unsupported

NAME = "onnxruntime.genai"
FORMATS = {"float32": "fp32", "int8": "int8", "int4": "int4"}
BLOCK = 32  # weights that share a scale
ACCURACY = 4  # of MatMulNBits: its sums are of 8-bit integers
NGRAM = 3  # tokens that are looked up, as OpenVINO's lookup does beside it
DRAFTED = 5  # tokens a step, at most


def contenders(place: Place) -> list[Peer]:
    where = environment(NAME, ["onnxruntime_genai", "onnx_ir"], place)
    if place.dtype not in FORMATS:
        need = f"one of {', '.join(FORMATS)}"
        raise Unsupported.missing(NAME, place.dtype, need, "choose another --dtype")
    kind = FORMATS[place.dtype]
    builder = _builder(where.packages)
    given = {"kind": kind, "builder": builder}
    common = {
        "model": str(converted(where, place.model, kind, given, here=True)),
        "threads": place.threads,
        "eos": place.eos,
    }
    name = f"{NAME} {place.dtype}"
    about = f"onnxruntime-genai {where.version('onnxruntime-genai')}, {kind}, "
    if kind != "fp32":
        about += f"blocks of {BLOCK}, accuracy_level={ACCURACY}, "
    about += f"intra_op_num_threads={place.threads}; Generator.generate_next_token"
    lookup = f"{about}, ngram_size={NGRAM}, max_draft_tokens={DRAFTED}"
    return [
        Worker(name, about, where, common | {"ngram": 0}),
        Worker(f"{name} ngram", lookup, where, common | {"ngram": NGRAM}),
    ]


def _builder(packages: list[str]) -> str:
    """Its script, among packages elsewhere or those of this process."""
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
        how: dict[str, Any] = {"max_length": len(ids) + max_new_tokens, "do_sample": False}
        if temperature:
            how |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            how["random_seed"] = seed
        params = genai.GeneratorParams(model)
        params.set_search_options(**how)
        if options["ngram"]:
            params.set_speculative_options(ngram_size=options["ngram"], max_draft_tokens=DRAFTED)
        found = Run([], [], [])
        began = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(numpy.array([ids], dtype=numpy.int32))
        waiting = 0  # tokens of the last step that it has not handed out yet
        while not generator.is_done():
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            now = time.perf_counter() - began
            if waiting:
                waiting -= 1
                found.times[-1] = now
                found.counts[-1] += 1
            else:
                found.times.append(now)
                found.counts.append(1)
                if options["ngram"]:
                    waiting = generator.get_speculative_stats()["tokens_buffered"]
            found.tokens.append(token)
            if token in options["eos"] or len(found.tokens) == max_new_tokens:
                break
        return found

    return run


def convert(options: dict[str, Any]) -> None:
    """Runs its builder, a script beside the modules that it imports."""
    script = Path(options["builder"])
    sys.path.insert(0, str(script.parent))
    more = [f"block_size={BLOCK}", f"accuracy_level={ACCURACY}"]
    sys.argv = ["", "--input", options["source"], "--output", options["out"]]
    sys.argv += ["--precision", options["kind"], "--execution_provider", "cpu"]
    sys.argv += ["--cache_dir", f"{options['out']}/cache"]
    if options["kind"] != "fp32":
        sys.argv += ["--extra_options", *more]
    runpy.run_path(str(script), run_name="__main__")
