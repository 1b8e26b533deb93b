"""`foretell train lm`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretell.cli.train import lm


def test_training_is_a_command(run: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat. " * 400)
    (tmp_path / "held.jsonl").write_text(
        "".join(
            json.dumps({"path": f"f{i}", "text": f"The dog {i} sat on the mat. " * 30}) + "\n"
            for i in range(300)
        )
    )
    size = {
        "hidden": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "intermediate": 16,
        "vocab_size": 300,
        "context": 64,
        "short_context": 32,
        "batch": 128,
        "micro": 128,
        "tokens": 256,
        "warmup": 1,
    }
    options = [
        x for name, value in size.items() for x in (f"--{name.replace('_', '-')}", str(value))
    ]
    args = [
        "train",
        "lm",
        "--out",
        str(tmp_path / "run"),
        "--corpus",
        str(tmp_path / "corpus"),
        "--no-compiled",
    ]
    args += ["--text", str(tmp_path / "text.txt"), "--text", str(tmp_path / "held.jsonl"), *options]
    code, out, _ = run(*args)
    assert code == 0 and "256 tokens seen" in out and out.count("\n") == 1
    code, out, _ = run(
        "generate",
        "The",
        "--model",
        str(tmp_path / "run" / "model"),
        "--max-new-tokens",
        "3",
        "--json",
    )
    assert code == 0 and len(json.loads(out)["tokens"]) <= 3
    assert run(*args, "--seed", "1")[0] == 2, "a run with other settings must not be continued"


def test_every_field_of_the_trainer_is_an_option() -> None:
    import dataclasses

    from foretell.train.lm import TrainLM

    options = {field.name: field.default for field in dataclasses.fields(lm.Settings)}
    assert options == {field.name: field.default for field in dataclasses.fields(TrainLM)}
