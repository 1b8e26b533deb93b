"""A model with LoRA weights added, as a folder of its own, in bfloat16.

`python -m foretell.merging MODEL LORA FOLDER` does it in a process of its own, so that the memory
is given back. Where the LoRA weights are of a model that fills canvases (`foretell train dlm
--rank`), what wrote from left to right does that then. Exit codes: 0; 1, the folder cannot be
written; 2, the weights do not belong to the model. One line on standard error says why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from foretell.errors import BadModel, first_line
from foretell.unpacking import readable


def merge(base: str, lora: Path, folder: Path) -> None:
    """Writes the model into a folder that is there. Raises BadModel, or OSError where the folder
    cannot be written.
    """
    import torch

    import foretell
    from foretell.families import adapted
    from foretell.families.learning import copied
    from foretell.families.masked import OURS
    from foretell.train.converting import converted
    from foretell.train.dlm import export

    lm = foretell.load(base, dtype="float32", executor="torch")
    canvas = adapted.read_settings(lora / adapted.CONFIG).get(OURS)
    target: Any = lm.models["target"]
    try:
        if canvas is None:
            hf = copied(target)
            adapted.merge(hf, lora, base)
            hf.to(torch.bfloat16).save_pretrained(folder)
            lm.tokenizer.save_pretrained(folder)  # type: ignore[union-attr]
        else:
            reader, tokenizer = converted(lm, canvas["block"])
            adapted.merge(reader.hf, lora, base)
            export(reader, tokenizer, folder)
    except BadModel:
        raise
    except Exception as error:  # tokenizers and safetensors raise their own
        raise OSError(first_line(error)) from error
    readable(folder)


def main(arguments: list[str]) -> int:
    base, lora, folder = arguments
    try:
        merge(base, Path(lora), Path(folder))
    except BadModel as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(error.strerror or first_line(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
