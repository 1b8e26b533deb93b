"""CTranslate2, for the architectures that it takes: plain decoding, which is all it has.

Its own converter reads the model. On a CPU it has no 16 bits: what is measured beside bfloat16 is
float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretell.bench.peers import Peer, Place, Run
from foretell.bench.peers._conversion import convert_model
from foretell.bench.peers._environment import find_environment
from foretell.bench.peers._worker import Worker
from foretell.errors import Unsupported

NAME = "ctranslate2"
FORMATS = {"bfloat16": "float32", "float16": "float32", "float32": "float32", "int8": "int8"}


def contenders(place: Place) -> list[Peer]:
    peer_environment = find_environment(NAME, [NAME], place)
    if place.dtype not in FORMATS:
        raise Unsupported.missing_capability(
            NAME, place.dtype, f"one of {', '.join(FORMATS)}", "choose another --dtype"
        )
    compute_type = FORMATS[place.dtype]
    options = {
        "model": str(
            convert_model(
                peer_environment, place.model, compute_type, {"kind": compute_type}, here=True
            )
        ),
        "kind": compute_type,
        "threads": place.threads,
        "eos": place.eos,
    }
    description = (
        f"ctranslate2 {peer_environment.version('ctranslate2')}, Generator.generate_batch, "
        f"compute_type={compute_type}, intra_threads={place.threads}"
    )
    return [Worker(f"{NAME} {compute_type}", description, peer_environment, options)]


def start(options: dict[str, Any]) -> Callable[..., Run]:
    import ctranslate2

    vocabulary: list[str] = json.loads(
        (Path(options["model"]) / "vocabulary.json").read_text("utf-8")
    )
    generator = ctranslate2.Generator(
        options["model"],
        compute_type=options["kind"],
        inter_threads=1,
        intra_threads=options["threads"],
    )

    def run(ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> Run:
        result = Run([], [], [])
        sampling_options = (
            {"sampling_topk": 0, "sampling_temperature": temperature}
            if temperature
            else {"sampling_topk": 1}
        )
        ctranslate2.set_random_seed(seed)
        prompt = [vocabulary[token_id] for token_id in ids]

        def note(step: Any) -> bool:
            result.times.append(time.perf_counter() - start_time)
            result.counts.append(1)
            result.tokens.append(step.token_id)
            return False

        start_time = time.perf_counter()
        generator.generate_batch(
            [prompt],
            max_length=max_new_tokens,
            end_token=options["eos"] or None,
            include_prompt_in_result=False,
            callback=note,
            **sampling_options,
        )
        return result

    return run


def convert(options: dict[str, Any]) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(options["source"]).convert(options["out"], quantization=options["kind"])
