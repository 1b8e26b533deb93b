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
from foretell.bench.peers import file_stem
from foretell.bench.peers._environment import PEERS_FOLDER, peer_folder, pinned_packages
from foretell.errors import BadConfig, ForetellError


def setup(name: str, options: Sequence[str]) -> None:
    """Raises BadConfig for a peer that needs none, CalledProcessError where pip fails (it has said
    why).
    """
    peers.check_peer(name)
    if not (PEERS_FOLDER / f"{file_stem(name)}.txt").is_file():
        raise BadConfig(f"{name}: needs no environment of its own")
    folder = peer_folder(name)
    (folder / "ready").unlink(missing_ok=True)
    shutil.rmtree(folder / "sources", ignore_errors=True)
    print(f"{name}: an environment in {folder}", file=sys.stderr)
    venv.create(folder / "env", clear=True, with_pip=True)
    python = str(folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options]
    package_lines = pinned_packages(name).splitlines()
    # What torch depends on differs between systems; all else is listed, and nothing more is wanted.
    for torch_line in (line for line in package_lines if line.startswith("torch==")):
        subprocess.run([*pip, torch_line], check=True)
    subprocess.run([*pip, "--no-deps", *package_lines], check=True)
    prepare = getattr(
        importlib.import_module(f"foretell.bench.peers.{file_stem(name)}"), "prepare", None
    )
    if prepare is not None:
        prepare(python, folder)
    (folder / "ready").write_text(pinned_packages(name), "utf-8")
    print(f"{name}: ready", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 pip failed, 2 the input was wrong."""
    parser = argparse.ArgumentParser(prog="python -m foretell.bench.peers", description=__doc__)
    parser.add_argument("command", choices=["setup"])
    parser.add_argument(
        "name",
        help=", ".join(
            name
            for name in peers.peer_names()
            if (PEERS_FOLDER / f"{file_stem(name)}.txt").is_file()
        ),
    )
    parsed, options = parser.parse_known_args(arguments)
    try:
        setup(parsed.name, options)
    except ForetellError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except subprocess.CalledProcessError as error:
        print(
            f"error: {parsed.name}: pip ended with exit code {error.returncode}, see above",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
