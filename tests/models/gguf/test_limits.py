"""Files of GGUF that are damaged, or were made to do harm: refused in one line before anyone else
reads them, and no tensor is of another size than its configuration says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as lib
import numpy as np
import pytest

from foretell.errors import BadModel
from foretell.loading.gguf_export import unpack_file
from foretell.models.gguf import gguf
from foretell.models.gguf import limits as gguf_limits
from foretell.models.gguf.tokenizer import read_tokenizer
from foretell.native import library
from tests import tiny
from tests.models.decoder import families

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the C library is not built")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def file_of(folder: Path) -> Path:
    return tiny.gguf(tiny.llama(**SIZES), folder / "model.gguf", kind="Q8_0")


# --- files that are damaged, or were made to do harm


def text_of(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def headed(folder: Path, told: dict[str, Any]) -> Path:
    """A file of such keys and tensors; a number: it says that it has so many, and has none."""
    parts = [told.get(name, ()) for name in ("tensors", "keys")]
    counts = [part if isinstance(part, int) else len(part) for part in parts]
    written = [b"".join(part) for part in parts if not isinstance(part, int)]
    path = folder / "it.gguf"
    head = b"GGUF" + struct.pack("<IQQ", told.get("version", 3), *counts)
    path.write_bytes(head + b"".join(reversed(written)) + bytes(64))
    return path


def tensor_of(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    count = struct.pack("<I", len(sizes))
    return text_of(name) + count + struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)


HARMFUL = {
    "has 1000000000000 keys": {"keys": 10**12},
    "has 18446744073709551615 tensors": {"tensors": 2**64 - 1},
    "version is 50331648": {"version": 3 << 24},
    "a name of 1152921504606846976 bytes": {"keys": [struct.pack("<Q", 1 << 60)]},
    "its header goes on": {"keys": [text_of("a") + struct.pack("<IQ", 8, 1 << 62)]},
    "a has 1152921504606846976 entries": {
        "keys": [text_of("a") + struct.pack("<IIQ", 9, 4, 1 << 60)]
    },
    "header goes on ": {"keys": [text_of("a") + struct.pack("<IIQQ", 9, 8, 2, 1 << 60)]},
    "a is a list of lists": {"keys": [text_of("a") + struct.pack("<IIQ", 9, 9, 1)]},
    "a has values of the unknown kind 13": {"keys": [text_of("a") + struct.pack("<I", 13)]},
    "it has a twice": {"keys": [text_of("a") + struct.pack("<IB", 0, 1)] * 2},
    "it has t twice": {"tensors": [tensor_of("t", 4)] * 2},
    "t has 0 dimensions": {"tensors": [tensor_of("t")]},
    "t has 4294967295 dimensions": {"tensors": [text_of("t") + struct.pack("<I", 2**32 - 1)]},
    "t is \\(4611686018427387904, 4\\)": {"tensors": [tensor_of("t", 1 << 62, 4)]},
    "t ends at byte": {"tensors": [tensor_of("t", 1 << 20)]},
    "t ends at byte \\d": {"tensors": [tensor_of("t", 4, offset=1 << 60)]},
    "t has rows of 33, no multiple of 32": {"tensors": [tensor_of("t", 33, 2, kind=8)]},
    "general.alignment is 3": {
        "keys": [text_of("general.alignment") + struct.pack("<II", 4, 3)],
        "tensors": [tensor_of("t", 1)],
    },
}


@pytest.mark.parametrize("said", HARMFUL)
def test_a_header_that_cannot_be_is_refused_before_anyone_else_reads_it(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("the file was handed on")

    monkeypatch.setattr(lib, "GGUFReader", never)
    path = headed(tmp_path, HARMFUL[said])
    for read in (gguf.read_packed, read_tokenizer, lambda file: unpack_file(file, tmp_path / "to")):
        with pytest.raises(BadModel, match=f"cannot be read .*{said.strip()}") as refused:
            read(path)
        assert "\n" not in str(refused.value)


def rewritten(source: Path, spoil: Callable[[str, np.ndarray], np.ndarray | None]) -> Path:
    """A file whose tensors were changed; None: left out."""
    reader = lib.GGUFReader(source)
    path = source.with_name("spoilt.gguf")
    writer = lib.GGUFWriter(path, str(reader.get_field("general.architecture").contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value, kinds = field.contents(), field.types
            writer.add_key_value(key, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        data = spoil(tensor.name, np.array(tensor.data))
        if data is not None:
            raw = None if data.dtype == np.float32 else tensor.tensor_type
            writer.add_tensor(tensor.name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SHORT = {
    "output.weight": lambda data: data[:-1],
    "output_norm.weight": lambda data: data[:-1],
    "blk.0.attn_norm.weight": lambda data: data[:1],
    "blk.1.ffn_norm.weight": lambda data: data[:32],
    "blk.0.attn_q.weight": lambda data: data[:32],
    "blk.0.attn_k.weight": lambda data: np.concatenate([data, data]),
    "blk.1.ffn_down.weight": lambda data: data[:, :34],
    "blk.0.attn_output.weight": lambda data: data[:1],
}


@pytest.mark.parametrize("name", SHORT)
def test_a_tensor_of_another_size_than_its_configuration_says_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    path = rewritten(file_of(tmp_path), lambda it, data: SHORT[name](data) if it == name else data)
    with pytest.raises(LookupError, match=f"{name} has the shape .*, and its header says"):
        gguf.read_packed(path)


def test_so_is_a_bias_of_another_size(tmp_path: Path) -> None:
    model = families.tiny(
        "qwen2", **{**SIZES, "hidden_size": 128, "vocab_size": len(tiny.tokenizer())}
    )
    source = tiny.gguf(model, tmp_path / "model.gguf", kind="Q8_0")
    gguf.read_packed(source)
    for name in ("blk.0.attn_q.bias", "blk.1.attn_v.bias"):
        path = rewritten(source, lambda it, data, name=name: data[:-1] if it == name else data)
        with pytest.raises(LookupError, match=f"{name} has the shape .*, and its header says"):
            gguf.read_packed(path)


def test_so_is_a_table_without_rows_for_all_tokens(tmp_path: Path) -> None:
    tables = ("token_embd.weight", "output.weight")
    path = rewritten(file_of(tmp_path), lambda it, data: data[:-1] if it in tables else data)
    with pytest.raises(LookupError, match="rows for 329 tokens, and its tokenizer has 330"):
        gguf.read_packed(path)


def test_so_are_layers_that_its_configuration_does_not_count(tmp_path: Path) -> None:
    source = file_of(tmp_path)
    path = rewritten(source, lambda name, data: None if name.startswith("blk.1.") else data)
    with pytest.raises(LookupError, match="block_count is 2, and it has 1 layers"):
        gguf.read_packed(path)


def test_a_good_file_is_read_as_its_writer_wrote_it(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    header, reader = gguf_limits.check_file(path), lib.GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        value = field.contents()
        found = header.lengths[key] if isinstance(value, list) else header.values[key]
        assert found == (len(value) if isinstance(value, list) else value), key
    sizes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
    assert header.tensors == sizes
    assert gguf_limits.check_file(path) is header, "it is read once"
