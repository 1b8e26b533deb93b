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
from foretell.ops.parsing import parse_json

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
    bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on standard output and nothing else."),
]
Prompt = Annotated[
    str, typer.Argument(metavar="PROMPT|-", help="The question or text; - reads standard input.")
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
    str, typer.Option(help="A method that `foretell methods` lists, with fields: ngram:n=3,k=10.")
]
Guidance = Annotated[
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
    int | None, typer.Option(min=1, help="Threads to compute with. Without it, torch's own choice.")
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
    def named_models(self) -> dict[str, str]:
        """The models under names, in order. Raises BadConfig."""
        models_by_name: dict[str, str] = {}
        for definition in self.named or []:
            name, _, model = definition.partition("=")
            if not (name and model):
                raise BadConfig(f"--models {definition}: write NAME=MODEL, as in judge=FOLDER")
            if name in models_by_name:
                raise BadConfig(f"--models {definition}: {name!r} is named twice")
            models_by_name[name] = model
        return models_by_name


@dataclass(frozen=True)
class ChatModelOptions(ModelOptions):
    """Model of a command that answers others: a chat model, unless another one is named."""

    model: Model = "smollm2"


@dataclass(frozen=True)
class BackendOptions:
    """Options that say what computes the model's forwards."""

    backend: Annotated[
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
        float, typer.Option(help="Draw among the most typical tokens of this probability together.")
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
    processor: Annotated[
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
        """Arguments of LM.generate. Raises BadConfig for a value outside its range."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.max_new_tokens is None:
            del options["max_new_tokens"]  # the model's kind decides
        for name in ("bad_words", "stop", "stop_token_ids"):
            options[name] = options[name] or ()
        options["logit_bias"] = read_biases(self.logit_bias or [])
        if self.temperature is None:
            del options["temperature"]
        if self.json_schema is not None:
            options["json_schema"] = read_schema(self.json_schema)
        if self.grammar is not None:
            options["grammar"] = read_content("--grammar", self.grammar)
        options["processor"] = options["processor"] or ()
        check_named("processor", self.processor)
        check_named("constraint", self.constraint)
        # The model's tokenizer is needed to check these.
        unencoded = ("bad_words", "logit_bias", "processor", "constraint")
        Sampling(**{name: value for name, value in options.items() if name not in unencoded})
        return options


def split_specs(text: str, option: str = "--method") -> list[str]:
    """`a,b:x=1,y=2,c` -> a, b:x=1,y=2, c: a part that begins with `name=` belongs to the spec
    before it.
    """
    specs: list[str] = []
    for part in split_parts(text):
        if specs and "=" in part.partition(":")[0]:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    if not specs:
        raise BadConfig(f"{option} is empty: name at least one method")
    return specs


def check_method(spec: str) -> None:
    """Raises UnknownMethod, or BadConfig for a field's value, before anything is loaded."""
    from foretell.registry import kind_of
    from foretell.spec import check_fields, split_methods

    for piece in split_methods(spec) if spec != "auto" else ():
        kind_of(piece.partition(":")[0])
    if ":" in spec:
        check_fields(spec)


def with_temperature(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run with a temperature, and a line where the method's card gives it."""
    from foretell.cards import card
    from foretell.registry import kind_of
    from foretell.spec import split_methods

    run_options = {"temperature": DEFAULT.temperature, **options}
    names = [piece.partition(":")[0] for piece in split_methods(spec)] if spec != "auto" else []
    card_temperature = max((card(name, kind_of(name)).temperature for name in names), default=0.0)
    if card_temperature and "temperature" not in options:
        run_options["temperature"] = card_temperature
        message(
            f"{spec} chooses among what is drawn: temperature {card_temperature:g}, "
            "as none is given"
        )
    return run_options


def check_named(kind: str, spec: str | None) -> None:
    """Raises UnknownMethod for methods of another kind, which a spec joins by `+`, and BadConfig
    for a field's value.
    """
    from foretell.registry import method_names, unknown_method
    from foretell.spec import check_fields, split_methods

    for piece in split_methods(spec, kind) if spec is not None else ():
        name = piece.partition(":")[0]
        if name not in method_names(kind):
            raise unknown_method(kind, name)
    if spec is not None and ":" in spec:
        check_fields(spec, kind)


def split_parts(text: str) -> tuple[str, ...]:
    """The parts of a text between commas, without those that are empty."""
    parts = (part.strip() for part in text.split(","))
    return tuple(part for part in parts if part)


def split_numbers(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """The numbers of a text between commas. Raises BadConfig."""
    try:
        return tuple(kind(part) for part in split_parts(text))
    except ValueError:
        raise BadConfig(f"{option} {text}: write numbers separated by commas") from None


def read_biases(pairs: Sequence[str]) -> dict[int, float]:
    """Reads biases by token from `ID=BIAS` texts. Raises BadConfig."""
    bias_by_token: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            bias_by_token[int(token)] = float(bias)
        except ValueError:
            raise BadConfig(f"--logit-bias {pair}: write ID=BIAS, as in 13=-5") from None
    return bias_by_token


def read_schema(option_value: str) -> str:
    """The JSON text of `--json-schema`, which is that text itself or a file's name. Raises
    BadConfig.
    """
    is_json_text = option_value.lstrip().startswith("{") or option_value.strip() == "true"
    text = option_value if is_json_text else read_content("--json-schema", option_value)
    try:
        parse_json(text)
    except ValueError as error:
        shown_value = "" if is_json_text else f" {option_value}"
        raise BadConfig(
            f"--json-schema{shown_value}: this is no JSON ({error}); correct it"
        ) from None
    return text


def read_content(option: str, name: str) -> str:
    """Reads the file that an option names. Raises BadConfig."""
    try:
        return Path(name).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadConfig(f"{option} {name}: cannot be read ({reason}); name a UTF-8 file") from None
