"""Prefills that feed several prompts, with weights in 8 and 4 bits: no bit depends on which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints.family_models import FamilyModel
from checkpoints.quantised_models import KINDS, write_model
from checkpoints.random_models import make
from engines.packed_replies import assert_alike, prompt_of
from engines.small_engine import open_engine
from extent import LONG, extent
from graphengine import Engine

LENGTHS = (5, 20, 1, 40, 9)
OPTIONS = {"device": "cpu", "dtype": "float32", "prompts_per_prefill": 4, "max_batch": 5}
# Products of so many columns have other bits at other numbers of lanes, if a BLAS computes them.
SIZES = {"hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 1}
ROUNDED: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "int4 with its head": {"quantize": "int4", "quantize_lm_head": True},
    "fp8 with fp8 activations": {"quantize": "fp8", "activations": "fp8"},
    "int8 with fp8 KV": {"quantize": "int8", "kv_dtype": "fp8"},
}
# Columns in another order, and activations in 8 bits, too.
FORMATS = extent(
    (("gptq desc_act", None), ("float-quantized channel", "fp8")),
    (
        *((name, None) for name in KINDS),
        *((name, "fp8") for name in ("float-quantized channel", "fp8 blocks")),
    ),
)
# Matrices of a layer in several formats; those of queries, keys and values are one linear.
GGUF_KINDS = {"attn_output": "Q6_K", "ffn_down": "Q4_1", "ffn": "Q4_K", "attn": "Q5_K"}


def packing(path: Path | None = None, **options: Any) -> Engine:
    return open_engine(path, **OPTIONS | options)


def gguf_kind(name: str) -> str:
    return next((kind for part, kind in GGUF_KINDS.items() if part in name), "Q8_0")


@pytest.mark.skipif(not LONG, reason="checkpoints that store such weights are smaller")
@pytest.mark.parametrize("name", ROUNDED)
def test_weights_that_an_engine_rounds(name: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    assert_alike(lambda: packing(**ROUNDED[name]), prompts, packed=2)


@pytest.mark.parametrize(("name", "activations"), FORMATS)
def test_weights_of_checkpoints(name: str, activations: str | None, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", KINDS[name], **SIZES).path
    prompts = [prompt_of(length, vocabulary=97) for length in LENGTHS]
    assert_alike(lambda: packing(path, activations=activations), prompts, packed=2)
    with packing(path) as engine:
        # NF4 is loaded in the model's dtype.
        assert engine.model.weights.packed() or "nf4" in name


def test_weights_of_gguf_files(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    FamilyModel(lambda: make("Llama", **sizes)).write(tmp_path / "source", 0)
    pytest.importorskip("gguf")
    from checkpoints.gguf_files import written

    file = written(tmp_path / "source", tmp_path / "files", gguf_kind).file
    prompts = [prompt_of(length, vocabulary=250) for length in LENGTHS]
    assert_alike(lambda: packing(file), prompts, packed=2)
    with packing(file) as engine:
        found = {weight.format.label for weight in engine.model.weights.packed()}
        assert len(found) > 3, found
