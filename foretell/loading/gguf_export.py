"""A .gguf file to a folder that transformers and foretell load: weights in bfloat16, configuration,
tokenizer and chat template.

`python -m foretell.loading.gguf_export FILE FOLDER` does it in a process of its own, so that the
memory of reading is given back. Exit codes: 0; 1, the folder cannot be written; 2, the file cannot
be unpacked. One line on standard error says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from foretell.errors import BadModel, ForetellError, first_message_line
from foretell.models.gguf.limits import check_file

VERSION = 2  # of what `unpack_file` makes of a file; folders of another version are made again
CURE = "llama.cpp may run the file itself: give its path"


def unpack_file(file_path: Path, folder: Path) -> None:
    """Writes the model into a folder that is there. Raises BadModel, or OSError where the folder
    cannot be written.
    """
    import torch

    from foretell.models.gguf.gguf import read_unpacked
    from foretell.models.gguf.tokenizer import read_tokenizer

    check_file(file_path)
    try:
        model = read_unpacked(file_path, torch.bfloat16)
    except LookupError as error:
        raise BadModel(f"{file_path}: cannot be unpacked ({error}); {CURE}") from error
    tokenizer = read_tokenizer(file_path)
    try:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    except Exception as error:  # tokenizers and safetensors raise their own
        raise OSError(first_message_line(error)) from error
    make_readable(folder)


def make_readable(folder: Path) -> None:
    """Lets whoever can read a folder's settings read its weights, which safetensors hides."""
    mode = (folder / "config.json").stat().st_mode
    for weight_file in folder.glob("*.safetensors"):
        weight_file.chmod(mode)


def exit_code(work: Callable[[], None]) -> int:
    """Exit code of a process that fills a folder; why it could not is said in a line."""
    try:
        work()
    except ForetellError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(error.strerror or first_message_line(error), file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    file_path, folder = map(Path, arguments)
    return exit_code(partial(unpack_file, file_path, folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
