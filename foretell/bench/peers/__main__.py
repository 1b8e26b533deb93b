"""`python -m foretell.bench.peers setup NAME`: makes the environment in which a peer is measured,
in the cache folder.

Its packages have the versions of NAME's .txt file in this folder. What follows NAME is handed to
pip, such as `--find-links FOLDER`. It replaces an earlier one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence

from foretell.bench import peers
from foretell.bench.peers import stem
from foretell.bench.peers._environment import HERE, home, pins
from foretell.errors import BadConfig, ForetellError


def setup(name: str, options: Sequence[str]) -> None:
    """Raises BadConfig for a peer that needs none, CalledProcessError where pip fails (it has said
    why).
    """
    peers.check(name)
    if not (HERE / f"{stem(name)}.txt").is_file():
        raise BadConfig(f"{name}: needs no environment of its own")
    folder = home(name)
    (folder / "ready").unlink(missing_ok=True)
    shutil.rmtree(folder / "sources", ignore_errors=True)
    print(f"{name}: an environment in {folder}", file=sys.stderr)
    venv.create(folder / "env", clear=True, with_pip=True)
    python = str(folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
    lines = pins(name).splitlines()
    # What torch depends on differs between systems; all else is listed, and nothing more is wanted.
    for torch in (line for line in lines if line.startswith("torch==")):
        subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "--no-deps", *lines], check=True)
    prepare = getattr(
        importlib.import_module(f"foretell.bench.peers.{stem(name)}"), "prepare", None
    )
    if prepare is not None:
        prepare(python, folder)
    (folder / "ready").write_text(pins(name), "utf-8")
    print(f"{name}: ready", file=sys.stderr)


def main(args: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 pip failed, 2 the input was wrong."""
    parser = argparse.ArgumentParser(prog="python -m foretell.bench.peers", description=__doc__)
    parser.add_argument("command", choices=["setup"])
    parser.add_argument(
        "name", help=", ".join(n for n in peers.names() if (HERE / f"{stem(n)}.txt").is_file())
    )
    known, options = parser.parse_known_args(args)
    try:
        setup(known.name, options)
    except ForetellError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:
        print(
            f"error: {known.name}: pip ended with exit code {error.returncode}, see above",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
