"""Turns outputs of the engine into OpenAI's answers, whole ones and the chunks of streams."""

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
from foretell.serve.scoring import token_offsets

if TYPE_CHECKING:
    from foretell.api.outputs import Output, Piece
    from foretell.core.stats import Stats
    from foretell.serve.served import Served
    from foretell.serve.translate import Call

Entry = Mapping[str, Any]  # of Output.logprobs: token, logprob, top
BESIDE = (
    "kv",
    "guidance",
    "processor",
    "constraint",
)  # kinds of what changes a text beside its method
Scores = Sequence[Sequence[Entry]]  # of each prompt, from its second token on


@dataclass
class Spelling:
    """Finds which tokens of one answer its text holds: nothing after a stop string is told.

    `ends`: ids that end a text and are no part of it.
    """

    decode: Any
    ends: frozenset[int]
    sent_length: int = 0  # characters of the answer that were sent
    spelled: int = 0  # characters of all tokens so far
    waiting: list[tuple[int, int, Entry]] = field(default_factory=list)  # start, end, entry

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.decode)

    def push_entries(
        self, entries: Sequence[Entry], text: str, is_last: bool
    ) -> list[tuple[int, Entry]]:
        """Returns (place in the text, entry) of each token whose text, of `text`, is sent now."""
        self.sent_length += len(text)
        for entry in entries:
            token = entry["token"]
            token_text = "" if token in self.ends else self._detokenizer.push([token])
            self.waiting.append((self.spelled, self.spelled + len(token_text), entry))
            self.spelled += len(token_text)
        if is_last:
            self.spelled += len(self._detokenizer.push([], final=True))
        is_uncut = is_last and self.spelled <= self.sent_length  # no stop string cut it
        due_entries = []
        while self.waiting:
            token_start, token_end, entry = self.waiting[0]
            # A token that has no text of its own, since it is a part of a character, goes with the
            # one that completes it.
            is_visible = token_start < self.sent_length and (
                is_last or token_end <= self.sent_length
            )
            if not (is_uncut or is_visible):
                break
            due_entries.append((token_start, entry))
            self.waiting.pop(0)
        if is_last:
            self.waiting.clear()
        return due_entries


class Answer:
    """Writes one request's answer. It is made when the request is translated, so that it has one
    id.
    """

    kind = ""  # of a whole answer
    chunk_kind = ""
    prefix = ""  # of ids

    def __init__(self, served: Served, request: Request, call: Call):
        self.served = served
        self.request = request
        self.call = call
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        part_specs = {kind: getattr(request, kind) for kind in BESIDE} | {"kv": request.policy}
        method_reward = call.arguments.get("reward")
        self.method, self.guarantee = served.describe_method(call.method, method_reward, part_specs)
        end_tokens = () if request.ignore_eos else served.lm.engine.eos
        self.ends = frozenset((*end_tokens, *(request.stop_token_ids or ())))
        self._spellings: dict[int, Spelling] = {}
        self._finished: dict[int, Stats] = {}  # of each choice of a stream that is done

    # --- whole answers

    def full_answer(
        self, outputs: Sequence[Output], scores: Scores | None = None
    ) -> dict[str, Any]:
        """Makes the answer of the outputs of all choices. Raises ApiError where one of them failed.

        `scores`: log-probabilities of the prompts, for `echo` with `logprobs`.
        """
        choice_documents = []
        for index, output in enumerate(outputs):
            if output.error is not None:
                raise of_ours(output.error)
            choice_documents.append(self._make_choice(index, output, scores))
        stats = [output.stats for output in outputs]
        statistics_field = self.sum_statistics(stats)
        if any(len(output.samples) > 1 for output in outputs):
            statistics_field["samples"] = [
                list(map(_format_sample, output.samples)) for output in outputs
            ]
        return self._make_head(self.kind) | {
            "choices": choice_documents,
            "usage": self.count_usage(stats),
            "foretell": statistics_field,
        }

    def _make_head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    def _make_choice(self, index: int, output: Output, scores: Scores | None) -> dict[str, Any]:
        raise NotImplementedError

    def count_usage(self, stats: Sequence[Stats]) -> dict[str, int]:
        """Counts tokens: those of a prompt count once, however many choices it has."""
        prompt_tokens = sum(len(ids) for ids in self.call.prompts[:: self.call.n])
        completion_tokens = sum(output_stats.tokens for output_stats in stats)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def sum_statistics(self, stats: Sequence[Stats]) -> dict[str, Any]:
        """The field `foretell`: how the tokens came about, over all choices."""
        step_count = sum(output_stats.steps for output_stats in stats)
        paced_counts = [output_stats.paced for output_stats in stats]
        paced_tokens = sum(count for count, _ in paced_counts)
        counted_steps = sum(count for _, count in paced_counts)
        return {
            "method": self.method,
            "guarantee": self.guarantee,
            "steps": step_count,
            "drafted": sum(output_stats.drafted for output_stats in stats),
            "accepted": sum(output_stats.accepted for output_stats in stats),
            "tokens_per_step": round(paced_tokens / counted_steps, 3)
            if paced_tokens or step_count
            else 1.0,
            "forwards": sum(sum(output_stats.calls.values()) for output_stats in stats),
            "rows": sum(sum(output_stats.rows.values()) for output_stats in stats),
            "computed_by": self.served.computed_by,
        }

    # --- streams

    def make_chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Makes the chunk of a piece; None: it says nothing. Raises ApiError where its choice
        failed.
        """
        if piece.error is not None:
            raise of_ours(piece.error)
        if piece.stats is not None:
            self._finished[piece.prompt] = piece.stats
        choice_delta = self._make_delta(
            piece
        )  # which also notes the tokens of a piece without a text
        is_traced = self.request.trace and (piece.tokens or piece.length is not None)
        if not (piece.text or piece.finish_reason or is_traced):
            return None
        chunk = self._make_head(self.chunk_kind) | {"choices": [choice_delta]}
        if self.request.include_usage:
            chunk["usage"] = None
        statistics_field = self._trace_piece(piece) if self.request.trace else {}
        if piece.finish_reason and len(self._finished) == len(self.call.prompts):
            statistics_field |= self.sum_statistics(list(self._finished.values()))
        if statistics_field:
            chunk["foretell"] = statistics_field
        return chunk

    def _trace_piece(self, piece: Piece) -> dict[str, Any]:
        """Tells the source of each token of a piece and the tree of its step; where a text is
        filled out of order, also the tokens that follow the text for now.
        """
        tree_document = None
        if piece.step is not None and len(piece.step.tree) > 1:
            draft_tree = piece.step.tree
            tree_document = {
                "tokens": [self.served.token_text(token) for token in draft_tree.tokens],
                "parents": draft_tree.parents,
                "sources": draft_tree.sources,
                "accepted": piece.step.path,
            }
        trace_field: dict[str, Any] = {
            "parts": piece.parts,
            "sources": piece.draft,
            "tree": tree_document,
        }
        if piece.length is not None:
            trace_field["placed"] = [
                [position, None if token is None else self._visible_text(token)]
                for position, token in piece.placed
            ]
            trace_field["length"] = piece.length
        return trace_field

    def _visible_text(self, token: int) -> str:
        """A token's text; an end has none."""
        return "" if token in self.ends else self.served.token_text(token)

    def _make_delta(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def opening_chunks(self, scores: Scores | None = None) -> list[dict[str, Any]]:
        """The chunks that a stream begins with."""
        raise NotImplementedError

    def closing_chunks(self) -> list[dict[str, Any]]:
        """The chunks that a stream ends with: the usage, if it is asked for."""
        if not self.request.include_usage:
            return []
        usage = self.count_usage(list(self._finished.values()))
        return [self._make_head(self.chunk_kind) | {"choices": [], "usage": usage}]

    # --- log-probabilities

    def _due_entries(
        self, index: int, entries: Sequence[Entry], text: str, is_last: bool
    ) -> list[tuple[int, Entry]]:
        spelling = self._spellings.get(index)
        if spelling is None:
            spelling = Spelling(self.served.lm.decode, self.ends)
            self._spellings[index] = spelling
        return spelling.push_entries(entries, text, is_last)

    def _best_tokens(self, entry: Entry) -> dict[str, float]:
        """The log-probabilities of the best tokens by their texts, the chosen one with them."""
        best_tokens: dict[str, float] = {}
        for token_entry in [*entry["top"], entry]:
            best_tokens.setdefault(
                self.served.token_text(token_entry["token"]), token_entry["logprob"]
            )
        return best_tokens


class Completion(Answer):
    """Answers of `/v1/completions`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"
    request: CompletionRequest

    def _make_choice(self, index: int, output: Output, scores: Scores | None) -> dict[str, Any]:
        echoed_text = self._echoed_text(index)
        logprobs = None
        if output.logprobs is not None:
            due_entries = self._due_entries(index, output.logprobs, output.text, True)
            logprobs = self._format_logprobs(index, due_entries, len(echoed_text), scores)
        return {
            "index": index,
            "text": echoed_text + output.text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _echoed_text(self, index: int) -> str:
        if not self.request.echo:
            return ""
        prompt_index = index // self.call.n
        text = self.call.prompt_texts[prompt_index]
        return self.served.lm.decode(self.call.prompts[index]) if text is None else text

    def _echoed_offsets(self, index: int) -> list[int]:
        """Finds where each token of a prompt begins in what is echoed of it."""
        prompt_ids, lm = self.call.prompts[index], self.served.lm
        text = self.call.prompt_texts[index // self.call.n]
        if text is None:  # it is what is decoded, without special tokens
            detokenizer = Detokenizer(lm.decode)
            ends = accumulate(len(detokenizer.push([token])) for token in prompt_ids)
            return [0, *ends][: len(prompt_ids)]
        text_ids = lm.encode(text, special=False)
        extra_positions = range(len(prompt_ids) - len(text_ids) + 1)
        prefix_length = next(
            (n for n in extra_positions if prompt_ids[n : n + len(text_ids)] == text_ids), 0
        )  # put before it
        token_bytes = [
            (self.served.token_bytes(token), self.served.is_special(token)) for token in prompt_ids
        ]
        return [0] * prefix_length + token_offsets(text, token_bytes[prefix_length:])

    def _format_logprobs(
        self,
        index: int,
        due_entries: Sequence[tuple[int, Entry]],
        answer_start: int,
        scores: Scores | None,
    ) -> dict[str, Any]:
        """Formats the tokens that are due; `answer_start`: characters of the text before the
        answer.
        """
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        best_tokens: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if scores is not None:
            ids = self.call.prompts[index]
            for token, entry in zip(ids, [None, *scores[index // self.call.n]], strict=True):
                tokens.append(self.served.token_text(token))
                token_logprobs.append(None if entry is None else entry["logprob"])
                best_tokens.append(None if entry is None else self._best_tokens(entry))
            offsets += self._echoed_offsets(index)
        for text_position, entry in due_entries:
            tokens.append(self.served.token_text(entry["token"]))
            token_logprobs.append(entry["logprob"])
            best_tokens.append(self._best_tokens(entry))
            offsets.append(answer_start + text_position)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": best_tokens,
            "text_offset": offsets,
        }

    def _make_delta(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            is_last = piece.finish_reason is not None
            due_entries = self._due_entries(piece.prompt, piece.logprobs or [], piece.text, is_last)
            logprobs = self._format_logprobs(
                piece.prompt, due_entries, len(self._echoed_text(piece.prompt)), None
            )
        return {
            "index": piece.prompt,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }

    def opening_chunks(self, scores: Scores | None = None) -> list[dict[str, Any]]:
        """Prompts of the choices, with `echo`."""
        chunks = []
        for index in range(len(self.call.prompts)) if self.request.echo else ():
            logprobs = None
            if scores is not None:
                logprobs = self._format_logprobs(index, [], 0, scores)
            choice = {
                "index": index,
                "text": self._echoed_text(index),
                "logprobs": logprobs,
                "finish_reason": None,
            }
            chunks.append(self._make_head(self.chunk_kind) | {"choices": [choice]})
        return chunks


class Chat(Answer):
    """Answers of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    request: ChatRequest

    def _make_choice(self, index: int, output: Output, scores: Scores | None) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._format_logprobs(
                self._due_entries(index, output.logprobs, output.text, True)
            )
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _format_logprobs(self, due_entries: Sequence[tuple[int, Entry]]) -> dict[str, Any]:
        content_entries = []
        for _, entry in due_entries:
            if entry["token"] in self.ends:
                continue  # it is no part of what was said
            content_entries.append(
                self._format_token(entry)
                | {"top_logprobs": list(map(self._format_token, entry["top"]))}
            )
        return {"content": content_entries, "refusal": None}

    def _format_token(self, entry: Entry) -> dict[str, Any]:
        token_bytes = self.served.token_bytes(entry["token"])
        return {
            "token": token_bytes.decode("utf-8", errors="replace"),
            "logprob": entry["logprob"],
            "bytes": list(token_bytes),
        }

    def opening_chunks(self, scores: Scores | None = None) -> list[dict[str, Any]]:
        """The role of the speaker, for each choice."""
        chunks = []
        for index in range(len(self.call.prompts)):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(self._make_head(self.chunk_kind) | {"choices": [choice]})
        return chunks

    def _make_delta(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            is_last = piece.finish_reason is not None
            due_entries = self._due_entries(piece.prompt, piece.logprobs or [], piece.text, is_last)
            logprobs = self._format_logprobs(due_entries)
        return {
            "index": piece.prompt,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }


def _format_sample(output: Output) -> dict[str, Any]:
    """Formats one of the texts that a method found, the answer among them."""
    return {"text": output.text, "finish_reason": output.finish_reason, "score": output.score}


def answer_for(served: Served, request: Request, call: Call) -> Answer:
    """Makes the writer of a request's answer."""
    if isinstance(request, ChatRequest):
        return Chat(served, request, call)
    return Completion(served, request, call)
