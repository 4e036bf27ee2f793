"""The paged KV cache of one layer: its layout, its addresses, and its checks.

    kv[blocks, 2, block_size, G, D]     key (0) and value (1) of every token; any stride on blocks
    block_table_SB[slot, i]             the block that holds tokens i*block_size .. of a slot
    kv_scales[2, G]                     float32, of the keys (0) and values (1) of each head; only
                                        for a cache of FP8_KV

Token t of a slot lives in block `block_table_SB[slot, t // block_size]` at offset `t % block_size`
(PagedAttention, Kwon et al. 2023). A cache may hold more than 2**31 elements: kernels address it
with int64. Table entries past a slot's length are never followed, and cache entries past it, in the
slot's last block, affect no result.

A cache has the dtype of the queries, or FP8_KV (e4m3: 3 bits of mantissa, at most 448). For FP8_KV
a key or value is first rounded to the queries' dtype and then stored by `quantise`; its value is
the stored number times its scale. A launch that appends a token attends to it as it is stored.

Letters: S slots, B blocks of a slot's table, N lanes of a launch, Q query heads, G kv heads,
D head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphengine.kernels.core.lanes import check_int32

BLOCK_SIZES = (8, 16, 32, 64, 128)
FP8_KV = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_KV).max

_LARGEST_E4M3 = tl.constexpr(0x7E)
_NAN_E4M3 = tl.constexpr(0x7F)


@triton.jit
def cache_offsets(
    table_row_ptr,
    token,
    mask,
    kv_block_stride,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """int64 element offset of head 0 of the key of each `token` of one slot; 0 where masked off."""
    block = tl.load(table_row_ptr + token // BLOCK_SIZE, mask=mask, other=0)
    return block.to(tl.int64) * kv_block_stride + (token % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def quantised_bits(x, scale):
    """`quantise` in a kernel: e4m3 bytes (uint8) of float32 `x / scale`; the two broadcast.

    It computes in integers because Triton's interpreter rounds a cast to e4m3 differently. The
    result is that of `cvt.rn.satfinite`, except for a NaN's sign.
    """
    bits = tl.div_rn(x, scale).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Ties to even, and the exponent's bias of 127 becomes 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 there are only multiples of 2**-9, which is the last bit of a float32 at 2**14.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    e4m3 = tl.where(magnitude < 0x3C800000, subnormal, normal)
    e4m3 = tl.minimum(e4m3, _LARGEST_E4M3)
    e4m3 = tl.where(magnitude > 0x7F800000, _NAN_E4M3, e4m3)
    return (e4m3 | ((bits >> 24) & 0x80)).to(tl.uint8)


def quantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Quantise `x / scale` to FP8_KV: rounded to nearest even, at most 448; NaN stays NaN."""
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_KV)


def gather_cache(
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot: int,
    length: int,
    kv_scales: torch.Tensor | None = None,
    *,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 copies of a slot's keys and values `first` .. `length` - 1, each [tokens, G, D]."""
    block_size = kv.shape[2]
    start = first // block_size
    blocks = block_table_SB[slot, start : -(-length // block_size)].long()
    tokens = slice(first - start * block_size, length - start * block_size)
    keys, values = (kv[:, part][blocks].flatten(0, 1)[tokens] for part in (0, 1))
    if tokens.start:
        # A BLAS may sum in another order if its inputs are aligned differently.
        keys, values = keys.clone(), values.clone()
    return _as_floats(keys, values, kv_scales)


def gather_entries(
    kv: torch.Tensor,
    block_table_SB: torch.Tensor,
    slot: int,
    token_of: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 copies of a slot's keys and values at `token_of` [n], each [n, G, D]."""
    block_size = kv.shape[2]
    block_of = block_table_SB[slot].long()[token_of // block_size]
    entry_of = token_of % block_size
    return _as_floats(kv[block_of, 0, entry_of], kv[block_of, 1, entry_of], kv_scales)


def _as_floats(
    keys: torch.Tensor, values: torch.Tensor, kv_scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = keys.float(), values.float()
    if kv_scales is not None:
        keys, values = keys * kv_scales[0, :, None], values * kv_scales[1, :, None]
    return keys, values


def append_to_cache(
    kv: torch.Tensor,
    block: torch.Tensor,
    entry: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store keys and values [n, G, D] of n tokens as entries `entry` [n] of blocks `block` [n]."""
    if kv_scales is not None:
        key, value = quantise(key, kv_scales[0, :, None]), quantise(value, kv_scales[1, :, None])
    kv[block, 0, entry] = key
    kv[block, 1, entry] = value


def check_cache_dtype(
    kv: torch.Tensor, kv_scales: torch.Tensor | None, name: str, dtype: torch.dtype, kv_heads: int
) -> None:
    """Raise ValueError unless `kv` with these scales can hold the `dtype` values of `name`.

    Whoever makes the scales must check that they are positive and finite.
    """
    if kv.dtype not in (dtype, FP8_KV):
        raise ValueError(f"kv is {kv.dtype}, {name} {dtype}: it must be that, or {FP8_KV}")
    if kv.dtype != FP8_KV:
        if kv_scales is not None:
            raise ValueError(f"kv_scales are for a cache of {FP8_KV}, not of {kv.dtype}")
        return
    if kv_scales is None:
        raise ValueError(f"a cache of {FP8_KV} needs kv_scales [2, {kv_heads}], not None")
    if (
        kv_scales.shape != (2, kv_heads)
        or kv_scales.dtype != torch.float32
        or not kv_scales.is_contiguous()
    ):
        raise ValueError(
            f"kv_scales must be a dense {torch.float32} [2, {kv_heads}], "
            f"not {kv_scales.dtype} {list(kv_scales.shape)}"
        )


def check_cache(
    kv: torch.Tensor, block_table_SB: torch.Tensor, *, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Raise ValueError unless `kv` and `block_table_SB` can serve queries of this shape."""
    if kv.dim() != 5 or kv.shape[1] != 2:
        raise ValueError(f"kv must be [blocks, 2, block_size, G, D], not {tuple(kv.shape)}")
    block_size = kv.shape[2]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size} is not one of {BLOCK_SIZES}")
    if kv.shape[3:] != (kv_heads, head_dim):
        raise ValueError(
            f"kv holds {kv.shape[3]} heads of {kv.shape[4]}, expected {kv_heads} of {head_dim}"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} kv heads")
    token_stride = kv_heads * head_dim
    dense = (block_size * token_stride, token_stride, head_dim, 1)
    if kv.stride()[1:] != dense:
        raise ValueError(f"kv must be dense within a block: strides {kv.stride()[1:]} != {dense}")
    check_int32(block_table_SB=block_table_SB)
    if block_table_SB.dim() != 2 or block_table_SB.stride(1) != 1:
        raise ValueError(
            f"block_table must be [S, B] with dense rows, not {tuple(block_table_SB.shape)} "
            f"with strides {block_table_SB.stride()}"
        )


def checked_output(
    out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor:
    """Return `out`, which must be a dense `shape` in `like`'s dtype, or a new uninitialised one."""
    if out is None:
        return like.new_empty(shape)
    if out.shape != shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(
            f"out must be a dense {like.dtype} {list(shape)}, not {out.dtype} {list(out.shape)}"
        )
    return out


def token_capacity(kv: torch.Tensor, block_table_SB: torch.Tensor) -> int:
    """Tokens that a slot's row of the block table can address."""
    return block_table_SB.shape[1] * kv.shape[2]


def position_limit(
    cos: torch.Tensor, kv: torch.Tensor, block_table_SB: torch.Tensor, max_seq_len: int
) -> int:
    """Number of positions within RoPE's table, the block table and the caller's bound."""
    return min(max_seq_len, cos.shape[0], token_capacity(kv, block_table_SB))
