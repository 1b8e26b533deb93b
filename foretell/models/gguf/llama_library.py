"""llama.cpp's functions, made silent, and its handles of files."""

from __future__ import annotations

import atexit
import io
from pathlib import Path
from typing import Any

from foretell.errors import BadModel, Unsupported

CURE = "pip install 'foretell[gguf]'"
ERROR = 4  # llama.cpp's level of messages about errors


class Log:
    """llama.cpp's messages, which it would print: the errors of the last call that failed."""

    errors: list[str] = []  # noqa: RUF012 - one for the process, as llama.cpp's callback is

    @classmethod
    def reason(cls) -> str:
        """The first error, in one line."""
        for message in cls.errors:
            if message:
                _, _, after_function = message.partition(": ")
                return after_function or message
        return "it gives no reason"


_library: Any = None
_callbacks: list[Any] = []  # held, as llama.cpp calls them for as long as the process lives


def load_library() -> Any:
    """llama.cpp's functions. Raises Unsupported where the package is missing."""
    global _library
    if _library is None:
        try:
            import llama_cpp._utils as output_files
            import llama_cpp.llama_cpp as lib
        except (ImportError, OSError, RuntimeError) as error:  # missing, or for other machines
            raise Unsupported.missing_capability(
                "foretell.load", "a .gguf file", f"the package llama-cpp-python ({error})", CURE
            ) from error

        # It leaves two files open, which Python would warn of when it ends.
        for value in vars(output_files).values():
            if isinstance(value, io.IOBase):
                atexit.register(value.close)

        def note(level: int, text: bytes, _: Any) -> None:
            if level == ERROR:
                Log.errors.append(text.decode("utf-8", "replace").strip())

        _callbacks.append(lib.llama_log_callback(note))
        lib.llama_log_set(_callbacks[0], None)
        lib.llama_backend_init()
        _library = lib
    return _library


def open_model(lib: Any, file_path: Path) -> Any:
    """A handle of the file's model, to be freed with `llama_model_free`. Raises BadModel."""
    options = lib.llama_model_default_params()
    options.n_gpu_layers = 0
    Log.errors.clear()
    handle = lib.llama_model_load_from_file(str(file_path).encode(), options)
    if not handle:
        raise BadModel(
            f"{file_path}: llama.cpp cannot read it ({Log.reason()}); fetch it again, or use a "
            "newer "
            "llama-cpp-python if the family is new"
        )
    return handle
