"""What the gated delta net is compiled to for sm_90, without a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from graphengine.kernels.recurrent.gated_delta.gated_delta_sizes import (
    GatedDeltaParams,
    GatedDeltaSizes,
)
from launches.compilation import (
    Op,
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    launches_handed_to,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

# Of Qwen3.5-4B.
SIZES = GatedDeltaSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
gated_delta = importlib.import_module("graphengine.kernels.recurrent.gated_delta.gated_delta")


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches_of(lanes: int, *, width: int = 0) -> dict[str, Op]:
    """Launches of rows of so many tokens in decode, or of a chunk where `width` is 0."""
    lane = new(lanes, dtype=torch.int32)
    heads = SIZES.value_heads
    params = GatedDeltaParams(
        new(SIZES.channels, SIZES.taps),
        new(heads, dtype=torch.float32),
        new(heads, dtype=torch.float32),
        new(SIZES.value_dim),
    )
    entries = max(width, 1)
    ring = new(8, SIZES.taps - 1 + entries, SIZES.channels)
    state = new(8, entries, *SIZES.state_shape, dtype=torch.float32)
    projected, where = new(lanes, SIZES.projected), (lane, lane, params, SIZES)
    found: list[Op] = []
    with launches_handed_to(found.append, gated_delta):
        if width:
            options = {"eps": 1e-6, "tokens_per_row": width, "pdl": True}
            gated_delta.gated_delta_decode(projected, ring, state, *where, **options)
        else:
            qkv = new(lanes, SIZES.channels)
            gated_delta.gated_delta_prefill(qkv, projected, state, *where, eps=1e-6, pdl=True)
    return {launch.kernel.__name__: launch for launch in found}


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("pieces_kernel", {"layer"}),
        ("scan_kernel", set()),
        ("outputs_kernel", {"norm_ptr"}),
    ],
)
def test_weights_alone_are_read_before_the_wait_of_a_chunk(name, weights):
    ptx, names = compile_launch(launches_of(128)[name])
    assert_waits_before_it_shows(ptx)
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    assert {each.partition(".")[0] for each in early} == weights


def test_rows_of_any_width_run_one_text():
    one, four = (
        compile_launch(launches_of(8, width=width)["decode_kernel"])[0] for width in (1, 4)
    )
    assert one == four
    assert_waits_before_it_shows(one)


WEIGHTS = {
    "decode_kernel": {"layer.conv_weight", "layer.a_log", "layer.dt_bias"},
    "gated_norm_kernel": {"norm_ptr"},
}
EARLIER = {
    "decode_kernel": {"slot_ptr", "position_ptr", "state_ptr", "ring_ptr"},
    "gated_norm_kernel": {"slot_ptr", "projected_ptr"},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_decode_asks_before_it_waits_for_what_is_there(name):
    """Weights come from memory each step, and past the L1 cache what older launches wrote."""
    ptx, names = compile_launch(launches_of(8, width=1)[name])
    assert_waits_before_it_shows(ptx)
    early = [load for load in global_loads(ptx, names) if not load.after_wait]
    assert {load.argument for load in early} == WEIGHTS[name] | EARLIER[name]
    assert all(load.past_l1 for load in early if load.argument in EARLIER[name])
