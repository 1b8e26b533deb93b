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
from foretell.bench.report.plot import bars
from foretell.core.drafter import Drafter
from foretell.core.request import Request
from foretell.core.types import Sampling
from foretell.engine.engine import Engine
from foretell.errors import BadConfig, Unsupported
from foretell.spec import resolve
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
    """What became of a method. `turns[i]`: the answers that were number i + 1 of their document."""

    method: str
    turns: list[Tally] = field(default_factory=list)

    @property
    def total(self) -> Tally:
        return sum(self.turns, Tally())

    def to_dict(self) -> dict[str, Any]:
        turns = [{"turn": i, **turn.to_dict()} for i, turn in enumerate(self.turns, 1)]
        return {"method": self.method, **self.total.to_dict(), "turns": turns}

    def shown_turns(self) -> list[Tally]:
        """At most SHOWN of them, the last of which may hold all later ones."""
        turns = self.turns[:SHOWN]
        if len(self.turns) > SHOWN:
            turns[-1] = sum(self.turns[SHOWN:], turns[-1])
        return turns


@dataclass
class Report:
    """What `replay` measured."""

    nodes: int
    fresh: bool
    rows: list[Row]
    documents: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, schema foretell.bench.replay/1."""
        return {
            "schema": "foretell.bench.replay/1",
            "version": foretell.__version__,
            "documents": self.documents,
            "nodes": self.nodes,
            "fresh": self.fresh,
            "rows": [row.to_dict() for row in self.rows],
        }

    def turn_names(self) -> list[str]:
        """Names of the turns that are shown."""
        count = max(len(row.turns) for row in self.rows)
        names = [f"turn {i}" for i in range(1, min(count, SHOWN) + 1)]
        if count > SHOWN:
            names[-1] += " and later"
        return names

    def text(self) -> str:
        """A table for people, a line a method."""
        names = self.turn_names()
        if len(names) == 1:
            names = []
        lines = [["method", "tokens/step", *names, "drafted/step", "accepted", "steps", "tokens"]]
        for row in self.rows:
            total = row.total
            turns = row.shown_turns()[: len(names)]
            accepted = "-"
            if total.drafted:
                accepted = f"{100 * total.accepted / total.drafted:.0f} %"
            lines.append(
                [
                    row.method,
                    f"{total.tokens_per_step:.2f}",
                    *(f"{turn.tokens_per_step:.2f}" for turn in turns),
                    f"{total.drafted / max(1, total.steps):.1f}",
                    accepted,
                    f"{total.steps:,}",
                    f"{total.tokens:,}",
                ]
            )
        return _aligned(lines)

    def svg(self) -> str:
        """The tokens a step of each method, a bar a turn."""
        values = []
        for row in self.rows:
            turns = row.shown_turns()
            values.append([turn.tokens_per_step if turn.steps else None for turn in turns])
        return bars(
            f"Replay of {self.documents:,} documents, at most {self.nodes} nodes a draft",
            [row.method for row in self.rows],
            self.turn_names(),
            values,
            "tokens a step (plain decoding: 1)",
        )


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first one is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        for cell, width in zip(line[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        texts.append("  ".join(cells))
    return "\n".join(texts)


def replay(
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
    vocab = max(tokenizer.get_vocab().values()) + 1
    players = [_Player(method, nodes, vocab, tokenizer) for method in methods]
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
    tokens: list[int] = []
    for turn, (prompt, text) in enumerate(document):
        tokens += _encode(tokenizer, prompt, first=turn == 0)
        answer = _encode(tokenizer, text)
        if not tokens:  # a text without a prompt: its first token is given
            tokens = answer[:1]
            answer = answer[1:]
        for player in players:
            turns = player.row.turns
            while len(turns) <= turn:
                turns.append(Tally())
            if answer:
                turns[turn] += player.play(tokens, answer)
        tokens += answer


class _Player:
    """One method with its engine, whose stores live as long as it does."""

    def __init__(self, method: Method, nodes: int, vocab: int, tokenizer: PreTrainedTokenizerBase):
        if method == "auto":
            raise BadConfig(
                "auto chooses by measured cost, and a recording has none: "
                "name methods, such as ngram"
            )
        name, self.strategy = resolve(method, lambda text: _encode(tokenizer, text))
        self.name = method if isinstance(method, str) else name
        if isinstance(self.strategy, Speculative) and not self.strategy.nodes:
            self.strategy = dataclasses.replace(self.strategy, nodes=nodes)
        missing = [f"a {model!r} model" for model in self.strategy.models]
        for need in self.strategy.needs:
            if need not in Recording.caps:
                missing.append(NEEDS.get(need, f"the capability {need!r}"))
        if missing:
            raise Unsupported.missing(self.name, "a recording", " and ".join(missing), CURE)
        self.row = Row(self.name)
        self.recording = Recording(vocab)
        self.tokenizer = tokenizer
        self.engine = Engine({"target": self.recording})

    def decode(self, tokens: Sequence[int]) -> str:
        """As LM.decode, for methods that compare tokenizers."""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def play(self, prompt: list[int], answer: list[int]) -> Tally:
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
        steps = stats.steps + 1  # which leave out the one that ends the prefill
        return Tally(stats.tokens, steps, stats.drafted, stats.accepted)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, first: bool = False) -> list[int]:
    """`first`: with the tokens that the tokenizer puts before a text."""
    ids: Any = tokenizer(text, add_special_tokens=first, verbose=False)["input_ids"]
    return [int(token) for token in ids]
