"""The pages of `foretell bench` and `foretell tune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretell.bench.report import markup, scaling, sections
from foretell.bench.report.markup import format_count, render_section
from foretell.bench.report.tables import Table, failures, tables

TILES = 4  # large figures at the top of a page


def html(document: dict[str, Any]) -> str:
    """The page of a bench: one self-contained file."""
    all_tables = tables(document)
    names = list(dict.fromkeys(cell["contender"] for cell in document["cells"]))
    # Our own methods come last; they have the strong colours where these do not suffice for all.
    colours = markup.assign_colours([*names[:1], *names[:0:-1]])
    page_parts = [_best_tiles(all_tables)]
    fewest_requests = min((table.requests for table in all_tables), default=1)
    for table in all_tables:
        if table.context is not None:
            continue
        page_parts.append(sections.headline_section(table, colours))
        if table.requests == fewest_requests:
            page_parts.append(sections.speed_up_section(table, colours))
            page_parts.append(sections.acceptance_section(table, colours))
            page_parts.append(sections.step_time_section(table))
    page_parts.append(scaling.costs_by_context(all_tables, colours))
    page_parts.append(scaling.costs_by_requests(all_tables, colours))
    page_parts.append(scaling.forward_costs(document, all_tables, colours))
    if all_tables:
        page_parts.append(sections.timeline_section(all_tables[0]))
    page_parts.append(_failure_section(document))
    page_parts.append(_method_section(document))
    return markup.render_page("foretell bench", document, page_parts)


def tuning_page(profile: dict[str, Any]) -> str:
    """The page of `foretell tune`: what was chosen, the speeds it was chosen by, and what a forward
    costs.
    """
    document = profile["bench"]
    all_tables = tables(document)
    table = all_tables[0]
    colours = markup.assign_colours(list(table.rows))
    best_tiles = []
    for text_kind, name in profile["best"].items():
        ratio = table.rows[name][text_kind]["ratio"]["median"]
        best_tiles.append((f"{ratio:.2f}x", f"best on {text_kind}: {name}"))
    page_parts = [
        render_section(f"auto stands for {profile['chosen']}", explain_choice(profile)),
        markup.render_tiles(best_tiles),
        sections.headline_section(table, colours),
        sections.rate_section(table, colours),
        scaling.forward_costs(document, all_tables, colours),
        sections.step_time_section(table),
        _failure_section(document),
        _method_section(document),
    ]
    return markup.render_page("foretell tune", document, page_parts)


def explain_choice(profile: dict[str, Any]) -> str:
    """Why `auto` stands for what it does, in two or three sentences."""
    default = profile["default"]
    means = profile["means"]
    against = "against plain decoding, geometric mean over the kinds of text"
    if few_prompts := profile.get("few"):
        explanation = (
            f"It is the default: {few_prompts} prompts are too few to choose another by, "
            "16 are enough."
        )
    elif profile["final"] is None:
        mean = means.get(default, 0.0)
        explanation = f"It is the default, which nothing was ahead of: {mean:.2f}x {against}."
    else:
        challenger = profile["final"]["challenger"]
        final_means = profile["final"]["means"]
        explanation = (
            "It won a second measurement on more prompts"
            if profile["chosen"] == challenger
            else (
                "It is the default, which a second measurement on more prompts did not find after"
            )
        )
        explanation += (
            f": {challenger} {final_means.get(challenger, 0.0):.2f}x, "
            f"the default {default} {final_means.get(default, 0.0):.2f}x {against}."
        )
    shown_only = [name for name in profile["shown_only"] if name in means]
    if shown_only:
        explanation += (
            " Never taken for auto, since they are not exact, read a file, or cannot decide by "
            f"cost at every temperature: {', '.join(shown_only)}."
        )
    return explanation


def _best_tiles(all_tables: Sequence[Table]) -> str:
    """The best method of each table."""
    figures = []
    for table in all_tables:
        if table.context is not None:
            continue
        mean_ratios = {name: table.mean(name) for name in table.rows}
        known_means = {name: mean for name, mean in mean_ratios.items() if mean is not None}
        if not known_means:
            continue
        best_name = max(known_means, key=known_means.__getitem__)
        baseline = table.finished(best_name)[0]["baseline"]
        caption = f"{best_name} against {baseline}, mean of {len(table.sets)} sets; {table.title}"
        figures.append((f"{known_means[best_name]:.2f}x", caption))
    return markup.render_tiles(figures[:TILES])


def _failure_section(document: dict[str, Any]) -> str:
    failure_lines = failures(document)
    if not failure_lines:
        return ""
    return f"<section><h2>Failed</h2>{markup.render_list(failure_lines, 'bad')}</section>"


def _method_section(document: dict[str, Any]) -> str:
    settings = document["settings"]
    rounds = format_count(settings["rounds"], "round")
    threads = format_count(document["machine"]["threads"], "thread")
    descriptions = {}
    for cell in document["cells"]:
        if cell["about"] not in ("", "foretell"):
            descriptions[cell["contender"]] = cell["about"]
    notes = [
        f"{rounds} after one that is not counted; prompt by prompt, contenders in an order "
        f"shuffled each time (seed {settings['seed']}), {threads} for all; in one process, "
        "but for peers with other packages.",
        f"{settings['max_new_tokens']} new tokens at most. Prefill and first token are left out "
        "of all speeds.",
        "Nobody learns from another contender's text or from an earlier round.",
        "Bytes read count every weight once a forward; a cache that holds weights can raise a "
        "share above 100 %.",
        *(f"{name}: {description}." for name, description in descriptions.items()),
    ]
    if document["peak_memory"]:
        notes.append(_describe_memory(document))
    return f"<section><h2>How it was measured</h2>{markup.render_list(notes)}</section>"


def _describe_memory(document: dict[str, Any]) -> str:
    explanation = (
        "Peak memory of the measuring process, all contenders in it together: "
        f"{document['peak_memory'] / 1e6:,.0f} MB"
    )
    if limit := document["memory_limit"]:
        explanation += (
            f"; {limit['weights'] / 1e6:,.0f} MB of weights x 1.15, "
            f"{limit['caches'] / 1e6:,.0f} MB of caches and 300 MB "
            f"are {limit['bytes'] / 1e6:,.0f} MB"
        )
    return f"{explanation}."
