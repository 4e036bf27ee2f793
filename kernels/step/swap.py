"""Copy cache blocks of all layers between two caches, device to device or through pinned memory.

Letters: L layers, P pairs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import BITS, check_int32
from graphengine.kernels.core.launching import launcher

_CHUNK_BYTES = 8192


def copy_blocks(
    source: torch.Tensor, destination: torch.Tensor, pairs_P2: torch.Tensor, count: int
) -> None:
    """Copy source[:, pairs[i, 0]] to destination[:, pairs[i, 1]] for every i < count, bit for bit.

    Args:
        source, destination: [L, blocks, ...] of one dtype and one block shape, dense within a
            block. Either may be pinned host memory, which the GPU reads or writes over the bus.
        pairs_P2: int32 [P, 2] on the device; a pair with a negative block is skipped.
        count: a host integer; it only sizes the grid, no count compiles anything.

    Both may be the same tensor. The order of the pairs is not defined: a block may be the target of
    at most one pair, and then not the source of another. Returns when the copy is launched; blocks
    are valid for later work on the current stream.
    """
    _check_caches(source, destination)
    check_int32(pairs=pairs_P2)
    if pairs_P2.dim() != 2 or pairs_P2.shape[1] != 2 or not pairs_P2.is_contiguous():
        raise ValueError(f"pairs must be a dense [P, 2], not {tuple(pairs_P2.shape)}")
    if not 0 <= count <= pairs_P2.shape[0]:
        raise ValueError(f"count={count} is outside 0..{pairs_P2.shape[0]}, the pairs given")
    if count == 0:
        return
    if not use_triton(pairs_P2):
        copy_blocks_reference(source, destination, pairs_P2, count)
        return
    for name, cache in (("source", source), ("destination", destination)):
        if pairs_P2.is_cuda and not cache.is_cuda and not cache.is_pinned():
            raise ValueError(f"{name} is pageable host memory: the GPU cannot reach it, pin it")
    # Copy integers, because a float may change its bits on the way (NaN payloads).
    bits = BITS[source.element_size()]
    elements = math.prod(source.shape[2:])
    chunk = triton.next_power_of_2(min(elements, _CHUNK_BYTES // source.element_size()))
    launcher(_copy_kernel, (count, source.shape[0], triton.cdiv(elements, chunk)))(
        source.view(bits),
        destination.view(bits),
        pairs_P2,
        source.stride(0),
        source.stride(1),
        destination.stride(0),
        destination.stride(1),
        ELEMENTS=elements,
        CHUNK=chunk,
        num_warps=4,
    )


@triton.jit
def _copy_kernel(
    source_ptr,
    destination_ptr,
    pairs_ptr,
    source_layer_stride,
    source_block_stride,
    destination_layer_stride,
    destination_block_stride,
    ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a pair, layer and chunk of a block."""
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    source_block = tl.load(pairs_ptr + pair * 2).to(tl.int64)
    destination_block = tl.load(pairs_ptr + pair * 2 + 1).to(tl.int64)
    if (source_block < 0) | (destination_block < 0):
        return
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = element < ELEMENTS
    source_ptr += layer * source_layer_stride + source_block * source_block_stride
    destination_ptr += (
        layer * destination_layer_stride + destination_block * destination_block_stride
    )
    tl.store(destination_ptr + element, tl.load(source_ptr + element, mask=mask), mask=mask)


def copy_blocks_reference(
    source: torch.Tensor, destination: torch.Tensor, pairs_P2: torch.Tensor, count: int
) -> None:
    """`copy_blocks` in plain PyTorch."""
    pairs = pairs_P2[:count].long()
    pairs = pairs[(pairs >= 0).all(dim=1)]
    from_block = pairs[:, 0].to(source.device)
    to_block = pairs[:, 1].to(destination.device)
    # Copy integers: not every operation knows every dtype, and a NaN keeps its bits.
    bits = BITS[source.element_size()]
    copied = source.view(bits)[:, from_block].to(destination.device)
    destination.view(bits)[:, to_block] = copied


def _check_caches(source: torch.Tensor, destination: torch.Tensor) -> None:
    if source.dtype != destination.dtype:
        raise ValueError(f"source is {source.dtype}, destination {destination.dtype}")
    layers_and_block = [(t.shape[0], *t.shape[2:]) for t in (source, destination)]
    if source.dim() < 3 or layers_and_block[0] != layers_and_block[1]:
        raise ValueError(
            f"source {tuple(source.shape)} and destination {tuple(destination.shape)} must agree "
            "in all but the second dimension"
        )
    for name, cache in (("source", source), ("destination", destination)):
        if not cache[0, 0].is_contiguous():
            raise ValueError(f"{name} must be dense within a block: strides {cache.stride()}")
