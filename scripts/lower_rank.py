"""LoRA weights of a lower rank: `python scripts/lower_rank.py FOLDER OUT --rank 32`.

Of every layer's product B A its largest singular values are kept, in bfloat16. It says which share
of the sum of their squares is lost. `models/foretell_models/smollm2-dlm` was made so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from foretell.models.decoder import adapted


def lowered(
    a: torch.Tensor, b: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """A (rank, in) and B (out, rank) of the nearest product; the sum of the squares of all singular
    values, and of those that are left out.
    """
    left, upper = torch.linalg.qr(b)
    right, lower = torch.linalg.qr(a.T)
    u, values, v = torch.linalg.svd(upper @ lower.T)
    half = values[:rank].sqrt()
    squares = values.square()
    low = ((right @ v.T)[:, :rank] * half).T
    return low, (left @ u)[:, :rank] * half, float(squares.sum()), float(squares[rank:].sum())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="LoRA weights of a lower rank")
    parser.add_argument("folder", type=Path, help="LoRA weights as PEFT saves them")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=32)
    options = parser.parse_args(arguments)
    settings = adapted.read_settings(options.folder / adapted.CONFIG)
    given, made = load_file(options.folder / adapted.WEIGHTS), {}
    whole = lost = 0.0
    for name in given:
        match = adapted.KEY.fullmatch(name)
        if match is None or match["part"] == "B":
            continue
        other = name.replace("lora_A", "lora_B")
        scale = adapted.scale_of(settings, match["module"], len(given[name]))
        a, b, squares, left_out = lowered(
            given[name].float(), scale * given[other].float(), options.rank
        )
        made[name], made[other] = a.bfloat16().contiguous(), b.bfloat16().contiguous()
        whole, lost = whole + squares, lost + left_out
    options.out.mkdir(parents=True, exist_ok=True)
    plain = {"alpha_pattern": {}, "rank_pattern": {}, "use_rslora": False}
    settings |= {"r": options.rank, "lora_alpha": options.rank, **plain}
    (options.out / adapted.CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file(made, options.out / adapted.WEIGHTS, {"format": "pt"})
    print(f"{options.out}: rank {options.rank}, {lost / whole:.4f} of the squares lost")


if __name__ == "__main__":
    main()
