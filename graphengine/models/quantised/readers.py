"""Reads weights of 8 and 4 bits, however a checkpoint stores them.

Nothing is rounded: the weight has the values that the checkpoint's own format gives it. All work is
done where the tensors lie, so they may be on a device.

Letters: M weight rows, K input features, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from graphengine.kernels.linear.kinds import CODES, FLOATS, KINDS, Code
from graphengine.kernels.linear.quantised import (
    QuantisedWeight,
    WeightFormat,
    packed_halves,
    unpacked_halves,
)
from graphengine.models.quantised.schemes import Layout, WeightScheme
from graphengine.models.quantised.stored_tensors import (
    LinearTensors,
    check_multiple,
    check_no_nan,
    check_range,
    group_shapes,
    group_text,
)

# The columns that the eight numbers of an int32 hold in AWQ's gemm layout, from the lowest bits.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class ReadWeight(NamedTuple):
    """A weight, and the names of all tensors of its linear that are now dealt with."""

    weight: QuantisedWeight
    names: tuple[str, ...]


def read_weight(
    scheme: WeightScheme, tensors: Mapping[str, Tensor], linear: str, shape: tuple[int, int]
) -> ReadWeight:
    """The weight [out_features, in_features] of the linear of this name.

    tensors  the checkpoint's, by name; each is looked up once, so that a mapping may read files.
             The weight may share their memory. On the device "meta" everything but values is
             checked, and columns have no order
    shape    the shape that the model's config implies

    ValueError, with names and numbers, for tensors that are missing, have another dtype or shape
    than the scheme and the shape say, or have meaningless values.
    """
    stored = LinearTensors(tensors, linear)
    codes, scales, zeros = _READERS[scheme.layout](scheme, stored, shape)
    whole = None
    if scheme.whole is not None:
        whole = stored.take_whole(scheme.whole, inverse=scheme.inverse)
    order = _read_order(scheme, stored, shape[1])
    if order is not None:
        codes = _ordered(codes, order, scheme.format)
    factors = None
    if scheme.factors is not None:
        blocks = scheme.format._replace(columns=scheme.format.block)
        factors = stored.take_scales(
            [scheme.factors],
            group_shapes(blocks, shape),
            (torch.float16,),
            f"factors, {group_text(blocks, shape)}",
            signed=True,
        )
    stored.skip(scheme.unread)
    if scheme.rows_if_0 is not None and stored.stored([scheme.rows_if_0]):
        _skip_zeros(stored, scheme.rows_if_0, "codes for other layouts than rows")
    weight = QuantisedWeight(
        format=scheme.format,
        codes=codes.contiguous(),
        scales=scales.contiguous(),
        whole=whole,
        zeros=None if zeros is None else zeros.contiguous(),
        order=order,
        factors=factors,
    )
    return ReadWeight(weight, tuple(dict.fromkeys(stored.used)))


def is_plain(scheme: WeightScheme, dtypes: Mapping[str, torch.dtype], linear: str) -> bool:
    """Whether a checkpoint has the linear's weight in 16 or 32 bits, and nothing of the scheme.

    dtypes  dtypes of the checkpoint's tensors, by name

    A draft module's projections may be stored like this if the config does not mention them.
    """
    beside = (*scheme.scales, *(name for name in scheme.codes if name != "weight"))
    return dtypes.get(f"{linear}.weight") in FLOATS and not any(
        f"{linear}.{name}" in dtypes for name in beside
    )


def read_order(
    scheme: WeightScheme, tensors: Mapping[str, Tensor], linear: str, columns: int
) -> Tensor | None:
    """Only the `order` of a `QuantisedWeight`, for a linear's weight with this many columns.

    ValueError as in `read_weight`.
    """
    return _read_order(scheme, LinearTensors(tensors, linear), columns)


_Parts = tuple[Tensor, Tensor, Tensor | None]


def _read_codes(scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]) -> _Parts:
    """Read one code per element."""
    code = CODES[scheme.format.code]
    assert code.stored is not None, f"{scheme=}"
    name = stored.name(*scheme.codes)
    codes = stored.take(
        *scheme.codes, shape=shape, dtypes=(code.stored,), why=f"codes of {code.name}"
    )
    if code.type == "float":
        check_no_nan(name, codes)
    elif code.bits == 4:
        check_multiple(name, "columns", shape[1], 2)
        codes = packed_halves(_raised(name, "codes of 4 bits", codes, code))
    scales = _scales(scheme, stored, shape)
    return codes.view(torch.uint8), scales, _read_plain_zeros(scheme, stored, shape)


def _scales(scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]) -> Tensor:
    kind = scheme.format
    scales = stored.take_scales(
        scheme.scales,
        group_shapes(kind, shape),
        KINDS[scheme.kind].scales,
        group_text(kind, shape),
        signed=scheme.signed,
    )
    return scales if scheme.factor == 1 else scales.float() * scheme.factor


def _read_plain_zeros(
    scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]
) -> Tensor | None:
    kind, end, code = scheme.format, scheme.zeros, CODES[scheme.format.code]
    if end is None or not (kind.has_zeros or stored.stored([end])):
        return None
    if not kind.has_zeros:
        _skip_zeros(stored, end, "zero points of a symmetric format")
        return None
    why = f"zero points, {group_text(kind, shape)},"
    zeros = stored.take_groups([end], group_shapes(kind, shape), (torch.int8,), why)
    if code.bits == 4:
        return _raised(stored.name(end), "zero points", zeros, code)
    return zeros.view(torch.uint8)


def _raised(name: str, what: str, numbers: Tensor, code: Code) -> Tensor:
    """Codes of signed numbers of 4 bits: the middle is added."""
    assert code.middle is not None, f"{code=}"
    check_range(name, what, numbers, -code.middle, code.middle - 1)
    return (numbers + code.middle).view(torch.uint8)


def _skip_zeros(stored: LinearTensors, end: str, what: str) -> None:
    """Skip numbers, which must all be 0."""
    check_range(stored.name(end), what, stored.take_any(end).float(), 0, 0)


def _read_int32_rows(scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]) -> _Parts:
    """Read codes packed in int32 along each row, and zero points packed along each column."""
    kind, (M, K) = scheme.format, shape
    per_word = 32 // kind.bits
    name = stored.name(*scheme.codes)
    check_multiple(name, "columns", K, 8 // kind.bits)
    if stored.stored(["weight_shape"]):
        sizes = stored.take_any("weight_shape")
        said = [M, K] if sizes.is_meta else sizes.tolist()
        if said != [M, K]:
            raise ValueError(f"{stored.linear}.weight_shape says {said}: its weight is {[M, K]}")
    words = stored.take(
        *scheme.codes,
        shape=(M, -(-K // per_word)),
        dtypes=(torch.int32,),
        why=f"a weight {[M, K]} in int32 of {per_word} codes",
    )
    codes = _bytes(words)[:, : K * kind.bits // 8]
    scales = _scales(scheme, stored, shape)
    if not kind.has_zeros:
        return _signed(codes, kind), scales, _read_plain_zeros(scheme, stored, shape)
    assert scheme.zeros is not None
    groups = kind.groups(M, K)[1]
    packed = stored.take(
        scheme.zeros,
        shape=(-(-M // per_word), groups),
        dtypes=(torch.int32,),
        why=f"zero points of {M} rows and {groups} groups in int32",
    )
    zeros = _numbers(_bytes(packed.T), kind)[:, :M].T
    return _signed(codes, kind), scales, _signed(zeros, kind)


def _read_gptq(scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]) -> _Parts:
    """Read codes packed in int32 along K; all tensors are transposed."""
    kind, (M, K) = scheme.format, shape
    per_word = 32 // kind.bits
    check_multiple(stored.name(*scheme.codes), "columns", K, per_word)
    words = stored.take(
        *scheme.codes,
        shape=(K // per_word, M),
        dtypes=(torch.int32,),
        why=f"a weight {[M, K]}, transposed, in int32 of {per_word} codes",
    )
    zeros = _read_packed_zeros(scheme, stored, shape)
    if zeros is not None:
        _check_zeros(scheme, stored, zeros)
        zeros = _signed(zeros.to(torch.uint8), kind) if kind.has_zeros else None
    return _signed(_bytes(words.T), kind), _transposed_scales(scheme, stored, shape), zeros


def _read_awq(scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]) -> _Parts:
    """Read codes packed in int32 along M in AWQ's own order; all tensors are transposed."""
    kind, (M, K) = scheme.format, shape
    check_multiple(stored.name(*scheme.codes), "rows", M, 8)
    check_multiple(stored.name(*scheme.codes), "columns", K, kind.columns or K)
    check_multiple(stored.name(*scheme.codes), "columns", K, 2)
    words = stored.take(
        *scheme.codes,
        shape=(K, M // 8),
        dtypes=(torch.int32,),
        why=f"a weight {[M, K]}, transposed, in int32 of 8 codes",
    )
    codes = packed_halves(_awq_rows(unpacked_halves(_bytes(words))).T)
    zeros = _read_packed_zeros(scheme, stored, shape)
    zeros = None if zeros is None else _awq_rows(zeros.T).T.to(torch.uint8)
    return codes, _transposed_scales(scheme, stored, shape), zeros


def _awq_rows(numbers: Tensor) -> Tensor:
    """Undo the order of numbers in AWQ's words: [.., M]."""
    places = torch.tensor(_AWQ_COLUMNS, device=numbers.device).argsort()
    words = numbers.reshape(*numbers.shape[:-1], -1, 8)
    return words[..., places].flatten(-2)


def _read_packed_zeros(
    scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]
) -> Tensor | None:
    """Zero points that are packed along M, as int32 [M, G]; None: there are none."""
    kind, (M, K) = scheme.format, shape
    if scheme.zeros is None or not (kind.has_zeros or stored.stored([scheme.zeros])):
        return None
    per_word = 32 // kind.bits
    name = stored.name(scheme.zeros)
    check_multiple(name, "rows", M, per_word)
    groups = kind.groups(M, K)[1]
    words = stored.take(
        scheme.zeros,
        shape=(groups, M // per_word),
        dtypes=(torch.int32,),
        why=f"zero points of {groups} groups and {M} rows in int32 of {per_word}",
    )
    return _numbers(_bytes(words), kind).T.int() + scheme.zero_shift


def _check_zeros(scheme: WeightScheme, stored: LinearTensors, zeros: Tensor) -> None:
    assert scheme.zeros is not None
    kind = scheme.format
    name = stored.name(scheme.zeros)
    if kind.has_zeros:
        check_range(name, "zero points", zeros, 0, 2**kind.bits - 1)
    else:
        middle = CODES[kind.code].middle
        assert middle is not None, f"{kind=}"
        check_range(name, "zero points of a symmetric format", zeros, middle, middle)


def _transposed_scales(
    scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]
) -> Tensor:
    (rows, columns), kind = shape, scheme.format
    groups = kind.groups(rows, columns)[1]
    why = f"of {groups} groups of {kind.columns or columns} columns and {rows} rows"
    dtypes = KINDS[scheme.kind].scales
    return stored.take_scales(scheme.scales, [(groups, rows)], dtypes, why, signed=scheme.signed).T


def _read_halves(scheme: WeightScheme, stored: LinearTensors, shape: tuple[int, int]) -> _Parts:
    """Read two codes per byte, the lower half first, maybe in blocks that share a scale."""
    kind, (M, K) = scheme.format, shape
    name = stored.name(*scheme.codes)
    check_multiple(name, "columns", K, kind.columns)
    blocks = scheme.codes[0].endswith("blocks")
    packed = stored.take(
        *scheme.codes,
        shape=(M, K // kind.columns, kind.columns // 2) if blocks else (M, K // 2),
        dtypes=(torch.uint8,),
        why=f"a weight {[M, K]} with two codes in a byte",
    )
    return packed.reshape(M, K // 2), _scales(scheme, stored, shape), None


def _read_order(scheme: WeightScheme, stored: LinearTensors, K: int) -> Tensor | None:
    """Int32 [K], the columns sorted by their groups; None where they are in this order already."""
    end = scheme.order
    if end is None or not (scheme.needs_order or stored.stored([end])):
        return None
    groups = stored.take(
        end, shape=(K,), dtypes=(torch.int32, torch.int64), why=f"the groups of {K} columns"
    )
    columns = scheme.format.columns or K
    count = -(-K // columns)
    name = stored.name(end)
    if groups.is_meta:
        return None
    check_range(name, "groups", groups, 0, count - 1)
    sizes = groups.long().bincount(minlength=count)
    wanted = torch.full_like(sizes, columns)
    wanted[-1] = K - (count - 1) * columns
    if not torch.equal(sizes, wanted):
        first = int((sizes != wanted).nonzero()[0])
        raise ValueError(
            f"{name} puts {int(sizes[first])} columns into group {first} of {count}: "
            f"it is of {int(wanted[first])}"
        )
    order = groups.argsort(stable=True).int()
    return None if bool((order[1:] > order[:-1]).all()) else order


def _ordered(codes: Tensor, order: Tensor, kind: WeightFormat) -> Tensor:
    """Codes whose columns are sorted by group."""
    if kind.bits == 8:
        return codes[:, order]
    return packed_halves(unpacked_halves(codes)[:, order])


def _bytes(words: Tensor) -> Tensor:
    """Int32 as uint8 [.., 4 times as many], the lowest bits first."""
    return words.contiguous().view(torch.uint8)


def _numbers(packed: Tensor, kind: WeightFormat) -> Tensor:
    """Unpack bytes to uint8, one number each."""
    return packed if kind.bits == 8 else unpacked_halves(packed)


def _signed(numbers: Tensor, kind: WeightFormat) -> Tensor:
    """Turn packed numbers, whose middle stands for 0, into codes."""
    return numbers ^ CODES[kind.code].flip


_READERS: Mapping[Layout, Callable[[WeightScheme, LinearTensors, tuple[int, int]], _Parts]] = {
    "codes": _read_codes,
    "int32_rows": _read_int32_rows,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "halves": _read_halves,
}
