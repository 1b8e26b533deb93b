"""Loading for the commands: a status on the terminal, and libraries that keep quiet."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import foretell
from foretell.cli._options import BackendOptions, ModelOptions
from foretell.cli._output import message, messages
from foretell.errors import BareText, Unsupported
from foretell.loading.fetch import resolve
from foretell.progress import show_working

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretell.api.lm import LM

AUTO = BackendOptions()


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No progress bars or logs of transformers; a warning is one line on standard error."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        message(f"warning: {text}")


def load_model(options: ModelOptions, backends: BackendOptions = AUTO, profile: bool = True) -> LM:
    """Loads the model. `profile`: also reads what `foretell tune` kept of it, and says in one line
    if that cannot be used; without one, what `auto` stands for is measured.
    """
    named_models = options.named_models
    for name in (options.model, options.draft, *named_models.values()):
        if name is not None:
            resolve(name)  # is fetched here, before the status, since it shows its own progress
    with show_working(f"loading {options.model}", messages), quiet_libraries():
        lm = foretell.load(
            options.model,
            draft=options.draft,
            models=named_models,
            draft_vocab=options.draft_vocab,
            device=options.device,
            dtype=options.dtype,
            exact_bits=backends.exact_bits,
            backend=backends.backend,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        if profile:
            _ = lm.auto
        return lm


def prompt_of(lm: LM, text: str, turn: bool | None) -> str | list[dict[str, str]]:
    """The prompt as `LM.generate` takes it: a turn of a chat or a text to continue. Where the user
    has not said which it is, it is a turn for a model that has a chat template, and one line says
    so.
    """
    if turn is None:
        turn = lm.tokenizer is not None and bool(lm.tokenizer.chat_template)
        if turn:
            message("a chat model: the prompt is a turn, which it answers; --raw continues it")
    if turn:
        return [{"role": "user", "content": text}]
    warnings.simplefilter("ignore", BareText)  # it was asked for
    return text


def fills_canvases(lm: LM) -> bool:
    """Whether its target does, and writes no text from left to right."""
    return "canvas" in lm.models["target"].caps


def check_writes(lm: LM, command: str, cure: str = "generate and serve run it") -> None:
    """Raises Unsupported for a model that fills canvases, with a command that drafts or trains
    against plain decoding.
    """
    if fills_canvases(lm):
        need = "a model that writes from left to right, and this one fills canvases"
        raise Unsupported.missing_capability(
            f"foretell {command}", lm.models["target"].name, need, cure
        )


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model, without the model."""
    from foretell.loading.load import load_tokenizer as load

    resolve(name)
    with show_working(f"loading {name}", messages), quiet_libraries():
        return load(name, revision)
