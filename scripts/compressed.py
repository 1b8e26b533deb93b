"""Bits a byte after contexts that a trained encoder has compressed.

    python scripts/compressed.py --kind arc-encoder --folder runs/arc/compressor --text books.jsonl

Every text is cut into a context and what follows it. Its bits are measured after the full context,
none, as many of the context's last tokens as there are rows, and the rows.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

import foretell
from foretell.train.caches.compressor import measure_compressor
from foretell.train.corpus import read_documents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", default="arc-encoder")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, default=256, help="tokens of a context")
    parser.add_argument("--following", type=int, default=128, help="tokens after it")
    parser.add_argument("--texts", type=int, default=64)
    given = parser.parse_args()
    lm = foretell.load(given.model, dtype="float32", backend="torch")
    texts = [text for _, text in islice(read_documents(given.text), 10 * given.texts)]
    sizes = given.length, given.following, given.texts
    told = measure_compressor(lm, given.kind, given.folder, texts, *sizes)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
