"""Decode attention over a cache of e4m3: the token's own key and value count as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from graphengine.kernels.attention.decode import decode_attention, decode_attention_arrivals
from graphengine.kernels.attention.reference import decode_attention_reference
from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.core.paged import FP8_KV, quantise
from graphengine.kernels.norm_rope.rope import rope_append_reference
from graphengine.kernels.norm_rope.rope_config import RopeConfig, rope_tables

NATIVE = torch.cuda.is_available() and not INTERPRETED
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 64, 16
# Splits have 64 keys.
LENGTHS = (0, 1, 63, 64, 70, 700 if NATIVE else 150)
MOST = 1 + max(LENGTHS)

Op = tuple[Callable[..., torch.Tensor], str]


def attend_long_splits(*arguments: Any, **options: Any) -> torch.Tensor:
    """On a GPU another kernel."""
    return decode_attention(*arguments, split_tokens=256, **options)


@pytest.fixture(
    scope="module", params=["short splits", "reference", *(["long splits"] if NATIVE else [])]
)
def op(request: pytest.FixtureRequest) -> Op:
    if request.param == "reference":
        return decode_attention_reference, "cpu"
    function = attend_long_splits if request.param == "long splits" else decode_attention
    return function, request.getfixturevalue("device")


@pytest.fixture(scope="module")
def op_dtypes(op: Op, request: pytest.FixtureRequest) -> tuple[torch.dtype, ...]:
    if op[0] is decode_attention_reference:
        return (torch.float32, torch.float16, torch.bfloat16)
    return tuple(request.getfixturevalue("dtypes"))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scales() -> torch.Tensor:
    """Some saturate, some leave few bits."""
    return torch.tensor([[0.004, 0.3], [0.02, 2.0]])


def run(
    op: Op,
    place_cache: Callable[..., Any],
    dtype: torch.dtype,
    lanes: Sequence[tuple[int, int]],
    *,
    width: int = 1,
    placement: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lanes (slot, tokens after the slot's cached ones): [N, Q * D], and a slot's stored keys and
    values [S, MOST + 8, G, D] in float32, read as they mean.
    """
    function, device = op
    kv_scales = scales()
    keys, values = (
        quantise(draw(len(LENGTHS), MOST, KV_HEADS, HEAD_DIM, seed=which).to(dtype), scale[:, None])
        for which, scale in enumerate(kv_scales)
    )
    cache = place_cache(
        keys.to(device),
        values.to(device),
        LENGTHS,
        block_size=BLOCK,
        placement=placement,
        poison=True,
        room=8,
    )
    tokens = {lane: draw((HEADS + 2 * KV_HEADS) * HEAD_DIM, seed=sum(lane)) for lane in lanes}
    qkv = torch.stack([tokens[lane] for lane in lanes]).to(device, dtype)
    slots = [slot for slot, _ in lanes]
    positions = [LENGTHS[slot] + ahead if slot >= 0 else -7 for slot, ahead in lanes]
    cos, sin = rope_tables(RopeConfig(), head_dim=HEAD_DIM, max_positions=MOST + 8, device=device)
    arguments: list[Any] = [qkv, cos, sin, cache.kv, cache.block_table_SB]
    arguments += [torch.tensor(each, dtype=torch.int32).to(device) for each in (slots, positions)]
    if function is not decode_attention_reference:
        count = decode_attention_arrivals(len(lanes), num_heads=HEADS, num_kv_heads=KV_HEADS)
        arguments.append(Launch(arrivals=torch.zeros(count, dtype=torch.int32, device=device)))
    optional = {} if function is decode_attention_reference else {"tokens_per_row": width}
    out = function(
        *arguments,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        scale=0.125,
        max_seq_len=MOST + 8,
        kv_scales=kv_scales.to(device),
        **optional,
    )
    columns = -(-(MOST + 8) // BLOCK)
    table = cache.block_table_SB.cpu()[:, :columns].long().clamp(0, cache.kv.shape[0] - 1)
    stored = cache.kv.cpu().float()[table].transpose(1, 2).flatten(2, 3)
    meant = stored * kv_scales[:, :, None][None, :, None]
    return out.cpu(), meant[:, 0], meant[:, 1]


def assert_stored(which: int, actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """Values to the bit; a key, which is rotated before, may be the next of e4m3."""
    step = 1 / 8 if which == 0 else 0
    smallest = step * 2.0**-6 * float(scales()[which].max())
    torch.testing.assert_close(actual, wanted, rtol=step, atol=smallest)


def test_equals_the_definition_over_what_is_stored(
    op: Op, op_dtypes: tuple[torch.dtype, ...], place_cache: Callable[..., Any]
) -> None:
    lanes = [(slot, 0) for slot in range(len(LENGTHS))]
    for dtype in op_dtypes:
        out, keys, values = run(op, place_cache, dtype, [(-1, 0), *lanes], placement=3)
        for (slot, _), row in zip(lanes, out[1:], strict=True):
            length = LENGTHS[slot]
            qkv = draw((HEADS + 2 * KV_HEADS) * HEAD_DIM, seed=slot).to(dtype)[None]
            # A cache of the queries' dtype, for the rotated query and key before they are stored.
            plain = torch.zeros(2, 2, MOST + 8, KV_HEADS, HEAD_DIM, dtype=dtype)
            one = torch.ones(1, 1, dtype=torch.int32)
            cos, sin = rope_tables(
                RopeConfig(), head_dim=HEAD_DIM, max_positions=MOST + 8, device="cpu"
            )
            position = torch.tensor([length], dtype=torch.int32)
            heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
            q = rope_append_reference(qkv, cos, sin, plain, one, one[0] - 1, position, **heads)
            for which, meant in enumerate((keys, values)):
                scale = scales()[which][:, None]
                own = quantise(plain[1, which, length], scale).float() * scale
                assert_stored(which, meant[slot, length], own)
            q = q.double().view(KV_HEADS, -1, HEAD_DIM)
            k, v = (t[slot, : length + 1].double().transpose(0, 1) for t in (keys, values))
            weights = torch.softmax(q @ k.mT * 0.125, dim=-1)
            tolerance = TOLERANCE[dtype]
            wanted = (weights @ v).flatten()
            torch.testing.assert_close(row.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", [decode_attention, *([attend_long_splits] if NATIVE else [])])
def test_the_siblings_of_a_row_count_as_they_are_stored(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    place_cache: Callable[..., Any],
    kernel: Callable[..., torch.Tensor],
) -> None:
    """The kernel, whose lanes cannot read what their siblings append, against the reference, whose
    lanes follow each other.
    """
    for dtype in dtypes:
        for slot in range(len(LENGTHS)):
            row = [(slot, ahead) for ahead in range(4)]
            out, *stored = run((kernel, device), place_cache, dtype, row, width=4)
            expected = (decode_attention_reference, "cpu")
            wanted, *wanted_stored = run(expected, place_cache, dtype, row)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
            end = LENGTHS[slot] + 4
            for which in (0, 1):
                assert_stored(which, stored[which][slot, :end], wanted_stored[which][slot, :end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_scales": None}, r"a cache of torch.float8_e4m3fn needs kv_scales \[2, 2\], not None"),
        ({"kv_scales": torch.ones(2)}, r"a dense torch.float32 \[2, 2\], not torch.float32 \[2\]"),
        ({"kv": torch.zeros(3, 2, 16, 2, 64)}, "kv_scales are for a cache of torch.float8_e4m3fn"),
        ({"kv": torch.zeros(3, 2, 16, 2, 64).half()}, "kv is torch.float16, qkv torch.float32"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    valid = {
        "qkv_NX": torch.zeros(2, 8 * 64),
        "cos": torch.zeros(16, 32),
        "sin": torch.zeros(16, 32),
        "kv": torch.zeros(3, 2, 16, 2, 64).to(FP8_KV),
        "block_table_SB": torch.zeros(2, 2, dtype=torch.int32),
        "slot_N": torch.full((2,), -1, dtype=torch.int32),
        "position_N": torch.zeros(2, dtype=torch.int32),
        "launch": Launch(arrivals=torch.zeros(4, dtype=torch.int32)),
        "num_heads": 4,
        "num_kv_heads": 2,
        "scale": 0.125,
        "max_seq_len": 16,
        "kv_scales": torch.ones(2, 2),
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**(valid | change))
