"""Makes commands of functions that train, and holds the inputs and steps that they share.

    @trainer("caches.gates.TrainGates")
    def gates(config: TrainGates, models: Models, out: TensorFile, text: Texts) -> Report:

is `foretell train gates`, in whichever file of this folder it stands. Its parameters are options,
and so are the fields of the settings `foretell.train.caches.gates.TrainGates`, which it gets as
`config`. A function that returns a Report has `--json`. One that takes `recipe` has `--recipe`, and
gets all settings of the run as a recipe has them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer import Option

from foretell.cli._loading import load_model, quiet_libraries
from foretell.cli._options import BackendOptions, Json, ModelOptions
from foretell.cli._output import check_writable, emit, emit_json, message, progress_bar, refusals
from foretell.core.renamed_options import rename_options
from foretell.errors import BadConfig
from foretell.loading.fetch import resolve

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.train.processes import Processes

Tell = Callable[[str, int, int | None], None]
Recipe = dict[str, Any]  # all settings of a run, by the options' names
TRAINERS = Path(__file__).parents[2] / "train"
# Type of an option -> the types that its value in a recipe may have, and their name.
RECIPE_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a text"),
    Path: ((str,), "a text"),
    list[str]: ((list,), "a list of texts"),
}


@dataclass(frozen=True)
class Report:
    """The end of a run: the document of `--json`, or without it a sentence for people.

    `warning`: a line that comes before the sentence.
    """

    document: Mapping[str, Any]
    sentence: str
    warning: str = ""


def trainer(settings: str = "") -> Callable[[Callable[..., str | Report]], Callable[..., int]]:
    """Makes a command of a function that returns a Report or a sentence, "" for none.

    `settings`: the class of its `config`, by its name below `foretell.train`.
    """

    def make_command(train: Callable[..., str | Report]) -> Callable[..., int]:
        if settings:
            train.__annotations__["config"] = read_settings(settings)
        signature = inspect.signature(train, eval_str=True)
        inputs = dict(signature.parameters)
        options: list[Parameter] = []
        if inputs.pop("recipe", None):
            options.append(_option("invocation", typer.Context))
            options.append(_option("recipe", Annotated[str | None, recipe_option(settings)], None))
        config_option = [inputs.pop("config")] if settings else []
        options += [*inputs.values(), *config_option]
        if signature.return_annotation is Report:
            options.append(_option("as_json", Json, False))

        @functools.wraps(train)
        def command(**values: Any) -> int:
            as_json = values.pop("as_json", False)
            if settings:
                fields = dataclasses.asdict(values["config"])
                values["config"] = import_settings(settings)(**fields)
            if "invocation" in values:
                values["recipe"] = settings_in_use(values.pop("invocation"))
            if "out" in values:
                values["out"].parent.mkdir(parents=True, exist_ok=True)
            return show_report(train(**values), as_json)

        keywords = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
        command.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
        return command

    return make_command


def _option(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def show_report(report: str | Report, as_json: bool) -> int:
    """Writes the end of a run to standard output; returns the command's exit code."""
    if isinstance(report, str):
        if report:
            emit(report)
    elif as_json:
        emit_json(report.document)
    else:
        if report.warning:
            message(f"warning: {report.warning}")
        emit(report.sentence)
    return 0


def read_settings(place: str) -> Any:
    """A dataclass with the fields of the class MODULE.NAME below `foretell.train`, read from its
    text, as importing it would import torch. The comment after a field is the option's help.
    """
    module, _, name = place.rpartition(".")
    text = TRAINERS.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
    lines = text.splitlines()
    (body,) = (
        node.body
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    fields = []
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        assert node.value is not None, f"{name}.{node.target.id} needs a default"
        default = ast.literal_eval(node.value)
        comment = lines[(node.end_lineno or 1) - 1].partition("#")[2].strip()
        annotation: Any = type(default)
        option: Any = Annotated[annotation, typer.Option(help=comment)]
        fields.append((node.target.id, option, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(name, fields, frozen=True)


def import_settings(place: str) -> Any:
    """The class MODULE.NAME below `foretell.train` itself."""
    module, _, name = place.rpartition(".")
    return getattr(import_module(f"foretell.train.{module}"), name)


def recipe_option(place: str) -> Any:
    """The option `--recipe` of a command with these settings: a file gives the options that the
    command line leaves out.
    """

    def fill_options(context: typer.Context, name: str | None) -> str | None:
        if name is None:
            return None
        from foretell.train import recipes

        path = recipes.find_recipe(name)
        known = [parameter.name for parameter in context.command.params]
        try:
            fields = rename_options(recipes.read_recipe(path), known, "{}")
        except BadConfig as error:
            raise BadConfig(f"{path}: {error}") from error
        check_recipe(context, path, fields)
        # The command line comes first, then this, then the options' defaults.
        context.default_map = fields
        settings = import_settings(place)
        try:
            settings(**{key: value for key, value in fields.items() if hasattr(settings, key)})
        except BadConfig as error:
            raise BadConfig(f"{path}: {error}") from error
        return name

    return typer.Option(
        metavar="NAME|FILE.toml",
        is_eager=True,
        callback=fill_options,
        help="Settings of a run; options given beside it win.",
    )


def check_recipe(context: typer.Context, path: Path, fields: Mapping[str, Any]) -> None:
    """Raises BadConfig for a field that the command does not have, or one of another type."""
    command: Any = context.command.callback
    options = {
        name: get_args(parameter.annotation)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "recipe" and get_args(parameter.annotation)
    }
    for name, value in fields.items():
        title = name.replace("_", "-")
        if name not in options:
            raise BadConfig(
                f"{path}: {title} is no setting of `foretell train {context.info_name}`; it takes "
                f"{', '.join(options).replace('_', '-')}"
            )
        annotation, option = options[name]
        kinds = [kind for kind in (annotation, *get_args(annotation)) if kind in RECIPE_TYPES]
        types, expected = RECIPE_TYPES[kinds[0]]
        parts = value if isinstance(value, list) else ()
        fits = isinstance(value, types) and all(isinstance(part, str) for part in parts)
        if not fits or (isinstance(value, bool) and bool not in types):
            raise BadConfig(f"{path}: {title}={value!r}: must be {expected}")
        if option.min is not None and value < option.min:
            raise BadConfig(f"{path}: {title}={value!r}: must be at least {option.min}")


def settings_in_use(context: typer.Context) -> dict[str, Any]:
    """All settings of the running command, as a recipe has them."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in context.params.items()
        if name != "recipe" and value is not None and value != []
    }


def _check_file(path: Path) -> Path:
    """Refuses a file that could not be written; folders that are missing are made for it."""
    check_writable("--out", path, folders_are_made=True)
    return path


def _file(metavar: str) -> Any:
    return Option(metavar=metavar, callback=_check_file, help="The file to write.")


TensorFile = Annotated[Path, _file("FILE.safetensors")]
RowFile = Annotated[Path, _file("FILE.jsonl")]
Folder = Annotated[Path, Option(metavar="FOLDER")]
Prompts = Annotated[Path, Option(metavar="FILE.jsonl")]
PromptFiles = Annotated[
    list[str], Option(metavar="FILE.jsonl", help="Prompts to be answered. Repeatable.")
]
Texts = Annotated[
    list[str],
    Option(
        metavar="SOURCE",
        help="Texts to read: stdlib, a folder, a .jsonl or a text file. Repeatable.",
    ),
]
SomeTexts = Annotated[list[str] | None, Option(metavar="SOURCE")]
TextTokens = Annotated[int, Option(min=1, help="Tokens of plain text in all.")]
Count = Annotated[int, Option(min=0)]
SaveEvery = Annotated[float, Option(min=0, help="Seconds between checkpoints.")]
Device = Annotated[str, Option(help="Where it is trained: cpu, cuda, cuda:1.")]
ProcessDevice = Annotated[
    str, Option(help="Where it is trained; cpu, but under `accelerate launch` GPUs.")
]


@dataclass(frozen=True)
class Models(BackendOptions, ModelOptions):
    """The model by which something is trained, and how it is loaded."""

    def load(self, profile: bool = False) -> LM:
        return load_model(self, self, profile)

    def train(self, task: str, train: Callable[..., Any], *inputs: Any) -> Any:
        """Loads the model and calls the trainer with it, the inputs and what moves a bar."""
        lm = self.load()
        with progress(task) as tell:
            return train(lm, *inputs, tell)


def read_files(names: Iterable[str | Path]) -> list[Any]:
    """The prompts of these files. Raises BadConfig."""
    from foretell.bench.prompts import read_prompts

    return [prompt for name in names for prompt in read_prompts(name)]


def read_sources(sources: Iterable[str]) -> Iterator[str]:
    """The texts of all sources. Raises BadConfig for one that is not there."""
    from foretell.train.corpus import read_documents

    for source in sources:
        for _, document in read_documents(source):
            # A .jsonl file may hold half a character, which no tokenizer takes.
            yield document.encode("utf-8", "replace").decode()


def load_trainable(target: str, device: str | None = None) -> LM:
    """A model in float32 by torch, through whose layers gradients pass."""
    import foretell

    return foretell.load(target, dtype="float32", backend="torch", device=device)


@contextmanager
def progress(task: str = "") -> Iterator[Tell]:
    """A progress bar and what moves it; a bar that is full, or has nothing to say, is hidden."""
    with progress_bar() as bars, quiet_libraries():
        bar = bars.add_task(task, total=None, visible=bool(task))

        def tell(step: str, count: int, total: int | None) -> None:
            bars.update(bar, description=step, completed=count, total=total, visible=count != total)

        yield tell


@contextmanager
def first_alone(processes: Processes) -> Iterator[Tell]:
    """The first of the processes runs the block before all others do."""
    with processes.first_alone(), progress() as tell:
        yield tell


@contextmanager
def open_run(*models: str, **folders: Path | None) -> Iterator[None]:
    """Fetches the models; in the block warnings are lines, and what the operating system refuses
    is told with these folders and their options.
    """
    for name in models:
        resolve(name)  # outside the block, where it can show its progress
    options = ", ".join(f"--{option} {path}" for option, path in folders.items())
    with quiet_libraries(), refusals(options):
        yield
