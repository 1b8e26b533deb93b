"""What `foretell doctor` says of a model's layers."""

from __future__ import annotations

from foretell.api.layer_report import report_layers
from foretell.models.decoder.decoder import Decoder
from foretell.models.decoder.fused import fused_blocks
from foretell.models.decoder.packed import pack_layers
from foretell.models.decoder.packed_experts import pack_experts
from tests.models.decoder.families import described, tiny


def test_what_differs_from_a_llama_layer_is_said_with_its_layers() -> None:
    report = report_layers(Decoder(described("smollm3"), "tiny", fused_blocks))
    assert report.described_by == "foretell/models/families/smollm.py"
    assert report.differences == (("rotation", "halves in layers 0, 2; none in layer 1"),)
    assert report.windows == "8 tokens in layers 0, 2; none in layer 1"
    assert report.experts == ()


def test_what_all_layers_share_is_said_once() -> None:
    report = report_layers(Decoder(described("gemma"), "tiny", fused_blocks))
    assert dict(report.differences) == {"norm_offset": "1.0", "activation": "gelu_tanh"}
    assert report.windows == "none"


def test_experts_have_lines_of_their_own() -> None:
    report = report_layers(Decoder(described("glm4_moe"), "tiny", fused_blocks))
    experts = dict(report.experts)
    assert experts["chosen"] == "3 of 8 a token" and experts["layers"] == "layers 1 to 2"
    assert experts["scoring"] == "logistic" and experts["chosen_groups"] == "2"
    assert "experts" not in dict(report.differences)


def test_matrices_are_counted_by_their_numbers_each_memory_once() -> None:
    hf = tiny("llama", tie_word_embeddings=True)
    wide = report_layers(Decoder(hf, "tiny", fused_blocks)).matrices
    ((name, _, size),) = wide
    assert name == "float32" and size == sum(p.nbytes for p in hf.parameters() if p.ndim > 1)
    hf = described("mixtral").bfloat16()
    pack_layers(hf, "int4")
    pack_experts(hf, "int4")
    counts = {name: count for name, count, _ in report_layers(Decoder(hf, "tiny")).matrices}
    assert counts["int4"] == 3 * (4 + 3)  # four of attention and three of all experts a layer
    assert counts["int8"] == 1  # the head
    assert counts["bfloat16"] == 1 + 3  # embeddings and routers


def test_layers_that_are_not_described_compute_themselves() -> None:
    report = report_layers(Decoder(tiny("nanochat"), "tiny", fused_blocks))
    assert report.described_by == "none: the model's own layers compute"
    assert (report.differences, report.windows) == ((), "")
    built_alike = report_layers(Decoder(tiny("internlm3"), "tiny", fused_blocks))
    assert built_alike.described_by == "none: they have the parts of a llama layer"
