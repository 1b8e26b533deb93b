"""Measures who computes which family in which number format, for the table of docs/models.md.

    python scripts/model_table.py [FAMILY ...]

builds a small random model of every family that foretell/models/families describes, and of others
that people run, loads it in every number format as a user would, and writes who computes it, or why
it is refused, to dev/measured/models.json; with names, only theirs. `scripts/docs.py` makes the
table of that. It takes some minutes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import foretell  # noqa: E402
from foretell.api.diagnosis import diagnose  # noqa: E402
from foretell.errors import ForetellError  # noqa: E402
from foretell.models.families.description import known_families  # noqa: E402
from foretell.native import library  # noqa: E402
from tests.models.decoder import families  # noqa: E402

RESULTS = ROOT / "dev" / "measured" / "models.json"
FORMATS = ("float32", "bfloat16", "int8", "int4")
SIZES = {**families.BASE, **families.SIZES}
STATE_SPACE = {**families.STATE_SPACE, "mamba_d_head": 32}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
CONVOLUTIONS = families.RECURRENT["lfm2"]
LATENT = {
    **families.ROUTED_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
# Families that are not described, and what each needs beside the usual sizes.
OTHERS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "bamba": {**STATE_SPACE, "attn_layer_indices": [1]},
    "bloom": {"n_layer": 3, "n_head": 4},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "falcon": {},
    "falcon_h1": {**STATE_SPACE, "mamba_d_ssm": 256},
    "falcon_mamba": families.RECURRENT["falcon_mamba"],
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": families.MIXED},
    "gemma4_text": {},
    "gptj": {"n_embd": 128, "n_layer": 3, "n_head": 4, "rotary_dim": 16},
    "granitemoehybrid": {
        **STATE_SPACE,
        **families.LOCAL_EXPERTS,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 96,
    },
    "granitemoeshared": {**families.LOCAL_EXPERTS, "shared_intermediate_size": 96},
    "hunyuan_v1_dense": {},
    "internlm3": {},
    "jamba": families.RECURRENT["jamba"],
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**families.EXPERTS, **CONVOLUTIONS},
    "llama4_text": {
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention"] * 3,
    },
    "mamba": families.RECURRENT["mamba"],
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 32, "n_groups": 2, "chunk_size": 16},
    "mpt": {"d_model": 128, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "nanochat": {},
    "nemotron_h": {},
    "olmo": {},
    "phimoe": {**families.LOCAL_EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**families.EXPERTS, **DELTA},
    "recurrent_gemma": {
        "lru_width": 128,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
}


def build_model(family: str) -> Any:
    """A small random model of a family."""
    if family in known_families():
        return families.described(family)
    fields = SIZES | OTHERS[family]
    if family == "falcon":
        del fields["head_dim"]  # its class derives it
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).eval()


def measure_format(folder: str, number_format: str) -> dict[str, str]:
    """Who computes the model in a folder, and why nobody else does."""
    try:
        lm = foretell.load(folder, dtype=number_format)
    except ForetellError as error:
        text = str(error).replace(folder, "it").splitlines()[0]
        return {"by": "refused", "reason": text}
    (report,) = diagnose(lm)
    reasons = dict(report.refusals)
    of_layers = reasons.get("native") or reasons.get("fused blocks")
    reason = of_layers or next(iter(reasons.values()), "")
    return {"by": report.backend, "reason": reason.replace(folder, "it")}


def measure_family(family: str) -> dict[str, dict[str, str]]:
    """Who computes a family, by number format."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["FORETELL_CACHE"] = f"{folder}/cache"
        try:
            build_model(family).bfloat16().save_pretrained(f"{folder}/model")
        except Exception as error:
            raise SystemExit(f"{family}: its model cannot be built: {error}") from error
        for number_format in FORMATS:
            found[number_format] = measure_format(f"{folder}/model", number_format)
    return found


def main(names: list[str]) -> int:
    known = json.loads(RESULTS.read_text("utf-8"))["families"] if RESULTS.exists() else {}
    every = sorted({*known_families(), *OTHERS})
    unknown = sorted(set(names) - set(every))
    if unknown:
        print(f"error: {', '.join(unknown)}: known are {', '.join(every)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    for family in names or every:
        with contextlib.redirect_stderr(io.StringIO()):
            known[family] = measure_family(family)
        print(family, *(f"{name}: {cell['by']}" for name, cell in known[family].items()))
    about = {
        "transformers": transformers.__version__,
        "kernels": library.kernel_kind(),
        "system": platform.machine(),
    }
    found = {"about": about, "families": {name: known[name] for name in every if name in known}}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
