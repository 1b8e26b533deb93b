"""A small right .gguf file in its parts, and some hundred wrong ones made of it, the same in every
run: see `wrong_files`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, LIST, U64, I64, F64 = range(13)
FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?",
         U64: "Q", I64: "q", F64: "d"}  # fmt: skip
FLOATS, BYTES = 0, 8  # formats of tensors: F32, and Q8_0 in blocks of 32 numbers and 34 bytes
HIDDEN, INNER, HEADS, KEY_HEADS, WIDTH, WORDS = 64, 96, 4, 2, 32, 262
HUGE = (2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


def text_bytes(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: int, value: Any) -> bytes:
    if kind == TEXT:
        return text_bytes(value)
    if kind == LIST:  # (kind of the parts, parts)
        part_kind, parts = value
        body = b"".join(value_bytes(part_kind, part) for part in parts)
        return struct.pack("<IQ", part_kind, len(parts)) + body
    return struct.pack(f"<{FORMS[kind]}", value)


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry; `sizes`: the inputs first. Its numbers are zeros."""

    name: str
    sizes: tuple[int, ...]
    number_format: int = BYTES
    offset: int = 0
    dimensions: int | None = None  # as the file says; None: as many as sizes

    @property
    def byte_count(self) -> int:
        count = math.prod(self.sizes)
        return count * 4 if self.number_format == FLOATS else count // 32 * 34

    def entry(self) -> bytes:
        count = len(self.sizes) if self.dimensions is None else self.dimensions
        form = f"<I{len(self.sizes)}QIQ"
        parts = struct.pack(form, count, *self.sizes, self.number_format, self.offset)
        return text_bytes(self.name) + parts


@dataclass(frozen=True)
class File:
    """The parts of a file; a key's value is (kind, value), or its bytes as they are."""

    keys: dict[str, tuple[int, Any] | bytes]
    tensors: tuple[Tensor, ...]
    version: int = 3
    magic: bytes = b"GGUF"
    key_count: int | None = None  # as the file says; None: as many as there are
    tensor_count: int | None = None
    data_bytes: int = 0
    more_keys: bytes = b""
    order: str = field(default="<")

    def encode(self) -> bytes:
        written = b"".join(
            text_bytes(key)
            + (value if isinstance(value, bytes)
               else struct.pack("<I", value[0]) + value_bytes(*value))
            for key, value in self.keys.items()
        )  # fmt: skip
        counts = (
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.keys) if self.key_count is None else self.key_count,
        )
        head = self.magic + struct.pack(f"{self.order}IQQ", self.version, *counts)
        head += written + self.more_keys + b"".join(tensor.entry() for tensor in self.tensors)
        return head + bytes(-len(head) % 32) + bytes(self.data_bytes)

    def with_keys(self, **changed: Any) -> File:
        """Other keys, with `__` for each dot in their names; None: without that one."""
        found = dict(self.keys)
        for name, value in changed.items():
            key = name.replace("__", ".")
            if value is None:
                del found[key]
            else:
                found[key] = value
        return replace(self, keys=found)

    def with_tensor(self, name: str, **changed: Any) -> File:
        found = [replace(t, **changed) if t.name == name else t for t in self.tensors]
        return replace(self, tensors=tuple(found))

    def added(self, *tensors: Tensor) -> File:
        return replace(self, tensors=self.tensors + tensors)


def placed(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], int]:
    """Tensors one after the other, and how many bytes they take."""
    at, found = 0, []
    for tensor in tensors:
        found.append(replace(tensor, offset=at))
        at += -(-tensor.byte_count // 32) * 32
    return tuple(found), at


def words() -> list[str]:
    """The letters of all bytes, as byte-level tokenizers write them, some merges, and an end."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]
    return [*letters, "th", "he", "in", "er", "the", "<|end|>"]


def right_file(layers: int = 1) -> File:
    """A file that is read: a llama with zeros for weights."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (HIDDEN, WORDS), "output": (HIDDEN, WORDS), "output_norm": (HIDDEN,)
    }  # fmt: skip
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.{name}": sizes for name, sizes in {
                "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HEADS * WIDTH),
                "attn_k": (HIDDEN, KEY_HEADS * WIDTH), "attn_v": (HIDDEN, KEY_HEADS * WIDTH),
                "attn_output": (HEADS * WIDTH, HIDDEN), "ffn_norm": (HIDDEN,),
                "ffn_gate": (HIDDEN, INNER), "ffn_up": (HIDDEN, INNER),
                "ffn_down": (INNER, HIDDEN),
            }.items()
        }  # fmt: skip
    tensors, size = placed([
        Tensor(f"{name}.weight", sizes, BYTES if len(sizes) > 1 else FLOATS)
        for name, sizes in shapes.items()
    ])  # fmt: skip
    keys: dict[str, tuple[int, Any] | bytes] = {
        "general.architecture": (TEXT, "llama"),
        "general.name": (TEXT, "small"),
        "llama.block_count": (U32, layers),
        "llama.context_length": (U32, 128),
        "llama.embedding_length": (U32, HIDDEN),
        "llama.feed_forward_length": (U32, INNER),
        "llama.attention.head_count": (U32, HEADS),
        "llama.attention.head_count_kv": (U32, KEY_HEADS),
        "llama.attention.key_length": (U32, WIDTH),
        "llama.attention.value_length": (U32, WIDTH),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.dimension_count": (U32, WIDTH),
        "llama.rope.freq_base": (F32, 10_000.0),
        "llama.vocab_size": (U32, WORDS),
        "tokenizer.ggml.model": (TEXT, "gpt2"),
        "tokenizer.ggml.pre": (TEXT, "gpt-2"),
        "tokenizer.ggml.tokens": (LIST, (TEXT, words())),
        "tokenizer.ggml.token_type": (LIST, (I32, [1] * (WORDS - 1) + [3])),
        "tokenizer.ggml.merges": (LIST, (TEXT, ["t h", "h e", "i n", "e r", "th e"])),
        "tokenizer.ggml.bos_token_id": (U32, WORDS - 1),
        "tokenizer.ggml.eos_token_id": (U32, WORDS - 1),
        "tokenizer.ggml.padding_token_id": (U32, WORDS - 1),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "general.alignment": (U32, 32),
    }
    return File(keys, tensors, data_bytes=size)


# --- what is wrong


Wrong = Iterator[tuple[str, bytes]]
NUMBERS = (
    "block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base vocab_size"
).split()
TOKEN_IDS = ("bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id", "eot_token_id")


def wrong_files() -> Wrong:
    """Names and bytes of files of which none may be read."""
    right = right_file()
    for make in (_cut, _counts, _beginnings, _lengths, _kinds, _values, _lacking, _tensors,
                 _alignments, _tokenizers, _lists, _others):  # fmt: skip
        for name, data in make(right):
            yield f"{make.__name__[1:]}: {name}", data


def _cut(right: File) -> Wrong:
    """Ends anywhere: in each part of the header, between its parts, in the numbers."""
    data = right.encode()
    header = len(data) - right.data_bytes
    for k in range(48):
        at = header * k // 48
        yield f"after byte {at} of {header}", data[:at]
    for k in range(12):
        yield f"in the numbers, {k}", data[: header + (right.data_bytes - 32) * k // 12]


def _counts(right: File) -> Wrong:
    for field_name, count in (("key_count", len(right.keys)), ("tensor_count", len(right.tensors))):
        for value in (0, count - 1, count + 1, 2 * count, 2**16 - 1, 2**16 + 1, *HUGE):
            yield f"{field_name} {value}", replace(right, **{field_name: value}).encode()


def _beginnings(right: File) -> Wrong:
    for version in (0, 1, 4, 2**31, 2**32 - 1):
        yield f"version {version}", replace(right, version=version).encode()
    yield "the other order of bytes", replace(right, order=">").encode()
    for magic in (b"FUGG", b"gguf", b"GGML", b"GGJT", b"PK\3\4", b"\x80\x04\x95\0", bytes(4)):
        yield f"magic {magic!r}", replace(right, magic=magic).encode()
    yield "nothing but a magic", b"GGUF"
    yield "a text", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
    yield "safetensors", struct.pack("<Q", 2) + b"{}" + bytes(64)
    yield "magic twice", b"GGUF" + right.encode()


def _lengths(right: File) -> Wrong:
    """Of texts: far beyond the file, where they stand for keys, values, words and tensors."""
    data = right.encode()
    places = {
        "a key": data.index(b"llama.block_count") - 8,
        "a value": data.index(b"llamallama" if b"llamallama" in data else b"small") - 8,
        "the first word": data.index(text_bytes("!")) if text_bytes("!") in data else 0,
        "a merge": data.index(b"th e") - 8,
        "a tensor": data.index(b"token_embd.weight") - 8,
    }
    for where, at in places.items():
        for value in (2**16, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1):
            yield f"{where} of {value} bytes", data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    at = places["a key"]
    yield "a key without a name", data[:at] + bytes(8) + data[at + 8 :]


def _kinds(right: File) -> Wrong:
    """Values of other kinds than whoever reads them takes."""
    for name in NUMBERS:
        key, real = f"llama__{name.replace('.', '__')}", "eps" in name or "freq" in name
        right_value = right.keys[f"llama.{name}"][1]
        yield f"{name} is a text", right.with_keys(**{key: (TEXT, "64")}).encode()
        for parts in ([], [right_value, right_value + 1]):
            made = (LIST, (F32 if real else U32, parts))
            yield f"{name} is a list of {len(parts)}", right.with_keys(**{key: made}).encode()
        other = (BOOL, True) if real else (F32, float(right_value))
        yield f"{name} is {other}", right.with_keys(**{key: other}).encode()
        if not real:
            yield f"{name} is below 0", right.with_keys(**{key: (I32, -1)}).encode()
    for kind in (13, 255, 2**32 - 1):
        raw = struct.pack("<I", kind) + bytes(4)
        yield f"a value of kind {kind}", right.with_keys(llama__block_count=raw).encode()
    for key, value in {
        "general__architecture": (U32, 1), "general__name": (LIST, (LIST, [(U8, [])])),
        "tokenizer__ggml__model": (U32, 1), "tokenizer__ggml__pre": (LIST, (U8, [1])),
        "tokenizer__ggml__add_bos_token": (TEXT, "yes"),
        "llama__rope__scaling__type": (U32, 1), "llama__rope__scaling__factor": (TEXT, "2"),
    }.items():  # fmt: skip
        yield f"{key.replace('__', '.')} is {value}", right.with_keys(**{key: value}).encode()


def _values(right: File) -> Wrong:
    """Numbers of the right kind that cannot be."""
    whole: dict[str, Sequence[int]] = {
        "block_count": (0, 2, 2**31, 2**32 - 1), "context_length": (0, 2**32 - 1),
        "embedding_length": (0, 1, 63, 2**31, 2**32 - 1),
        "feed_forward_length": (0, 32, 2**31), "vocab_size": (0, 1, 2**31),
        "attention.head_count": (0, 3, 8, 2**31, 2**32 - 1),
        "attention.head_count_kv": (0, 3, 8, 2**31),
        "attention.key_length": (0, 31, 64, 2**31), "attention.value_length": (0, 31, 2**31),
        "rope.dimension_count": (0, 31, 2**31),
    }  # fmt: skip
    for name, values in whole.items():
        for value in values:
            key = f"llama__{name.replace('.', '__')}"
            yield f"{name} {value}", right.with_keys(**{key: (U32, value)}).encode()
    yield "block_count 2^64 - 1", right.with_keys(llama__block_count=(U64, 2**64 - 1)).encode()
    real = (math.nan, math.inf, -math.inf, -1.0)
    for name, values in {
        "attention.layer_norm_rms_epsilon": (*real, 1e30), "rope.freq_base": (*real, 0.0),
        "rope.scaling.factor": real, "rope.scaling.attn_factor": real,
    }.items():  # fmt: skip
        for value in values:
            key = f"llama__{name.replace('.', '__')}"
            yield f"{name} {value}", right.with_keys(**{key: (F32, value)}).encode()
            yield f"{name} {value}, twice as long", right.with_keys(**{key: (F64, value)}).encode()


def _lacking(right: File) -> Wrong:
    for key in ("general.architecture", "llama.block_count", "llama.context_length",
                "llama.embedding_length", "llama.feed_forward_length",
                "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
                "tokenizer.ggml.model", "tokenizer.ggml.tokens"):  # fmt: skip
        yield key, right.with_keys(**{key.replace(".", "__"): None}).encode()
    for tensor in right.tensors:
        if tensor.name != "output.weight":  # the embeddings would be it
            left = tuple(other for other in right.tensors if other is not tensor)
            yield tensor.name, replace(right, tensors=left).encode()
    yield "all tensors", replace(right, tensors=()).encode()
    yield "all keys", replace(right, keys={}).encode()


def _tensors(right: File) -> Wrong:
    query, norm = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
    for sizes in ((0, 64), (64, 0), (2**62, 64), (64, 2**62), (2**63, 2), (2**32, 2**32),
                  (2**64 - 64, 2**64 - 64), (64, 64), (128, 64), (64, 128, 1, 2), (33, 128),
                  (64, 127), (64, 129), (8192,)):  # fmt: skip
        yield f"sizes {sizes}", right.with_tensor(query, sizes=sizes).encode()
    for sizes in ((1,), (63,), (65,), (64, 64), (2**61,)):
        yield f"a norm of {sizes}", right.with_tensor(norm, sizes=sizes).encode()
    for count in (0, 1, 3, 5, 2**31, 2**32 - 1):
        yield f"{count} dimensions", right.with_tensor(query, dimensions=count).encode()
    for kind in (4, 5, 31, 36, 99, 255, 2**31, 2**32 - 1):
        yield f"format {kind}", right.with_tensor(query, number_format=kind).encode()
    for kind in (0, 1, 9, 10, 12, 24, 28):
        yield f"of the other format {kind}", right.with_tensor(query, number_format=kind).encode()
    for offset in (1, 33, 2**20, 2**40, 2**63, 2**64 - 32, 2**64 - 1):
        yield f"offset {offset}", right.with_tensor(query, offset=offset).encode()
    first, second = right.tensors[0], right.tensors[1]
    yield "two in one place", right.with_tensor(second.name, offset=first.offset).encode()
    overlap = first.offset + 32
    yield "one into the next", right.with_tensor(second.name, offset=overlap).encode()
    yield (
        "all in one place",
        replace(
            right, tensors=tuple(replace(tensor, offset=0) for tensor in right.tensors)
        ).encode(),
    )
    end = right.data_bytes
    more = replace(right, data_bytes=end + 4096)
    for name in ("", "x" * 1025, "other.weight", "blk.1.attn_q.weight", "blk.x.attn_q.weight",
                 "blk.", "blk", "blk.4294967296.attn_q.weight", "blk.-1.attn_q.weight",
                 "blk.0.attn_q.bias.weight", "a\nb", query):  # fmt: skip
        tensor = Tensor(name, (32,), FLOATS, end)
        yield f"one more, {name[:20]!r}", more.added(tensor).encode()
    data = right.encode()
    yield "a name that is no text", data.replace(b"token_embd.weight", b"token_\xff\xfe\xfd.weight")
    many = tuple(Tensor(f"blk.{k}.x", (1,), FLOATS, end + 32 * k) for k in range(20_000))
    yield "20,000 more", replace(right, data_bytes=end + 32 * 20_000).added(*many).encode()
    layers = tuple(Tensor(f"blk.{k}.x", (1,), FLOATS, end + 32 * k) for k in range(1, 4000))
    wide = replace(right, data_bytes=end + 32 * 4000).added(*layers)
    yield "4,000 layers", wide.with_keys(llama__block_count=(U32, 4000)).encode()


def _alignments(right: File) -> Wrong:
    for value in (0, 3, 31, 33, 2**20, 2**31, 2**32 - 1):
        yield f"{value}", right.with_keys(general__alignment=(U32, value)).encode()
    for made in ((TEXT, "32"), (LIST, (U32, [32])), (F32, 32.0), (BOOL, True), (I32, -32)):
        yield f"{made}", right.with_keys(general__alignment=made).encode()


def _tokenizers(right: File) -> Wrong:
    texts = words()
    key = "tokenizer__ggml__"

    def tokens(parts: Sequence[Any], kind: int = TEXT) -> bytes:
        return right.with_keys(**{f"{key}tokens": (LIST, (kind, parts))}).encode()

    yield "no words", tokens([])
    yield "words are numbers", tokens(range(WORDS), U32)
    yield "words are a text", right.with_keys(**{f"{key}tokens": (TEXT, "a b")}).encode()
    yield "more words than rows", tokens([*texts, "more"])
    yield "many more words than rows", tokens([*texts, *(f"more{k}" for k in range(2000))])
    for name, part in {"token_type": (I32, 1), "scores": (F32, 0.0)}.items():
        kind, value = part
        for count in (0, 1, WORDS - 1, WORDS + 1):
            made = (LIST, (kind, [value] * count))
            yield f"{count} of {name}", right.with_keys(**{f"{key}{name}": made}).encode()
        made = (LIST, (TEXT, ["1"] * WORDS))
        yield f"{name} are texts", right.with_keys(**{f"{key}{name}": made}).encode()
        yield f"{name} is one", right.with_keys(**{f"{key}{name}": part}).encode()
    for parts in (["t"], ["t h e"], ["zz qq"], [""], [" "]):
        made = (LIST, (TEXT, parts))
        yield f"merges {parts}", right.with_keys(**{f"{key}merges": made}).encode()
    yield "merges are numbers", right.with_keys(**{f"{key}merges": (LIST, (U8, [1]))}).encode()
    yield "merges are a text", right.with_keys(**{f"{key}merges": (TEXT, "t h")}).encode()
    for name in TOKEN_IDS:
        for value in ((U32, WORDS), (U32, 2**32 - 2), (I32, -2), (U64, 2**63), (TEXT, "0"),
                      (F32, 0.5), (LIST, (U32, [0, 1]))):  # fmt: skip
            yield f"{name} {value}", right.with_keys(**{f"{key}{name}": value}).encode()
    for name in ("", "no such"):
        yield f"model {name!r}", right.with_keys(**{f"{key}model": (TEXT, name)}).encode()
    yield "an unknown rule", right.with_keys(**{f"{key}pre": (TEXT, "no such")}).encode()


def _lists(right: File) -> Wrong:
    def one_more(raw: bytes, name: str = "general.more") -> bytes:
        made = replace(right, key_count=len(right.keys) + 1)
        return replace(made, more_keys=text_bytes(name) + struct.pack("<I", LIST) + raw).encode()

    for kind in (U8, U32, TEXT, U64):
        for count in (2**20, *HUGE):
            yield f"{count} of kind {kind}", one_more(struct.pack("<IQ", kind, count))
    nested = b"".join(struct.pack("<IQ", LIST, 1) for _ in range(2000))
    yield "2,000 lists in each other", one_more(nested + struct.pack("<IQB", U8, 1, 0))
    pair = struct.pack("<IQ", LIST, 2) + struct.pack("<IQB", U8, 1, 0) * 2
    yield "lists in a list", one_more(pair)
    for kind in (13, 99, 2**31):
        yield f"of kind {kind}", one_more(struct.pack("<IQ", kind, 1) + bytes(8))
    yield "a million numbers", one_more(struct.pack("<IQ", U8, 1_000_000) + bytes(1_000_000))
    yield "300,000 texts", one_more(struct.pack("<IQ", TEXT, 300_000) + bytes(8 * 300_000))
    for count in (5000, 65_000):
        more = b"".join(text_bytes(f"general.k{k}") + struct.pack("<IB", U8, 0)
                        for k in range(count))  # fmt: skip
        made = replace(right, key_count=len(right.keys) + count, more_keys=more)
        yield f"{count} keys", made.encode()


def _others(right: File) -> Wrong:
    changed: dict[str, dict[str, Any]] = {
        "another architecture": {"general__architecture": (TEXT, "no such")},
        "no architecture's name": {"general__architecture": (TEXT, "")},
        "an architecture of many lines": {"general__architecture": (TEXT, "llama\nllama")},
        "a part": {"split__count": (U16, 2)},
        "a part that is a text": {"split__count": (TEXT, "2")},
        "an adapter": {"general__type": (TEXT, "adapter")},
        "an unknown key": {"llama__more": (U32, 1)},
        "an unknown beginning": {"more": (U32, 1)},
        "a key of many lines": {"llama__a\nb": (U32, 1)},
        "experts": {"llama__expert_count": (U32, 8)},
        "windows": {"llama__attention__sliding_window": (U32, 2**32 - 1)},
        "no such scaling": {"llama__rope__scaling__type": (TEXT, "no such")},
        "scaling of many lines": {"llama__rope__scaling__type": (TEXT, "a\nb" * 1000)},
    }
    for name, keys in changed.items():
        yield name, right.with_keys(**keys).encode()
    again = text_bytes("llama.block_count") + struct.pack("<II", U32, 1)
    twice = replace(right, key_count=len(right.keys) + 1, more_keys=again)
    yield "a key twice", twice.encode()
    data = right.encode()
    yield "a key that is no text", data.replace(b"llama.vocab_size", b"llama.\xff\xfe\xfdb_size")
    yield "random after a beginning", data[:24] + bytes(k * 7919 % 251 for k in range(4096))
