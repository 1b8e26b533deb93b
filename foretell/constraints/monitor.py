"""After a dot only names that a language server completes may follow, then the end of the name.

The text is code: the prompt (or `prefix`) and what is written after it, a file of a folder `root`
that need not exist. Where a dot asks for a member of what stands before it, a language server that
knows the folder is asked which names complete the text there. Only these may be written: tokens
that begin a name or go on with it and, once a whole one stands there, what cannot go on a name, or
the end of the text. Names are compared as bytes, so they hold however the model's tokens divide
them, and so do tokens that hold a dot, a name and more. Where the server has no answer the text is
free, which `Output.stats.outside` counts. Questions go along with forwards, those about drafts as
well, and one text is asked about once. A text that `max_new_tokens` cuts may end within a name.

Paper: Agrawal et al., Monitor-Guided Decoding of Code LMs with Static Analysis of Repository
Context, arXiv:2306.10763
Guarantee: lossy: other names have no chance after a dot, on purpose; whatever drafts, the text has
exactly the distribution that this leaves
Cost: target 1, and a question to the server for each dot
Needs: a tokenizer whose tokens are pieces of the text, and a language server: pip install
'foretell[monitor]'
Trains: nothing
Differs:
- dots in strings, comments, numbers and `from . import` ask for nothing; the paper's asks at any
dot, and stays free where no answer comes
- tokens that go on after a dot are asked about, too, where the vocabulary has such with letters:
the paper's looks at the end of a token only. With anything before such a dot they are left out,
since shorter tokens write the same text
- of tokens with the same bytes all are allowed, where the paper's code knows one
- the question with closed brackets is asked only where the first has no answer
- a break is a byte of ASCII that cannot stand in a name
- of the paper's monitors this is the one for members; those for arguments and for states of objects
are not here
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretell.constraints.completing import Completing, Documents
from foretell.constraints.language_server import LanguageServer
from foretell.core.constraint import Prompted, TextConstraint
from foretell.core.settings import Range
from foretell.core.text import Written
from foretell.errors import BadConfig, Unsupported

MODULE = "jedi_language_server"


@dataclass(frozen=True)
class Monitor(TextConstraint):
    """The settings of a monitor: a folder, and a file in it that the text is taken for."""

    root: str = "."  # folder that the server knows
    file: str = "text.py"  # path in it that imports of the text are relative to
    prefix: Written = ""  # code before the output, in the prompt's place; @FILE in a spec
    server: str = ""  # command of a language server; without it, jedi-language-server
    limit: Annotated[float, Range(0, 3600, open_low=True)] = 2.0  # seconds of an answer
    restarts: Annotated[int, Range(0, 1000)] = 3  # of a dead server, after which names are free

    endless = True

    def __post_init__(self) -> None:
        super().__post_init__()
        file_path = Path(self.file)
        if file_path.is_absolute() or ".." in file_path.parts or file_path.suffix != ".py":
            raise BadConfig.field("monitor:file", self.file, "a path in root, as in pkg/mod.py")
        if not self.root:
            raise BadConfig.field("monitor:root", self.root, "a folder of code")

    def on(self, prompted: Prompted) -> Completing:
        root_folder = Path(self.root)
        if not root_folder.is_dir():
            raise BadConfig.field("monitor:root", self.root, "a folder that exists")
        document_path = root_folder.resolve() / self.file
        if not document_path.parent.is_dir():
            raise BadConfig.field("monitor:file", self.file, f"in a folder that {root_folder} has")
        completion_server = self.language_server(prompted.kept)
        preceding = self.prefix.encode()
        if not preceding:
            preceding = prompted.words.text(prompted.prompt)
            if not preceding.startswith(b"  "):  # some tokenizers put one space before a text
                preceding = preceding.removeprefix(b" ")
        return Completing(Documents(completion_server, document_path), preceding, prompted)

    def language_server(self, shared_state: MutableMapping[Any, Any]) -> LanguageServer:
        """Returns the server, which all that ask for the same share by `shared_state`.

        Raises BadConfig or Unsupported.
        """
        command, root = self._server_command(), Path(self.root).resolve()
        server_key = "monitor", *command, root, self.limit, self.restarts
        new_server = LanguageServer(command, root, self.limit, self.restarts)
        shared_server: LanguageServer = shared_state.setdefault(server_key, new_server)
        return shared_server

    def _server_command(self) -> list[str]:
        """Returns the server's command. Raises BadConfig or Unsupported."""
        if not self.server:
            if importlib.util.find_spec(MODULE) is None:
                raise Unsupported(
                    "monitor needs the package jedi-language-server: "
                    "pip install 'foretell[monitor]', or name another server: monitor:server=..."
                )
            # With this Python, and not in danger of importing what stands in the folder.
            return [sys.executable, "-P", "-c", f"from {MODULE}.cli import cli; cli()"]
        try:
            command_words = shlex.split(self.server)
        except ValueError:
            command_words = []
        if not command_words or shutil.which(command_words[0]) is None:
            raise BadConfig.field("monitor:server", self.server, "a command that can be run")
        return command_words
