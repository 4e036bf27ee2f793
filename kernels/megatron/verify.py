"""Rows after a speculative step: the accepted drafts, and the inputs of the next step.

    verify_speculative_tokens -> prepare_next_forward_pass -> rewind.rewind_kv_cache
                                                           -> rewind.mamba_state_selective_copy

The four ops have the names, arguments and layouts of Megatron-core's inference controller and may
replace its own: int32 and int64 in any mix, buffers longer than the rows, on a GPU or the CPU. A
live count is an int or, for a captured graph, an integer scalar on the device. With a scalar the
grid covers the buffers, and the rows past the live ones are padded.

A row is one request. There are R rows: D that decode, then P whose prompt came in. A decode row
feeds K + 1 tokens, the last emitted one and K drafts; of a prefill row one logit is required, the
prompt's last. Here `n` positions hold the *required* tokens in that order, then perhaps padding.
"""

from __future__ import annotations

import operator

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.dispatch import use_triton
from graphengine.kernels.core.launching import launcher

Count = int | torch.Tensor

_INDEX_DTYPES = (torch.int32, torch.int64)
_BLOCK = 128


def verify_speculative_tokens(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: Count,
    num_prefill_requests: Count,
    num_speculative_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept each decode row's drafts up to the first that the target would not have emitted.

    Position 0 of a decode row is accepted; position j if input[j] == output[j - 1] at every
    position 1..j. A prefill row's only position is accepted, padding is not.

    Args:
        input_tokens: [n] or [1, n], D rows of K + 1 tokens, then P of one, then padding, which is
            not read.
        output_tokens: [n], or fewer if padding is left out: the target's token after each input.
        num_decode_requests, num_prefill_requests: D and P.
        num_speculative_tokens: K, 0 included.

    Returns:
        last_one_indices: new int64 [D + P], the position of each row's last accepted token. If one
            of the counts is a tensor, it is [n], with -1 in the padded rows.
        accepted_tokens_mask: new bool [n].
        input_tokens: as given, squeezed to [n].

    If counts on a GPU do not fit the arrays, rows that are not whole are left out. ValueError for
    what the host can see: wrong dtypes, shapes and devices, counts that do not fit.
    """
    check_drafts(num_speculative_tokens)
    device = input_tokens.device
    input_tokens = _squeeze("input_tokens", input_tokens)
    check_indices(0, device, input_tokens=input_tokens, output_tokens=output_tokens)
    positions = input_tokens.numel()
    readable = min(positions, output_tokens.numel())
    decode = check_count("num_decode_requests", num_decode_requests, positions, device)
    prefill = check_count("num_prefill_requests", num_prefill_requests, positions, device)
    required = (decode or 0) * (num_speculative_tokens + 1) + (prefill or 0)
    if required > readable:
        raise ValueError(
            f"num_decode_requests={decode} and num_prefill_requests={prefill} with "
            f"num_speculative_tokens={num_speculative_tokens} require {required} tokens: "
            f"there are {positions} inputs and {output_tokens.numel()} outputs"
        )
    if not use_triton(input_tokens):
        return verify_speculative_tokens_reference(
            input_tokens,
            output_tokens,
            num_decode_requests,
            num_prefill_requests,
            num_speculative_tokens,
        )
    rows = _rows_to_verify(num_decode_requests, num_prefill_requests, positions)
    last_one_indices = torch.empty(rows, dtype=torch.int64, device=device)
    accepted_tokens_mask = torch.empty(positions, dtype=torch.bool, device=device)
    if positions:
        launcher(_verify_kernel, (triton.cdiv(positions, _BLOCK),))(
            input_tokens,
            output_tokens,
            last_one_indices,
            accepted_tokens_mask,
            num_decode_requests,
            num_prefill_requests,
            rows,
            positions,
            readable,
            K=num_speculative_tokens,
            DECODE_ON_DEVICE=isinstance(num_decode_requests, torch.Tensor),
            PREFILL_ON_DEVICE=isinstance(num_prefill_requests, torch.Tensor),
            BLOCK=_BLOCK,
        )
    return last_one_indices, accepted_tokens_mask, input_tokens


def verify_speculative_tokens_reference(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: Count,
    num_prefill_requests: Count,
    num_speculative_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Plain twin of `verify_speculative_tokens`."""
    input_tokens = _squeeze("input_tokens", input_tokens)
    positions, device = input_tokens.numel(), input_tokens.device
    readable = min(positions, output_tokens.numel())
    stride = num_speculative_tokens + 1
    decode = max(int(num_decode_requests), 0)
    prefill = max(min(int(num_prefill_requests), readable - decode * stride), 0)
    decode = min(decode, readable // stride)
    prompts = decode * stride

    drafts = input_tokens[:prompts].view(decode, stride)[:, 1:]
    targets = output_tokens[:prompts].view(decode, stride)[:, :-1]
    accepted = (drafts == targets).long().cumprod(dim=1)
    first = torch.arange(decode, device=device) * stride

    accepted_tokens_mask = torch.zeros(positions, dtype=torch.bool, device=device)
    accepted_tokens_mask[:prompts].view(decode, stride)[:, 1:] = accepted != 0
    accepted_tokens_mask[first] = True
    accepted_tokens_mask[prompts : prompts + prefill] = True

    rows = _rows_to_verify(num_decode_requests, num_prefill_requests, positions)
    last_one_indices = torch.full((rows,), -1, dtype=torch.int64, device=device)
    last_one_indices[:decode] = first + accepted.sum(dim=1)
    last_one_indices[decode : decode + prefill] = prompts + torch.arange(prefill, device=device)
    return last_one_indices, accepted_tokens_mask, input_tokens


def prepare_next_forward_pass(
    num_decode_requests: Count,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    sampled_tokens_buf: torch.Tensor,
    last_accepted_seq_buf: torch.Tensor,
    accepted_tokens_per_request: torch.Tensor,
    accepted_token_counts: torch.Tensor,
    num_speculative_tokens: int,
    error_count: torch.Tensor | None = None,
) -> None:
    """Gather each row's newest token, its place in the sequence and its accepted drafts, in place.

        sampled_tokens_buf[r] = output_tokens[last_one_indices[r]]
        last_accepted_seq_buf[r] = required_logit_indices[last_one_indices[r]]

    For a decode row accepted_tokens_per_request[r] gets the K drafts, -1 for one that was not
    accepted, and accepted_token_counts[r] the number of accepted ones. For prefill rows these two
    are not written: the caller filled them with -1 and 0. Nothing is written for a padded row,
    whose last_one_index is -1.

    Args:
        num_decode_requests: D.
        output_tokens, input_tokens, accepted_tokens_mask: [n] as in `verify_speculative_tokens`.
        required_logit_indices: [n] or more: the position of each required token in the packed
            sequence of the step.
        last_one_indices: [R], from `verify_speculative_tokens`; its length is the number of rows.
        sampled_tokens_buf, last_accepted_seq_buf: [R] or more, overwritten.
        accepted_tokens_per_request: [D or more, K or more], dense rows, however far apart. If D is
            a tensor, this and accepted_token_counts need all R rows.
        accepted_token_counts: [D] or more.
        num_speculative_tokens: K, 0 included.
        error_count: [1], to which the number of skipped rows is added.

    The buffers must not overlap what is read. A row that points outside the arrays is skipped and
    counted on a GPU; on the CPU it is a ValueError, before anything is written. ValueError on any
    device for what the host can see: wrong dtypes, shapes and devices, counts that do not fit.
    """
    check_drafts(num_speculative_tokens)
    rows, device = last_one_indices.numel(), last_one_indices.device
    input_tokens = _squeeze("input_tokens", input_tokens)
    accepted_tokens_mask = _squeeze("accepted_tokens_mask", accepted_tokens_mask)
    decode = check_count("num_decode_requests", num_decode_requests, rows, device)
    if decode is None or isinstance(num_decode_requests, torch.Tensor):
        decode = rows
    else:
        _check_decode_rows(decode, num_speculative_tokens, input_tokens, accepted_tokens_mask)
    check_indices(
        0,
        device,
        last_one_indices=last_one_indices,
        output_tokens=output_tokens,
        required_logit_indices=required_logit_indices,
        input_tokens=input_tokens,
    )
    check_indices(
        rows,
        device,
        sampled_tokens_buf=sampled_tokens_buf,
        last_accepted_seq_buf=last_accepted_seq_buf,
    )
    check_indices(decode, device, accepted_token_counts=accepted_token_counts)
    check_table(
        "accepted_tokens_per_request",
        accepted_tokens_per_request,
        (decode, num_speculative_tokens),
        device,
    )
    _check_mask(accepted_tokens_mask, device)
    check_error_count(error_count, device)
    if rows == 0:
        return
    operands = (
        num_decode_requests,
        output_tokens,
        required_logit_indices,
        last_one_indices,
        accepted_tokens_mask,
        input_tokens,
        sampled_tokens_buf,
        last_accepted_seq_buf,
        accepted_tokens_per_request,
        accepted_token_counts,
        num_speculative_tokens,
        error_count,
    )
    if not last_one_indices.is_cuda:
        _raise_for_rows_outside(*operands[:6], num_speculative_tokens)
    if use_triton(last_one_indices):
        _launch_prepare(*operands)
    else:
        prepare_next_forward_pass_reference(*operands)


def prepare_next_forward_pass_reference(
    num_decode_requests: Count,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    sampled_tokens_buf: torch.Tensor,
    last_accepted_seq_buf: torch.Tensor,
    accepted_tokens_per_request: torch.Tensor,
    accepted_token_counts: torch.Tensor,
    num_speculative_tokens: int,
    error_count: torch.Tensor | None = None,
) -> None:
    """Plain twin of `prepare_next_forward_pass`; skips and counts on any device."""
    input_tokens = input_tokens.flatten()
    accepted_tokens_mask = accepted_tokens_mask.flatten()
    outside = _rows_outside(
        num_decode_requests,
        output_tokens,
        required_logit_indices,
        last_one_indices,
        accepted_tokens_mask,
        input_tokens,
        num_speculative_tokens,
    )
    add_errors(error_count, outside)
    live = (last_one_indices >= 0) & ~outside
    row = torch.nonzero(live).squeeze(1)
    position = last_one_indices[row].long()
    sampled_tokens_buf[row] = output_tokens[position].to(sampled_tokens_buf.dtype)
    last_accepted_seq_buf[row] = required_logit_indices[position].to(last_accepted_seq_buf.dtype)

    row = row[row < num_decode_requests]
    draft = torch.arange(num_speculative_tokens, device=row.device)
    drafts = row[:, None] * (num_speculative_tokens + 1) + 1 + draft
    accepted = accepted_tokens_mask[drafts]
    accepted_tokens_per_request[row[:, None], draft] = (
        input_tokens[drafts].where(accepted, -1).to(accepted_tokens_per_request.dtype)
    )
    accepted_token_counts[row] = accepted.sum(dim=1).to(accepted_token_counts.dtype)


def check_drafts(num_speculative_tokens: int) -> None:
    """Raise ValueError unless K is 0 or more."""
    if num_speculative_tokens < 0:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be 0 or more")


def check_indices(rows: int, device: torch.device, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless every tensor is a dense int32 or int64 vector of `rows` or more."""
    for name, tensor in tensors.items():
        check_index_dtype(name, tensor, device)
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() < rows:
            raise ValueError(
                f"{name} must be a dense vector of {rows} or more, not {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )


def check_table(
    name: str, tensor: torch.Tensor, shape: tuple[int, int], device: torch.device
) -> None:
    """Raise ValueError unless it is an int32 or int64 matrix of at least `shape`, rows dense."""
    check_index_dtype(name, tensor, device)
    fits = tensor.dim() == 2 and all(map(operator.ge, tensor.shape, shape))
    if not fits or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(
            f"{name} must be a matrix of {shape[0]} x {shape[1]} or more with dense rows, not "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def check_index_dtype(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is int32 or int64 and on `device`."""
    if tensor.dtype not in _INDEX_DTYPES:
        raise ValueError(f"{name} must be int32 or int64, not {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, other tensors are on {device}")


def check_count(name: str, count: Count, most: int, device: torch.device) -> int | None:
    """The count, if the host can know it without waiting; None for a scalar on a GPU.

    ValueError unless it is 0..most and, if it is a tensor, an integer scalar on `device`.
    """
    if isinstance(count, torch.Tensor):
        check_index_dtype(name, count, device)
        if count.numel() != 1:
            raise ValueError(f"{name} must be an int or a scalar, not {tuple(count.shape)}")
        if count.is_cuda:
            return None
        count = int(count)
    if not 0 <= operator.index(count) <= most:
        raise ValueError(f"{name}={count} is outside 0..{most}, the rows that the tensors hold")
    return operator.index(count)


def check_error_count(error_count: torch.Tensor | None, device: torch.device) -> None:
    """Raise ValueError unless it is None or an integer scalar on `device`."""
    if error_count is None:
        return
    check_index_dtype("error_count", error_count, device)
    if error_count.numel() != 1:
        raise ValueError(f"error_count must be a scalar, not {tuple(error_count.shape)}")


def add_errors(error_count: torch.Tensor | None, wrong: torch.Tensor) -> None:
    """Add the number of wrong rows, as the kernels do."""
    if error_count is not None:
        error_count += wrong.sum().to(error_count.dtype)


def _squeeze(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a dense [n] or [1, n], not {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    return tensor


def _check_mask(accepted_tokens_mask: torch.Tensor, device: torch.device) -> None:
    if accepted_tokens_mask.dtype != torch.bool:
        raise ValueError(f"accepted_tokens_mask must be bool, not {accepted_tokens_mask.dtype}")
    if accepted_tokens_mask.device != device:
        raise ValueError(
            f"accepted_tokens_mask is on {accepted_tokens_mask.device}, other tensors are on "
            f"{device}"
        )


def _check_decode_rows(
    decode: int, drafts: int, input_tokens: torch.Tensor, accepted_tokens_mask: torch.Tensor
) -> None:
    required = decode * (drafts + 1)
    if required > min(input_tokens.numel(), accepted_tokens_mask.numel()):
        raise ValueError(
            f"num_decode_requests={decode} with num_speculative_tokens={drafts} require "
            f"{required} tokens: there are {input_tokens.numel()} inputs and "
            f"{accepted_tokens_mask.numel()} entries in the mask"
        )


def _rows_to_verify(decode: Count, prefill: Count, positions: int) -> int:
    """Rows of last_one_indices: the live ones, or as many as there could be."""
    if isinstance(decode, torch.Tensor) or isinstance(prefill, torch.Tensor):
        return positions
    return decode + prefill


def _rows_outside(
    num_decode_requests: Count,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    drafts: int,
) -> torch.Tensor:
    """bool [R]: the rows to skip, because they point outside the arrays."""
    gathered = min(output_tokens.numel(), required_logit_indices.numel())
    fed = min(input_tokens.numel(), accepted_tokens_mask.numel())
    row = torch.arange(last_one_indices.numel(), device=last_one_indices.device)
    cut = (row < num_decode_requests) & (row * (drafts + 1) + drafts >= fed)
    outside = (last_one_indices < -1) | (last_one_indices >= gathered)
    return (outside | cut) & (last_one_indices != -1)


def _raise_for_rows_outside(
    num_decode_requests: Count,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    drafts: int,
) -> None:
    arrays = (output_tokens, required_logit_indices, accepted_tokens_mask, input_tokens)
    outside = _rows_outside(
        num_decode_requests,
        output_tokens,
        required_logit_indices,
        last_one_indices,
        accepted_tokens_mask,
        input_tokens,
        drafts,
    )
    for row in outside.nonzero().flatten().tolist():
        raise ValueError(
            f"row {row} with last_one_indices={int(last_one_indices[row])} points outside the "
            "{} outputs, {} required_logit_indices, {} entries of the mask or {} inputs".format(
                *(array.numel() for array in arrays)
            )
        )


def _launch_prepare(
    num_decode_requests: Count,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    sampled_tokens_buf: torch.Tensor,
    last_accepted_seq_buf: torch.Tensor,
    accepted_tokens_per_request: torch.Tensor,
    accepted_token_counts: torch.Tensor,
    num_speculative_tokens: int,
    error_count: torch.Tensor | None,
) -> None:
    rows = last_one_indices.numel()
    launcher(_prepare_kernel, (triton.cdiv(rows, _BLOCK),))(
        num_decode_requests,
        output_tokens,
        required_logit_indices,
        last_one_indices,
        accepted_tokens_mask,
        input_tokens,
        sampled_tokens_buf,
        last_accepted_seq_buf,
        accepted_tokens_per_request,
        accepted_token_counts,
        error_count,
        accepted_tokens_per_request.stride(0),
        rows,
        min(output_tokens.numel(), required_logit_indices.numel()),
        min(input_tokens.numel(), accepted_tokens_mask.numel()),
        K=num_speculative_tokens,
        DECODE_ON_DEVICE=isinstance(num_decode_requests, torch.Tensor),
        BLOCK=_BLOCK,
    )


@triton.jit
def load_count(count, ON_DEVICE: tl.constexpr):
    """A live count as int64, given by value or by address."""
    if ON_DEVICE:
        live = tl.load(count).to(tl.int64)
    else:
        live = count.to(tl.int64)
    return live


@triton.jit
def count_errors(error_count_ptr, wrong):
    """Add the number of rows that are wrong; a None counts nothing."""
    if error_count_ptr is not None:
        errors = tl.sum(wrong.to(tl.int32), 0).to(error_count_ptr.dtype.element_ty)
        if errors > 0:
            tl.atomic_add(error_count_ptr, errors)


@triton.jit(
    do_not_specialize=[
        "num_decode_requests",
        "num_prefill_requests",
        "rows",
        "positions",
        "readable",
    ]
)
def _verify_kernel(
    input_ptr,
    output_ptr,
    last_one_ptr,
    mask_ptr,
    num_decode_requests,
    num_prefill_requests,
    rows,
    positions,
    readable,
    K: tl.constexpr,
    DECODE_ON_DEVICE: tl.constexpr,
    PREFILL_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One lane serves row i, and position i if that is padding."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    decode = load_count(num_decode_requests, DECODE_ON_DEVICE)
    prefill = load_count(num_prefill_requests, PREFILL_ON_DEVICE)
    # Keep only whole rows; `readable + 1` is too many already, and cannot overflow below.
    decode = tl.minimum(tl.maximum(decode, 0), readable + 1)
    prefill = tl.maximum(tl.minimum(prefill, readable - decode * (K + 1)), 0)
    decode = tl.minimum(decode, readable // (K + 1))
    prompts = decode * (K + 1)

    decodes = i < decode
    first = i * (K + 1)
    last = first
    accepted = decodes
    tl.store(mask_ptr + first, accepted, mask=decodes)
    for draft in range(K):
        token = tl.load(input_ptr + first + draft + 1, mask=accepted, other=0).to(tl.int64)
        target = tl.load(output_ptr + first + draft, mask=accepted, other=0).to(tl.int64)
        accepted = accepted & (token == target)
        tl.store(mask_ptr + first + draft + 1, accepted, mask=decodes)
        last += accepted.to(tl.int64)

    position = prompts + (i - decode)
    prefills = (i >= decode) & (i < decode + prefill)
    tl.store(mask_ptr + position, prefills, mask=prefills)
    last = tl.where(decodes, last, tl.where(prefills, position, -1))
    tl.store(last_one_ptr + i, last, mask=i < rows)
    padding = (i >= prompts + prefill) & (i < positions)
    tl.store(mask_ptr + i, padding == 0, mask=padding)


@triton.jit(do_not_specialize=["num_decode_requests", "rows", "gathered", "fed"])
def _prepare_kernel(
    num_decode_requests,
    output_ptr,
    required_ptr,
    last_one_ptr,
    mask_ptr,
    input_ptr,
    sampled_ptr,
    last_seq_ptr,
    accepted_ptr,
    accepted_count_ptr,
    error_count_ptr,
    accepted_stride,
    rows,
    gathered,
    fed,
    K: tl.constexpr,
    DECODE_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(last_one_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    decodes = row < load_count(num_decode_requests, DECODE_ON_DEVICE)
    first = row * (K + 1)
    outside = (position < -1) | (position >= gathered) | (decodes & (first + K >= fed))
    outside = outside & (position != -1)
    live = (position >= 0) & (outside == 0)
    count_errors(error_count_ptr, outside)

    tl.store(sampled_ptr + row, tl.load(output_ptr + position, mask=live), mask=live)
    tl.store(last_seq_ptr + row, tl.load(required_ptr + position, mask=live), mask=live)

    decodes = decodes & live
    count = tl.zeros_like(row)
    for draft in range(K):
        accepted = tl.load(mask_ptr + first + draft + 1, mask=decodes, other=0) != 0
        token = tl.load(input_ptr + first + draft + 1, mask=decodes & accepted, other=-1)
        tl.store(accepted_ptr + row * accepted_stride + draft, token, mask=decodes)
        count += accepted.to(tl.int64)
    tl.store(accepted_count_ptr + row, count, mask=decodes)
