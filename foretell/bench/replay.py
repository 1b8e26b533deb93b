"""Scores drafters on recorded outputs: how many tokens a step each would have given, with no model
run.

At temperature 0 what a copying drafter gains depends on the text alone. So the engine and the
drafters run as they do when serving, against a `Recording` in place of the model: every step
verifies a draft against what was really said. A recording has no logits and no forward cost:
drafters that learn from logits or ask a draft model are refused, and the size of a draft is a given
number of nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

import foretell
from foretell.bench.recordings import Document
from foretell.bench.report.plot import bar_chart
from foretell.core.drafter import Drafter
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.spec import resolve_method
from foretell.speculation.strategy import Speculative, Strategy
from foretell.testing.recording import Recording

SHOWN = 4  # turns that tables and plots show; later ones are added to the last of them
MOST_NODES = 1024
NEEDS = {
    "rows": "the model's logits",
    "layers": "the model's hidden states",
    "parts": "the model's hidden states",
}
CURE = "name methods that work on text alone, such as ngram"
Method = str | Drafter | Strategy


@dataclass
class Tally:
    """Sums over recorded tokens. A step is a forward of the model that committed tokens."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        """All tokens over all steps; plain decoding is 1."""
        return self.tokens / self.steps if self.steps else 1.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"tokens_per_step": self.tokens_per_step}


@dataclass
class Row:
    """Results of a method. `turns[i]`: the answers that were number i + 1 of their document."""

    method: str
    turns: list[Tally] = field(default_factory=list)

    @property
    def total(self) -> Tally:
        return sum(self.turns, Tally())

    def to_dict(self) -> dict[str, Any]:
        turns = [
            {"turn": turn_number, **turn.to_dict()}
            for turn_number, turn in enumerate(self.turns, 1)
        ]
        return {"method": self.method, **self.total.to_dict(), "turns": turns}

    def shown_turns(self) -> list[Tally]:
        """At most SHOWN of them, the last of which may hold all later ones."""
        turns = self.turns[:SHOWN]
        if len(self.turns) > SHOWN:
            turns[-1] = sum(self.turns[SHOWN:], turns[-1])
        return turns


@dataclass
class Report:
    """Results of `replay_documents`."""

    nodes: int
    fresh: bool
    rows: list[Row]
    documents: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, schema foretell.measure.replay/1."""
        return {
            "schema": "foretell.measure.replay/1",
            "version": foretell.__version__,
            "documents": self.documents,
            "nodes": self.nodes,
            "fresh": self.fresh,
            "rows": [row.to_dict() for row in self.rows],
        }

    def turn_names(self) -> list[str]:
        """Names of the turns that are shown."""
        turn_count = max(len(row.turns) for row in self.rows)
        shown_names = [
            f"turn {turn_number}" for turn_number in range(1, min(turn_count, SHOWN) + 1)
        ]
        if turn_count > SHOWN:
            shown_names[-1] += " and later"
        return shown_names

    def text(self) -> str:
        """A table for people, a line a method."""
        turn_names = self.turn_names()
        if len(turn_names) == 1:
            turn_names = []
        table_lines = [
            ["method", "tokens/step", *turn_names, "drafted/step", "accepted", "steps", "tokens"]
        ]
        for row in self.rows:
            total_tally = row.total
            turns = row.shown_turns()[: len(turn_names)]
            accepted_share = "-"
            if total_tally.drafted:
                accepted_share = f"{100 * total_tally.accepted / total_tally.drafted:.0f} %"
            table_lines.append(
                [
                    row.method,
                    f"{total_tally.tokens_per_step:.2f}",
                    *(f"{turn.tokens_per_step:.2f}" for turn in turns),
                    f"{total_tally.drafted / max(1, total_tally.steps):.1f}",
                    accepted_share,
                    f"{total_tally.steps:,}",
                    f"{total_tally.tokens:,}",
                ]
            )
        return _align_columns(table_lines)

    def svg(self) -> str:
        """The tokens a step of each method, a bar a turn."""
        bar_values = []
        for row in self.rows:
            turns = row.shown_turns()
            bar_values.append([turn.tokens_per_step if turn.steps else None for turn in turns])
        return bar_chart(
            f"Replay of {self.documents:,} documents, at most {self.nodes} nodes a draft",
            [row.method for row in self.rows],
            self.turn_names(),
            bar_values,
            "tokens a step (plain decoding: 1)",
        )


def _align_columns(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first one is aligned to the left."""
    column_widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    line_texts = []
    for line in lines:
        cells = [line[0].ljust(column_widths[0])]
        for cell, width in zip(line[1:], column_widths[1:], strict=True):
            cells.append(cell.rjust(width))
        line_texts.append("  ".join(cells))
    return "\n".join(line_texts)


def replay_documents(
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    documents: Iterable[Document],
    nodes: int = 16,
    *,
    fresh: bool = False,
    tell: Callable[[int], None] = lambda done: None,
) -> Report:
    """Replays every document with every method, in one pass over the documents, which may be a
    stream.

    `nodes`: drafted a step at most, where a method's spec does not say. What drafters learn is kept
    from document to document, as in serving, unless `fresh`. Calls `tell(documents done)` after
    each. Raises BadConfig or, for a method that needs more than text, Unsupported.
    """
    if not isinstance(nodes, int) or not 1 <= nodes <= MOST_NODES:
        raise BadConfig.field("nodes", nodes, f"between 1 and {MOST_NODES}")
    if not methods:
        raise BadConfig("no methods: name at least one, such as ngram")
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    players = [_Player(method, nodes, vocab_size, tokenizer) for method in methods]
    report = Report(nodes, fresh, [player.row for player in players])
    for document in documents:
        if fresh:
            for player in players:
                player.engine.stores.clear()
        _replay_document(tokenizer, players, document)
        report.documents += 1
        tell(report.documents)
    if not any(row.total.tokens for row in report.rows):
        raise BadConfig(f"nothing to replay: {report.documents} documents hold no recorded text")
    return report


def _replay_document(
    tokenizer: PreTrainedTokenizerBase, players: Sequence[_Player], document: Document
) -> None:
    past_tokens: list[int] = []
    for turn_index, (prompt, text) in enumerate(document):
        past_tokens += _encode(tokenizer, prompt, with_prefix=turn_index == 0)
        answer_tokens = _encode(tokenizer, text)
        if not past_tokens:  # a text without a prompt: its first token is given
            past_tokens = answer_tokens[:1]
            answer_tokens = answer_tokens[1:]
        for player in players:
            turns = player.row.turns
            while len(turns) <= turn_index:
                turns.append(Tally())
            if answer_tokens:
                turns[turn_index] += player.play_answer(past_tokens, answer_tokens)
        past_tokens += answer_tokens


class _Player:
    """A method with its engine, whose stores live as long as it does."""

    def __init__(
        self, method: Method, nodes: int, vocab_size: int, tokenizer: PreTrainedTokenizerBase
    ):
        if method == "auto":
            raise BadConfig(
                "auto chooses by measured cost, and a recording has none: "
                "name methods, such as ngram"
            )
        method_name, self.strategy = resolve_method(method, lambda text: _encode(tokenizer, text))
        self.name = method if isinstance(method, str) else method_name
        if isinstance(self.strategy, Speculative) and not self.strategy.nodes:
            self.strategy = dataclasses.replace(self.strategy, nodes=nodes)
        missing_needs = [f"a {model!r} model" for model in self.strategy.models]
        for need in self.strategy.needs:
            if need not in Recording.caps:
                missing_needs.append(NEEDS.get(need, f"the capability {need!r}"))
        if missing_needs:
            raise Unsupported.missing_capability(
                self.name, "a recording", " and ".join(missing_needs), CURE
            )
        self.row = Row(self.name)
        self.recording = Recording(vocab_size)
        self.tokenizer = tokenizer
        self.engine = Engine({"target": self.recording})

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes as LM.decode does, for methods that compare tokenizers."""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def play_answer(self, prompt: list[int], answer: list[int]) -> Tally:
        """Generates the recorded `answer` to `prompt`."""
        self.recording.text = prompt + answer
        sampling = Sampling(max_new_tokens=len(answer), ignore_eos=True)
        live = self.engine.add(Request(prompt, self.strategy, sampling, self.name, self.decode))
        for _ in self.engine.run():
            pass
        if live.error:
            raise live.error
        if live.ctx.output != answer:
            raise Unsupported(
                f"{self.name} strays from the recorded text; only exact methods can be replayed"
            )
        stats = live.ctx.stats
        step_count = stats.steps + 1  # which leave out the one that ends the prefill
        return Tally(stats.tokens, step_count, stats.drafted, stats.accepted)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, with_prefix: bool = False) -> list[int]:
    """`with_prefix`: with the tokens that the tokenizer puts before a text."""
    token_ids: Any = tokenizer(text, add_special_tokens=with_prefix, verbose=False)["input_ids"]
    return [int(token) for token in token_ids]
