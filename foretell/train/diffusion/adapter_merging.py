"""A model with LoRA weights added, as a folder of its own, in bfloat16.

`python -m foretell.train.diffusion.adapter_merging MODEL LORA FOLDER` does it in a process of its
own, so that the memory is given back. Where the LoRA weights are of a model that fills canvases
(`foretell train dlm --rank`), what wrote from left to right does that then. Exit codes: 0; 1, the
folder cannot be written; 2, the weights do not belong to the model. One line on standard error says
why.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foretell.errors import first_message_line
from foretell.loading.gguf_export import exit_code, make_readable


def merge_adapters(base: str, lora: Path, folder: Path) -> None:
    """Writes the model into a folder that is there. Raises ForetellError, or OSError where the
    folder cannot be written.
    """
    import torch

    import foretell
    from foretell.models.decoder import adapted
    from foretell.models.decoder.learning import copy_modules
    from foretell.models.diffusion.masked import OURS
    from foretell.train.diffusion.converting import convert_model, shorten_model
    from foretell.train.diffusion.dlm import export_canvases

    settings = adapted.read_settings(lora / adapted.CONFIG)
    canvas = settings.get(OURS)
    lm = foretell.load(base, dtype="float32", backend="torch")
    if canvas is None:
        hf: Any = copy_modules(lm.models["target"])
        adapted.merge_adapter(hf, lora, base)
    else:
        reader, tokenizer = convert_model(lm, canvas["block"])
        if settings.get("cut"):
            shorten_model(reader.hf, settings["cut"])
        adapted.merge_adapter(reader.hf, lora, base)
    try:
        if canvas is None:
            hf.to(torch.bfloat16).save_pretrained(folder)
            lm.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
        else:
            export_canvases(replace(reader, longest=canvas.get("longest", 0)), tokenizer, folder)
    except Exception as error:  # tokenizers and safetensors raise their own
        raise OSError(first_message_line(error)) from error
    make_readable(folder)


def main(arguments: list[str]) -> int:
    base, lora, folder = arguments
    return exit_code(partial(merge_adapters, base, Path(lora), Path(folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
