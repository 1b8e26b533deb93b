"""Small documents of figures, as scripts/compare.py writes them."""

from __future__ import annotations

from typing import Any

PLAIN = "foretell bfloat16 plain"
AUTO = "foretell bfloat16 auto"
LLAMA = "llama.cpp BF16"
LOOKUP = "llama.cpp BF16 prompt lookup 10"
INT8 = "openvino int8"


def described(bits: int, plain: bool, method: str | None, process: str) -> dict[str, Any]:
    return {"about": "as it is", "bits": bits, "plain": plain, "method": method, "process": process}


CONTENDERS = {
    PLAIN: described(16, True, "plain", "foretell bfloat16"),
    AUTO: described(16, False, "auto", "foretell bfloat16"),
    "transformers": described(16, True, None, "transformers"),
    LLAMA: described(16, True, None, LLAMA),
    LOOKUP: described(16, False, None, LOOKUP),
    INT8: described(8, True, None, INT8),
}
SPEEDS = {PLAIN: 30.0, AUTO: 60.0, "transformers": 10.0, LLAMA: 20.0, LOOKUP: 40.0, INT8: 50.0}


def part(
    times: dict[str, float] | None = None, sets: tuple[str, ...] = ("chat",)
) -> dict[str, Any]:
    """Two prompts, two rounds; the second prompt is twice as quick for all. `times`: of SPEEDS, for
    contenders that take part; the tokens of `auto` differ from plain decoding's on prompt 1.
    """
    rows = []
    for name, factor in (times or dict.fromkeys(SPEEDS, 1.0)).items():
        for prompt in range(2):
            for turn in (1, 2):
                speed = SPEEDS[name] * factor * (prompt + 1)
                mat = 1.0 if CONTENDERS[name]["plain"] else 2.0
                digest = "other" if name == AUTO and prompt else "same"
                rows.append([name, prompt, turn, speed, mat, 0.1, digest])
    return {
        "date": "2026-11-22",
        "machine": "a processor",
        "cores": 2,
        "versions": {"torch": "2.13.0"},
        "load": {
            "foretell bfloat16": {
                "load_s": 1.0,
                "ready_s": 2.0,
                "first_token_s": 0.5,
                "loaded_bytes": 4e8,
                "loading_peak_bytes": 5e8,
                "peak_bytes": None,
                "weight_bytes": 200_000_000,
            }
        },
        "absent": {"ctranslate2 int8": "not installed"},
        "memory_rate": [10e9, 20e9, 40e9],
        "prefill": [[PLAIN, 1, 2.0], [LLAMA, 1, 1.0], [LLAMA, 2, 1.0]],
        "steps": {"foretell bfloat16": {"1": 0.02, "8": 0.03}},
        "runs": dict.fromkeys(sets, rows),
    }


def document(*parts: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {
        "schema": "foretell.compare/2",
        "settings": {
            "model": "tiny",
            "threads": 2,
            "max_new_tokens": 8,
            "temperature": 0.0,
            "rounds": 2,
            "long_prompt": 2000,
        }
        | settings,
        "contenders": CONTENDERS,
        "parts": list(parts or [part()]),
    }
