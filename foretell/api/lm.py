"""The entry point of users: `LM` with `generate` and `stream`.

`api.prompts` makes requests, `engine.driver` runs them, and `api.outputs` makes the answers.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from foretell.api import profiles
from foretell.api.arguments import known_arguments, per_prompt, split_terms
from foretell.api.contexts import Contexts, ReadPrompt, read_prompt
from foretell.api.defaults import default_method, simplest_method
from foretell.api.diagnosis import in_brief
from foretell.api.editor import Editor
from foretell.api.outputs import Output, Piece, Stream, list_outputs, raise_failed, refused_pieces
from foretell.api.prompts import Text, place_prompt, split_prompts
from foretell.cache.prefix_tree import PrefixTree
from foretell.constraints.asking import ask_ahead, inner_method
from foretell.core.context import Context
from foretell.core.drafter import Drafter
from foretell.core.model import Model
from foretell.core.request import Request
from foretell.core.stats import Stats
from foretell.core.tracing import Steps, TraceStep
from foretell.diffusion.loop import CANVAS
from foretell.engine import saved_stores as stores
from foretell.engine.checks import check_adapter, check_prefix, models_for, with_temperature
from foretell.engine.cost_profile import ROWS, model_identity, profile_model
from foretell.engine.driver import Driver
from foretell.engine.engine import Engine
from foretell.engine.live import Live
from foretell.engine.memory_budget import min_budget
from foretell.engine.prefix_cache import Reuse
from foretell.engine.scheduler import FairPlan
from foretell.engine.status import find_troubles
from foretell.errors import BadConfig, ForetellError, ForetellWarning
from foretell.ops.threads import threads_here
from foretell.progress import COLUMNS, Bar
from foretell.spec import AUTO, resolve_method, with_reward
from foretell.speculation.costs import SIZES
from foretell.speculation.strategy import Speculative, Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Method = str | Drafter | Strategy
__all__ = ["LM", "Output", "Piece", "Stats"]


@dataclass
class _Batch:
    """Requests of one call: of each prompt its n samples, or why it has none."""

    prompts: list[list[Request] | ForetellError]
    is_list: bool  # whether a list of prompts was given

    @property
    def requests(self) -> list[Request]:
        usable = [requests for requests in self.prompts if isinstance(requests, list)]
        return [request for requests in usable for request in requests]


class LM:
    """A language model with its engine. What drafters learn lives as long as it does.

    Any number of threads and event loops may call it at once; their requests share forwards.
    `models` and `tokenizers` hold the target and every other model by name.
    """

    def __init__(
        self,
        target: Model,
        tokenizer: PreTrainedTokenizerBase | None = None,
        models: Mapping[str, Model] | None = None,
        path: Path | None = None,
        eos: Sequence[int] = (),
        tokenizers: Mapping[str, PreTrainedTokenizerBase | None] | None = None,
    ):
        self.path = path
        self.models: dict[str, Model] = {"target": target, **(models or {})}
        self.tokenizers = dict.fromkeys(self.models) | dict(tokenizers or {})
        self.tokenizers["target"] = tokenizer
        for name, model in self.models.items():
            check_adapter(name, model)
            model.tokenizer = self.tokenizers[name]
        # Of each model the backends that `load` would have chosen, and why they refused it.
        self.refusals: dict[str, tuple[tuple[str, str], ...]] = {}
        self.engine = Engine(self.models, eos)
        self.driver = Driver(self.engine)
        self.measured = False
        self._text = Text(tokenizer, target.vocab, eos)
        self._default = AUTO
        self._auto: tuple[int, str] | None = None  # what it stands for, with so many threads

    def __repr__(self) -> str:
        return in_brief(self)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._text.tokenizer

    # --- generation

    def generate(
        self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any
    ) -> Any:
        """Generates for one prompt (text, token ids, chat messages, or Contexts that are read
        apart: an Output) or for a list of them (a list).

        Every sampling argument of types.Sampling may be given, as one value or as a list with one
        value a prompt, and beside them `tenant` (a name; what drafters learn and known prefixes are
        shared within one), `priority` (higher ones first), `timeout` (seconds), `guidance`
        ("cfg:g=2"), `kv` (a cache policy: "snapkv:budget=1024"), `reward` ("keywords:words=dog"),
        `budget` ("forwards=2000,seconds=30"), `pictures` (what a model's processor gives) and
        `prefix` (rows of the prompt's first tokens, as an Editor makes them).
        A failed one of a list has its `error` set; a single one raises it.
        """
        batch = self._make_batch(prompt, method, sampling)
        live_requests: list[Live] = []
        sources: dict[int, list[str]] = {}
        if batch.requests:
            with self.driver.following(batch.requests, every_step=False) as (live_requests, events):
                for received in events:
                    for event in received:
                        sources.setdefault(event.request, []).extend(event.sources)
        return self._make_answers(batch, live_requests, sources)

    def trace(self, prompt: Any, method: Method = "auto", **sampling: Any) -> list[TraceStep]:
        """Returns what happened in every step of one generation: see tracing.TraceStep."""
        batch = self._make_batch(prompt, method, sampling)
        if batch.is_list or len(batch.requests) > 1:
            raise BadConfig(
                "trace shows one sample of one prompt: give one prompt, and leave n out"
            )
        steps: list[TraceStep] = []
        batch.requests[0].trace = steps.append
        with self.driver.following(batch.requests, every_step=False) as (live_requests, events):
            for _ in events:
                pass
        self._make_answers(batch, live_requests, {live_requests[0].index: []})
        return steps

    async def agenerate(
        self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any
    ) -> Any:
        """`generate` for an event loop. Cancelling the task ends the requests."""
        batch, threads = await self._batch_async(prompt, method, sampling)
        live_requests: list[Live] = []
        sources: dict[int, list[str]] = {}
        if batch.requests:
            following = self.driver.following_async(batch.requests, False, threads)
            async with following as (live_requests, events):
                async for received in events:
                    for event in received:
                        sources.setdefault(event.request, []).extend(event.sources)
        return self._make_answers(batch, live_requests, sources)

    def stream(
        self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any
    ) -> Generator[Piece, None, None]:
        """Generates in Pieces, as tokens become final. Closing it ends the requests.

        Arguments are checked at once; the requests begin with the first piece asked for, and go on
        however fast the pieces are read. With `trace=True` each has the step that it came from.
        """
        batch = self._make_batch(prompt, method, sampling)
        return self._stream_pieces(self._check_streamable(batch))

    async def astream(
        self, prompt: Any, method: Method | Sequence[Method] = "auto", **sampling: Any
    ) -> AsyncGenerator[Piece, None]:
        """`stream` for an event loop. Closing it, or cancelling its task, ends the requests."""
        batch, threads = await self._batch_async(prompt, method, sampling)
        for piece in refused_pieces(self._check_streamable(batch).prompts):
            yield piece
        if not batch.requests:
            return
        following = self.driver.following_async(batch.requests, True, threads)
        async with following as (live_requests, events):
            streams = self._make_streams(batch, live_requests)
            async for received in events:
                for event in received:
                    yield self._make_piece(streams[event.request], event, batch.is_list)

    def _stream_pieces(self, batch: _Batch) -> Generator[Piece, None, None]:
        yield from refused_pieces(batch.prompts)
        if not batch.requests:
            return
        with self.driver.following(batch.requests) as (live_requests, events):
            streams = self._make_streams(batch, live_requests)
            for received in events:
                for event in received:
                    yield self._make_piece(streams[event.request], event, batch.is_list)

    @staticmethod
    def _check_streamable(batch: _Batch) -> _Batch:
        for requests in batch.prompts:
            if isinstance(requests, list) and len(requests) > 1:
                raise BadConfig("n: streaming gives one sample a prompt; use generate for more")
        return batch

    def _make_streams(self, batch: _Batch, live_requests: Sequence[Live]) -> dict[int, Stream]:
        usable = [i for i, requests in enumerate(batch.prompts) if isinstance(requests, list)]
        pairs = zip(usable, live_requests, strict=True)
        return {live.index: Stream(live, prompt, self.decode) for prompt, live in pairs}

    @staticmethod
    def _make_piece(stream: Stream, event: Any, is_list: bool) -> Piece:
        piece = stream.piece(event)
        if piece.error is not None and not is_list:
            raise piece.error
        return piece

    def _make_answers(
        self, batch: _Batch, live_requests: Sequence[Live], sources: Mapping[int, list[str]]
    ) -> Any:
        answers: list[Output] = []
        remaining = list(live_requests)
        for requests in batch.prompts:
            if isinstance(requests, ForetellError):
                answers.append(Output("", [], "error", Stats(), error=requests))
                continue
            samples: list[Output] = []
            for _ in requests:
                live_request = remaining.pop(0)
                token_sources = sources.get(live_request.index, [])
                samples += list_outputs(live_request, token_sources, self.decode)
            samples[0].samples = samples
            answers.append(samples[0])
        if batch.is_list:
            return answers
        return raise_failed(answers[0])

    def fill(self, parts: Sequence[str | int], method: Method = "auto", **sampling: Any) -> Output:
        """Fills the gaps of a text with a model that fills canvases. `parts`: texts, and numbers of
        missing tokens between them. The answer is all that follows the first text.
        """
        prompt, canvas = self._text.with_gaps(parts)
        options = {"max_new_tokens": len(canvas), "ignore_eos": True, **sampling}
        answer: Output = self.generate(prompt, method, canvas=canvas, **options)
        return answer

    def editor(self, text: str, method: Method = "auto") -> Editor:
        """A text that is edited while its rows are kept, and completed by a method."""
        return Editor(self, text, method)

    # --- requests

    async def _batch_async(
        self, prompt: Any, method: Any, sampling: dict[str, Any]
    ) -> tuple[_Batch, int]:
        """The batch, made on another thread, and the threads to compute with."""
        if self.driver.is_held:
            raise BadConfig("no event loop can run on a thread that has the model to itself")
        threads = threads_here()
        make = partial(self._make_batch, prompt, method, sampling)
        return await asyncio.get_running_loop().run_in_executor(None, make), threads

    def _make_batch(self, prompt: Any, method: Any, sampling: dict[str, Any]) -> _Batch:
        """Checks everything before anything runs. A wrong argument raises; of many prompts one that
        cannot be used, or that its method refuses, becomes its error, unless none can be used.
        """
        threads_here()
        sampling = known_arguments(sampling)
        prompts, is_list = split_prompts(prompt)
        count = len(prompts)
        methods = per_prompt("method", method, count, is_list)
        columns = {key: per_prompt(key, value, count, is_list) for key, value in sampling.items()}
        batch: list[list[Request] | ForetellError] = []
        for i, item in enumerate(prompts):
            options = {name: values[i] for name, values in columns.items()}
            batch.append(self._make_requests(item, methods[i], options))
        with self.driver.exclusive():
            for i, requests in enumerate(batch):
                if isinstance(requests, list):
                    batch[i] = self._check_requests(requests)
        usable = [requests for requests in batch if isinstance(requests, list)]
        for requests in batch:
            if isinstance(requests, ForetellError) and not usable:
                raise requests
        strategies = [inner_method(requests[0].strategy) for requests in usable]
        if any(isinstance(s, Speculative) and not s.nodes for s in strategies):
            self._measure_once()
        return _Batch(batch, is_list)

    def _make_requests(
        self, prompt: Any, method: Any, options: Mapping[str, Any]
    ) -> list[Request] | ForetellError:
        """The n requests of one prompt, or why it cannot be used. Raises for its arguments."""
        try:
            self._text.warn_of(prompt.question if isinstance(prompt, Contexts) else prompt)
            token_ids, kv = read_prompt(prompt, options.get("kv"), self._text)
        except ForetellError as error:
            return error
        if kv is not None:
            options = {**options, "kv": kv}
        terms, options = split_terms(options, self._text.encode_text, self.models["target"])
        traced, canvas, reward = map(terms.pop, ("trace", "canvas", "reward"))
        if not isinstance(method, str | Drafter | Strategy):
            raise BadConfig.field("method", method, "a spec like 'ngram:n=3', or a config object")
        name, strategy = self.resolve(method, reward)
        options = with_temperature(name, strategy, options)
        sampling = self._text.sampling(options, terms["tenant"], terms["deadline"])
        begin, inputs = place_prompt(self.models["target"], token_ids, terms.pop("pictures"))
        if canvas is not None:
            inputs = {**inputs, CANVAS: canvas}
        text = self.decode if self.tokenizer is not None else None
        requests = []
        for k in range(sampling.n):
            choices = self._text.sample(sampling, k, begin, self.models["target"])
            asking_strategy = ask_ahead(strategy, choices)
            request = Request(begin, asking_strategy, choices, name, text, inputs=inputs, **terms)
            request.trace = Steps() if traced else None
            requests.append(request)
        return requests

    def _check_requests(self, requests: list[Request]) -> list[Request] | ForetellError:
        """Returns them, or why the prompt cannot be used. Raises where its arguments cannot be."""
        engine, first_request = self.engine, requests[0]
        try:
            plain_method = resolve_method(simplest_method(engine.models["target"]))[1]
            plain = Request(first_request.prompt, plain_method)
            plain.inputs, plain.policy = first_request.inputs, first_request.policy
            models_for(engine, plain)
        except ForetellError as error:
            return error
        models = models_for(engine, first_request)
        check_prefix(first_request, models)
        ctx = Context(engine, first_request, models)
        try:
            first_request.strategy.run(ctx).close()  # what it refuses before its first forward
        except ForetellError as error:
            return error
        return requests

    # --- methods and what they cost

    @property
    def default(self) -> str:
        """The method that `auto` stands for without a profile: see `defaults.default_method`."""
        self._measure_once()
        return self._default

    @property
    def auto(self) -> str:
        """The method that `auto` stands for: the one that `foretell tune` chose, else `default`.

        A profile that is damaged, or was made elsewhere, is left aside with a warning.
        """
        if "canvas" in self.models["target"].caps:
            return simplest_method(self.models["target"])
        threads = threads_here()
        if self._auto is None or self._auto[0] != threads:
            with self.driver.exclusive():
                profile, trouble = profiles.load_profile(self.models, self.path)
                if trouble:
                    warnings.warn(trouble, ForetellWarning, 2)
                self._auto = threads, profile["chosen"] if profile else self.default
        return self._auto[1]

    def forget_profile(self) -> None:
        """`auto` is looked up again when it is needed: there is a new profile."""
        self._auto = None

    def resolve(self, method: Method, reward: Any = None) -> tuple[str, Strategy]:
        """(name, strategy) of a spec or a config object on this model, with a reward if it chooses
        by one. Raises UnknownMethod or BadConfig.
        """
        method = self.auto if isinstance(method, str) and method == "auto" else method
        encode = self._text.encode_text
        if reward is None:
            return resolve_method(method, encode)
        return with_reward(method, reward, encode)

    def bring(self, method: Method = "auto") -> None:
        """Loads what a method brings, a head for example; else its first request waits for it."""
        strategy = self.resolve(method)[1]
        with self.driver.exclusive():
            self.engine.brought[strategy] = strategy.bring(self.engine.models)

    def _measure_once(self) -> None:
        if not self.measured:
            with self.driver.exclusive():
                if not self.measured:
                    self.measure()

    def measure(self, fresh: bool = False) -> dict[str, Any]:
        """Measures this model's forwards, which decides how much is drafted; returns the seconds.

        Read from the user's cache folder, or measured (a few seconds) and kept there; `fresh`
        measures in any case. Running requests wait for it.
        """
        target = self.models["target"]
        with Bar(*COLUMNS, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task(f"measuring {target.name}", visible=False, total=None)

            def tell(done_count: int, total: int) -> None:
                progress.update(bar, completed=done_count, total=total, visible=True)

            with self.driver.exclusive():
                costs, file = profile_model(target, fresh, tell)
                self.engine.take_costs(target, costs)
                # Decided once: what steps turn out to take later must not change it.
                draft = self.models.get("draft")
                self._default = default_method(target, draft, costs.one_token_seconds())
                self.measured = True
                seconds = {}
                for rows in ROWS:
                    curve = costs.curve(SIZES[-1], rows)
                    seconds[rows] = {size: float(curve[size - 1]) for size in SIZES}
        return {"about": model_identity(target), "file": str(file), "seconds": seconds}

    # --- many requests

    def limit(
        self,
        memory: int | None = None,
        requests: int | None = None,
        between_tokens: float | None = None,
        prefixes: int = 0,
        budget: int | None = None,
    ) -> None:
        """Sets what running requests may take: bytes of cache rows, how many run at once, seconds
        between two steps of a text while others begin (None: no limit, twice a usual step), and
        bytes of rows that are kept of texts for later ones that begin so (0: none).

        `budget`: bytes in all, weights, distributions, logits and masks included. A request drafts
        as much a step as fits into it (or into its share, if `requests` says how many run at once),
        or nothing, or becomes shorter; see `foretell.engine.memory_budget`. Raises BadConfig where
        nothing fits, with what would do.
        """
        numbers: dict[str, float | None] = {"memory": memory, "requests": requests}
        numbers |= {"between_tokens": between_tokens, "budget": budget}
        for name, number in numbers.items():
            if number is not None and not number > 0:
                raise BadConfig.field(name, number, "above 0, or None for no limit")
        if prefixes < 0:
            raise BadConfig.field("prefixes", prefixes, "a number of bytes, 0 or more")
        with self.driver.exclusive():
            engine = self.engine
            engine.admission.memory, engine.admission.requests = memory, requests
            engine.plan = FairPlan(between_tokens=between_tokens)
            engine.reuse = Reuse(engine, PrefixTree(prefixes)) if prefixes else None
            engine.admission.budget = budget
            needed_bytes = min_budget(engine)
            if budget is not None and budget < needed_bytes:
                engine.admission.budget = None
                allowed = f"at least {needed_bytes} bytes for a plain step"
                raise BadConfig.field("budget", budget, allowed)

    def check_integrity(self) -> list[str]:
        """Faults in the rows that are kept while there is no request; empty: there are none."""
        return self.driver.run(lambda: find_troubles(self.engine))

    # --- what drafters learnt

    def save_stores(self, folder: str | Path) -> list[Path]:
        """Writes what drafters have learnt into a folder; returns the files. Raises BadFile where
        they cannot be written, and then leaves none behind.
        """
        return self.driver.run(lambda: stores.save_stores(self.engine, Path(folder)))

    def load_stores(self, folder: str | Path) -> list[Path]:
        """Takes in what `save_stores` wrote, or nothing and raises BadFile for a bad file."""
        return self.driver.run(lambda: stores.load_stores(self.engine, Path(folder)))

    # --- texts

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; `special`: with those that the tokenizer puts around a prompt."""
        return self._text.encode(text, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._text.decode(tokens)

    def prompt_ids(self, prompt: Any, most: int | None = None) -> list[int]:
        """Token ids of one prompt as `generate` takes it: see `Text.prompt_ids`."""
        return self._text.prompt_ids(prompt, most)

    def compile(self, form: Mapping[str, Any], tenant: str, until: float) -> None:
        """Compiles a form (json_schema, regex or grammar) for requests to come."""
        self._text.grammars.compile_form(form, tenant, until)

    def read_prompt(self, prompt: Any, kv: Any = None, most: int | None = None) -> ReadPrompt:
        """Token ids of a prompt, and the policy that reads its contexts: see `read_prompt`."""
        return read_prompt(prompt, kv, self._text, most)

    def read_apart(self, prompt: Contexts, kv: Any = None) -> ReadPrompt:
        """As `read_prompt`, by the name that it had before."""
        return self.read_prompt(prompt, kv)
