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
from foretell.core.context import Request
from foretell.core.drafter import Drafter
from foretell.core.engine import Engine
from foretell.core.strategy import Speculative, Strategy
from foretell.core.types import Sampling
from foretell.errors import BadConfig, Unsupported
from foretell.families.recording import Recording
from foretell.measure.plot import bars
from foretell.measure.recordings import Document
from foretell.spec import resolve

SHOWN = 4  # turns told apart in tables and plots, the later ones together with the last of them
WORDS = {"rows": "the model's logits", "layers": "the model's hidden states"}


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
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Tally(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"tokens_per_step": self.tokens_per_step}


@dataclass
class Row:
    """What became of one method: `turns[i]` holds the answers that were number i + 1 of their
    document.
    """

    method: str
    turns: list[Tally] = field(default_factory=list)

    @property
    def total(self) -> Tally:
        return sum(self.turns, Tally())


@dataclass
class Report:
    """What `replay` found."""

    nodes: int
    fresh: bool
    rows: list[Row]
    documents: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, schema foretell.measure.replay/1."""
        rows = [
            {
                "method": row.method,
                **row.total.to_dict(),
                "turns": [{"turn": i, **turn.to_dict()} for i, turn in enumerate(row.turns, 1)],
            }
            for row in self.rows
        ]
        return {
            "schema": "foretell.measure.replay/1",
            "version": foretell.__version__,
            "documents": self.documents,
            "nodes": self.nodes,
            "fresh": self.fresh,
            "rows": rows,
        }

    def by_turn(self) -> tuple[list[str], list[list[Tally]]]:
        """Names of the turns told apart, and of each row their tallies; the last may hold all later
        turns.
        """
        count = max(len(row.turns) for row in self.rows)
        names = [f"turn {i}" for i in range(1, min(count, SHOWN) + 1)]
        if count > SHOWN:
            names[-1] += " and later"
        parts = [
            [*row.turns[: SHOWN - 1], sum(row.turns[SHOWN - 1 :], Tally())] for row in self.rows
        ]
        return names, [part[: len(names)] for part in parts]

    def text(self) -> str:
        """A table for people, a line a method."""
        names, turns = self.by_turn()
        names = names if len(names) > 1 else []
        lines = [["method", "tokens/step", *names, "drafted/step", "accepted", "steps", "tokens"]]
        for row, parts in zip(self.rows, turns, strict=True):
            all_, each = row.total, [f"{part.tokens_per_step:.2f}" for part in parts[: len(names)]]
            share = f"{100 * all_.accepted / all_.drafted:.0f} %" if all_.drafted else "-"
            lines.append(
                [
                    row.method,
                    f"{all_.tokens_per_step:.2f}",
                    *each,
                    f"{all_.drafted / max(1, all_.steps):.1f}",
                    share,
                    f"{all_.steps:,}",
                    f"{all_.tokens:,}",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)),
                ]
            )
            for line in lines
        )

    def svg(self) -> str:
        """The tokens a step of each method, a bar a turn."""
        names, turns = self.by_turn()
        values = [
            [part.tokens_per_step if part.steps else None for part in parts] for parts in turns
        ]
        return bars(
            f"Replay of {self.documents:,} documents, at most {self.nodes} nodes a draft",
            [row.method for row in self.rows],
            names,
            values,
            "tokens a step (plain decoding: 1)",
        )


def replay(
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[str | Drafter | Strategy],
    documents: Iterable[Document],
    nodes: int = 16,
    *,
    fresh: bool = False,
    tell: Callable[[int], None] = lambda done: None,
) -> Report:
    """Replays every document with every method, in one pass over the documents, which may be a
    stream.

    `nodes`: drafted a step at most, where a method's spec does not say. What drafters learn is kept
    from document to document, as in serving, unless `fresh`. `tell(documents done)` is called after
    each. Raises BadConfig or, for a method that needs more than text, Unsupported.
    """
    if not isinstance(nodes, int) or not 1 <= nodes <= 1024:
        raise BadConfig.field("nodes", nodes, "between 1 and 1024")
    if not methods:
        raise BadConfig("no methods: name at least one, such as ngram")
    vocab = max(tokenizer.get_vocab().values()) + 1
    players = [_Player(spec, nodes, vocab, tokenizer) for spec in methods]
    report = Report(nodes, fresh, [Row(player.name) for player in players])
    for document in documents:
        tokens: list[int] = []
        for player in players if fresh else ():
            player.engine.stores.clear()
        for turn, (prompt, text) in enumerate(document):
            tokens += _encode(tokenizer, prompt, first=turn == 0)
            answer = _encode(tokenizer, text)
            if not tokens:  # a text without a prompt: its first token is given
                tokens, answer = answer[:1], answer[1:]
            for player, row in zip(players, report.rows, strict=True):
                row.turns += [Tally() for _ in range(len(row.turns), turn + 1)]
                if answer:
                    row.turns[turn] += player.play(tokens, answer)
            tokens += answer
        report.documents += 1
        tell(report.documents)
    if not any(row.total.tokens for row in report.rows):
        raise BadConfig(f"nothing to replay: {report.documents} documents hold no recorded text")
    return report


class _Player:
    """One method with its engine, whose stores live as long as it does."""

    def __init__(
        self,
        spec: str | Drafter | Strategy,
        nodes: int,
        vocab: int,
        tokenizer: PreTrainedTokenizerBase,
    ):
        if spec == "auto":
            raise BadConfig(
                "auto chooses by measured cost, and a recording has none: name methods, such as ngram"
            )
        name, self.strategy = resolve(spec, lambda text: _encode(tokenizer, text))
        self.name = spec if isinstance(spec, str) else name
        if isinstance(self.strategy, Speculative) and not self.strategy.nodes:
            self.strategy = dataclasses.replace(self.strategy, nodes=nodes)
        missing = [f"a {model!r} model" for model in self.strategy.models]
        missing += [
            WORDS.get(need, f"the capability {need!r}")
            for need in self.strategy.needs
            if need not in Recording.caps
        ]
        if missing:
            cure = "name methods that work on text alone, such as ngram"
            raise Unsupported.missing(self.name, "a recording", " and ".join(missing), cure)
        self.recording, self.tokenizer = Recording(vocab), tokenizer
        self.engine = Engine({"target": self.recording})

    def decode(self, tokens: Sequence[int]) -> str:
        """As LM.decode, for methods that compare tokenizers."""
        return str(
            self.tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def play(self, prompt: list[int], answer: list[int]) -> Tally:
        """Generates `answer` behind `prompt` as it was recorded."""
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
        return Tally(
            stats.tokens, stats.steps + 1, stats.drafted, stats.accepted
        )  # its steps leave the first one out


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, first: bool = False) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=first, verbose=False)["input_ids"]
    return [int(t) for t in ids]
