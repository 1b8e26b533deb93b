"""`foretell trace`: shows every step of one generation, and where plain decoding differs."""

from __future__ import annotations

import dataclasses

import foretell
from foretell.cli._input import prompt_text
from foretell.cli._loading import check_writes, load_model, prompt_of
from foretell.cli._options import (
    BackendOptions,
    Json,
    Method,
    ModelOptions,
    Prompt,
    SamplingOptions,
    Turn,
    check_method,
    with_temperature,
)
from foretell.cli._output import emit, emit_json, messages
from foretell.errors import BadConfig
from foretell.progress import show_working


def trace(
    prompt: Prompt,
    models: ModelOptions,
    backends: BackendOptions,
    sampling: SamplingOptions,
    method: Method = "auto",
    turn: Turn = None,
    as_json: Json = False,
) -> int:
    """Show every step of one generation, and the first token that plain decoding has otherwise."""
    check_method(method)
    options = with_temperature(method, sampling.arguments())
    if sampling.n > 1:
        raise BadConfig("trace shows one sample: leave --n out")
    text = prompt_text(prompt)
    lm = load_model(models, backends)
    check_writes(lm, "trace", "watch its canvas with generate or serve")
    from foretell.core import tracing

    prompted = prompt_of(lm, text, turn)
    with show_working("generating", messages):
        steps = lm.trace(prompted, method, **options)
        greedy = options["temperature"] == 0
        plain = lm.trace(prompted, "plain", **options) if greedy else []
    divergence = tracing.first_divergence(steps, plain) if greedy else None
    if as_json:
        emit_json(
            {
                "schema": "foretell.trace/1",
                "version": foretell.__version__,
                "model": models.model,
                "method": method,
                "prompt": text,
                "chat": not isinstance(prompted, str),
                "steps": [tracing.to_dict(step) for step in steps],
                "compared": greedy,
                "identical": divergence is None if greedy else None,
                "first_divergence": dataclasses.asdict(divergence) if divergence else None,
            }
        )
        return 0
    emit(tracing.render_steps(steps, lm.decode))
    emit("")
    if greedy:
        count = len(tracing.list_places(steps))
        emit(tracing.render_divergence(divergence, count, method, lm.decode))
    else:
        emit("not compared with plain decoding: two runs draw different tokens above temperature 0")
    return 0
