"""Record which experts each token took, for the host; and replay such records.

The ids go into a mailbox of their own, in the format of the first mailbox. Row r writes lane r of
it; a token of a prompt chunk counts as a row. Token j has `route_items(L, k)` items, beginning at
item j * route_items(L, k). Item i has ids 2 * i (the low 16 bits) and 2 * i + 1 of the token's
L * k ids, layer by layer with the best first; an odd number of ids is followed by 0xffff. Each item
is

    (sequence & 0xffffffff) << 32 | payload

one aligned 64-bit store in entry sequence % entries, which the reader trusts by its own tag only.
Sequence is the step counter after the step has published, so tag and entry are those of the
replay's record in the first mailbox. Only tokens within the row's count are written, those of its
first lanes: of a row with drafts, only accepted tokens. All other items keep their old contents.

A record to be replayed is in a host table, by slot and position. One launch at the start of a step
fetches the ids of all lanes and layers, because each read goes to the host.

Letters: S slots, P positions, R rows, W lanes of a row, N = R * W lanes, L layers with experts,
k chosen of a lane.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.lanes import check_lanes, check_vector
from graphengine.kernels.core.launching import launcher
from graphengine.kernels.core.pdl import launch_options, wait_for_inputs
from graphengine.kernels.step.publish import check_mailbox
from graphengine.kernels.step.record import tag_items, tag_of

_BLOCK = 256


def route_items(layers: int, top_k: int) -> int:
    """Number of items of a token; each holds two ids."""
    return -(-layers * top_k // 2)


def publish_routes(
    mailbox_items: torch.Tensor,
    sequence_1: torch.Tensor,
    count_R: torch.Tensor,
    slot_N: torch.Tensor,
    expert_LNk: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Write the ids of the tokens that rows have taken in, as the module's docstring describes. One
    launch.

    Args:
        mailbox_items: int64 [entries, lanes, items], lanes >= R, items >= W * route_items(L, k);
            the device's memory or pinned host memory. Its reader must be done with the entry.
        sequence_1: int64 [1], `SlotState.sequence` after the step has published; only read.
        count_R: int32, tokens that each row has taken in, those of its first lanes.
        slot_N: int32, -1 for a padded lane.
        expert_LNk: int32, `Routes.expert` of each layer; padded lanes are not read.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes, rows = slot_N.numel(), count_R.numel()
    check_lanes(lanes, slot=slot_N)
    check_lanes(rows, count=count_R)
    check_vector("sequence", sequence_1, 1, torch.int64)
    layers, top_k = _check_ids(expert_LNk, lanes)
    width = lanes // max(rows, 1)
    if width * rows != lanes:
        raise ValueError(f"{lanes} lanes of {rows} rows")
    of_token = route_items(layers, top_k)
    entries, mailbox_lanes, items = check_mailbox(mailbox_items, rows, 0)
    if items < width * of_token:
        raise ValueError(
            f"{width} tokens of {of_token} items do not fit a mailbox of {items} items a lane"
        )
    if not use_triton(slot_N):
        publish_routes_reference(mailbox_items, sequence_1, count_R, slot_N, expert_LNk)
        return
    if not rows:
        return
    block = min(_BLOCK, triton.next_power_of_2(of_token))
    launcher(_publish_kernel, (lanes, triton.cdiv(of_token, block)))(
        mailbox_items,
        sequence_1,
        count_R,
        slot_N,
        expert_LNk,
        lanes,
        entries,
        mailbox_lanes,
        items,
        W=width,
        IDS=layers * top_k,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=1,
        **launch_options(pdl),
    )


def publish_routes_reference(
    mailbox_items: torch.Tensor,
    sequence_1: torch.Tensor,
    count_R: torch.Tensor,
    slot_N: torch.Tensor,
    expert_LNk: torch.Tensor,
) -> None:
    """Plain twin of `publish_routes`."""
    layers, lanes, top_k = expert_LNk.shape
    rows = count_R.numel()
    width, of_token = lanes // max(rows, 1), route_items(layers, top_k)
    sequence = int(sequence_1)
    entry = mailbox_items[sequence % mailbox_items.shape[0]]
    ids = expert_LNk.transpose(0, 1).reshape(lanes, -1).long() & 0xFFFF
    if ids.shape[1] % 2:
        ids = torch.cat((ids, ids.new_full((lanes, 1), 0xFFFF)), dim=1)
    items = tag_items(torch.tensor(sequence)) | ids[:, ::2] | ids[:, 1::2] << 16
    taken = torch.arange(width) < count_R[:, None]
    taken &= (slot_N >= 0).view(rows, width)
    for row, j in taken.nonzero().tolist():
        entry[row, j * of_token : (j + 1) * of_token] = items[row * width + j]


def given_routes(
    table_SPLk: torch.Tensor,
    length_S: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Fetch the ids of records that lanes replay: new int32 [L, N, k], -1 for no record. One
    launch.

    Args:
        table_SPLk: int16 [S, P, L, k], the device's memory or pinned host memory: the ids of
            each position, all different, or -1 in all places.
        length_S: int32, positions in each slot's record, 0 for none; at most P.
        slot_N: int32, -1 for a padded lane.
        position_N: int32, position of each lane's token.
        pdl: the launch may overlap the one before, by the rules of `core.pdl`.

    ValueError for a shape or dtype that does not fit.
    """
    lanes = slot_N.numel()
    check_lanes(lanes, slot=slot_N, position=position_N)
    if table_SPLk.dim() != 4 or table_SPLk.dtype != torch.int16 or not table_SPLk.is_contiguous():
        raise ValueError(
            f"table must be a dense int16 [S, P, L, k], not {table_SPLk.dtype} "
            f"{tuple(table_SPLk.shape)}"
        )
    slots, positions, layers, top_k = table_SPLk.shape
    check_lanes(slots, length=length_S)
    given = slot_N.new_empty(layers, lanes, top_k)
    if not use_triton(slot_N):
        return given_routes_reference(table_SPLk, length_S, slot_N, position_N, out=given)
    block = min(_BLOCK, triton.next_power_of_2(layers * top_k))
    launcher(_given_kernel, (lanes, triton.cdiv(layers * top_k, block)))(
        given,
        table_SPLk,
        length_S,
        slot_N,
        position_N,
        lanes,
        positions,
        IDS=layers * top_k,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=1,
        **launch_options(pdl),
    )
    return given


def given_routes_reference(
    table_SPLk: torch.Tensor,
    length_S: torch.Tensor,
    slot_N: torch.Tensor,
    position_N: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Plain twin of `given_routes`; it fills `out`."""
    slot = slot_N.clamp_min(0).long()
    there = (slot_N >= 0) & (position_N < length_S[slot])
    ids = table_SPLk[slot, position_N.where(there, 0).long()].int()
    out.copy_(ids.where(there[:, None, None], -1).transpose(0, 1))
    return out


def _check_ids(expert_LNk: torch.Tensor, lanes: int) -> tuple[int, int]:
    """Return (L, k); ValueError unless `expert_LNk` is dense int32 ids of this many lanes."""
    shape, dtype = tuple(expert_LNk.shape), expert_LNk.dtype
    dense = dtype == torch.int32 and expert_LNk.is_contiguous()
    if len(shape) != 3 or shape[1] != lanes or not dense or 0 in shape[::2]:
        raise ValueError(f"expert must be a dense int32 [L, {lanes}, k], not {dtype} {shape}")
    return shape[0], shape[2]


@triton.jit
def _publish_kernel(
    items_ptr,
    sequence_ptr,
    count_ptr,
    slot_ptr,
    expert_ptr,
    lanes,
    entries,
    mailbox_lanes,
    items,
    W: tl.constexpr,
    IDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (lane, block of its items)."""
    lane = tl.program_id(0)
    row = lane // W
    j = lane % W
    wait_for_inputs(PDL)

    live = tl.load(slot_ptr + lane) >= 0
    taken = live & (j < tl.load(count_ptr + row, mask=live, other=0))
    sequence = tl.load(sequence_ptr)
    ITEMS: tl.constexpr = (IDS + 1) // 2
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = taken & (i < ITEMS)
    low = 2 * i
    low_ptr = expert_ptr + (low // TOP_K * lanes + lane) * TOP_K + low % TOP_K
    high = low + 1
    high_ptr = expert_ptr + (high // TOP_K * lanes + lane) * TOP_K + high % TOP_K
    low_id = tl.load(low_ptr, mask=there, other=0)
    high_id = tl.load(high_ptr, mask=there & (high < IDS), other=0xFFFF)
    payload = (low_id & 0xFFFF).to(tl.int64) | ((high_id & 0xFFFF).to(tl.int64) << 16)
    entry_ptr = items_ptr + ((sequence % entries) * mailbox_lanes + row) * items
    tl.store(entry_ptr + j * ITEMS + i, tag_of(sequence) | payload, mask=there)


@triton.jit
def _given_kernel(
    given_ptr,
    table_ptr,
    length_ptr,
    slot_ptr,
    position_ptr,
    lanes,
    positions,
    IDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs (lane, block of its ids)."""
    lane = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    slot = tl.load(slot_ptr + lane).to(tl.int64)
    live = slot >= 0
    position = tl.load(position_ptr + lane, mask=live, other=0)
    there = live & (position < tl.load(length_ptr + slot, mask=live, other=0))
    record_ptr = table_ptr + (slot * positions + position) * IDS
    ids = tl.load(record_ptr + i, mask=there & (i < IDS), other=-1)
    out_ptr = given_ptr + (i // TOP_K * lanes + lane) * TOP_K + i % TOP_K
    tl.store(out_ptr, ids.to(tl.int32), mask=i < IDS)
