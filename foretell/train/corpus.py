"""Text for training: where it comes from, how it is cut into training and held-out parts, and its
tokens on disk.

This file knows texts, the tokenizer and two flat files of uint16 token ids. It knows nothing about
models. A source is `stdlib` or `stdlib-tests` (the Python sources of the running interpreter), a
folder, a `.jsonl` file whose rows have `text`, or a plain text file; `SOURCE*3` repeats it three
times. Whole documents are held out, chosen by the hash of their name, so that the choice survives a
rebuild on another machine.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from foretell.errors import BadConfig, BadFile, first_message_line
from foretell.ops.parsing import parse_json

END = "<|endoftext|>"
PIECE = 1 << 24  # tokens that are looked through at a time
SPECIALS = [END, "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>", "<|r0|>", "<|r1|>"]
SUFFIXES = {".py", ".rst", ".md", ".txt"}
# Words with their leading space, single digits, runs of punctuation with the line end, indentation
# in one piece.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def read_documents(source: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of one source. Raises BadConfig when it does not exist."""
    if source in ("stdlib", "stdlib-tests"):
        root = Path(sysconfig.get_paths()["stdlib"])
        for path in sorted(root.rglob("*.py")):
            path_parts = set(path.relative_to(root).parts)
            is_test = bool({"test", "tests", "idle_test"} & path_parts)
            if not {"site-packages", "lib2to3", "pydoc_data"} & path_parts and is_test == (
                source == "stdlib-tests"
            ):
                yield (
                    f"stdlib/{path.relative_to(root).as_posix()}",
                    path.read_text("utf-8", errors="replace"),
                )
        return
    path = Path(source)
    if not path.exists():
        raise BadConfig(
            f"--text {source}: no such file or folder "
            "(use `stdlib`, a folder, a .jsonl or a text file)"
        )
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            if file.suffix == ".jsonl":
                yield from read_documents(str(file))
            elif file.suffix in SUFFIXES:
                yield (
                    f"{path.name}/{file.relative_to(path)}",
                    file.read_text("utf-8", errors="replace"),
                )
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    row = parse_json(line)
                except UnicodeDecodeError:
                    raise BadConfig(
                        f"--text {source}: line {number + 1} is not UTF-8; "
                        "convert it, or leave it out"
                    ) from None
                except json.JSONDecodeError as error:
                    raise BadConfig(
                        f"--text {source}: line {number + 1} is no JSON ({error.msg}); "
                        "mend or remove it"
                    ) from None
                if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                    raise BadConfig(
                        f"--text {source}: line {number + 1} has no field `text` that is a text"
                    )
                yield (
                    f"{row.get('source', path.stem)}/{row.get('path', row.get('title', number))}",
                    row["text"],
                )
    else:
        yield path.name, path.read_text("utf-8", errors="replace")


def held_out(name: str, share: float) -> bool:
    """Whether the document of this name is kept from training (a `share` of them is)."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < share * 2**32


def without_boilerplate(text: str, seen_counts: Counter[int], limit: int = 2) -> str:
    """Drops long paragraphs that already stood in `limit` earlier documents (templates, licence
    headers).
    """
    kept_parts = []
    for part in text.split("\n\n"):
        part_hash = hash(part.strip())
        seen_counts[part_hash] += len(part) > 80
        if seen_counts[part_hash] <= limit:
            kept_parts.append(part)
    return "\n\n".join(kept_parts)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: every text round-trips, digits stay single, indentation is one piece."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare_corpus(
    out: Path,
    sources: list[str],
    vocab_size: int,
    share: float = 0.01,
    tokenizer: Path | None = None,
) -> dict[str, object]:
    """Writes tokenizer.json, train.bin, heldout.bin (uint16), heldout.jsonl, corpus.json to `out`;
    returns the last.
    """
    out.mkdir(parents=True, exist_ok=True)
    record_path = out / "corpus.json"
    if record_path.exists():
        earlier_record = _read_corpus(out, record_path)
        if earlier_record["sources"] == sources and earlier_record["vocab_size"] == vocab_size:
            return earlier_record
        raise BadConfig(
            f"{out} holds a corpus made from {earlier_record['sources']}; "
            "choose another --out or delete it"
        )
    seen_counts: Counter[int] = Counter()
    train_texts: list[tuple[str, int]] = []
    heldout_texts: list[tuple[str, str]] = []
    for spec in sources:
        source, _, times = spec.partition("*")
        for name, text in read_documents(source):
            if held_out(name, share):
                heldout_texts.append((name, text))
            elif text := without_boilerplate(text, seen_counts):
                train_texts.append((text, int(times or 1)))
    if tokenizer is not None:  # of the model that is trained on, or taught from
        text_tokenizer = Tokenizer.from_file(str(tokenizer))
    else:
        text_tokenizer = train_tokenizer((text for text, _ in train_texts), vocab_size)
    end_token = text_tokenizer.token_to_id(END)
    counts = {"train": 0, "heldout": 0}
    order = np.random.default_rng(0)
    copies = [text for text, times in train_texts for _ in range(times)]
    shuffled = [copies[i] for i in order.permutation(len(copies))]
    for part_name, texts in (("train", shuffled), ("heldout", [text for _, text in heldout_texts])):
        with (out / f"{part_name}.bin").open("wb") as file:
            for start in range(0, len(texts), 256):
                for code in text_tokenizer.encode_batch(texts[start : start + 256]):
                    ids = np.array([end_token, *code.ids], dtype=np.uint16)
                    counts[part_name] += len(ids)
                    file.write(ids.tobytes())
    with (out / "heldout.jsonl").open("w") as file:
        for name, text in heldout_texts:
            file.write(json.dumps({"name": name, "text": text}) + "\n")
    text_tokenizer.save(str(out / "tokenizer.json"))
    info: dict[str, object] = {
        "sources": sources,
        "vocab_size": vocab_size,
        "train_documents": len(copies),
        "train_tokens": counts["train"],
        "heldout_documents": len(heldout_texts),
        "heldout_tokens": counts["heldout"],
        "heldout_bytes": sum(len(text.encode()) for _, text in heldout_texts),
    }
    record_path.write_text(json.dumps(info, indent=1))
    return info


def _read_corpus(out: Path, record: Path) -> dict[str, object]:
    """Returns the record of a corpus that is there. Raises BadFile where files do not fit it."""
    try:
        corpus_record: dict[str, Any] = parse_json(record.read_text("utf-8"))
        vocab = Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size()
        for part_name in ("train", "heldout"):
            path, count = out / f"{part_name}.bin", corpus_record[f"{part_name}_tokens"]
            if path.stat().st_size != 2 * count:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {2 * count}")
            # By pieces: it may be larger than memory.
            ids = np.memmap(path, np.uint16, "r") if count else np.empty(0, np.uint16)
            for first_token in range(0, count, PIECE):
                if int(ids[first_token : first_token + PIECE].max()) >= vocab:
                    raise ValueError(f"{path.name} has tokens beyond its tokenizer's {vocab}")
        lines = (out / "heldout.jsonl").read_text("utf-8").splitlines()
        rows = [parse_json(line) for line in lines]
        if len(rows) != corpus_record["heldout_documents"] or not all(
            isinstance(row[name], str) for row in rows for name in ("name", "text")
        ):
            raise ValueError(
                f"heldout.jsonl has not its {corpus_record['heldout_documents']} texts"
            )
        if not {"sources", "vocab_size"} <= corpus_record.keys():
            raise ValueError("it says not what it was made of")
    except Exception as error:  # tokenizers raises nothing more special
        complaint = f"its files are damaged ({first_message_line(error)})"
        raise BadFile(f"{record}: {complaint}; delete the folder, and it is made again") from error
    return corpus_record
