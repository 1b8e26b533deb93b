"""Checks of a request before its first forward: prompts, inputs, and methods that a model
cannot run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.core.masked_text import FILLERS, MASKS, NOISE, default_filler
from foretell.core.refusals import source_name
from foretell.engine.memory_budget import room_for
from foretell.errors import BadConfig, PromptTooLong, Unsupported

if TYPE_CHECKING:
    from foretell.core.model import Model
    from foretell.core.request import Method, Request


CAPABILITIES = {  # of a model: what is lacking without it, and the cure
    "canvas": (
        "a model that fills canvases, such as LLaDA's, and this one writes from left to right",
        "leave the method out, or load another model",
    ),
    MASKS: (
        "a model that fills masks, and it fills uniform noise",
        f"choose a method for that, for example {FILLERS[NOISE]!r}",
    ),
    NOISE: (
        "a model that fills uniform noise, and it fills masks",
        f"choose a method for that, for example {FILLERS[MASKS]!r}",
    ),
}


def check_adapter(name: str, model: Any) -> None:
    """Raises BadConfig for a model that lacks what every adapter has, see `core.model.Model`."""
    missing = [f for f in ("name", "vocab", "context", "layout", "caps") if not hasattr(model, f)]
    if missing:
        raise BadConfig(
            f"the model {name!r} is a {type(model).__name__} without {', '.join(missing)}: wrap "
            "one of transformers (foretell.wrap), or write an adapter (foretell.core.model.Model)"
        )


def models_for(engine: Any, request: Request) -> Mapping[str, Model]:
    """The models of a request, those that its method brings included.

    Raises Unsupported, PromptTooLong or BadConfig.
    """
    target: Model = engine.models["target"]
    check_prompt(request, target)
    models = dict(engine.models)
    fills = "canvas" in target.caps
    if fills and "canvas" not in request.strategy.needs:
        need = "a model that writes from left to right: it fills canvases"
        cure = f"choose a method of the kind diffusion, for example {default_filler(target)!r}"
        raise Unsupported.missing_capability(request.name, target.name, need, cure)
    for part in request.parts:
        part_name = request.name if part is request.strategy else source_name(part)
        for need in part.needs:
            if need not in target.caps:
                default_reason = f"the capability {need!r}", "choose another method"
                raise Unsupported.missing_capability(
                    part_name, target.name, *CAPABILITIES.get(need, default_reason)
                )
        brought_models = engine.brought.pop(part, None) or part.bring(engine.models)
        if brought_models:
            engine.brought[part] = brought_models  # used last
        models |= brought_models
        if any(model.feeds for model in brought_models.values()) and "taps" not in target.caps:
            raise Unsupported.missing_capability(
                part_name, target.name, "hidden states", "use another method or model"
            )
        for name in {*part.models} - {*models}:
            raise Unsupported.missing_model(part_name, target.name, name)
    check_inputs(request, models)
    if request.policy is not None and not any(target.layout):
        raise Unsupported.missing_capability(
            "a cache policy", target.name, "cache rows that it can change", "use another model"
        )
    request.room = room_for(engine, request, models)
    return models


def check_inputs(request: Request, models: Mapping[str, Model]) -> None:
    """Checks what its models read beside the text. Raises BadConfig or Unsupported."""
    model_names = dict.fromkeys(
        ["target", *(name for part in request.parts for name in part.models)]
    )
    target = models["target"]
    if "pictures" in request.inputs and "pictures" not in target.caps:
        refusal = getattr(target, "pictures_refused", "") or "it has no part that sees"
        need = f"a model whose pictures it can compute ({refusal})"
        raise Unsupported.missing_capability("pictures", target.name, need, "give the text alone")
    for name in model_names:
        reader: Any = models[name]
        if "source" in reader.caps:
            reader.check_source(request.inputs.get("source"))
        check_pictures = getattr(
            reader, "check_pictures", None
        )  # views of such a model read the text alone
        if (
            check_pictures is not None
            and "pictures" in reader.caps
            and "pictures" in request.inputs
        ):
            check_pictures(request)


def check_prefix(request: Request, models: Mapping[str, Model]) -> None:
    """Checks that rows made before can be used where they must be, or the engine would read the
    text anew without a word. Raises BadConfig.
    """
    prefix = request.prefix
    if prefix is None:
        return
    if tuple(request.prompt[: prefix.end]) != prefix.tokens or prefix.end >= len(request.prompt):
        raise BadConfig("prefix: the prompt does not go on after the tokens of these rows")
    if request.policy is not None:
        raise BadConfig("kv: rows that were made before come under no cache policy; leave kv out")
    model_names = {name for part in request.parts for name in part.models}
    if not {tap for name in model_names for tap in models[name].feeds} <= prefix.states.keys():
        raise BadConfig(
            f"{request.name} reads hidden states, and the rows that were made before lack them; "
            "make them for this method"
        )


def check_prompt(request: Request, target: Model) -> None:
    """Raises PromptTooLong, BadConfig or Unsupported."""
    if "blocks" in target.caps:
        need = "a model that writes from left to right"
        cure = "load it beside its target: load(TARGET, draft=...)"
        raise Unsupported.missing_capability(request.name, target.name, need, cure)
    prompt = request.prompt
    is_valid = all(isinstance(token, int) and 0 <= token < target.vocab for token in prompt)
    if not is_valid or not prompt:
        id_range = f"0 to {target.vocab - 1}"
        raise BadConfig(f"a prompt has at least one token, all of the vocabulary ({id_range})")
    endless = request.policy is not None and request.policy.endless and request.policy.pieces
    spared = 0 if request.policy is None else request.policy.spared
    if spared and len(prompt) - spared >= target.context:
        raise PromptTooLong(
            f"the prefix, what is read of the contexts and the question take "
            f"{len(prompt) - spared} positions and {target.name} holds {target.context}; cut the "
            "longest context in two, or shorten it"
        )
    if len(prompt) - spared >= target.context and not endless:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens and {target.name} holds {target.context}; "
            "shorten it"
        )
    if request.sampling.stop and request.text is None:
        raise BadConfig("stop: texts need a tokenizer; use stop_token_ids")


def with_temperature(name: str, strategy: Method, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request's options with a temperature for a method that chooses among what is drawn. Raises
    BadConfig for 0, at which all that it draws is alike.
    """
    default_temperature = getattr(strategy, "drawn_at", 0.0)
    if not default_temperature or options.get("temperature"):
        return options
    if options.get("temperature") is not None:
        raise BadConfig(
            f"temperature=0: {name} chooses among what is drawn, and at 0 all draws are alike; "
            f"leave it out, for {default_temperature:g}, or give one above 0"
        )
    return {**options, "temperature": default_temperature}
