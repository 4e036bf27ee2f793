"""The kinds of weights in 8 and 4 bits: the one table of them.

Kernels, loading, the budget and the benchmark read it, so that only these know a kind by its name:
this table, the readers of configs (`graphengine/models/quantised/`), and the decoders, which turn
packed codes into numbers in registers: `linear/gluon/packed_gluon_codes.py` and
`packed_chunk_codes.py`, and `experts/packed/packed_triton.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CodeKind = Literal["e4m3", "int8", "int4", "e2m1", "uint4"]
KindName = Literal[
    "fp8", "mxfp8", "int8", "int4", "nvfp4", "mxfp4", "q4_1", "q5_1", "q4_k", "q5_k", "q6_k"
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
POWERS = (torch.uint8, torch.float8_e8m0fnu)
"""Scales that are powers of two: a byte `b` stands for 2 ** (b - 127)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The value of the lower three bits of a float of 4 bits; the fourth is the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """How one number of a weight is written.

    name          as in labels of formats
    bits          8, or 4: two codes in a byte
    type          as compressed-tensors calls it
    values        float32 of codes, uint8: the reference of all decoders
    stored        dtype in checkpoints that have one code per element; None: no checkpoint does
    middle        the packed number that stands for 0; None: a group has no zero point
    flip          bits in which a packed number and its code differ
    moves         how kernels want the bits of a halfword of codes rearranged: (first bit, number of
                  bits, their place)
    folds         whether its product with a scale in e4m3 or a power of two is exact in 16 bits
    size          about the root mean square of random codes, of which `drawn` keeps these bits
    drawn_zeros   random zero points: from, and up to
    """

    name: CodeKind
    bits: int
    type: Literal["float", "int"]
    values: Callable[[Tensor], Tensor]
    stored: torch.dtype | None
    middle: int | None = None
    flip: int = 0
    moves: tuple[tuple[int, int, int], ...] = ()
    folds: bool = False
    size: float
    drawn: int = 255
    drawn_zeros: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A code with its scales.

    columns   columns that share a scale, if the kind fixes them; 0: any
    scales    dtypes that a checkpoint may have them in
    whole     whether there is a factor on all scales, too
    rounded   rows and columns that share a scale where `quantize=` makes it; None: it does not
    groups    other numbers of columns that `graphengine quantize` offers
    minimums  whether a number is subtracted from each group, beside its scale
    block     columns that share factors on scales and minimums, which are integers then; 0: none
    """

    code: Code
    columns: int = 0
    scales: tuple[torch.dtype, ...] = FLOATS
    whole: bool = False
    rounded: tuple[int, int] | None = None
    groups: tuple[int, ...] = ()
    minimums: bool = False
    block: int = 0


def _e2m1_values(codes: Tensor) -> Tensor:
    table = torch.tensor(E2M1, device=codes.device)
    return torch.cat((table, -table))[codes.long()]


_FLOAT8 = Code(
    name="e4m3",
    bits=8,
    type="float",
    values=lambda codes: codes.view(torch.float8_e4m3fn).float(),
    stored=torch.float8_e4m3fn,
    size=0.43,
    # Numbers below 2, and so no NaN.
    drawn=0xBF,
)
_INT8 = Code(
    name="int8",
    bits=8,
    type="int",
    values=lambda codes: codes.view(torch.int8).float(),
    stored=torch.int8,
    middle=128,
    flip=128,
    size=74.0,
    drawn_zeros=(0, 11),
)
_INT4 = Code(
    name="int4",
    bits=4,
    type="int",
    values=lambda codes: codes.float() - 8,
    stored=torch.int8,
    middle=8,
    size=4.6,
    drawn_zeros=(6, 11),
)
_UINT4 = Code(
    name="uint4",
    bits=4,
    type="int",
    values=lambda codes: codes.float(),
    stored=None,
    size=8.8,
)
_FLOAT4 = Code(
    name="e2m1",
    bits=4,
    type="float",
    values=_e2m1_values,
    stored=None,
    # Magnitudes and signs of the first three lie as far apart as in a bfloat16; the fourth has the
    # bits that are left.
    moves=(
        *((0, 3, 6), (3, 1, 15), (4, 3, 3), (7, 1, 12), (8, 3, 0), (11, 1, 9)),
        *((12, 1, 13), (13, 2, 10), (15, 1, 14)),
    ),
    folds=True,
    size=2.9,
)

KINDS: Mapping[KindName, Kind] = {
    # A byte may mean a power of two here, too; its dtype must say so.
    "fp8": Kind(code=_FLOAT8, scales=(*FLOATS, torch.float8_e8m0fnu), rounded=(1, 0)),
    "mxfp8": Kind(code=_FLOAT8, columns=32, scales=POWERS),
    "int8": Kind(code=_INT8, rounded=(1, 0)),
    "int4": Kind(code=_INT4, rounded=(1, 128), groups=(32, 64, 128)),
    "nvfp4": Kind(code=_FLOAT4, columns=16, scales=(torch.float8_e4m3fn,), whole=True),
    "mxfp4": Kind(code=_FLOAT4, columns=32, scales=POWERS),
    # Formats of llama.cpp, by its names. Codes of 5 and 6 bits take 8 bits. Q2_K, and linears whose
    # parts have several formats, are these with another number of columns.
    "q4_1": Kind(code=_UINT4, columns=32, scales=FLOATS, minimums=True),
    "q5_1": Kind(code=_INT8, columns=32, scales=FLOATS, minimums=True),
    "q4_k": Kind(code=_UINT4, columns=32, scales=(torch.int8,), minimums=True, block=256),
    "q5_k": Kind(code=_INT8, columns=32, scales=(torch.int8,), minimums=True, block=256),
    "q6_k": Kind(code=_INT8, columns=16, scales=(torch.int8,), block=256),
}
CODES: Mapping[CodeKind, Code] = {kind.code.name: kind.code for kind in KINDS.values()}
