"""What convolutions are compiled to for sm_90, without a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from graphengine.kernels.core.dispatch import INTERPRETED
from launches.compilation import (
    assert_waits_before_it_shows,
    compile_launch,
    global_loads,
    record_launch,
)

pytestmark = pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")

CHANNELS, TAPS = 2048, 3
conv = importlib.import_module("graphengine.kernels.recurrent.conv")
short_conv = importlib.import_module("graphengine.kernels.recurrent.short_conv")


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_of(lanes: int, **options: int):
    """The launch of a prompt's chunk without `options`, else of rows of a short convolution."""
    lane = new(lanes, dtype=torch.int32)
    weights = (
        new(CHANNELS, TAPS),
        new(CHANNELS),
        new(8, 2 + max([1, *options.values()]), CHANNELS),
    )
    if not options:
        x = new(lanes, CHANNELS)
        return record_launch(
            conv, lambda: conv.causal_conv_chunk(x, *weights, lane, lane, pdl=True)
        )
    x = new(lanes, 3 * CHANNELS)
    run = short_conv.short_conv_decode
    return record_launch(short_conv, lambda: run(x, *weights, lane, lane, pdl=True, **options))


@pytest.mark.parametrize("options", [{}, {"tokens_per_row": 1}, {"tokens_per_row": 4}])
def test_what_is_read_before_the_wait(options):
    """Weights, and in decode, past the L1 cache, what older launches wrote."""
    ptx, names = compile_launch(launch_of(128, **options))
    assert_waits_before_it_shows(ptx)
    early = {load.argument for load in global_loads(ptx, names) if not load.after_wait}
    earlier = {"slot_ptr", "position_ptr", "kept_ptr"} if options else set()
    assert early == {"weight_ptr", "bias_ptr"} | earlier
    assert all(
        load.past_l1
        for load in global_loads(ptx, names)
        if not load.after_wait and load.argument in earlier
    )


def test_rows_of_any_width_run_one_text():
    one, four = (compile_launch(launch_of(8, tokens_per_row=width))[0] for width in (1, 4))
    assert one == four
