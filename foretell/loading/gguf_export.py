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
from typing import Any

from foretell.errors import BadModel, ForetellError, first_message_line
from foretell.models.gguf.limits import check_file

VERSION = 2  # of what `unpack_file` makes of a file; folders of another version are made again
PLAIN = ("default", "gpt-2")  # rules of words that are the byte-level tokenizer's own
# Rules of tokenizers that take a word of the vocabulary whole, whatever the merges say, and begin a
# text with its first token unless the file says otherwise.
WHOLE_WORDS = frozenset(
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken"
    ).split()
)
SPACE = "\u2581"  # that sentencepiece writes for one
CURE = "llama.cpp may run the file itself: give its path"


def unpack_file(file_path: Path, folder: Path) -> None:
    """Writes the model into a folder that is there. Raises BadModel, or OSError where the folder
    cannot be written.
    """
    import torch

    from foretell.models.gguf.gguf import read_unpacked

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


def read_tokenizer(file_path: Path) -> Any:
    """The tokenizer in a .gguf file, as transformers has it. Raises BadModel."""
    from transformers import AutoTokenizer

    from foretell.models.gguf.header import read_header

    check_file(file_path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file_path.parent, gguf_file=file_path.name)
    except Exception as error:  # transformers raises nearly anything here
        raise BadModel(
            f"{file_path}: has no usable tokenizer ({first_message_line(error)}); {CURE}"
        ) from error
    values = read_header(file_path).values
    if tokenizer.chat_template is None:
        template = values.get("tokenizer.chat_template")
        tokenizer.chat_template = None if template is None else str(template)
    rule = str(values.get("tokenizer.ggml.pre", "default"))
    _split_words(tokenizer, file_path, rule)
    if rule in WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
        if values.get("tokenizer.ggml.add_bos_token") is None and tokenizer.bos_token is not None:
            tokenizer.add_bos_token = True
    _set_beginning(
        tokenizer.backend_tokenizer, values.get("tokenizer.ggml.add_space_prefix") is not False
    )
    return tokenizer


def _split_words(tokenizer: Any, file_path: Path, rule: str) -> None:
    """Splits texts before the merges by the rule that the file names, where transformers does not
    know it and takes GPT-2's. Raises BadModel for a rule that is not known here either.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) or rule in PLAIN:
        return
    if rule != "smollm":
        raise BadModel(
            f"{file_path}: its tokenizer splits words by the rule {rule!r}, unknown here; {CURE}"
        )
    # Every digit is a word of its own, so that several spaces before a number are one token.
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])


def _set_beginning(backend: Any, has_space: bool) -> None:
    """Puts a space before a text of sentencepiece's, and before what follows a special token, or
    none. transformers puts one where no other stands.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = None
    elif has_space or not isinstance(backend.normalizer, normalizers.Sequence):
        return
    replacement = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replacement])
        if has_space
        else replacement
    )
    if not has_space:
        decoder_steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(decoder_steps)


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
