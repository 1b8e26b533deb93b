"""Outputs of the engine to OpenAI's answers, whole ones and the chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from foretell.core.text import Detokenizer
from foretell.serve.errors import of_ours
from foretell.serve.schemas import ChatRequest, CompletionRequest, Request
from foretell.serve.scoring import places

if TYPE_CHECKING:
    from foretell.api.outputs import Output, Piece
    from foretell.core.stats import Stats
    from foretell.serve.served import Served
    from foretell.serve.translate import Call

Entry = Mapping[str, Any]  # of Output.logprobs: token, logprob, top
BESIDE = ("kv", "rows", "warp", "constraint")  # kinds of what changes a text beside its method
Scores = Sequence[Sequence[Entry]]  # of each prompt, from its second token on


@dataclass
class Spelling:
    """Which tokens of one answer its text holds: nothing behind a stop string is told.

    `ends`: ids that end a text and are no part of it.
    """

    decode: Any
    ends: frozenset[int]
    written: int = 0  # characters of the answer that were sent
    spelled: int = 0  # characters of all tokens so far
    waiting: list[tuple[int, int, Entry]] = field(default_factory=list)  # start, end, entry

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.decode)

    def push(self, entries: Sequence[Entry], text: str, done: bool) -> list[tuple[int, Entry]]:
        """(place in the text, entry) of each token whose text is sent now; `text`: what is."""
        self.written += len(text)
        for entry in entries:
            token = entry["token"]
            said = "" if token in self.ends else self._detokenizer.push([token])
            self.waiting.append((self.spelled, self.spelled + len(said), entry))
            self.spelled += len(said)
        if done:
            self.spelled += len(self._detokenizer.push([], final=True))
        whole = done and self.spelled <= self.written  # no stop string cut it
        due = []
        while self.waiting:
            start, end, entry = self.waiting[0]
            # A token that has no text of its own, since it is a part of a character, goes with the
            # one that completes it.
            shown = start < self.written and (done or end <= self.written)
            if not (whole or shown):
                break
            due.append((start, entry))
            self.waiting.pop(0)
        if done:
            self.waiting.clear()
        return due


class Answer:
    """Writes one request's answer. Made when the request is translated, so that it has one id."""

    kind = ""  # of a whole answer
    chunk_kind = ""
    prefix = ""  # of ids

    def __init__(self, served: Served, request: Request, call: Call):
        self.served = served
        self.request = request
        self.call = call
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        beside = {kind: getattr(request, kind) for kind in BESIDE} | {"kv": request.policy}
        reward = call.arguments.get("reward")
        self.method, self.guarantee = served.about(call.method, reward, beside)
        ends = () if request.ignore_eos else served.lm.engine.eos
        self.ends = frozenset((*ends, *(request.stop_token_ids or ())))
        self._spellings: dict[int, Spelling] = {}
        self._finished: dict[int, Stats] = {}  # of each choice of a stream that is done

    # --- whole answers

    def whole(self, outputs: Sequence[Output], scores: Scores | None = None) -> dict[str, Any]:
        """The answer of the outputs of all choices. Raises ApiError where one of them failed.

        `scores`: log-probabilities of the prompts, for `echo` with `logprobs`.
        """
        choices = []
        for index, output in enumerate(outputs):
            if output.error is not None:
                raise of_ours(output.error)
            choices.append(self._choice(index, output, scores))
        stats = [output.stats for output in outputs]
        about = self.numbers(stats)
        if any(len(output.samples) > 1 for output in outputs):
            about["samples"] = [list(map(_sample, output.samples)) for output in outputs]
        return self._head(self.kind) | {
            "choices": choices,
            "usage": self.usage(stats),
            "foretell": about,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.name,
        }

    def _choice(self, index: int, output: Output, scores: Scores | None) -> dict[str, Any]:
        raise NotImplementedError

    def usage(self, stats: Sequence[Stats]) -> dict[str, int]:
        """Tokens: those of a prompt count once, however many choices it has."""
        prompt = sum(len(ids) for ids in self.call.prompts[:: self.call.n])
        completion = sum(one.tokens for one in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def numbers(self, stats: Sequence[Stats]) -> dict[str, Any]:
        """The field `foretell`: how the tokens came about, over all choices."""
        steps = sum(one.steps for one in stats)
        paced = [one.paced for one in stats]
        tokens = sum(count for count, _ in paced)
        counted = sum(count for _, count in paced)
        return {
            "method": self.method,
            "guarantee": self.guarantee,
            "steps": steps,
            "drafted": sum(one.drafted for one in stats),
            "accepted": sum(one.accepted for one in stats),
            "tokens_per_step": round(tokens / counted, 3) if tokens or steps else 1.0,
            "forwards": sum(sum(one.calls.values()) for one in stats),
            "rows": sum(sum(one.rows.values()) for one in stats),
            "computed_by": self.served.computed_by,
        }

    # --- streams

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None: it says nothing. Raises ApiError where its choice failed."""
        if piece.error is not None:
            raise of_ours(piece.error)
        if piece.stats is not None:
            self._finished[piece.prompt] = piece.stats
        delta = self._delta(piece)  # which also notes the tokens of a piece without a text
        traced = self.request.trace and (piece.tokens or piece.length is not None)
        if not (piece.text or piece.finish_reason or traced):
            return None
        chunk = self._head(self.chunk_kind) | {"choices": [delta]}
        if self.request.include_usage:
            chunk["usage"] = None
        about = self._trace(piece) if self.request.trace else {}
        if piece.finish_reason and len(self._finished) == len(self.call.prompts):
            about |= self.numbers(list(self._finished.values()))
        if about:
            chunk["foretell"] = about
        return chunk

    def _trace(self, piece: Piece) -> dict[str, Any]:
        """Who proposed each token of a piece, and the tree of its step; what stands behind the text
        for now, where that is filled out of order.
        """
        tree = None
        if piece.step is not None and len(piece.step.tree) > 1:
            drafted = piece.step.tree
            tree = {
                "tokens": [self.served.token_text(token) for token in drafted.tokens],
                "parents": drafted.parents,
                "sources": drafted.sources,
                "accepted": piece.step.path,
            }
        about: dict[str, Any] = {"parts": piece.parts, "sources": piece.draft, "tree": tree}
        if piece.length is not None:
            about["placed"] = [
                [place, None if token is None else self._shown(token)]
                for place, token in piece.placed
            ]
            about["length"] = piece.length
        return about

    def _shown(self, token: int) -> str:
        """A token's text; an end has none."""
        return "" if token in self.ends else self.served.token_text(token)

    def _delta(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, scores: Scores | None = None) -> list[dict[str, Any]]:
        """What a stream begins with."""
        raise NotImplementedError

    def closing(self) -> list[dict[str, Any]]:
        """What a stream ends with: the usage, if it is asked for."""
        if not self.request.include_usage:
            return []
        usage = self.usage(list(self._finished.values()))
        return [self._head(self.chunk_kind) | {"choices": [], "usage": usage}]

    # --- log-probabilities

    def _due(
        self, index: int, entries: Sequence[Entry], text: str, done: bool
    ) -> list[tuple[int, Entry]]:
        spelling = self._spellings.get(index)
        if spelling is None:
            spelling = Spelling(self.served.lm.decode, self.ends)
            self._spellings[index] = spelling
        return spelling.push(entries, text, done)

    def _best(self, entry: Entry) -> dict[str, float]:
        """The best tokens by their texts, the chosen one with them."""
        best: dict[str, float] = {}
        for one in [*entry["top"], entry]:
            best.setdefault(self.served.token_text(one["token"]), one["logprob"])
        return best


class Completion(Answer):
    """Of `/v1/completions`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    request: CompletionRequest

    def _choice(self, index: int, output: Output, scores: Scores | None) -> dict[str, Any]:
        echoed = self._echoed(index)
        logprobs = None
        if output.logprobs is not None:
            due = self._due(index, output.logprobs, output.text, True)
            logprobs = self._logprobs(index, due, len(echoed), scores)
        return {
            "index": index,
            "text": echoed + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _echoed(self, index: int) -> str:
        if not self.request.echo:
            return ""
        prompt = index // self.call.n
        text = self.call.asked[prompt]
        return self.served.lm.decode(self.call.prompts[index]) if text is None else text

    def _echoed_places(self, index: int) -> list[int]:
        """Where each token of a prompt begins in what is echoed of it."""
        ids, lm = self.call.prompts[index], self.served.lm
        text = self.call.asked[index // self.call.n]
        if text is None:  # it is what is decoded, without special tokens
            detokenizer = Detokenizer(lm.decode)
            ends = accumulate(len(detokenizer.push([token])) for token in ids)
            return [0, *ends][: len(ids)]
        own = lm.encode(text, special=False)
        spare = range(len(ids) - len(own) + 1)
        before = next((n for n in spare if ids[n : n + len(own)] == own), 0)  # put before it
        known = [(self.served.token_bytes(token), self.served.is_special(token)) for token in ids]
        return [0] * before + places(text, known[before:])

    def _logprobs(
        self,
        index: int,
        due: Sequence[tuple[int, Entry]],
        start: int,
        scores: Scores | None,
    ) -> dict[str, Any]:
        """`start`: characters of the text before the answer."""
        tokens: list[str] = []
        values: list[float | None] = []
        best: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if scores is not None:
            ids = self.call.prompts[index]
            for token, entry in zip(ids, [None, *scores[index // self.call.n]], strict=True):
                tokens.append(self.served.token_text(token))
                values.append(None if entry is None else entry["logprob"])
                best.append(None if entry is None else self._best(entry))
            offsets += self._echoed_places(index)
        for place, entry in due:
            tokens.append(self.served.token_text(entry["token"]))
            values.append(entry["logprob"])
            best.append(self._best(entry))
            offsets.append(start + place)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": best,
            "text_offset": offsets,
        }

    def _delta(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            done = piece.finish_reason is not None
            due = self._due(piece.prompt, piece.logprobs or [], piece.text, done)
            logprobs = self._logprobs(piece.prompt, due, len(self._echoed(piece.prompt)), None)
        return {
            "index": piece.prompt,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def opening(self, scores: Scores | None = None) -> list[dict[str, Any]]:
        """With `echo`: of each choice its prompt."""
        chunks = []
        for index in range(len(self.call.prompts)) if self.request.echo else ():
            logprobs = None
            if scores is not None:
                logprobs = self._logprobs(index, [], 0, scores)
            choice = {
                "index": index,
                "text": self._echoed(index),
                "logprobs": logprobs,
                "finish_reason": None,
            }
            chunks.append(self._head(self.chunk_kind) | {"choices": [choice]})
        return chunks


class Chat(Answer):
    """Of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    request: ChatRequest

    def _choice(self, index: int, output: Output, scores: Scores | None) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._logprobs(self._due(index, output.logprobs, output.text, True))
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _logprobs(self, due: Sequence[tuple[int, Entry]]) -> dict[str, Any]:
        content = []
        for _, entry in due:
            if entry["token"] in self.ends:
                continue  # it is no part of what was said
            content.append(
                self._token(entry) | {"top_logprobs": list(map(self._token, entry["top"]))}
            )
        return {"content": content, "refusal": None}

    def _token(self, entry: Entry) -> dict[str, Any]:
        said = self.served.token_bytes(entry["token"])
        return {
            "token": said.decode("utf-8", errors="replace"),
            "logprob": entry["logprob"],
            "bytes": list(said),
        }

    def opening(self, scores: Scores | None = None) -> list[dict[str, Any]]:
        """Of each choice who speaks."""
        chunks = []
        for index in range(len(self.call.prompts)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(self._head(self.chunk_kind) | {"choices": [choice]})
        return chunks

    def _delta(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            done = piece.finish_reason is not None
            due = self._due(piece.prompt, piece.logprobs or [], piece.text, done)
            logprobs = self._logprobs(due)
        return {
            "index": piece.prompt,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


def _sample(output: Output) -> dict[str, Any]:
    """One of the texts that a method found, the answer among them."""
    return {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "score": output.score,
    }


def answer_for(served: Served, request: Request, call: Call) -> Answer:
    """Who writes the answer of a request."""
    if isinstance(request, ChatRequest):
        return Chat(served, request, call)
    return Completion(served, request, call)
