"""The pages of `foretell bench` and `foretell tune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretell.bench.report import markup, scaling, sections
from foretell.bench.report.markup import count, section
from foretell.bench.report.tables import Table, failures, tables

TILES = 4  # large figures at the top of a page


def html(document: dict[str, Any]) -> str:
    """The page of a bench: one self-contained file."""
    every = tables(document)
    names = list(dict.fromkeys(cell["contender"] for cell in document["cells"]))
    # Our own methods come last; they have the strong colours where these do not suffice for all.
    colours = markup.colours([*names[:1], *names[:0:-1]])
    parts = [_tiles(every)]
    fewest = min((table.requests for table in every), default=1)
    for table in every:
        if table.context is not None:
            continue
        parts.append(sections.headline(table, colours))
        if table.requests == fewest:
            parts.append(sections.speed_ups(table, colours))
            parts.append(sections.acceptance(table, colours))
            parts.append(sections.time_of_a_step(table))
    parts.append(scaling.by_context(every, colours))
    parts.append(scaling.by_requests(every, colours))
    parts.append(scaling.forward_costs(document, every, colours))
    if every:
        parts.append(sections.timelines(every[0]))
    parts.append(_failed(document))
    parts.append(_how(document))
    return markup.page("foretell bench", document, parts)


def tuned(profile: dict[str, Any]) -> str:
    """The page of `foretell tune`: what was chosen, the speeds it was chosen by, and what a forward
    costs.
    """
    document = profile["bench"]
    every = tables(document)
    table = every[0]
    colours = markup.colours(list(table.rows))
    best = []
    for kind, name in profile["best"].items():
        ratio = table.rows[name][kind]["ratio"]["median"]
        best.append((f"{ratio:.2f}x", f"best on {kind}: {name}"))
    parts = [
        section(f"auto stands for {profile['chosen']}", reasons(profile)),
        markup.tiles(best),
        sections.headline(table, colours),
        sections.rates(table, colours),
        scaling.forward_costs(document, every, colours),
        sections.time_of_a_step(table),
        _failed(document),
        _how(document),
    ]
    return markup.page("foretell tune", document, parts)


def reasons(profile: dict[str, Any]) -> str:
    """Why `auto` stands for what it does, in two or three sentences."""
    default = profile["default"]
    means = profile["means"]
    against = "against plain decoding, geometric mean over the kinds of text"
    if few := profile.get("few"):
        text = f"It is the default: {few} prompts are too few to choose another by, 16 are enough."
    elif profile["final"] is None:
        mean = means.get(default, 0.0)
        text = f"It is the default, which nothing was ahead of: {mean:.2f}x {against}."
    else:
        challenger = profile["final"]["challenger"]
        final = profile["final"]["means"]
        text = (
            "It won a second measurement on more prompts"
            if profile["chosen"] == challenger
            else (
                "It is the default, which a second measurement on more prompts did not find behind"
            )
        )
        text += (
            f": {challenger} {final.get(challenger, 0.0):.2f}x, "
            f"the default {default} {final.get(default, 0.0):.2f}x {against}."
        )
    shown_only = [name for name in profile["shown_only"] if name in means]
    if shown_only:
        text += (
            " Never taken for auto, since they are not exact, read a file, or cannot decide by "
            f"cost at every temperature: {', '.join(shown_only)}."
        )
    return text


def _tiles(every: Sequence[Table]) -> str:
    """The best method of each table."""
    figures = []
    for table in every:
        if table.context is not None:
            continue
        means = {name: table.mean(name) for name in table.rows}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if not known:
            continue
        best = max(known, key=known.__getitem__)
        baseline = table.finished(best)[0]["baseline"]
        line = f"{best} against {baseline}, mean of {len(table.sets)} sets; {table.title}"
        figures.append((f"{known[best]:.2f}x", line))
    return markup.tiles(figures[:TILES])


def _failed(document: dict[str, Any]) -> str:
    lines = failures(document)
    if not lines:
        return ""
    return f"<section><h2>Failed</h2>{markup.items(lines, 'bad')}</section>"


def _how(document: dict[str, Any]) -> str:
    settings = document["settings"]
    rounds = count(settings["rounds"], "round")
    threads = count(document["machine"]["threads"], "thread")
    abouts = {}
    for cell in document["cells"]:
        if cell["about"] not in ("", "foretell"):
            abouts[cell["contender"]] = cell["about"]
    lines = [
        f"{rounds} after one that is not counted; prompt by prompt, contenders in an order "
        f"shuffled each time (seed {settings['seed']}), {threads} for all; in one process, "
        "but for peers with other packages.",
        f"{settings['max_new_tokens']} new tokens at most. Prefill and first token are left out "
        "of all speeds.",
        "Nobody learns from another contender's text or from an earlier round.",
        "Bytes read count every weight once a forward; a cache that holds weights can raise a "
        "share above 100 %.",
        *(f"{name}: {about}." for name, about in abouts.items()),
    ]
    if document["peak_memory"]:
        lines.append(_memory(document))
    return f"<section><h2>How it was measured</h2>{markup.items(lines)}</section>"


def _memory(document: dict[str, Any]) -> str:
    text = (
        "Peak memory of the measuring process, all contenders in it together: "
        f"{document['peak_memory'] / 1e6:,.0f} MB"
    )
    if limit := document["memory_limit"]:
        text += (
            f"; {limit['weights'] / 1e6:,.0f} MB of weights x 1.15, "
            f"{limit['caches'] / 1e6:,.0f} MB of caches and 300 MB "
            f"are {limit['bytes'] / 1e6:,.0f} MB"
        )
    return f"{text}."
