"""Reports who computes a model and why: in full for `foretell doctor`, in one line when it loads.

`auto` prefers the quickest backend of the device, and torch with fused layers. Where they refuse a
model the results are the same and steps are slower, so nobody should find out by accident.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foretell.engine.cost_profile import number_format
from foretell.models import backend_registry as registry
from foretell.ops.assets import INSTALL, shipped_folder

if TYPE_CHECKING:
    from foretell.api.layer_report import LayerReport
    from foretell.core.model import Model

_shown_notices: set[str] = set()


class Loaded(Protocol):
    """The part of an LM that is reported: its models, and who refused each of them, and why."""

    models: dict[str, Model]
    refusals: dict[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class ModelReport:
    """How one model of an LM is computed."""

    name: str  # its name in the LM: "target", "draft" or another one
    model: str  # what it was loaded from
    family: str  # its architecture: "llama", "gpt2"
    dtype: str  # number format of its matrices: "bfloat16", "int8"
    backend: str  # what computes ordinary steps: "torch", "openvino", "llama.cpp"
    refusals: tuple[tuple[str, str], ...]  # (backend or "fused blocks", why it was refused)
    loop: bool  # whether foretell runs the layers one by one (hidden states, subsets of layers)
    fused: bool  # whether torch computes a layer in a few joined operations
    layers: int
    vocab: int  # tokens
    context: int  # tokens
    description: LayerReport | None = None  # of a decoder's layers


def diagnose(lm: Loaded) -> list[ModelReport]:
    """A report for every model of the LM, the target first."""
    return [
        _report_model(name, model, lm.refusals.get(name, ())) for name, model in lm.models.items()
    ]


def in_brief(lm: Loaded) -> str:
    """A line for people, as in a notebook: the models, their number formats, who computes them."""
    descriptions = []
    for report in diagnose(lm):
        name = "" if report.name == "target" else f"{report.name} "
        descriptions.append(
            f"{name}{report.model}: {report.family} in {report.dtype} by {report.backend}, "
            f"{report.context:,} tokens of context"
        )
    return f"<foretell.LM {'; '.join(descriptions)}>"


def print_notice(message: str) -> None:
    """Prints a line on stderr, once per process for each message."""
    if message not in _shown_notices:
        _shown_notices.add(message)
        print(f"note: {message}", file=sys.stderr)


def notice_refusals(lm: Loaded, source: str) -> None:
    """Says of each model that `auto` would have computed in a quicker way why it is not."""
    for report in diagnose(lm):
        if report.refusals:
            reasons = [
                f"{backend} does not take it ({reason})" for backend, reason in report.refusals
            ]
            print_notice(
                f"{report.model} is computed by {report.backend}: {_join_reasons(reasons)}. "
                "Its results are right, its steps slower; "
                f"`foretell doctor {source}` says more, backend={report.backend!r} says nothing"
            )


def notice_of_missing_head(source: str, head: str) -> None:
    """Says of a model by name that a head drafts for it, which is not here."""
    if head and shipped_folder(head) is None:
        print_notice(
            f"{source} has a head that drafts for it, {head}, which is not here; "
            f"{INSTALL}, brings it, and `auto` is quicker with it"
        )


def notice_of_torch(hf: Any) -> None:
    """Says of a model in its user's memory, which torch alone computes, that `load` would have
    something quicker for its folder.
    """
    folder = str(getattr(hf.config, "name_or_path", ""))
    if hf.device.type != "cpu" or not folder or not Path(folder).is_dir():
        return
    quicker = [
        *registry.whole_backends(hf, "cpu"),
        *reversed([*registry.candidate_backends(hf, "cpu")]),
    ]
    if quicker:
        print_notice(
            f"torch computes this model of yours; foretell.load({folder!r}) reads it anew, and "
            f"{quicker[0][0]} computes that, several times as fast on a CPU"
        )


def _join_reasons(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _report_model(name: str, model: Model, refusals: tuple[tuple[str, str], ...]) -> ModelReport:
    # Imported here: a .gguf file needs none of transformers' models, which fill 100 MB.
    from foretell.backends.llama_cpp import GGUF

    backend = "torch"
    loop = False
    fused = False
    layers = len(model.layout)
    description: LayerReport | None = None
    inner: Any = model
    if isinstance(model, GGUF):
        family = model.family
        backend = "llama.cpp"
        layers = int(inner.lib.llama_model_n_layer(inner.model_handle))
    else:
        from foretell.api.layer_report import report_layers
        from foretell.drafters.model.trimming import Trimmed
        from foretell.models.decoder.decoder import Decoder
        from foretell.models.encoder_decoder.seq2seq import EncoderDecoder

        inner = model.base if isinstance(model, Trimmed) else model
        family = type(inner).__name__.lower()
        if isinstance(inner, EncoderDecoder):
            family = inner.config.model_type
            loop = True
        if isinstance(inner, Decoder):
            family = inner.config.model_type
            description = report_layers(inner)
            loop = inner.loop is not None
            fused = inner.fused
            if inner.backend is not None:
                backend = inner.backend.name
    return ModelReport(
        name,
        model.name,
        family,
        number_format(model),
        backend,
        refusals,
        loop,
        fused,
        layers,
        model.vocab,
        model.context,
        description,
    )
