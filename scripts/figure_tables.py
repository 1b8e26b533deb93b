"""From the documents of dev/measured to the tables of the pages. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison.pages import table

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "dev" / "measured"
BITS = {"bfloat16": "16 bits", "int8": "8 bits", "int4": "4 bits"}
SETS = ("chat", "summarisation", "retrieval", "translation", "mathematics", "code", "edits")
FLOOR = 0.97  # of plain decoding's speed: `auto` should never be below it


def document(name: str) -> dict[str, Any] | None:
    """What was measured under this name; None: nothing yet."""
    path = MEASURED / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def where(found: dict[str, Any]) -> str:
    """Model and machine of a document, in one sentence."""
    about = found["about"]
    return (
        f"`{about['model']}`, {about['threads']} threads of {about['cores']} cores "
        f"({about['processor']}), nothing else running. {about['how']}"
    )


def never_slower(found: dict[str, Any]) -> str:
    """Times plain decoding, for each kind of text, temperature, number of requests and format."""
    parts = [where(found)]
    low = high = 0
    for dtype in BITS:
        cells = [cell for cell in found["cells"] if cell["dtype"] == dtype]
        if not cells:
            continue
        keys = sorted({(cell["temperature"], cell["requests"]) for cell in cells})
        rows = []
        for temperature, requests in keys:
            row = [f"T = {temperature:g}, {requests}"]
            for name in SETS:
                one = [c for c in cells if key_of(c) == (temperature, requests, name)]
                row.append(shown(one[0]["ratio"]) if one else "")
                low += bool(one) and one[0]["ratio"]["high"] < FLOOR
                high += bool(one)
            rows.append(row)
        parts.append(table([f"{BITS[dtype]}: temperature, requests", *SETS], rows))
    parts.append(f"{high - low} of {high} cells reach {FLOOR} within their range; {low} do not.")
    return "\n\n".join(parts)


def key_of(cell: dict[str, Any]) -> tuple[float, int, str]:
    return cell["temperature"], cell["requests"], cell["set"]


def shown(ratio: dict[str, float]) -> str:
    """The median, and where there are more runs than one the range of nine tenths."""
    text = f"{ratio['median']:.2f}"
    if ratio["low"] < ratio["high"]:
        text += f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"**{text}**" if ratio["high"] < FLOOR else text


def beside_plain(found: dict[str, Any]) -> str:
    """Times plain decoding: a row a method, a column a kind of text, format and temperature."""
    columns = list(dict.fromkeys((c["dtype"], c["temperature"], c["set"]) for c in found["cells"]))
    head = [f"{name}, {BITS[dtype]}, T = {heat:g}" for dtype, heat, name in columns]
    rows = []
    for method in dict.fromkeys(cell["contender"] for cell in found["cells"]):
        row = [f"`{method}`"]
        for column in columns:
            one = [
                cell
                for cell in found["cells"]
                if (cell["dtype"], cell["temperature"], cell["set"]) == column
                and cell["contender"] == method
            ]
            row.append(f"{one[0]['ratio']['median']:.2f}" if one else "")
        rows.append(row)
    return f"{where(found)}\n\n{table(['times plain decoding', *head], rows)}"


def serving(found: dict[str, Any]) -> str:
    """Tokens a second by clients, with drafts and without, and after one beginning."""
    parts = [where(found)]
    for title, levels in found["levels"].items():
        clients = sorted({level["clients"] for level in levels})
        rows = []
        for fields in dict.fromkeys(level["as"] for level in levels):
            row = [fields]
            for count in clients:
                some = [one for one in levels if one["as"] == fields and one["clients"] == count]
                speeds = ", ".join(f"{one['tokens_per_s']:.0f}" for one in some)
                slow = max((one["between_tokens_ms"]["p99"] for one in some), default=0.0)
                row.append(f"{speeds} ({slow:.0f} ms)")
            rows.append(row)
        head = [
            f"{title}: tokens/s (99 % of pieces)",
            *(f"{n} client{(n > 1) * 's'}" for n in clients),
        ]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def batch(found: dict[str, Any]) -> str:
    """A file of chats after one system prompt, by method."""
    rows = []
    for method, runs in found["runs"].items():
        speeds = ", ".join(f"{run['tokens_per_s']:.1f}" for run in runs)
        rows.append([f"`{method}`", speeds, f"{100 * runs[0]['shared']:.1f} %"])
    head = ["method", "tokens/s", "of all prompt tokens shared"]
    return f"{where(found)}\n\n{table(head, rows)}"


def kv(found: dict[str, Any]) -> str:
    """Milliseconds a token after a long prompt, by cache policy and format."""
    head = ["cache policy"]
    for dtype in found["seconds"]:
        head += [f"{BITS[dtype]}, ms a token", "times as quick as the full cache"]
    rows = []
    for policy in next(iter(found["seconds"].values())):
        row = [f"`{policy}`" if policy else "full cache"]
        for seconds in found["seconds"].values():
            own, full = median(seconds[policy]), median(seconds[""])
            row += [f"{1e3 * own:.1f}", f"{full / own:.2f}"]
        rows.append(row)
    return f"{where(found)}\n\n{table(head, rows)}"


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
