"""foretell inside transformers: `model.generate(**inputs,
custom_generate=foretell.hf("token-recycling"))`.

transformers prepares inputs, logits processors and stopping criteria as always; here the prepared
objects are evaluated token by token along each path, so an option means exactly what it means
there. A batch is split into one request a row, without its padding, and put together again. What
cannot be honoured is refused by name, before the first forward where that can be known.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foretell.api.diagnosis import notice_of_torch
from foretell.core.drafter import Drafter
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.stores import Stores
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.errors import BadConfig, ForetellWarning, RequestFailed, Unsupported, first_line
from foretell.loading.attached import attached
from foretell.models.decoder.decoder import Decoder
from foretell.spec import resolve
from foretell.speculation.strategy import Strategy

# Fields of a GenerationConfig that cannot be honoured, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "assistant_early_exit": (None,),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
    "encoder_repetition_penalty": (None, 1),
    "encoder_no_repeat_ngram_size": (None, 0),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None, "dynamic", "static"),
}
CACHES = ("past_key_values", "cache_params")  # the latter of models without attention
KNOWN = {
    "attention_mask",
    "position_ids",
    *CACHES,
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


_turns: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()


def holds_tokens(cache: Any) -> bool:
    """Whether a cache of transformers has taken tokens in, as rows or as a state."""
    for layer in cache.layers:
        rows = layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
        if rows or any(getattr(layer, "has_previous_state", {}).values()):
            return True
    return False


def hf(
    method: str | Drafter | Strategy = "token-recycling",
    draft: PreTrainedModel | str | Path | None = None,
) -> Hook:
    """What `custom_generate=` of a transformers model's `generate` takes. `draft`: a smaller model
    or its folder.

    Seeds come from torch's generator, so torch.manual_seed repeats a result. Stop strings go into
    `stopping_criteria=[StopStringCriteria(tokenizer, stops)]`: transformers itself refuses
    `stop_strings=` here.
    """
    return Hook(method, draft)


class Hook:
    """The callable. It remembers what drafters learnt of each model."""

    def __init__(
        self, method: str | Drafter | Strategy, draft: PreTrainedModel | str | Path | None
    ):
        if not isinstance(method, str | Drafter | Strategy):
            raise BadConfig.field("method", method, "a spec like 'ngram:n=3', or a config object")
        self.name, self.strategy = resolve(method)
        self.draft = draft
        self._stores: WeakKeyDictionary[PreTrainedModel, Stores] = WeakKeyDictionary()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Called by `generate`: input_ids (B, L), padded on the left -> (B, L + new), or the usual
        output object.
        """
        given = _generate_arguments()
        if streamer is None:
            streamer = given.get("streamer")
        others = {"assistant_model": given.get("assistant_model")} | model_kwargs
        self._refuse(model, generation_config, others)
        if synced_gpus or given.get("synced_gpus"):
            raise self._no("synced_gpus")
        pads = self._pads(input_ids, model_kwargs)
        rows = [ids[pad:].tolist() for ids, pad in zip(input_ids.cpu(), pads, strict=True)]
        requests = self._requests(
            input_ids, pads, rows, logits_processor, stopping_criteria, generation_config
        )
        criteria = self._criteria(stopping_criteria, requests)
        # A forward of ours changes the model's attention while it lasts, so calls take turns.
        with _turns.setdefault(model, threading.RLock()):
            training = model.training
            try:
                engine = self._engine(model.eval())
                run = _Run(self, engine, requests, input_ids, criteria, streamer, generation_config)
                outputs = run.outputs()
            finally:
                model.train(training)
        sequences = _padded(input_ids, outputs, generation_config)
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _engine(self, model: PreTrainedModel) -> Engine:
        """A new engine, since the model may have changed, with what drafters learnt before."""
        notice_of_torch(model)
        models: dict[str, Model] = {"target": attached(model, model.config.model_type)}
        draft = self._draft_model()
        if draft is not None:
            models["draft"] = draft
            vocab = models["target"].vocab
            if draft.vocab != vocab:
                raise BadConfig(
                    f"the draft model has {draft.vocab} tokens, the model {vocab}: use a relative"
                )
        engine = Engine(models)
        engine.stores = self._stores.setdefault(model, engine.stores)
        return engine

    def _requests(
        self,
        input_ids: torch.Tensor,
        pads: Sequence[int],
        prompts: Sequence[list[int]],
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> list[Request]:
        """One request a row of the batch."""
        count = len(prompts)
        ends = [token for c in criteria for token in _ids(getattr(c, "eos_token_id", None))]
        longest = min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria))
        seeds = [0] * count
        if config.do_sample:
            seeds = torch.randint(2**62, (count,)).tolist()
        requests = []
        for row, prompt in enumerate(prompts):
            padding = input_ids[row, : pads[row]].cpu()
            of_row = (RowProcessors(processors, padding, row),) if len(processors) else ()
            sampling = Sampling(
                max_new_tokens=longest - input_ids.shape[1],
                temperature=1.0 if config.do_sample else 0.0,
                stop_token_ids=tuple(ends),
                seed=seeds[row],
                logits_processors=of_row,
            )
            requests.append(Request(prompt, self.strategy, sampling, self.name))
        return requests

    def _criteria(
        self, criteria: StoppingCriteriaList, requests: Sequence[Request]
    ) -> list[StoppingCriteria]:
        """Those that the engine does not check itself."""
        others = []
        for criterion in criteria:
            if not isinstance(criterion, MaxLengthCriteria) and not hasattr(
                criterion, "eos_token_id"
            ):
                others.append(criterion)
        if others and len(requests) > 1 and not requests[0].sampling.stop_token_ids:
            raise self._no(
                "stopping_criteria on a batch without an end token",
                "give eos_token_id and pad_token_id",
            )
        return others

    def stops(self, criterion: StoppingCriteria, ids: torch.Tensor) -> bool:
        """Whether a criterion ends the text of ids (1, L)."""
        try:
            # Without `output_scores` transformers, too, gives None for the scores.
            return bool(torch.as_tensor(criterion(ids, None)).any())  # type: ignore[arg-type]
        except Exception as error:
            name = type(criterion).__name__
            if "NoneType" in str(error):
                raise self._no(
                    f"the stopping criterion {name}, which reads `scores` "
                    f"({first_line(error)}): they need output_scores=True"
                ) from error
            raise RequestFailed(
                f"{self.name}: the stopping criterion {name} failed "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error

    def _draft_model(self) -> Decoder | None:
        if self.draft is None:
            return None
        if isinstance(self.draft, str | Path):
            from foretell.loading.load import load

            model = load(self.draft).models["target"]
            assert isinstance(model, Decoder)
            self.draft = model.hf
        return attached(self.draft, "the draft model")

    def _refuse(
        self, model: PreTrainedModel, config: GenerationConfig, others: dict[str, Any]
    ) -> None:
        if model.config.is_encoder_decoder:
            raise self._no("an encoder-decoder model")
        for name, fine in REFUSED.items():
            if getattr(config, name, None) not in fine:
                raise self._no(
                    f"{name}={getattr(config, name)!r}",
                    "leave it out, or leave custom_generate out",
                )
        for name, value in others.items():
            if name not in KNOWN and value is not None:
                raise self._no(name, "leave it out, or leave custom_generate out")
        for name in CACHES:
            cache = others.get(name)
            if cache is not None and holds_tokens(cache):
                raise self._no(f"{name} that hold tokens", "give the whole prompt as input_ids")

    def _pads(self, input_ids: torch.Tensor, given: dict[str, Any]) -> list[int]:
        """How many padding tokens each row begins with."""
        if input_ids.shape[1] == 0:
            raise self._no("a prompt without input_ids")
        mask = given.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
        if (
            mask.shape != input_ids.shape
            or bool((mask.diff(dim=1) < 0).any())
            or not bool(mask[:, -1].all())
        ):
            raise self._no(
                "an attention_mask with holes or padding on the right", "pad on the left"
            )
        positions = given.get("position_ids")
        expected = (mask.cumsum(1) - 1) * mask
        if positions is not None and not bool(((positions * mask) == expected).all()):
            raise self._no("position_ids of your own")
        return (input_ids.shape[1] - mask.sum(1)).tolist()

    def _no(self, what: str, cure: str = "leave custom_generate out") -> Unsupported:
        return Unsupported(f"foretell.hf({self.name!r}) cannot honour {what}; {cure}")


class _Run:
    """One call of `generate`: the engine, the requests of its rows, and what they have written."""

    def __init__(
        self,
        hook: Hook,
        engine: Engine,
        requests: Sequence[Request],
        input_ids: torch.Tensor,
        criteria: Sequence[StoppingCriteria],
        streamer: Any,
        config: GenerationConfig,
    ):
        self.hook = hook
        self.engine = engine
        self.requests = requests
        self.input_ids = input_ids
        self.criteria = criteria
        self.streamer = streamer
        self.pad = _pad(config)
        self.lives: list[Live] = []
        self.written: list[list[int]] = [[] for _ in requests]
        self.ended: set[int] = set()  # rows that a criterion ended
        self.streamed = 0  # columns that the streamer has

    def outputs(self) -> list[list[int]]:
        """The new tokens of each row."""
        try:
            for request in self.requests:
                self.lives.append(self.engine.add(request))
            while any(self._going()):
                for event in self.engine.step():
                    row = event.request - self.lives[0].index
                    error = self.lives[row].error
                    if error is not None:
                        raise error
                    self._write(row, event.tokens)
                if self.streamer is not None:
                    self._stream()
        finally:
            for live in self.lives:
                self.engine.end(live)
        for row, live in enumerate(self.lives):
            short = len(self.written[row]) < self.requests[row].sampling.max_new_tokens
            if live.reason == "length" and short and row not in self.ended:
                warnings.warn(
                    f"{self.hook.name}: a text ended where the model's context does, "
                    "before max_length",
                    ForetellWarning,
                    stacklevel=5,
                )
        return self.written

    def _going(self) -> list[bool]:
        """Of each row whether it goes on."""
        return [live in self.engine.live for live in self.lives]

    def _write(self, row: int, tokens: Sequence[int]) -> None:
        written = self.written[row]
        for token in tokens:
            if row in self.ended:
                return
            written.append(token)
            if self.criteria:
                new = self.input_ids.new_tensor(written)
                ids = torch.cat([self.input_ids[row], new])[None]
                # All are called, as by transformers: they may keep count.
                verdicts = [self.hook.stops(criterion, ids) for criterion in self.criteria]
                if any(verdicts):
                    self.ended.add(row)
                    self.engine.end(self.lives[row])

    def _stream(self) -> None:
        """Gives the streamer every column (B,) that is complete."""
        going = self._going()
        lengths = [len(written) for written in self.written]
        open_lengths = [n for n, goes in zip(lengths, going, strict=True) if goes]
        complete = min(open_lengths) if open_lengths else max(lengths)
        for column in range(self.streamed, complete):
            tokens = [
                written[column] if column < len(written) else self.pad for written in self.written
            ]
            self.streamer.put(torch.tensor(tokens))
        self.streamed = max(self.streamed, complete)


class RowProcessors:
    """Processors made for a batch, for one row of it. They see the row's padding before its tokens,
    as transformers would show it to them.
    """

    def __init__(self, processors: LogitsProcessorList, padding: torch.Tensor, row: int):
        self.padding = padding[None]
        self.processors = [_of_row(processor, len(padding), row) for processor in processors]

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = torch.cat([self.padding.to(ids.device), ids], 1)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores


def _of_row(processor: Any, padding: int, row: int) -> Any:
    """For one row the two kinds of processor that depend on which row of the batch it is."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and torch.is_tensor(
        processor.prompt_ignore_length
    ):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = padding
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor


def _generate_arguments() -> dict[str, Any]:
    """The arguments of the `generate` that is running.

    transformers 5.23 does not hand `streamer` and `assistant_model` to a callable; ignoring them
    would leave a reader of the streamer waiting for ever.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def _padded(
    input_ids: torch.Tensor, outputs: Sequence[list[int]], config: GenerationConfig
) -> torch.Tensor:
    """input_ids (B, L) and the new tokens of each row -> (B, L + the most of them)."""
    pad = _pad(config)
    longest = max(map(len, outputs))
    rows = [output + [pad] * (longest - len(output)) for output in outputs]
    new = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)
    return torch.cat([input_ids, new.view(len(input_ids), longest)], 1)


def _pad(config: GenerationConfig) -> int:
    """The token that fills up rows which end before others."""
    for value in (config._pad_token_tensor, config._eos_token_tensor):
        ids = _ids(value)
        if ids:
            return ids[0]
    return 0


def _ids(value: Any) -> list[int]:
    return [] if value is None else torch.as_tensor(value).flatten().tolist()
