"""`foretell chat`: a conversation on the terminal, or with questions from a pipe, one a line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foretell.cli._answers import colour_piece, stats_line
from foretell.cli._conversation import Chat, read_conversation
from foretell.cli._input import standard_input
from foretell.cli._loading import load_model
from foretell.cli._options import (
    BackendOptions,
    ChatModelOptions,
    Method,
    SamplingOptions,
    check_method,
)
from foretell.cli._output import (
    check_writable,
    emit,
    json_text,
    message,
    messages,
    refusals,
    write_file,
)
from foretell.errors import BadConfig, BadFile, ForetellError, UnknownMethod
from foretell.ops.files import cache_folder
from foretell.ops.parsing import parse_json

if TYPE_CHECKING:
    from foretell.api.outputs import Piece

PROMPT = "> "
GOES_ON = ". "  # before the next line of a question
REMEMBERED = 1000  # lines of earlier chats
PREFIXES = 2**30  # bytes of cache rows at most that are kept for the next question


def chat(
    models: ChatModelOptions,
    backends: BackendOptions,
    sampling: SamplingOptions,
    method: Method = "auto",
    system: Annotated[
        str, typer.Option(help="What the model is told before the conversation.")
    ] = "",
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not keep questions for the next chat.")
    ] = False,
) -> int:
    """Talk with a chat model. /help lists what else can be typed."""
    options = sampling.arguments()
    if sampling.n > 1:
        raise BadConfig("a chat has one answer a question: leave --n out, and use /retry")
    if sampling.logprobs is not None:
        raise BadConfig("a chat shows no log-probabilities: leave --logprobs out")
    check_method(method)
    standard_input("pipe questions in, one a line")
    lm = load_model(models, backends)
    if lm.tokenizer is None or not lm.tokenizer.chat_template:
        raise BadConfig(
            f"{models.model}: its tokenizer has no chat template; "
            "name a chat model, as in --model smollm2"
        )
    lm.limit(prefixes=PREFIXES)
    talk = Chat(lm, system=system)
    talk.change(method, **options)
    session = Session(talk, interactive=sys.stdin.isatty())
    if not session.interactive:
        return session.run()
    message(f"{models.model}, method {method}; /help lists commands, Ctrl-D ends")
    with line_editing(None if no_history else cache_folder() / "chat_history"):
        return session.run()


@dataclass
class Session:
    """A conversation with somebody who types, or with a pipe."""

    chat: Chat
    interactive: bool
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    styles: dict[str, str] = field(default_factory=dict)  # of drafters, as they appear
    known_left_out: int = 0  # turns of which was said that they are

    def run(self) -> int:
        """Runs until /quit, the end of the input, or Ctrl-C at the prompt. Returns the exit code:
        of a pipe that of the last line that failed, if one did.
        """
        code = 0
        while True:
            text = self.read_input()
            try:
                if text is None or not self.take(text):
                    return code
            except ForetellError as error:
                message(f"error: {error}")
                code = 0 if self.interactive else error.exit_code
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                message("interrupted")

    def read_input(self) -> str | None:
        """The next question or command. A line that ends in a backslash goes on in the next one.

        None: there is no more. Raises BadConfig where what is piped in is no UTF-8 text.
        """
        lines: list[str] = []
        try:
            while True:
                line = self._read_line(GOES_ON if lines else PROMPT)
                if not line.endswith("\\"):
                    return "\n".join([*lines, line])
                lines.append(line[:-1])
        except UnicodeDecodeError as error:
            decoding_fault = f"not UTF-8 text (byte 0x{error.object[error.start]:02x})"
            if not self.interactive:  # the lines after it are lost as well
                raise BadConfig(
                    f"standard input: {decoding_fault}; convert it, for example with iconv -t UTF-8"
                ) from None
            message(f"error: {decoding_fault}; set the terminal to UTF-8")
            return ""
        except EOFError:
            if self.interactive:
                messages.print()
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            messages.print()
            return None

    def _read_line(self, prompt: str) -> str:
        if not self.interactive:
            return input()
        if self.console.is_terminal:
            return input(prompt)
        messages.print(prompt, end="")  # standard output is for answers
        return input()

    def take(self, text: str) -> bool:
        """Answers a question or obeys a command; False: that was the last one."""
        if not text.strip():
            return True
        if not text.startswith("/") or text.startswith("//"):
            self.answer(self.chat.ask(text.removeprefix("/")))
            return True
        name, _, argument = text.partition(" ")
        if name not in COMMANDS:
            raise UnknownMethod.suggest_names("command", name, COMMANDS)
        command = COMMANDS[name]
        argument = argument.strip()
        if argument and not command.argument:
            raise BadConfig(f"{name} {argument}: {name} takes nothing after it")
        command.run(self, argument)
        return name != "/quit"

    def answer(self, pieces: Generator[Piece, None, None]) -> None:
        """Shows an answer as it comes. Ctrl-C ends it on a terminal; what was said is kept."""
        known_sources = set(self.styles)
        piece = None
        try:
            with contextlib.closing(pieces):
                for piece in pieces:
                    self._say_what_is_left_out()
                    self._show(piece)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            kept_text = "what was said is kept" if piece is not None else "nothing was said yet"
            self._end_line(piece)
            message(f"interrupted; {kept_text}")
            return
        except ForetellError:
            self._end_line(piece)
            raise
        emit("")
        if piece is not None and piece.finish_reason == "length":
            message("cut off at --max-new-tokens, or where the model's context ends")
        if self.console.is_terminal and not self.console.no_color:
            for source in [name for name in self.styles if name not in known_sources]:
                messages.print(Text(f"drafted by {source}", self.styles[source]))

    def _show(self, piece: Piece) -> None:
        if not self.console.is_terminal:
            emit(piece.text, end="")
            return
        with refusals("standard output"):
            self.console.print(colour_piece(piece, self.styles), end="")

    def _end_line(self, piece: Piece | None) -> None:
        if piece is not None or self.console.is_terminal:
            emit("")

    def _say_what_is_left_out(self) -> None:
        if self.chat.left_out > self.known_left_out:
            message(
                f"the model's context is full: the first {self.chat.left_out} of "
                f"{len(self.chat.turns)} turns are left out from here on"
            )
        self.known_left_out = self.chat.left_out

    # --- commands

    def help(self, _: str) -> None:
        command_table = Table.grid(padding=(0, 2))
        for name, command in COMMANDS.items():
            command_table.add_row(f"{name} {command.argument}".rstrip(), command.help_text)
        messages.print(command_table)
        message(
            "A line that ends in \\ goes on in the next one; // begins a question with a slash."
        )

    def set_method(self, spec: str) -> None:
        if spec:
            check_method(spec)
            self.chat.change(spec)
        message(f"method {self.chat.method}")

    def stats(self, _: str) -> None:
        turns = self.chat.turns
        if turns and turns[-1].stats is not None:
            message(stats_line(turns[-1].stats, self.chat.method))
        finished_stats = [turn.stats for turn in turns if turn.stats is not None]
        lm = self.chat.lm
        context = lm.models["target"].context
        engine_status = lm.engine.status()
        accepted = sum(answer_stats.accepted for answer_stats in finished_stats)
        drafted = sum(answer_stats.drafted for answer_stats in finished_stats)
        interrupted = len(turns) - len(finished_stats)
        message(
            f"conversation: {len(turns)} turns, {interrupted} of them interrupted, "
            f"{self.chat.left_out} left out; {accepted} of {drafted} drafted "
            f"tokens accepted; {self.chat.tokens()} of {context} tokens of context; "
            f"{engine_status['prefix_tokens_reused']} of "
            f"{engine_status['prefix_tokens_asked']} tokens of questions and what was before "
            "them known already"
        )

    def system(self, text: str) -> None:
        self.chat.tell(text)
        message("the model is told so" if text else "the model is told nothing beforehand")

    def clear(self, _: str) -> None:
        self.chat.clear()
        message("all turns are forgotten")

    def undo(self, _: str) -> None:
        turn = self.chat.undo()
        message(f"forgotten: {turn.question}")

    def retry(self, _: str) -> None:
        self.answer(self.chat.retry())

    def save(self, name: str) -> None:
        path = command_path("/save", name)
        check_writable("/save", path)
        if path.exists():
            try:
                read_conversation(read_document(path), str(path))
            except BadFile:
                raise BadConfig(
                    f"/save {path}: exists, and is no saved chat; name another file"
                ) from None
        write_file("/save", path, json_text(self.chat.to_dict()) + "\n")
        message(f"{len(self.chat.turns)} turns saved to {path}")

    def load(self, name: str) -> None:
        path = command_path("/load", name)
        self.chat.take(read_document(path), str(path))
        message(f"{len(self.chat.turns)} turns loaded from {path}")

    def seed(self, text: str) -> None:
        self._set_number("seed", int, text)

    def temperature(self, text: str) -> None:
        self._set_number("temperature", float, text)

    def _set_number(self, name: str, kind: Callable[[str], Any], text: str) -> None:
        if text:
            try:
                value = kind(text)
            except ValueError:
                raise BadConfig(f"/{name} {text}: write a number") from None
            self.chat.change(**{name: value})
        message(f"{name} {self.chat.sampling[name]}")

    def quit(self, _: str) -> None:
        """Nothing is left to do."""


class Command(NamedTuple):
    argument: str  # as it is shown; empty: there is none
    help_text: str
    run: Callable[[Session, str], None]


COMMANDS = {
    "/help": Command("", "this list", Session.help),
    "/method": Command(
        "[SPEC]", "how answers are made, as in /method ngram:n=3", Session.set_method
    ),
    "/stats": Command("", "numbers of the last answer and of the conversation", Session.stats),
    "/system": Command("[TEXT]", "tell the model something beforehand, or nothing", Session.system),
    "/clear": Command("", "forget all turns", Session.clear),
    "/undo": Command("", "forget the last turn", Session.undo),
    "/retry": Command("", "answer the last question again, with the next seed", Session.retry),
    "/save": Command("FILE", "keep the conversation in a file", Session.save),
    "/load": Command("FILE", "go on with a conversation from a file", Session.load),
    "/seed": Command("[N]", "of the random numbers, above temperature 0", Session.seed),
    "/temperature": Command(
        "[X]", "0 takes the best token; higher draws more freely", Session.temperature
    ),
    "/quit": Command("", "end, as Ctrl-D does", Session.quit),
}


def command_path(command: str, name: str) -> Path:
    """The path of a command's file. Raises BadConfig without a name."""
    if not name:
        raise BadConfig(f"{command}: name a file, as in {command} talk.json")
    return Path(name).expanduser()


def read_document(path: Path) -> Any:
    """The JSON of a file. Raises BadFile."""
    with refusals(str(path), "name a file that /save wrote"):
        data = path.read_bytes()
    try:
        return parse_json(data)
    except ValueError:
        raise BadFile(f"{path}: no JSON text; name a file that /save wrote") from None


@contextlib.contextmanager
def line_editing(history: Path | None) -> Generator[None, None, None]:
    """Inside, lines can be edited and called back, and commands completed by Tab.

    `history`: where lines are kept from one chat to the next, for this user's eyes alone. Where
    that file cannot be read or written, a chat begins without.
    """
    try:
        import readline
    except ImportError:  # not everywhere part of Python
        yield
        return

    def complete(text: str, state: int) -> str | None:
        matching_names = [
            name for name in COMMANDS if text.startswith("/") and name.startswith(text)
        ]
        return matching_names[state] if state < len(matching_names) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(REMEMBERED)
    if history is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
    try:
        yield
    finally:
        readline.set_completer(None)
        if history is not None:
            with contextlib.suppress(OSError):
                history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
                readline.write_history_file(history)
