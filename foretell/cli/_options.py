"""Options that several commands share, and how their values are read.

A command that takes one of these dataclasses has an option for each of its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretell.cli._output import message
from foretell.core.types import Sampling
from foretell.errors import BadConfig
from foretell.ops.parsing import json_of

DEFAULT = Sampling()

Model = Annotated[
    str,
    typer.Option(
        help="`demo`, a name that `foretell fetch` lists, a folder, hub id or .gguf file."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="A smaller model that drafts, best one with the same tokenizer; demo has its own."
    ),
]
Named = Annotated[
    list[str] | None,
    typer.Option(
        "--models",
        metavar="NAME=MODEL",
        help="Another model, under the name that a method asks it by: judge=FOLDER. Repeatable.",
    ),
]
DraftVocab = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.json",
        help="Tokens the draft model is cut down to, a file that `foretell trim` wrote.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1 and so on. Without it, a GPU if there is one, and the CPU for "
        "int8 and int4."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Number format: float32, bfloat16, float16, float64, int8, int4; auto: as stored."
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python files that come with the model."),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on standard output and nothing else."),
]
Prompt = Annotated[
    str,
    typer.Argument(metavar="PROMPT|-", help="The question or text; - reads standard input."),
]
Turn = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="The prompt is a turn of a chat, which is answered, or a text, which is continued. "
        "Without it, a turn where the model has a chat template.",
    ),
]
Method = Annotated[
    str,
    typer.Option(help="A method that `foretell methods` lists, with fields: ngram:n=3,k=10."),
]
Rows = Annotated[
    str | None,
    typer.Option(
        help="Where the model's rows come from: cfg:g=2, dola, lol; with fields, as of a method."
    ),
]
Kv = Annotated[
    str | None,
    typer.Option(
        help="What a cache keeps: snapkv:budget=1024, snapkv+gear:bits=4; with fields, as of a "
        "method, and several joined by +."
    ),
]
Reward = Annotated[
    str | None,
    typer.Option(
        help="What best-of, deal and the like choose by: keywords:words=dog, r3:encoder=FOLDER; "
        "a+b is their mean, each by its weight: length:target=9,weight=2."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(help="Ends after so much: forwards=2000, seconds=30, or both with a comma."),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads to compute with. Without it, torch's own choice."),
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model is loaded, and how."""

    model: Model = "demo"
    draft: Draft = None
    device: Device = None
    dtype: Dtype = "auto"
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    draft_vocab: DraftVocab = None
    named: Named = None

    @property
    def others(self) -> dict[str, str]:
        """The models under names, in order. Raises BadConfig."""
        found: dict[str, str] = {}
        for given in self.named or []:
            name, _, model = given.partition("=")
            if not (name and model):
                raise BadConfig(f"--models {given}: write NAME=MODEL, as in judge=FOLDER")
            if name in found:
                raise BadConfig(f"--models {given}: {name!r} is named twice")
            found[name] = model
        return found


@dataclass(frozen=True)
class ChatModelOptions(ModelOptions):
    """The same of a command that answers others: a chat model, unless another one is named."""

    model: Model = "smollm2"


@dataclass(frozen=True)
class ExecutorOptions:
    """What computes the model's forwards."""

    executor: Annotated[
        str,
        typer.Option(
            help="Who computes steps: torch, native, openvino, onnxruntime, graphs, auto."
        ),
    ] = "auto"
    exact_bits: Annotated[
        bool,
        typer.Option(
            "--exact-bits",
            help="Refuses what cannot promise the same logits to the last bit in any forward.",
        ),
    ] = False


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when to stop: the fields of Sampling as the command line has
    them.
    """

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of an answer at most. Without it 512, and 256 on a canvas, all of which "
            "is computed in every forward."
        ),
    ] = None
    min_new_tokens: Annotated[
        int, typer.Option(help="No end and no stop before so many tokens.")
    ] = DEFAULT.min_new_tokens
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 takes the best token; higher draws more freely. Without it 0, or what the card "
            "of a method says that chooses among what is drawn."
        ),
    ] = None
    top_k: Annotated[int, typer.Option(help="Draw among so many best tokens; 0: among all.")] = (
        DEFAULT.top_k
    )
    top_p: Annotated[
        float, typer.Option(help="Draw among the best tokens that have this probability together.")
    ] = DEFAULT.top_p
    min_p: Annotated[
        float, typer.Option(help="Leave out tokens below this share of the best one's probability.")
    ] = DEFAULT.min_p
    typical_p: Annotated[
        float,
        typer.Option(help="Draw among the most typical tokens of this probability together."),
    ] = DEFAULT.typical_p
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens of prompt and answer become less likely.")
    ] = DEFAULT.repetition_penalty
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logits of tokens that the answer has.")
    ] = DEFAULT.presence_penalty
    frequency_penalty: Annotated[
        float, typer.Option(help="The same for each time that the answer has the token.")
    ] = DEFAULT.frequency_penalty
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="No sequence of so many tokens comes twice; 0: off.")
    ] = DEFAULT.no_repeat_ngram_size
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=BIAS", help="Added to a token's logit. Repeatable."),
    ] = None
    bad_words: Annotated[
        list[str] | None, typer.Option(help="Text that is never written. Repeatable.")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer. Repeatable.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="Token that ends the answer. Repeatable.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")
    ] = DEFAULT.ignore_eos
    seed: Annotated[int, typer.Option(help="Of the random numbers, above temperature 0.")] = (
        DEFAULT.seed or 0
    )
    n: Annotated[
        int, typer.Option("--n", "-n", help="Answers, with this seed and those after it.")
    ] = DEFAULT.n
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of each token and of so many best ones."),
    ] = None
    warp: Annotated[
        str | None,
        typer.Option(help="What changes rows by the text: momentum, rpg:decay=0.8, or a+b."),
    ] = None
    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="The answer is JSON that follows this schema; {} allows any JSON.",
        ),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="The whole answer matches this regular expression.")
    ] = None
    grammar: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The answer follows this grammar, in llguidance's Lark."),
    ] = None
    constraint: Annotated[
        str | None,
        typer.Option(help="What may follow what: monitor:root=FOLDER,file=pkg/mod.py, for code."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """What LM.generate takes. Raises BadConfig for a value outside its range."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.max_new_tokens is None:
            del given["max_new_tokens"]  # the model's kind decides
        for name in ("bad_words", "stop", "stop_token_ids"):
            given[name] = given[name] or ()
        given["logit_bias"] = biases(self.logit_bias or [])
        if self.temperature is None:
            del given["temperature"]
        if self.json_schema is not None:
            given["json_schema"] = schema(self.json_schema)
        if self.grammar is not None:
            given["grammar"] = content("--grammar", self.grammar)
        given["warp"] = given["warp"] or ()
        check_named("warp", self.warp)
        check_named("constraint", self.constraint)
        # The model's tokenizer is needed to check these.
        unencoded = ("bad_words", "logit_bias", "warp", "constraint")
        Sampling(**{name: value for name, value in given.items() if name not in unencoded})
        return given


def split_specs(text: str, option: str = "--method") -> list[str]:
    """`a,b:x=1,y=2,c` -> a, b:x=1,y=2, c: a part that begins with `name=` belongs to the spec
    before it.
    """
    specs: list[str] = []
    for part in several(text):
        if specs and "=" in part.partition(":")[0]:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    if not specs:
        raise BadConfig(f"{option} is empty: name at least one method")
    return specs


def check_method(spec: str) -> None:
    """Raises UnknownMethod before anything is loaded."""
    from foretell.registry import kind_of
    from foretell.spec import pieces

    for piece in pieces(spec) if spec != "auto" else ():
        kind_of(piece.partition(":")[0])


def tempered(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run with a temperature, and a line where the method's card gives it."""
    from foretell.cards import card
    from foretell.registry import kind_of
    from foretell.spec import pieces

    found = {"temperature": DEFAULT.temperature, **options}
    names = [piece.partition(":")[0] for piece in pieces(spec)] if spec != "auto" else []
    usual = max((card(name, kind_of(name)).temperature for name in names), default=0.0)
    if usual and "temperature" not in options:
        found["temperature"] = usual
        message(f"{spec} chooses among what is drawn: temperature {usual:g}, as none is given")
    return found


def check_named(kind: str, spec: str | None) -> None:
    """The same for the methods of another kind that a spec joins by `+`."""
    from foretell.registry import names, unknown
    from foretell.spec import pieces

    for piece in pieces(spec, kind) if spec is not None else ():
        name = piece.partition(":")[0]
        if name not in names(kind):
            raise unknown(kind, name)


def several(text: str) -> tuple[str, ...]:
    """The parts of a text between commas, without those that are empty."""
    parts = (part.strip() for part in text.split(","))
    return tuple(part for part in parts if part)


def numbers(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """The numbers of a text between commas. Raises BadConfig."""
    try:
        return tuple(kind(part) for part in several(text))
    except ValueError:
        raise BadConfig(f"{option} {text}: write numbers separated by commas") from None


def biases(pairs: Sequence[str]) -> dict[int, float]:
    """Of `ID=BIAS` texts. Raises BadConfig."""
    read: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            read[int(token)] = float(bias)
        except ValueError:
            raise BadConfig(f"--logit-bias {pair}: write ID=BIAS, as in 13=-5") from None
    return read


def schema(given: str) -> str:
    """The JSON text of `--json-schema`, which is that text itself or a file's name. Raises
    BadConfig.
    """
    written = given.lstrip().startswith("{") or given.strip() == "true"
    text = given if written else content("--json-schema", given)
    try:
        json_of(text)
    except ValueError as error:
        shown = "" if written else f" {given}"
        raise BadConfig(f"--json-schema{shown}: this is no JSON ({error}); correct it") from None
    return text


def content(option: str, name: str) -> str:
    """What stands in the file that an option names. Raises BadConfig."""
    try:
        return Path(name).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfig(f"{option} {name}: cannot be read ({what}); name a UTF-8 file") from None
