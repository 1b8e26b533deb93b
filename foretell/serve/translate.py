"""From a request over HTTP to a call of `LM.generate`, and nothing is lost on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.api.contexts import Contexts
from foretell.api.defaults import answer_tokens, baseline
from foretell.api.prompts import placed
from foretell.core.spending import spending_of
from foretell.errors import BadConfig, BadModel, ForetellError, PromptTooLong
from foretell.serve.chats import chat_prompt
from foretell.serve.errors import ARGUMENTS, ApiError, of_ours
from foretell.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    Request,
    StructuredOutputs,
)
from foretell.spec import (
    build,
    constraint_of,
    given,
    kv_of,
    pieces,
    reward_of,
    source_of,
    unwrapped,
    warpers_of,
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
    """What a server grants. None: no bound of its own."""

    method: str = "auto"  # of requests that name none
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    timeout: float | None = None  # seconds
    monitor: str | None = None  # the folder that language servers may be asked about
    tests: str = ""  # file of the tests by which programs may be rewarded; "": none are run
    texts: int | None = MOST_CHOICES  # that are written side by side for one request

    def seconds(self, request: Request) -> float | None:
        """That a request may take; None: any number."""
        given = [one for one in (request.timeout, self.timeout) if one is not None]
        return min(given, default=None)


UNBOUNDED = Bounds(texts=None)


@dataclass
class Call:
    """What to call `LM.generate`, `agenerate`, `stream` or `astream` with.

    `prompts`: token ids of each choice, the n of one prompt side by side; in `arguments` a list has
    a value for each choice.
    """

    prompts: list[list[int]]
    method: str
    arguments: dict[str, Any]
    n: int  # choices a prompt
    each: int  # texts that the method of a choice writes side by side
    asked: list[str | None]  # of each prompt its text, where it was given as one

    @property
    def texts(self) -> int:
        return len(self.prompts) * self.each


def translate(
    request: Request,
    lm: LM,
    tenant: str = "",
    seed: int | None = None,
    bounds: Bounds = UNBOUNDED,
    go_on: Callable[[], None] = lambda: None,
) -> Call:
    """The call that a request asks for. Raises ApiError.

    `tenant`: who asks; `seed`: for a request without one (None: it is drawn at random); `go_on`:
    called between two prompts, and may raise.
    """
    _check_choices(request)
    texts, ids, kv = _prompts(request, lm, go_on)
    scored = (
        isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None
    )
    unscored = {"source": "reads the prompt in an encoder", "canvas": "fills canvases"}
    reads = [how for cap, how in unscored.items() if cap in lm.models["target"].caps]
    if scored and reads:
        raise ApiError(
            f"echo: this model {reads[0]}, which gives a prompt's tokens no log-probabilities; "
            "leave out echo, or logprobs",
            "echo",
            "unsupported_value",
        )
    _check_lengths(request, ids, bounds)
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
        arguments["logit_bias"] = _bias(request.logit_bias)
    arguments["logprobs"] = _logprobs(request)
    first = seed if request.seed is None else request.seed
    arguments["seed"] = [None if first is None else first + k for _ in ids for k in range(n)]
    arguments["max_new_tokens"] = [
        _limit(request, lm, one, bounds, kv) for one in ids for _ in range(n)
    ]
    arguments |= _form(request) | _beside(request, bounds.tests) | _constraint(request, bounds)
    if kv is not None:
        arguments["kv"] = kv
    method = _method(request, bounds.method, baseline(lm.models["target"]))
    strategy = _strategy(lm, method, arguments.get("reward"))
    if "temperature" not in arguments:
        arguments["temperature"] = TEMPERATURE if getattr(strategy, "draws", True) else 0.0
    branches = getattr(strategy, "most_texts", 1)
    if bounds.texts is not None and len(ids) * n * branches > bounds.texts:
        raise ApiError(
            f"method: it writes {branches} texts side by side, and with {len(ids) * n} answers "
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
    seconds = bounds.seconds(request)
    if seconds is not None:
        arguments["timeout"] = seconds
    prompts = [one for one in ids for _ in range(n)]
    return Call(prompts, method, arguments, n, branches, texts)


# --- prompts


def _check_choices(request: Request) -> None:
    """Raises ApiError for more answers than one request may have."""
    prompts = 1
    if isinstance(request, CompletionRequest) and not isinstance(request.prompt, str):
        many = not isinstance(request.prompt[0], int)
        prompts = len(request.prompt) if many else 1
    n = request.n or 1
    if prompts * n > MOST_CHOICES:
        field = "n" if prompts <= MOST_CHOICES else "prompt"
        raise ApiError(
            f"{field}: {prompts} prompts with {n} choices each are more than {MOST_CHOICES} "
            "answers; send several requests",
            field,
            "invalid_value",
        )


def _prompts(
    request: Request, lm: LM, go_on: Callable[[], None]
) -> tuple[list[str | None], list[list[int]], Any]:
    """Of each prompt its text, if it was one, and its token ids; the policy that reads contexts, if
    there are some.
    """
    if isinstance(request, ChatRequest):
        chat = chat_prompt(request.messages, lm)
        ids, kv = _encoded(lm, _behind(request, chat), "messages", request.kv)
        return [None], [ids], kv
    assert isinstance(request, CompletionRequest)
    prompt: Any = request.prompt
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    many = [prompt] if single else prompt
    texts = [one if isinstance(one, str) else None for one in many]
    encoded = []
    for one in many:
        go_on()
        encoded.append(_encoded(lm, _behind(request, one), "prompt", request.kv))
    return texts, [ids for ids, _ in encoded], encoded[0][1]


def _behind(request: Request, prompt: Any) -> Any:
    """What is asked, behind its contexts where it has some."""
    if request.contexts is None:
        return prompt
    return Contexts(request.contexts, prompt, request.prefix or "", request.expand or ())


def _encoded(lm: LM, prompt: Any, field: str, spec: str | None) -> tuple[list[int], Any]:
    """Token ids, checked: a fault is of this field. Beside them the policy that reads contexts.
    Raises ApiError.
    """
    target = lm.models["target"]
    kv = None
    try:
        if isinstance(prompt, Contexts):
            field = "contexts"
            if spec is not None:
                _refuse_files("kv", spec)  # before a policy reads any
            ids, kv = lm.read_apart(prompt, spec)
        else:
            reads = "source" in target.caps  # whose length the encoder decides
            ids = lm.prompt_ids(prompt, None if reads else target.context - 1)
    except PromptTooLong as error:
        raise ApiError(f"{field}: {error}", field, "context_length_exceeded") from None
    except (BadConfig, BadModel) as error:  # a text without a tokenizer
        message = str(error).removeprefix(f"{field}: ")
        raise ApiError(f"{field}: {message}", field, "invalid_value") from None
    inputs = placed(target, ids)[1]
    if inputs:
        return _source(target, inputs, ids, field), kv
    for token in ids:
        if token >= target.vocab:
            raise ApiError(
                f"{field}: token {token} is not in the vocabulary (0 to {target.vocab - 1})",
                field,
                "invalid_value",
            )
    length = len(ids) - _spared(kv, target, field if spec is None else "kv")
    if length >= target.context:
        raise ApiError(
            f"{field}: it has {length} tokens, and the model holds {target.context} with the "
            "answer; shorten it",
            field,
            "context_length_exceeded",
        )
    return ids, kv


def _spared(kv: Any, target: Any, field: str = "kv") -> int:
    """Tokens of a prompt that take no positions of their own, under what `_prompts` returned.

    Raises ApiError, of this field, where the target cannot have such a policy.
    """
    try:
        return 0 if kv is None else int(kv.policy(target).spared)
    except ForetellError as error:
        refusal = of_ours(error)
        refusal.param = field
        raise refusal from None


def _source(target: Any, inputs: Mapping[str, Any], ids: list[int], field: str) -> list[int]:
    """The same ids, checked as a source. Raises ApiError."""
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


def _limit(request: Request, lm: LM, ids: Sequence[int], bounds: Bounds, kv: Any) -> int:
    """Tokens of an answer at most: what is asked, and what the context holds."""
    target = lm.models["target"]
    room = target.context + _spared(kv, target) - len(placed(target, list(ids))[0])
    if bounds.answer_tokens is not None:
        room = min(room, bounds.answer_tokens)
    given = _asked_limit(request)
    if given is None and isinstance(request, CompletionRequest):
        given = COMPLETION_TOKENS
    if given is None and "canvas" in target.caps:  # all of it is computed in every forward
        given = answer_tokens(target)
    return room if given is None else min(given, room)


def _check_lengths(request: Request, ids: Sequence[Sequence[int]], bounds: Bounds) -> None:
    """Raises ApiError for more tokens than the server grants."""
    most = bounds.prompt_tokens
    longest = max(map(len, ids))
    if most is not None and longest > most:
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise ApiError(
            f"{field}: it has {longest} tokens, and this server takes {most}; shorten it",
            field,
            "context_length_exceeded",
        )
    given = _asked_limit(request)
    if bounds.answer_tokens is not None and given is not None and given > bounds.answer_tokens:
        field = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        raise ApiError(
            f"{field}: this server gives at most {bounds.answer_tokens} tokens",
            field,
            "invalid_value",
        )


def _logprobs(request: Request) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    assert isinstance(request, CompletionRequest)
    return request.logprobs


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for token, number in given.items():
        if not (token.isascii() and token.isdecimal()) or len(token) > 16:
            raise ApiError(f"logit_bias: {token!r} is no token id", "logit_bias", "invalid_value")
        bias[int(token)] = number
    return bias


def _form(request: Request) -> dict[str, Any]:
    """The form that the answer must have, as an argument of sampling."""
    form = request.response_format
    if form is not None and form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form is not None and form.json_schema is not None:
        return {"json_schema": form.json_schema.schema_}
    if request.structured_outputs is not None:
        return _structured(request.structured_outputs)
    return {}


def _structured(wanted: StructuredOutputs) -> dict[str, Any]:
    if wanted.json_ is not None:
        return {"json_schema": wanted.json_}
    if wanted.regex is not None:
        return {"regex": wanted.regex}
    if wanted.grammar is not None:
        return {"grammar": wanted.grammar}
    return {"regex": "|".join(map(_literally, wanted.choice or ()))}


def _literally(text: str) -> str:
    """A regular expression that this text alone matches."""
    return "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else c for c in text)


def _method(request: Request, default: str, plain: str) -> str:
    """The method that is asked for; `plain`: without speculation. What reads files, or takes more
    than its share, is refused.
    """
    if request.speculation == "off":
        return plain
    if request.method is None:
        return "auto" if request.speculation == "on" and default == "plain" else default
    spec = request.method
    if spec != "auto":
        _refuse_files("method", spec)
        for _, name, value in given(spec):
            if unwrapped(value).partition(":")[0] == TESTS:
                raise _refused("method", f"{TESTS}: give it in the field `reward`")
            if _above(value, LARGEST_FIELD):
                raise _refused("method", f"{name}={value}: at most {LARGEST_FIELD} over HTTP")
    return spec


def _strategy(lm: LM, method: str, reward: Any) -> Any:
    """That of a method's spec; None for one that is refused, which is told where the answer is
    made, and for `auto`, which is of the kind that speculates.
    """
    try:
        return None if method == "auto" else lm.resolve(method, reward)[1]
    except ForetellError:
        return None


def _beside(request: Request, tests: str) -> dict[str, Any]:
    """What goes with the method: a source of rows, warpers, a reward, by their specs, which are
    checked here so that a fault is known by its field. Raises ApiError.
    """
    found: dict[str, Any] = {}
    for field, made in (
        ("rows", source_of),
        ("kv", kv_of),
        ("warp", warpers_of),
        ("reward", reward_of),
        ("budget", spending_of),
    ):
        spec = getattr(request, field)
        if spec is None:
            continue
        if field == "reward" and TESTS in {one.partition(":")[0] for one in pieces(spec, field)}:
            found[field] = _tested(spec, tests)
            continue
        _refuse_files(field, spec)
        try:
            made(spec)
        except BadConfig as error:
            raise ApiError(f"{field}: {error}", field, "invalid_value") from None
        found[field] = spec
    return found


def _constraint(request: Request, bounds: Bounds) -> dict[str, Any]:
    """A constraint that starts a program of the server, where it allows that: on a folder of its
    own choice. Raises ApiError.
    """
    spec = request.constraint
    if spec is None:
        return {}
    if bounds.monitor is None:
        raise _refused("constraint", "this server starts no programs: serve --monitor FOLDER does")
    if spec.partition(":")[0] != "monitor":
        raise _refused("constraint", "monitor is the only one")
    for _, name, _ in given(spec):
        if name != "file":
            raise _refused("constraint", f"{name}: over HTTP only file can be chosen")
    try:
        made: Any = constraint_of(spec)
    except BadConfig as error:
        raise ApiError(f"constraint: {error}", "constraint", "invalid_value") from None
    return {"constraint": dataclasses.replace(made, root=bounds.monitor)}


def _tested(spec: str, file: str) -> Reward:
    """The reward that runs programs, by the tests of the server's own file. Raises ApiError."""
    if len(pieces(spec, "reward")) > 1:
        raise _refused("reward", f"{TESTS}: over HTTP it goes with no other reward")
    fields = {name: value for _, name, value in given(spec)}
    if not file:
        why = "it runs programs; start the server with --allow-tests FILE to have them tested"
        raise _refused("reward", f"{TESTS}: {why}")
    if fields.keys() - {"name"}:
        raise _refused("reward", f"{TESTS}: a client may give name alone, as in {TESTS}:name=a")
    try:
        made: Reward = build(TESTS, "reward", {"path": file, **fields})
    except BadConfig:  # which would tell where the file lies
        why = f"there are no tests of the name {fields.get('name', '')!r}"
        raise ApiError(f"reward: {TESTS}: {why}", "reward", "invalid_value") from None
    return made


def _refuse_files(field: str, spec: str) -> None:
    for _, name, value in given(spec, "drafter" if field == "method" else field):
        value = unwrapped(value)
        named = value.startswith("@") if name in TEXTS else not {*"@/\\"}.isdisjoint(value)
        if named or name in NAME_FILES:
            raise _refused(field, f"{name}: files of the server cannot be named")


def _above(text: str, most: float) -> bool:
    try:
        return abs(float(text)) > most
    except ValueError:
        return False


def _refused(field: str, why: str) -> ApiError:
    return ApiError(f"{field}: {why}", field, "unsupported_value")
