"""The table of a step's launches: what each multiplies by, and which kernels are whose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from graphengine import Engine
from graphengine.core.recorded_rows import record_rows
from graphengine.observe.op_table import Misaligned, OpRow, align
from graphengine.profiles.benchmark.engines import build_engine
from graphengine.profiles.benchmark.shapes import SHAPES, Subject

SIZES = {
    "device": "cpu", "max_batch": 1, "max_seq_len": 128, "prefill_buckets": (16,),
    "dtype": "bfloat16", "row_family": "dot",
}  # fmt: skip
LATENT = {
    **SHAPES["deepseek-v2-lite"],
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
PACKED = {
    **SHAPES["gpt-oss-20b"],
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{name: SHAPES[name] for name in ("tiny", "tiny-moe", "tiny-delta", "tiny-hybrid")},
    "tiny-gemma": SHAPES["tiny-gemma"],
    "latent attention": LATENT,
    "packed experts": PACKED,
}


def open_shape(name: str, **options: Any) -> Engine:
    subject = Subject.of_config(CONFIGS[name], name=name)
    return build_engine(subject, {**SIZES, **options})[0]


def rows_of(engine: Engine, graph: str = "decode/1/fast") -> list[OpRow]:
    (key,) = [key for key in engine.memory.graphs if key.name == graph]
    return record_rows(engine.runtime, engine.memory, [key])[key]


def nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        (name, quantize)
        for name in CONFIGS
        # Weights that are packed already are not rounded.
        for quantize in ((None,) if name == "packed experts" else (None, "fp8", "int4"))
    ],
)
def test_every_linear_of_a_decode_step_is_a_part(name: str, quantize: str | None) -> None:
    """Each of its layers' weights is read by one launch, and all of the weight."""
    with open_shape(name, quantize=quantize) as engine:
        rows, weights, linears = rows_of(engine), engine.model.weights, engine.model.config.linears
        attending = len(weights.kv_scales()) or engine.model.config.num_layers
        held = weights.by_linear()
    counts = Counter(row.part for row in rows)
    assert counts.pop("KV") == attending
    counts.pop("")
    assert counts.keys() == linears.keys() == held.keys()
    for part, linear in linears.items():
        read = sum(row.part_bytes for row in rows if row.part == part)
        if not linear.experts:
            assert read == nbytes(held[part]), part
    assert all(row.part_bytes == 0 for row in rows if row.part in ("", "KV"))


def test_looking_up_embeddings_is_no_product_by_a_tied_lm_head() -> None:
    with open_shape("tiny-delta") as engine:
        decode, prefill = (rows_of(engine, name) for name in ("decode/1/fast", "prefill/16"))
        assert engine.model.config.tie_embeddings
    for rows, looks_up in ((decode, "_begin_decode_kernel"), (prefill, "_embed_kernel")):
        reading = {row.kernel: row.part for row in rows if row.stage == "embed_tokens"}
        assert reading == {looks_up: "", "dot_kernel": "lm_head"}


def test_a_ring_is_a_cache() -> None:
    with open_shape("tiny-gemma") as engine:
        assert engine.runtime.program.states.rings
        decode, prefill = (rows_of(engine, name) for name in ("decode/1/fast", "prefill/16"))
    for rows in (decode, prefill):
        assert [row.part for row in rows].count("KV") == 3
    writers = [row for row in prefill if row.kernel == "_rope_append_kernel"]
    assert len(writers) == 3
    assert all(row.part == "" and row.stage.startswith("KV ") for row in writers)


# Kernels and launches.


@pytest.fixture(scope="module")
def rows() -> list[OpRow]:
    with open_shape("tiny") as engine:
        return rows_of(engine)


def test_kernels_have_the_rows_of_their_launches(rows: list[OpRow]) -> None:
    assert align([row.kernel for row in rows], rows) == rows
    mixed = [name for row in rows for name in ("Memset (Device)", row.kernel, "void at::fill")]
    assert align(mixed, rows) == [each for row in rows for each in (None, row, None)]
    assert align(["void at::fill"], []) == [None]


def test_other_kernels_are_refused_with_the_first_difference(rows: list[OpRow]) -> None:
    names = [row.kernel for row in rows]
    swapped = [names[0], names[2], names[1], *names[3:]]
    assert names[1:3] == ["dot_kernel", "decode_attention_kernel"]
    for kernels, message in (
        (swapped, "13 kernels ran and 13 launches are recorded: number 1 is "
         "decode_attention_kernel among the kernels, and dot_kernel among the launches"),
        (names[:-1], "12 kernels ran and 13 launches are recorded: number 12 is none among the "
         "kernels, and _finish_decode_kernel among the launches"),
        ([*names, "dot_kernel"], "14 kernels ran and 13 launches are recorded: number 13 is "
         "dot_kernel among the kernels, and none among the launches"),
    ):  # fmt: skip
        with pytest.raises(Misaligned, match=re.escape(message)):
            align(kernels, rows)


def test_a_known_kernel_without_a_launch_is_refused(rows: list[OpRow]) -> None:
    names = [row.kernel for row in rows]
    kernels = [*names[:5], "_defer_kernel", *names[5:]]
    assert align(kernels, rows)[5] is None, "nobody knows whose it is"
    with pytest.raises(Misaligned, match="number 5 is _defer_kernel among the kernels"):
        align(kernels, rows, known={"_defer_kernel"})
