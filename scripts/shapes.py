"""Writes .gguf files of the shapes that people run, filled with random numbers.

    python scripts/shapes.py 1b Q4_K_M Q8_0 --to runs/shapes
    python scripts/shapes.py 30b MXFP4 --seed 1
    python scripts/shapes.py --list                 # shapes, types, and how large each file is

A step of such a file costs what one of the real model costs; its texts mean nothing. Tensors have
the types that llama.cpp's recipe of that name gives them, weights a standard deviation of
1 / sqrt(inputs), and the tokenizer is made by rule and reads every text. `--tiny` writes a small
model of the same family, for tests. A file is written under another name until it is whole, and a
run that was broken off goes on where it ended. One seed always gives the same bytes.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from noise_blocks import Format, matrix_pieces, noise_tile
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from foretell.progress import Bar  # noqa: E402

SPARE = 1 << 28  # bytes of a disk that are left free
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
CONTROL, BYTE, NORMAL = gguf.TokenType.CONTROL, gguf.TokenType.BYTE, gguf.TokenType.NORMAL


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, in numbers; of experts and windows 0: it has none.

    `turning`: by what the slowest parts of a head turn slower than the fastest (Llama 3).
    """

    title: str
    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    context: int
    epsilon: float
    rope_base: float
    tied: bool
    turning: float = 0.0
    experts: int = 0
    experts_used: int = 0
    expert_inner: int = 0
    window: int = 0

    def tiny(self) -> Shape:
        """A model of this family and its peculiarities that is made in no time."""
        sizes: dict[str, Any] = {"layers": 4, "heads": 4, "head_width": 64}
        sizes |= {"inner": 512, "vocabulary": 512, "context": 512}
        # Rows of 160 are no multiple of 256, as those of Gemma 3's smallest model are none.
        sizes |= {"hidden": 160, "key_heads": 1} if self.window else {"hidden": 256, "key_heads": 2}
        if self.experts:
            sizes |= {"experts": 16, "experts_used": 4, "expert_inner": 256}
        if self.window:
            sizes["window"] = 32
        return replace(self, title=f"{self.title}, tiny", **sizes)


SHAPES = {
    "270m": Shape("Gemma 3 270M", "gemma3", 18, 640, 2048, 4, 1, 256, 262_144, 32_768,
                  1e-6, 1e6, tied=True, window=512),
    "1b": Shape("Llama 3.2 1B", "llama", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072,
                1e-5, 5e5, tied=True, turning=32.0),
    "4b": Shape("Qwen3 4B", "qwen3", 36, 2560, 9728, 32, 8, 128, 151_936, 40_960,
                1e-6, 1e6, tied=True),
    "8b": Shape("Llama 3.1 8B", "llama", 32, 4096, 14_336, 32, 8, 128, 128_256, 131_072,
                1e-5, 5e5, tied=False, turning=8.0),
    "30b": Shape("Qwen3 30B-A3B", "qwen3moe", 48, 2048, 6144, 32, 4, 128, 151_936, 40_960,
                 1e-6, 1e6, tied=False, experts=128, experts_used=8, expert_inner=768),
}  # fmt: skip
# Recipes: the format of most matrices, and how a header names the recipe.
RECIPES = {
    "Q8_0": (Format.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "Q4_K_M": (Format.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "Q4_0": (Format.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "Q5_K_M": (Format.Q5_K, gguf.LlamaFileType.MOSTLY_Q5_K_M),
    "Q6_K": (Format.Q6_K, gguf.LlamaFileType.MOSTLY_Q6_K),
    "BF16": (Format.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "F16": (Format.F16, gguf.LlamaFileType.MOSTLY_F16),
    "MXFP4": (Format.MXFP4, gguf.LlamaFileType.MOSTLY_MXFP4_MOE),
}
# What takes the place of a format for rows that are no multiple of its blocks of 256.
NARROW = {Format.Q4_K: Format.Q5_0, Format.Q5_K: Format.Q5_1, Format.Q6_K: Format.Q8_0}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `sizes`: the inputs last."""

    name: str
    sizes: tuple[int, ...]
    number_format: Format

    @property
    def byte_count(self) -> int:
        block_length, block_bytes = gguf.GGML_QUANT_SIZES[self.number_format]
        return math.prod(self.sizes) // block_length * block_bytes


# --- which tensors a file has, and of which formats


def tensor_sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of all tensors, without `.weight`."""
    hidden, width = shape.hidden, shape.head_width
    yield "token_embd", (shape.vocabulary, hidden)
    if not shape.tied:
        yield "output", (shape.vocabulary, hidden)
    yield "output_norm", (hidden,)
    if shape.turning:
        yield "rope_freqs", (width // 2,)
    for layer in range(shape.layers):
        yield from ((f"blk.{layer}.{name}", sizes) for name, sizes in layer_sizes(shape))


def layer_sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, width = shape.hidden, shape.head_width
    yield "attn_norm", (hidden,)
    yield "attn_q", (shape.heads * width, hidden)
    yield "attn_k", (shape.key_heads * width, hidden)
    yield "attn_v", (shape.key_heads * width, hidden)
    yield "attn_output", (hidden, shape.heads * width)
    if shape.architecture != "llama":
        yield "attn_q_norm", (width,)
        yield "attn_k_norm", (width,)
    if shape.architecture == "gemma3":
        yield "post_attention_norm", (hidden,)
        yield "post_ffw_norm", (hidden,)
    yield "ffn_norm", (hidden,)
    if shape.experts:
        yield "ffn_gate_inp", (shape.experts, hidden)
        yield "ffn_gate_exps", (shape.experts, shape.expert_inner, hidden)
        yield "ffn_up_exps", (shape.experts, shape.expert_inner, hidden)
        yield "ffn_down_exps", (shape.experts, hidden, shape.expert_inner)
    else:
        yield "ffn_gate", (shape.inner, hidden)
        yield "ffn_up", (shape.inner, hidden)
        yield "ffn_down", (hidden, shape.inner)


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether a recipe of mixed formats spends more bits on this layer: the first and the last
    eighth, and each third between them.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def format_of(name: str, sizes: tuple[int, ...], shape: Shape, recipe: str) -> Format:
    """The format that llama.cpp's recipe gives a tensor."""
    kind = name.rpartition(".")[2]
    if len(sizes) == 1 or kind == "ffn_gate_inp":
        return Format.F32
    number_format = RECIPES[recipe][0]
    if recipe == "MXFP4":
        return Format.MXFP4 if len(sizes) == 3 else Format.Q8_0
    if kind == ("token_embd" if shape.tied else "output"):
        if recipe in ("Q4_0", "Q4_K_M", "Q5_K_M"):
            number_format = Format.Q6_K
    elif (
        recipe in ("Q4_K_M", "Q5_K_M")
        and kind in ("attn_v", "ffn_down", "ffn_down_exps")
        and has_more_bits(int(name.split(".")[1]), shape.layers)
    ):
        number_format = Format.Q6_K
    fits = sizes[-1] % gguf.GGML_QUANT_SIZES[number_format][0] == 0
    return number_format if fits else NARROW[number_format]


def tensors_of(shape: Shape, recipe: str) -> list[Tensor]:
    return [
        Tensor(f"{name}.weight", sizes, format_of(name, sizes, shape, recipe))
        for name, sizes in tensor_sizes(shape)
    ]


# --- the tokenizer


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level tokenizer: itself where it can be seen,
    else the next one that nobody uses.
    """
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def syllables(space: str) -> Iterator[tuple[str, str]]:
    """Texts of letters, shorter ones first, as (what it begins with, its last letter)."""
    beginnings = [space, *LETTERS]
    while True:
        longer = []
        for beginning in beginnings:
            for letter in LETTERS:
                yield beginning, letter
                longer.append(beginning + letter)
        beginnings = longer


def add_byte_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """All bytes, syllables with the merges that make them, and at the end a beginning and an
    end.
    """
    letters = byte_letters()
    pairs = [pair for pair, _ in zip(syllables(letters[ord(" ")]), range(size - 258), strict=False)]
    texts = [*letters, *map("".join, pairs), "<|begin|>", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([NORMAL] * (size - 2) + [CONTROL] * 2)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)
    writer.add_pad_token_id(size - 1)


def add_scored_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """Control tokens, bytes to fall back on, visible letters, and syllables; the score falls with
    the id.
    """
    control, space = ["<pad>", "<eos>", "<bos>", "<unk>"], "\u2581"
    single = [space, *map(chr, range(33, 127))]
    texts = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *single]
    types = [CONTROL] * 3 + [gguf.TokenType.UNKNOWN] + [BYTE] * 256
    pairs = zip(syllables(space), range(size - len(texts)), strict=False)
    texts += ["".join(pair) for pair, _ in pairs]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores([0.0] * len(types) + [-float(k) for k in range(size - len(types))])
    writer.add_token_types(types + [NORMAL] * (size - len(types)))
    for k, add in enumerate((writer.add_pad_token_id, writer.add_eos_token_id,
                             writer.add_bos_token_id, writer.add_unk_token_id)):  # fmt: skip
        add(k)
    writer.add_add_space_prefix(False)


# --- the file


def header_bytes(shape: Shape, recipe: str, seed: int, tensors: list[Tensor]) -> bytes:
    """All of the file before its numbers, filled up to a multiple of its alignment."""
    with tempfile.TemporaryDirectory(prefix="foretell-") as folder:
        path = Path(folder) / "header"
        writer = gguf.GGUFWriter(path, shape.architecture)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(f"{shape.title}, random")
        writer.add_description(f"random numbers of seed {seed}, recipe {recipe}")
        writer.add_file_type(RECIPES[recipe][1])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_sizes(writer, shape)
        if shape.architecture == "gemma3":
            add_scored_tokenizer(writer, shape.vocabulary)
        else:
            add_byte_tokenizer(writer, shape.vocabulary)
        writer.add_add_bos_token(not shape.architecture.startswith("qwen"))
        writer.add_add_eos_token(False)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.sizes, np.dtype(np.float32),
                                   tensor.byte_count, tensor.number_format)  # fmt: skip
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = path.read_bytes()
    return header + bytes(-len(header) % gguf.GGUF_DEFAULT_ALIGNMENT)


def add_sizes(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.vocabulary)
    if shape.architecture == "llama":
        writer.add_rope_dimension_count(shape.head_width)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.expert_inner)


def rope_factors(shape: Shape) -> np.ndarray:
    """By what each pair of a head turns slower: nothing for pairs that turn once in less than 2,048
    tokens, `turning` for those that need more than 8,192, between them a mixture of both.
    """
    pairs = np.arange(shape.head_width // 2)
    turns = 8192 / (2 * np.pi * shape.rope_base ** (2 * pairs / shape.head_width))
    share = np.clip((turns - 1) / 3, 0, 1)
    return (1 / ((1 - share) / shape.turning + share)).astype(np.float32)


def tensor_pieces(
    tensor: Tensor, shape: Shape, seed: int, tiles: dict[tuple[Format, int], np.ndarray]
) -> Iterator[np.ndarray]:
    """The bytes of a tensor; `tiles` are those made before, by format and inputs."""
    draw = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    if tensor.name.startswith("rope_freqs"):
        yield rope_factors(shape).view(np.uint8)
    elif len(tensor.sizes) == 1:
        norm = 1 + 0.1 * draw.standard_normal(tensor.sizes, np.float32)
        yield norm.astype(np.float32).view(np.uint8)
    else:
        key = tensor.number_format, tensor.sizes[-1]
        if key not in tiles:
            tile_draw = np.random.default_rng([seed, *key])
            tiles[key] = noise_tile(tensor.number_format, tensor.sizes[-1] ** -0.5, tile_draw)
        yield from matrix_pieces(tiles[key], tensor.byte_count, draw)


def write_file(path: Path, shape: Shape, recipe: str, seed: int, bar: Bar) -> int:
    """Writes a file that is not there, and returns its size in bytes. Raises OSError where there is
    no room for it.
    """
    tensors = tensors_of(shape, recipe)
    header = header_bytes(shape, recipe, seed, tensors)
    size = len(header) + sum(padded(tensor.byte_count) for tensor in tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f"{path.name}.part")
    room = shutil.disk_usage(path.parent).free
    room += begun.stat().st_size if begun.exists() else 0
    if size + SPARE > room:
        raise OSError(f"{path}: it takes {size / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free; "
                      "name another folder with --to")  # fmt: skip
    task = bar.add_task(path.name, total=size // 1_000_000)
    with begun.open("r+b" if begun.exists() else "w+b") as file:
        end = resume(file, header)
        tiles: dict[tuple[Format, int], np.ndarray] = {}
        at = len(header)
        for tensor in tensors:
            following = at + padded(tensor.byte_count)
            if following > end:
                if file.tell() != at:
                    file.seek(at)
                    file.truncate()
                for piece in tensor_pieces(tensor, shape, seed, tiles):
                    file.write(piece.data)
                file.write(bytes(following - at - tensor.byte_count))
            at = following
            bar.update(task, completed=at // 1_000_000)
    os.replace(begun, path)
    return size


def padded(byte_count: int) -> int:
    return -(-byte_count // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT


def resume(file: BinaryIO, header: bytes) -> int:
    """Where an earlier run of the same file ended; the header's end if there was none."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(header)) == header:
        return end
    file.seek(0)
    file.truncate()
    file.write(header)
    return len(header)


def list_shapes() -> None:
    for name, shape in SHAPES.items():
        print(f"{name}: {shape.title}, GB by type")
        for recipe in RECIPES:
            if shape.experts or recipe != "MXFP4":
                size = sum(tensor.byte_count for tensor in tensors_of(shape, recipe))
                print(f"  {recipe:8}{size / 1e9:6.2f}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("shape", nargs="?", choices=SHAPES)
    parser.add_argument("types", nargs="*", metavar="type", help=", ".join(RECIPES))
    parser.add_argument("--to", type=Path, default=Path("runs/shapes"), help="a folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small model of the same family")
    parser.add_argument("--list", action="store_true", help="sizes of all files, and end")
    options = parser.parse_args(arguments)
    if options.list:
        list_shapes()
        return 0
    if options.shape is None or not options.types:
        parser.error("name a shape and at least one type; --list shows them")
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: must be 0 or more")
    shape = SHAPES[options.shape].tiny() if options.tiny else SHAPES[options.shape]
    for recipe in options.types:
        if recipe not in RECIPES:
            parser.error(f"type {recipe!r}: must be one of {', '.join(RECIPES)}")
        if recipe == "MXFP4" and not shape.experts:
            parser.error("MXFP4 is for experts: the shape must be 30b")
    with Bar(*Bar.get_default_columns(), console=Console(stderr=True)) as bar:
        for recipe in options.types:
            end = "-tiny" if options.tiny else ""
            path = options.to / f"{options.shape}{end}-{recipe}-seed{options.seed}.gguf"
            if path.exists():
                print(f"{path}: is there")
                continue
            try:
                size = write_file(path, shape, recipe, options.seed, bar)
            except OSError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            print(f"{path}: {size / 1e9:.3f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
