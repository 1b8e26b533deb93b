"""Translates a request over HTTP to a call of `LM.generate`; nothing is lost on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.api.contexts import Contexts
from foretell.api.defaults import answer_tokens, baseline_method
from foretell.api.prompts import place_prompt
from foretell.core.spending import spending_of
from foretell.errors import BadConfig, BadModel, ForetellError, PromptTooLong
from foretell.serve.chats import chat_prompt
from foretell.serve.errors import ARGUMENTS, ApiError, of_ours
from foretell.serve.schemas import ChatRequest, CompletionRequest, Request, StructuredOutputs
from foretell.spec import (
    build_cache_policy,
    build_constraint,
    build_guidance,
    build_method,
    build_processors,
    build_reward,
    iterate_fields,
    split_methods,
    strip_parentheses,
)

if TYPE_CHECKING:
    from foretell.api.lm import LM
    from foretell.rewards.base import Reward

TEMPERATURE = 1.0  # OpenAI's
COMPLETION_TOKENS = 16  # OpenAI's; an answer in a chat may take what is left of the context
MOST_CHOICES = 128
LARGEST_FIELD = 10_000  # of a method, whose fields say how much it computes and keeps
TESTS = "tests"  # the reward that runs programs
# Fields of what stands beside a request that name a file or a folder.
NAME_FILES = (
    *("path", "head", "weights", "encoder", "attribute", "dir", "calibration", "gates", "filter"),
    "folder",
)
# Fields that hold a text, which a value beginning with an @ alone takes from a file.
TEXTS = ("cue", "end", "passage", "pattern", "principle", "references", "start", "stop", "words")


@dataclass(frozen=True)
class Bounds:
    """The limits that a server grants. None: no bound of its own."""

    method: str = "auto"  # of requests that name none
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    timeout: float | None = None  # seconds
    monitor: str | None = None  # the folder that language servers may be asked about
    tests: str = ""  # file of the tests by which programs may be rewarded; "": none are run
    texts: int | None = MOST_CHOICES  # that are written side by side for one request

    def max_seconds(self, request: Request) -> float | None:
        """Returns the seconds that a request may take; None: any number."""
        time_limits = [limit for limit in (request.timeout, self.timeout) if limit is not None]
        return min(time_limits, default=None)


UNBOUNDED = Bounds(texts=None)


@dataclass
class Call:
    """Arguments for `LM.generate`, `agenerate`, `stream` or `astream`.

    `prompts`: token ids of each choice, the n of one prompt side by side; in `arguments` a list has
    a value for each choice.
    """

    prompts: list[list[int]]
    method: str
    arguments: dict[str, Any]
    n: int  # choices a prompt
    branch_count: int  # texts that the method of a choice writes side by side
    prompt_texts: list[str | None]  # of each prompt its text, where it was given as one

    @property
    def texts(self) -> int:
        return len(self.prompts) * self.branch_count


def translate_request(
    request: Request,
    lm: LM,
    tenant: str = "",
    seed: int | None = None,
    bounds: Bounds = UNBOUNDED,
    go_on: Callable[[], None] = lambda: None,
) -> Call:
    """Makes the call that a request asks for. Raises ApiError.

    `tenant`: who asks; `seed`: for a request without one (None: it is drawn at random); `go_on`:
    called between two prompts, and may raise.
    """
    _check_choices(request)
    texts, prompt_ids, kv = _encode_prompts(request, lm, go_on)
    wants_scores = (
        isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    )
    unscored = {"source": "reads the prompt in an encoder", "canvas": "fills canvases"}
    reasons = [reason for cap, reason in unscored.items() if cap in lm.models["target"].caps]
    if wants_scores and reasons:
        raise ApiError(
            f"echo: this model {reasons[0]}, which gives a prompt's tokens no log-probabilities; "
            "leave out echo, or logprobs",
            "echo",
            "unsupported_value",
        )
    _check_lengths(request, prompt_ids, bounds)
    n = request.n or 1
    arguments: dict[str, Any] = {}
    for argument, field in ARGUMENTS.items():
        value = getattr(request, field)
        if value is not None:
            arguments[argument] = value
    if arguments.get("top_k") == -1:  # vLLM's way to switch it off
        arguments["top_k"] = 0
    for name in ("bad_words", "stop", "stop_token_ids"):
        if isinstance(arguments.get(name), list):
            arguments[name] = tuple(arguments[name])  # a list would be one value a prompt
    if request.logit_bias:
        arguments["logit_bias"] = _parse_bias(request.logit_bias)
    arguments["logprobs"] = _logprob_count(request)
    first_seed = seed if request.seed is None else request.seed
    arguments["seed"] = [
        None if first_seed is None else first_seed + k for _ in prompt_ids for k in range(n)
    ]
    arguments["max_new_tokens"] = [
        _answer_limit(request, lm, ids, bounds, kv) for ids in prompt_ids for _ in range(n)
    ]
    arguments |= _answer_form(request) | _method_parts(request, bounds.tests)
    arguments |= _build_monitor(request, bounds)
    if kv is not None:
        arguments["kv"] = kv
    method = _choose_method(request, bounds.method, baseline_method(lm.models["target"]))
    strategy = _resolve_strategy(lm, method, arguments.get("reward"))
    if "temperature" not in arguments:
        arguments["temperature"] = TEMPERATURE if getattr(strategy, "draws", True) else 0.0
    branches = getattr(strategy, "most_texts", 1)
    answer_count = len(prompt_ids) * n
    if bounds.texts is not None and answer_count * branches > bounds.texts:
        raise ApiError(
            f"method: it writes {branches} texts side by side, and with {answer_count} answers "
            f"these are more than {bounds.texts}; ask for fewer",
            "method",
            "invalid_value",
        )
    if tenant:
        arguments["tenant"] = tenant
    if request.priority:
        arguments["priority"] = request.priority
    if request.trace:
        arguments["trace"] = True
    max_seconds = bounds.max_seconds(request)
    if max_seconds is not None:
        arguments["timeout"] = max_seconds
    prompts = [ids for ids in prompt_ids for _ in range(n)]
    return Call(prompts, method, arguments, n, branches, texts)


# --- prompts


def _check_choices(request: Request) -> None:
    """Raises ApiError for more answers than one request may have."""
    prompt_count = 1
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        has_many = not isinstance(request.prompt[0], int)
        prompt_count = len(request.prompt) if has_many else 1
    n = request.n or 1
    if prompt_count * n > MOST_CHOICES:
        field = "n" if prompt_count <= MOST_CHOICES else "prompt"
        raise ApiError(
            f"{field}: {prompt_count} prompts with {n} choices each are more than {MOST_CHOICES} "
            "answers; send several requests",
            field,
            "invalid_value",
        )


def _encode_prompts(
    request: Request, lm: LM, go_on: Callable[[], None]
) -> tuple[list[str | None], list[list[int]], Any]:
    """Returns each prompt's text, if it was one, and its token ids; then the policy that reads
    contexts, if there are some.
    """
    if isinstance(request, ChatRequest):
        chat_text = chat_prompt(request.messages, lm)
        ids, kv = _encode_prompt(lm, _add_contexts(request, chat_text), "messages", request.kv)
        return [None], [ids], kv
    assert isinstance(request, CompletionRequest)
    prompt: Any = request.prompt
    is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
    raw_prompts = [prompt] if is_single else prompt
    prompt_texts = [prompt if isinstance(prompt, str) else None for prompt in raw_prompts]
    encoded_prompts = []
    for raw_prompt in raw_prompts:
        go_on()
        encoded_prompts.append(
            _encode_prompt(lm, _add_contexts(request, raw_prompt), "prompt", request.kv)
        )
    return prompt_texts, [ids for ids, _ in encoded_prompts], encoded_prompts[0][1]


def _add_contexts(request: Request, prompt: Any) -> Any:
    """Returns the prompt after its contexts, where the request has some."""
    if request.contexts is None:
        return prompt
    return Contexts(request.contexts, prompt, request.prefix or "", request.expand or ())


def _encode_prompt(lm: LM, prompt: Any, field: str, spec: str | None) -> tuple[list[int], Any]:
    """Returns checked token ids, of which a fault is one of this field, and the policy that reads
    contexts. Raises ApiError.
    """
    target = lm.models["target"]
    try:
        if isinstance(prompt, Contexts):
            field = "contexts"
            if spec is not None:
                _refuse_files("kv", spec)  # before a policy reads any
        reads_source = "source" in target.caps  # whose length the encoder decides
        most = None if reads_source else target.context - 1
        ids, kv = lm.read_prompt(prompt, spec, most)
    except PromptTooLong as error:
        raise ApiError(f"{field}: {error}", field, "context_length_exceeded") from None
    except (BadConfig, BadModel) as error:  # a text without a tokenizer
        message = str(error).removeprefix(f"{field}: ")
        raise ApiError(f"{field}: {message}", field, "invalid_value") from None
    inputs = place_prompt(target, ids)[1]
    if inputs:
        return _check_source(target, inputs, ids, field), kv
    for token in ids:
        if token >= target.vocab:
            raise ApiError(
                f"{field}: token {token} is not in the vocabulary (0 to {target.vocab - 1})",
                field,
                "invalid_value",
            )
    prompt_length = len(ids) - _spared_tokens(kv, target, field if spec is None else "kv")
    if prompt_length >= target.context:
        raise ApiError(
            f"{field}: it has {prompt_length} tokens, and the model holds {target.context} with "
            "the answer; shorten it",
            field,
            "context_length_exceeded",
        )
    return ids, kv


def _spared_tokens(kv: Any, target: Any, field: str = "kv") -> int:
    """Counts the tokens of a prompt that take no positions of their own, under the policy that
    `_encode_prompts` returned.

    Raises ApiError, of this field, where the target cannot have such a policy.
    """
    try:
        return 0 if kv is None else int(kv.build_policy(target).spared)
    except ForetellError as error:
        refusal = of_ours(error)
        refusal.param = field
        raise refusal from None


def _check_source(target: Any, inputs: Mapping[str, Any], ids: list[int], field: str) -> list[int]:
    """Returns the ids, checked as a source. Raises ApiError."""
    try:
        target.check_source(inputs["source"])
    except PromptTooLong as error:
        raise ApiError(f"{field}: {error}", field, "context_length_exceeded") from None
    except BadConfig as error:
        raise ApiError(f"{field}: {error}", field, "invalid_value") from None
    return ids


# --- arguments


def _asked_limit(request: Request) -> int | None:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def _answer_limit(request: Request, lm: LM, ids: Sequence[int], bounds: Bounds, kv: Any) -> int:
    """Returns the tokens that an answer may have: as many as are asked for, within the context."""
    target = lm.models["target"]
    free_tokens = (
        target.context + _spared_tokens(kv, target) - len(place_prompt(target, list(ids))[0])
    )
    if bounds.answer_tokens is not None:
        free_tokens = min(free_tokens, bounds.answer_tokens)
    asked_tokens = _asked_limit(request)
    if asked_tokens is None and isinstance(request, CompletionRequest):
        asked_tokens = COMPLETION_TOKENS
    if asked_tokens is None and "canvas" in target.caps:  # all of it is computed in every forward
        asked_tokens = answer_tokens(target)
    return free_tokens if asked_tokens is None else min(asked_tokens, free_tokens)


def _check_lengths(request: Request, ids: Sequence[Sequence[int]], bounds: Bounds) -> None:
    """Raises ApiError for more tokens than the server grants."""
    max_prompt = bounds.prompt_tokens
    longest_prompt = max(map(len, ids))
    if max_prompt is not None and longest_prompt > max_prompt:
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise ApiError(
            f"{field}: it has {longest_prompt} tokens, and this server takes "
            f"{max_prompt}; shorten it",
            field,
            "context_length_exceeded",
        )
    asked_tokens = _asked_limit(request)
    max_answer = bounds.answer_tokens
    if max_answer is not None and asked_tokens is not None and asked_tokens > max_answer:
        field = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        raise ApiError(
            f"{field}: this server gives at most {max_answer} tokens", field, "invalid_value"
        )


def _logprob_count(request: Request) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def _parse_bias(bias_fields: dict[str, float]) -> dict[int, float]:
    token_bias = {}
    for token, number in bias_fields.items():
        if not (token.isascii() and token.isdecimal()) or len(token) > 16:
            raise ApiError(f"logit_bias: {token!r} is no token id", "logit_bias", "invalid_value")
        token_bias[int(token)] = number
    return token_bias


def _answer_form(request: Request) -> dict[str, Any]:
    """The form that the answer must have, as an argument of sampling."""
    form = request.response_format
    if form is not None and form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form is not None and form.json_schema is not None:
        return {"json_schema": form.json_schema.schema_}
    if request.structured_outputs is not None:
        return _structured_form(request.structured_outputs)
    return {}


def _structured_form(structured_outputs: StructuredOutputs) -> dict[str, Any]:
    if structured_outputs.json_ is not None:
        return {"json_schema": structured_outputs.json_}
    if structured_outputs.regex is not None:
        return {"regex": structured_outputs.regex}
    if structured_outputs.grammar is not None:
        return {"grammar": structured_outputs.grammar}
    return {"regex": "|".join(map(_escape_literally, structured_outputs.choice or ()))}


def _escape_literally(text: str) -> str:
    """Returns a regular expression that this text alone matches."""
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else c for c in text)


def _choose_method(request: Request, default_spec: str, plain_method: str) -> str:
    """Returns the method that is asked for; `plain_method`: without speculation. A method that
    reads files, or takes more than its share, is refused.
    """
    if request.speculation == "off":
        return plain_method
    if request.method is None:
        return "auto" if request.speculation == "on" and default_spec == "plain" else default_spec
    spec = request.method
    if spec != "auto":
        _refuse_files("method", spec)
        for _, name, value in iterate_fields(spec):
            if strip_parentheses(value).partition(":")[0] == TESTS:
                raise _refuse_value("method", f"{TESTS}: give it in the field `reward`")
            if _exceeds_limit(value, LARGEST_FIELD):
                raise _refuse_value("method", f"{name}={value}: at most {LARGEST_FIELD} over HTTP")
    return spec


def _resolve_strategy(lm: LM, method: str, reward: Any) -> Any:
    """Resolves a method's spec; None for one that is refused, which is told where the answer is
    made, and for `auto`, which is of the kind that speculates.
    """
    try:
        return None if method == "auto" else lm.resolve(method, reward)[1]
    except ForetellError:
        return None


def _method_parts(request: Request, tests_file: str) -> dict[str, Any]:
    """Collects the specs that go with the method: a source of rows, processors, a reward. They are
    checked here so that a fault is known by its field. Raises ApiError.
    """
    method_parts: dict[str, Any] = {}
    for field, build_part in (
        ("guidance", build_guidance),
        ("kv", build_cache_policy),
        ("processor", build_processors),
        ("reward", build_reward),
        ("budget", spending_of),
    ):
        spec = getattr(request, field)
        if spec is None:
            continue
        if field == "reward" and TESTS in {
            reward_part.partition(":")[0] for reward_part in split_methods(spec, field)
        }:
            method_parts[field] = _build_tests_reward(spec, tests_file)
            continue
        _refuse_files(field, spec)
        try:
            build_part(spec)
        except BadConfig as error:
            raise ApiError(f"{field}: {error}", field, "invalid_value") from None
        method_parts[field] = spec
    return method_parts


def _build_monitor(request: Request, bounds: Bounds) -> dict[str, Any]:
    """Builds a constraint that starts a program of the server, where it allows that: on a folder of
    its own choice. Raises ApiError.
    """
    spec = request.constraint
    if spec is None:
        return {}
    if bounds.monitor is None:
        raise _refuse_value(
            "constraint", "this server starts no programs: serve --monitor FOLDER does"
        )
    if spec.partition(":")[0] != "monitor":
        raise _refuse_value("constraint", "monitor is the only one")
    for _, name, _ in iterate_fields(spec):
        if name != "file":
            raise _refuse_value("constraint", f"{name}: over HTTP only file can be chosen")
    try:
        monitor: Any = build_constraint(spec)
    except BadConfig as error:
        raise ApiError(f"constraint: {error}", "constraint", "invalid_value") from None
    return {"constraint": dataclasses.replace(monitor, root=bounds.monitor)}


def _build_tests_reward(spec: str, tests_file: str) -> Reward:
    """Builds the reward that runs programs, by the tests of the server's file. Raises ApiError."""
    if len(split_methods(spec, "reward")) > 1:
        raise _refuse_value("reward", f"{TESTS}: over HTTP it goes with no other reward")
    given_fields = {name: value for _, name, value in iterate_fields(spec)}
    if not tests_file:
        reason = "it runs programs; start the server with --allow-tests FILE to have them tested"
        raise _refuse_value("reward", f"{TESTS}: {reason}")
    if given_fields.keys() - {"name"}:
        raise _refuse_value(
            "reward", f"{TESTS}: a client may give name alone, as in {TESTS}:name=a"
        )
    try:
        tests_reward: Reward = build_method(TESTS, "reward", {"path": tests_file, **given_fields})
    except BadConfig:  # which would tell where the file lies
        reason = f"there are no tests of the name {given_fields.get('name', '')!r}"
        raise ApiError(f"reward: {TESTS}: {reason}", "reward", "invalid_value") from None
    return tests_reward


def _refuse_files(field: str, spec: str) -> None:
    for _, name, value in iterate_fields(spec, "drafter" if field == "method" else field):
        value = strip_parentheses(value)
        names_file = value.startswith("@") if name in TEXTS else not {*"@/\\"}.isdisjoint(value)
        if names_file or name in NAME_FILES:
            raise _refuse_value(field, f"{name}: files of the server cannot be named")


def _exceeds_limit(text: str, upper_limit: float) -> bool:
    try:
        return abs(float(text)) > upper_limit
    except ValueError:
        return False


def _refuse_value(field: str, reason: str) -> ApiError:
    return ApiError(f"{field}: {reason}", field, "unsupported_value")
