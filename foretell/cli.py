"""The command line: thin, and quick to start. What is asked for goes to stdout, everything else to
stderr.

Exit codes: 0 done; 1 a claim or a request failed; 2 the input was wrong, said in one line; 130
interrupted. Nothing here imports torch before it is needed, so that `foretell methods` and `--help`
answer at once.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table
from rich.text import Text

import foretell
from foretell.core.types import Sampling
from foretell.errors import BadConfig, ForetellError

if TYPE_CHECKING:
    from foretell.api import LM, Output, Piece
    from foretell.cards import Card
    from foretell.core.stats import Stats

ROUNDS = 3  # of --compare
COLOURS = (
    "green",
    "cyan",
    "magenta",
    "yellow",
    "blue",
    "red",
)  # of sources, in order of appearance
D = Sampling()
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=foretell.__doc__,
)
train_app = typer.Typer(no_args_is_help=True, help="Train the models that foretell needs.")
app.add_typer(train_app, name="train")
err = Console(stderr=True, highlight=False)

Model = Annotated[
    str, typer.Option(help="demo, a folder in transformers' layout, a hub id, or a .gguf file.")
]
Draft = Annotated[
    str | None, typer.Option(help="The same for a smaller relative; demo brings its own.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU if there is one.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16, float64, int8, or auto: as stored.")
]
Executor = Annotated[
    str,
    typer.Option(
        help="What computes ordinary steps: torch, openvino, onnxruntime, graphs, or auto."
    ),
]
ExactBits = Annotated[
    bool,
    typer.Option(
        "--exact-bits", help="Logits equal to the last bit in any forward; int8, on a CPU."
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Remote = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python files that come with the model.")
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")
]


def main() -> None:
    """The entry point: runs the command and exits."""
    sys.exit(run())


def run(args: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a user's mistake is one line on stderr."""
    try:
        code = app(
            args if args is None else list(args), prog_name="foretell", standalone_mode=False
        )
        sys.stdout.flush()
        return int(code or 0)
    except ForetellError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        message = error.format_message()  # empty where typer has shown the help already
        return _fail(f"{message} (see --help)", 2) if message else 2
    except OSError as error:  # a folder that cannot be written, a full disk
        return _fail(
            f"{error.filename or 'a file'}: {error.strerror or error}; choose another place", 2
        )
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _fail(message: str, code: int) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return code


def _version(wanted: bool) -> None:
    if wanted:
        print(f"foretell {foretell.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """foretell: generates faster, and proves that nothing changed."""


@app.command()
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT|-", help="The text to continue; - reads stdin.")
    ],
    model: Model = "demo",
    draft: Draft = None,
    method: Annotated[
        str, typer.Option(help="As `foretell methods` lists, with fields: ngram:n=3,k=10.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option()] = D.max_new_tokens,
    min_new_tokens: Annotated[int, typer.Option()] = D.min_new_tokens,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = D.temperature,
    top_k: Annotated[int, typer.Option(help="0: off.")] = D.top_k,
    top_p: Annotated[float, typer.Option()] = D.top_p,
    min_p: Annotated[float, typer.Option()] = D.min_p,
    typical_p: Annotated[float, typer.Option()] = D.typical_p,
    repetition_penalty: Annotated[float, typer.Option()] = D.repetition_penalty,
    presence_penalty: Annotated[float, typer.Option()] = D.presence_penalty,
    frequency_penalty: Annotated[float, typer.Option()] = D.frequency_penalty,
    no_repeat_ngram_size: Annotated[int, typer.Option()] = D.no_repeat_ngram_size,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Repeatable.")
    ] = None,
    bad_words: Annotated[list[str] | None, typer.Option(help="Never written; repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")
    ] = None,
    stop_token_ids: Annotated[list[int] | None, typer.Option(help="Repeatable.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on behind the model's end.")
    ] = False,
    seed: Annotated[int, typer.Option()] = D.seed,
    n: Annotated[
        int, typer.Option("--n", "-n", help="Samples, of this seed and the following.")
    ] = D.n,
    logprobs: Annotated[
        int | None, typer.Option(help="Also of this many best tokens (with --json).")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    executor: Executor = "auto",
    exact_bits: ExactBits = False,
    revision: Revision = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure plain decoding beside it.")
    ] = False,
) -> int:
    """Continue a text. Drafted tokens are coloured by who proposed them."""
    given = locals()
    options = {f.name: given[f.name] for f in dataclasses.fields(Sampling) if f.name in given}
    options |= {name: options[name] or () for name in ("bad_words", "stop", "stop_token_ids")}
    options["logit_bias"] = dict(_biases(logit_bias or []))
    Sampling(
        **{k: v for k, v in options.items() if k not in ("bad_words", "logit_bias")}
    )  # wrong ones: before loading
    _known(method)
    if compare and n > 1:
        raise BadConfig("--compare measures one sample: leave --n out")
    text = _stdin() if prompt == "-" else prompt
    lm = _load(model, draft, device, dtype, revision, trust_remote_code, executor, exact_bits)
    from foretell.measure.profiling import numbers

    about = {
        "schema": "foretell.generate/1",
        "version": foretell.__version__,
        "model": model,
        "dtype": numbers(lm.models["target"]),
        "method": method,
        "prompt": text,
    }
    if compare:
        report = _compare(lm, text, method, options, show=not as_json)
        if as_json:
            print(json.dumps(about | report))
        return 0
    if as_json or n > 1:
        with err.status("generating"):
            out = lm.generate(text, method, **options)
        if as_json:
            samples = (
                {"samples": [sample.to_dict() for sample in out.samples]}
                if len(out.samples) > 1
                else {}
            )
            print(json.dumps(about | out.to_dict() | samples))
            return 0
        for k, sample in enumerate(out.samples):
            print(f"--- sample {k + 1} of {n}, seed {seed + k}", file=sys.stderr)
            print(sample.text)
            _say(sample.stats, method)
        return 0
    last = _show(text, lm.stream(text, method, **options))
    if last is not None and last.stats is not None:
        _say(last.stats, method)
    return 0


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Only this one, with its whole card.")] = None,
    as_json: Json = False,
) -> int:
    """List the methods, or show the card of one."""
    from foretell.cards import card

    cards = [card(name)] if name else foretell.methods()
    if as_json:
        print(
            json.dumps(
                {"schema": "foretell.methods/1", "methods": [_plain(c) for c in cards]}, indent=1
            )
        )
        return 0
    console = Console(highlight=False)
    if name:
        _card(console, cards[0])
        return 0
    table = Table("method", "kind", "guarantee", "what it does", box=None, pad_edge=False)
    for c in cards:
        table.add_row(Text(c.name, "bold"), c.kind, c.guarantee, c.summary)
    console.print(table)
    return 0


@app.command()
def audit(
    method: Annotated[
        str, typer.Option(help="One or several, separated by commas: ngram:n=2,k=4,draft is two.")
    ],
    model: Model = "demo",
    draft: Draft = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Instead of the built-in ones.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Of each greedy comparison.")] = 48,
    device: Device = None,
    dtype: Dtype = "auto",
    executor: Executor = "auto",
    exact_bits: ExactBits = False,
    revision: Revision = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> int:
    """Check on this machine what methods claim; exit 0 only if every claim held."""
    from foretell.measure.prompts import read_prompts

    specs = split_specs(method)
    for spec in specs:
        _known(spec)
    chosen = read_prompts(prompts) if prompts else None
    lm = _load(model, draft, device, dtype, revision, trust_remote_code, executor, exact_bits)
    from foretell.measure import audit as auditor

    with _progress() as progress:
        bar = progress.add_task("audit", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        report = auditor.audit(
            lm, specs, chosen, model=model, max_new_tokens=max_new_tokens, tell=tell
        )
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print(report.text())
    return 0 if report.held else 1


@app.command()
def replay(
    methods: Annotated[
        str, typer.Option(help="One or several, separated by commas; a+b is both in one.")
    ],
    text: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help="Lines of `prompt` and `text`, the answer.")
    ],
    tokenizer: Annotated[
        str, typer.Option(help="demo, a folder with a tokenizer, or a hub id.")
    ] = "demo",
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Question file, if --text holds answers in FastChat's shape."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(help="Drafted a step at most, unless the method says.")
    ] = 16,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many documents.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget at each document what drafters learnt.")
    ] = False,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="OUT|-",
            help="JSON, to a file beside the table or to stdout instead of it.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="A bar chart.")] = None,
    revision: Revision = None,
) -> int:
    """Score drafters on recorded answers: tokens a step, with no model run."""
    specs = split_specs(methods, "--methods")
    stdout = json_out is not None and str(json_out) == "-"
    if plot is not None and plot.suffix != ".svg":
        raise BadConfig(f"--plot {plot}: the plot is an SVG; give a name that ends in .svg")
    for name, path in (("--json", None if stdout else json_out), ("--plot", plot)):
        _writable(name, path)
    from foretell.loading import load_tokenizer
    from foretell.measure.recordings import Recordings
    from foretell.measure.replay import replay as score

    recordings = Recordings(text, questions)
    with err.status(f"loading {tokenizer}"), _quiet():
        chosen = load_tokenizer(tokenizer, revision)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("replay", total=recordings.size)

        def tell(done: int) -> None:
            progress.update(
                bar, description=f"replay: {done:,} documents", completed=recordings.read
            )

        report = score(
            chosen, specs, itertools.islice(recordings, limit), nodes, fresh=fresh, tell=tell
        )
    if json_out is not None:
        more = {"tokenizer": tokenizer, "text": str(text), "skipped": recordings.skipped}
        document = json.dumps(report.to_dict() | more, indent=1)
        print(document) if stdout else json_out.write_text(document + "\n", "utf-8")
    if plot is not None:
        plot.write_text(report.svg(), "utf-8")
    if recordings.skipped:
        print(
            f"warning: {recordings.skipped:,} answers left out: {questions} lacks their questions",
            file=sys.stderr,
        )
    if not stdout:
        print(report.text())
        print(
            f"{report.documents:,} documents; plain decoding makes 1.00 tokens a step",
            file=sys.stderr,
        )
    return 0


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(help="One or several, separated by commas: demo, folders or hub ids.")
    ] = "demo",
    draft: Draft = None,
    dtype: Annotated[
        str, typer.Option(help="One or several: float32, bfloat16, float16, float64, int8, auto.")
    ] = "auto",
    methods: Annotated[
        str, typer.Option(help="One or several; plain decoding is always among them.")
    ] = "plain,auto",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Repeatable; also code, docs, prose, edits, repetitive: all of these.",
        ),
    ] = None,
    peers: Annotated[
        str, typer.Option(help="transformers, llama.cpp, openvino, ctranslate2; the first leads.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 96,
    temperature: Annotated[str, typer.Option(help="One or several; 0: greedy.")] = "0",
    seed: Annotated[int, typer.Option(help="Of the samples and of the order.")] = 0,
    rounds: Annotated[int, typer.Option(help="Counted ones; another one warms up.")] = 3,
    requests: Annotated[str, typer.Option(help="One or several: prompts that run at once.")] = "1",
    contexts: Annotated[
        str, typer.Option(help="One or several: also behind so many tokens, of all prompts.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="For everybody; torch's own choice if not given.")
    ] = None,
    device: Device = None,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="OUT|-", help="The document; a file that is there is continued."
        ),
    ] = None,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="The report, one file.")
    ] = None,
) -> int:
    """Measure methods side by side, and other libraries beside them; exit 1 if something failed."""
    stdout = json_out is not None and str(json_out) == "-"
    file = None if stdout else json_out
    for name, path in (("--json", file), ("--html", html_out)):
        _writable(name, path)
    specs = split_specs(methods, "--methods")
    for spec in specs:
        _known(spec)
    import torch

    from foretell.measure import bench as runner
    from foretell.measure import report

    settings = runner.Settings(
        models=_several(model),
        draft=draft,
        dtypes=_several(dtype),
        methods=tuple(specs),
        peers=_several(peers),
        max_new_tokens=max_new_tokens,
        temperatures=_numbers("--temperature", temperature, float),
        seed=seed,
        rounds=rounds,
        requests=_numbers("--requests", requests, int),
        contexts=_numbers("--contexts", contexts, int),
        device=device,
    )
    sets = runner.read_sets(prompts or [])
    if threads:
        torch.set_num_threads(threads)
    document = runner.begin(settings, sets, file)
    with _progress(still=True) as progress:
        bar = progress.add_task("bench", total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total, refresh=True)

        def load(name: str, kind: str) -> LM:
            progress.stop()  # loading and measuring have displays of their own
            try:
                lm = _load(name, draft, device, kind, None, False)
                lm.measure()
            finally:
                progress.start()
            return lm

        def save(found: dict[str, Any]) -> None:
            if file is not None:
                runner.write(found, file)

        runner.bench(settings, sets, load, document, tell, save)
    if html_out is not None:
        html_out.write_text(report.html(document), "utf-8")
    if stdout:
        print(json.dumps(document, indent=1))
    else:
        console = Console(highlight=False)
        for found in report.tables(document):
            head, *rows = found.text()
            table = Table(*head, box=None, pad_edge=False)
            for row in rows:
                table.add_row(*map(Text, row))
            console.print(Text(found.title, "bold"), soft_wrap=True)
            console.print(table)
    for line in (failed := report.failures(document)):
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


@app.command()
def datastore(
    text: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="stdlib, folders, .jsonl or text files.")
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="MODEL", help="Whose tokens: demo, a folder or a hub id.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="Written whole or not at all.")
    ],
) -> int:
    """Index texts for the method rest, which drafts what follows in them."""
    from foretell.loading import load_tokenizer
    from foretell.ops.datastore import build
    from foretell.train.corpus import documents

    with err.status(f"loading {tokenizer}"), _quiet():
        coder = load_tokenizer(tokenizer)

    def texts() -> Iterator[str]:
        for source in text:
            try:  # a .jsonl may hold half a character, which no tokenizer takes
                yield from (
                    words.encode("utf-8", "replace").decode()
                    for _, words in documents(source)
                    if words
                )
            except BadConfig as error:
                raise BadConfig(str(error).removeprefix("--text ")) from None

    def tokens() -> Iterator[list[int]]:
        rest = texts()
        while batch := list(itertools.islice(rest, 64)):
            yield from coder(batch, add_special_tokens=False, return_attention_mask=False)[
                "input_ids"
            ]

    def decode(ids: Sequence[int]) -> str:  # as an LM does, for it is compared with that
        return str(
            coder.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    with _progress() as progress:
        bar = progress.add_task("reading", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(bar, description=what, completed=done, total=total)

        store = build(out, tokens(), decode, tell)
    print(
        f"{out}: {store.documents:,} documents, {len(store.tokens):,} tokens, {store.nbytes / 1e6:,.1f} MB; "
        f"use it with --method rest:path={out}"
    )
    return 0


@app.command()
def tune(
    model: Model = "demo",
    draft: Draft = None,
    dtype: Dtype = "auto",
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="A kind of text each, instead of those that ship; repeatable.",
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="Candidates instead of the usual ones, beside the default.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="The profile holds for that many.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="What is kept, without measuring.")] = False,
    device: Device = None,
    revision: Revision = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
    html_out: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="The same as a page.")
    ] = None,
) -> int:
    """Measure a model on this machine and keep what was found: `auto` goes by it."""
    _writable("--html", html_out)
    specs = split_specs(methods, "--methods") if methods else []
    for spec in specs:
        _known(spec)
    import torch

    from foretell import profiles
    from foretell.measure import report, tuning
    from foretell.measure.bench import read_sets

    sets = read_sets(prompts or [])
    if threads:
        torch.set_num_threads(threads)
    lm = _load(model, draft, device, dtype, revision, trust_remote_code)
    if show:
        profile, _ = profiles.kept(lm.models, lm.path)
        if profile is None:
            raise BadConfig(
                f"--show: there is no profile of {model} here; leave --show out to measure"
            )
    else:
        with _progress(still=True) as progress:
            bar = progress.add_task("measuring", total=None)

            def tell(what: str, done: int, total: int) -> None:
                progress.update(bar, description=what, completed=done, total=total, refresh=True)

            profile = tuning.tune(lm, sets, specs or tuning.CANDIDATES, model=model, tell=tell)
    if html_out is not None:
        html_out.write_text(report.tuned(profile), "utf-8")
    if as_json:
        print(json.dumps(profile, indent=1))
    else:
        _tuned(profile)
    for line in (failed := report.failures(profile["bench"])):
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def _tuned(profile: dict[str, Any]) -> None:
    """Tables of what was measured, and what follows from it."""
    from foretell.measure import report

    document, means, chosen = profile["bench"], profile["means"], profile["chosen"]
    console = Console(highlight=False)
    (found,) = report.tables(document)
    rates = Table(
        Column("tokens/s", no_wrap=True), *found.sets, "mean", "drafts", box=None, pad_edge=False
    )
    for name, cells in found.rows.items():
        speeds = [(cells[kind].get("tokens_per_s") or {}).get("median") for kind in found.sets]
        sizes = report.drafted(list(cells.values()))
        figures = ["" if v is None else f"{v:,.0f}" for v in speeds]
        figures += [
            f"{means[name]:.2f}x" if name in means else "",
            "" if sizes is None else f"{sizes:.1f}",
        ]
        rates.add_row(Text(name, "bold" if name == chosen else ""), *figures)
    (measured,) = document["models"]
    lines = list(measured["seconds"].items())
    costs = Table(Column("ms by tokens", no_wrap=True), *lines[0][1], box=None, pad_edge=False)
    for rows, line in lines:
        costs.add_row(f"behind {rows} rows", *(f"{1000 * s:.2f}" for s in line.values()))
    console.print(Text(found.title, "bold"), soft_wrap=True)
    for part in (rates, "", costs, ""):
        console.print(part)
    best: dict[str, list[str]] = {}
    for kind, name in profile["best"].items():
        best.setdefault(name, []).append(kind)
    console.print(f"memory: {document['bandwidth']['bytes_per_s'] / 1e9:.1f} GB/s", soft_wrap=True)
    console.print(
        "best: " + "; ".join(f"{name} on {', '.join(kinds)}" for name, kinds in best.items()),
        soft_wrap=True,
    )
    console.print(
        Text(f"auto stands for {chosen}.", "bold"), report.reasons(profile), soft_wrap=True
    )
    print(f"kept in {profile['file']}; measured in {profile['seconds']:.0f} s", file=sys.stderr)


def split_specs(text: str, option: str = "--method") -> list[str]:
    """`a,b:x=1,y=2,c` -> a, b:x=1,y=2, c: a part that begins with `name=` belongs to the spec
    before it.
    """
    specs: list[str] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if specs and "=" in part.partition(":")[0]:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    if not specs:
        raise BadConfig(f"{option} is empty: name at least one method")
    return specs


def _fields(path: Path, name: str) -> list[tuple[str, Any]]:
    """(name, default) of a dataclass's fields, read from its text: importing it would import
    torch.
    """
    module = ast.parse(path.read_text("utf-8"))
    body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == name)
    return [
        (n.target.id, ast.literal_eval(n.value))
        for n in body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and n.value is not None
    ]


TRAIN_FIELDS = _fields(Path(__file__).parent / "train" / "lm.py", "TrainLM")


def train_lm(
    out: Annotated[Path, typer.Option(help="Folder of the run; the finished model is OUT/model.")],
    corpus: Annotated[
        Path, typer.Option(help="Folder for the tokenizer and the tokens of the texts.")
    ],
    text: Annotated[
        list[str],
        typer.Option(
            metavar="SOURCE",
            help="stdlib, a folder, a .jsonl or a text file; SOURCE*3 repeats it. Repeatable.",
        ),
    ],
    teacher: Annotated[
        str | None, typer.Option(help="Folder of a model with the same tokenizer to distil.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Folder of a model of the same shape to begin with.")
    ] = None,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 300.0,
    compiled: Annotated[
        bool, typer.Option(help="Compile the step; quicker, if a C++ compiler is there.")
    ] = True,
    **settings: Any,
) -> int:
    """Train a small language model on text, or distil one. The same command continues an
    interrupted run.
    """
    from foretell.train.lm import TrainLM, train

    config = TrainLM(**settings)
    _check_teacher(teacher)
    with _quiet():
        report = train(corpus, out, config, text, teacher, save_every, compiled, init=init)
    print(
        f"{out / 'model'}: {report['parameters']:,} parameters, {report['tokens_seen']:,} tokens seen, "
        f"{report['heldout_bits_per_byte']} bits per byte held out"
    )
    return 0


def _with_fields(function: Callable[..., int]) -> Callable[..., int]:
    """Gives the command one option for each field of TrainLM."""
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [
        inspect.Parameter(
            n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=type(default)
        )
        for n, default in TRAIN_FIELDS
    ]
    function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in (*own, *more)} | {"return": int}
    return function


train_app.command("lm")(_with_fields(train_lm))


# --- what the commands share


def _known(spec: str) -> None:
    """Raises UnknownMethod before anything is loaded."""
    from foretell.registry import kind_of
    from foretell.spec import pieces

    for piece in pieces(spec) if spec != "auto" else ():
        kind_of(piece.partition(":")[0])


def _writable(option: str, path: Path | None) -> None:
    """Checked before the work, not behind it."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "a folder" if path.is_dir() else "its folder does not exist"
        raise BadConfig(f"{option} {path}: {what}; name a file")


def _several(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in _several(text))
    except ValueError:
        raise BadConfig(f"{option} {text}: write numbers separated by commas") from None


def _biases(pairs: Sequence[str]) -> Iterator[tuple[int, float]]:
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            yield int(token), float(bias)
        except ValueError:
            raise BadConfig(f"--logit-bias {pair}: write ID=BIAS, as in 13=-5") from None


def _check_teacher(teacher: str | None) -> None:
    if teacher is not None and not (Path(teacher) / "config.json").is_file():
        raise BadConfig(
            f"--teacher {teacher}: no model folder; give one with config.json and .safetensors files"
        )


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadConfig(
            f"standard input is not text in {error.encoding}; give UTF-8 text"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or logs of transformers; a warning is one line on stderr."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for message in dict.fromkeys(" ".join(str(w.message).split()) for w in caught):
        print(f"warning: {message}", file=sys.stderr)


def _load(
    model: str,
    draft: str | None,
    device: str | None,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    executor: str = "auto",
    exact_bits: bool = False,
) -> LM:
    with err.status(f"loading {model}"), _quiet():
        lm = foretell.load(
            model,
            draft=draft,
            device=device,
            dtype=dtype,
            exact_bits=exact_bits,
            executor=executor,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        _ = lm.auto  # a profile that does not count is told now, in one line
        return lm


def _progress(still: bool = False) -> Progress:
    """`still`: nothing moves by itself, so that no thread disturbs what is being timed."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(
        *columns, console=err, transient=True, disable=not err.is_terminal, auto_refresh=not still
    )


def _show(prompt: str, pieces: Iterator[Piece]) -> Piece | None:
    """Writes an answer as it comes; on a terminal behind its prompt, and coloured. Returns the last
    piece.
    """
    console, styles, piece = Console(highlight=False, soft_wrap=True), dict[str, str](), None
    colours = console.is_terminal
    if colours:
        console.print(Text(prompt, "dim"), end="")
    try:
        for piece in pieces:
            if not colours:
                print(piece.text, end="", flush=True)
                continue
            line, shown = Text(), 0
            for part, source in zip(piece.parts, piece.draft, strict=True):
                if source != "target":
                    styles.setdefault(source, COLOURS[len(styles) % len(COLOURS)])
                line.append(part, styles.get(source))
                shown += len(part)
            console.print(line.append(piece.text[shown:]), end="")
    finally:
        if piece is not None or colours:
            print()
    for source, colour in styles.items():
        err.print(Text(f"drafted by {source}", colour))
    return piece


def _say(stats: Stats, method: str) -> None:
    """The numbers of one answer, in one line on stderr."""
    print(
        f"{method}: {stats.tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, MAT {stats.mat:.2f}, "
        f"{stats.steps} steps, {stats.accepted} of {stats.drafted} drafted accepted, "
        f"first token after {1000 * stats.ttft_s:.0f} ms",
        file=sys.stderr,
    )


def _compare(
    lm: LM, prompt: str, method: str, options: dict[str, Any], show: bool
) -> dict[str, Any]:
    """Plain decoding and `method` in turns; what drafters learn is forgotten before every run."""
    specs = ["plain", method]
    lm.generate(prompt, "plain", **options)
    if show:
        _show(prompt, lm.stream(prompt, method, **options))
    else:
        lm.generate(prompt, method, **options)
    runs: list[list[Output]] = [[], []]
    with _progress() as progress:
        bar = progress.add_task("measuring", total=ROUNDS * 2)
        for _ in range(ROUNDS):
            for side, spec in enumerate(specs):
                lm.engine.stores.clear()
                runs[side].append(lm.generate(prompt, spec, **options))
                progress.advance(bar)
    plain, ours = runs[0][-1], runs[1][-1]
    speeds = [[out.stats.tokens_per_s for out in outs] for outs in runs]
    ratios = [b / a for a, b in zip(*speeds, strict=True) if a and b]
    gain = (
        {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        if ratios
        else None
    )
    pairs = enumerate(zip(plain.tokens, ours.tokens, strict=False))
    differs = next((i for i, (a, b) in pairs if a != b), min(len(plain.tokens), len(ours.tokens)))
    identical = plain.tokens == ours.tokens
    if show:
        table = Table("", "tokens/s", "speed-up", "MAT", "identical", box=None, pad_edge=False)
        table.add_row("plain", f"{statistics.median(speeds[0]):,.1f}", "1.00", "1.00", "")
        times = (
            f"{gain['median']:.2f} ({gain['min']:.2f} to {gain['max']:.2f})"
            if gain
            else "too short"
        )
        same = "yes" if identical else f"no, from token {differs + 1} on"
        table.add_row(
            method, f"{statistics.median(speeds[1]):,.1f}", times, f"{ours.stats.mat:.2f}", same
        )
        Console(highlight=False).print(table)
        print(
            f"{len(ours.tokens)} tokens; medians and range of {ROUNDS} rounds, run in turns, nothing learnt beforehand",
            file=sys.stderr,
        )
    return ours.to_dict() | {
        "compare": {
            "rounds": ROUNDS,
            "plain": {
                "tokens_per_s": speeds[0],
                "stats": plain.stats.to_dict(),
                "tokens": plain.tokens,
            },
            "method": {"tokens_per_s": speeds[1], "stats": ours.stats.to_dict()},
            "speed_up": gain,
            "identical": identical,
            "first_difference": None if identical else differs,
        }
    }


def _plain(card: Card) -> dict[str, Any]:
    return {
        **{f.name: getattr(card, f.name) for f in dataclasses.fields(card)},
        "file": str(card.file),
    }


def _card(console: Console, card: Card) -> None:
    console.print(Text(card.name, "bold"), f"({card.kind})", card.summary, soft_wrap=True)
    if card.prose:
        console.print(f"\n{card.prose}\n", soft_wrap=True, markup=False)
    for label in ("guarantee", "paper", "cost", "needs", "trains", "differs"):
        console.print(
            Text(f"{label}: ", "bold"), getattr(card, label), sep="", soft_wrap=True, markup=False
        )
    fields = ", ".join(f"{k}={v}" for k, v in card.defaults.items()) or "none"
    console.print(Text("fields: ", "bold"), fields, sep="", soft_wrap=True, markup=False)
    console.print(Text("file: ", "bold"), str(card.file), sep="", soft_wrap=True, markup=False)
