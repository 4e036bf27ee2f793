"""How a model's weights will lie in memory, decided before any of them is read.

This follows from a checkpoint's config and the headers of its tensors, or from the format that the
user wants weights rounded to. Of the tensors' values, only the orders of columns are read, which
are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from graphengine.config import RoundedKind
from graphengine.kernels.linear.packed import PackedForm, empty_packed, packed_form
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.linears import WeightForms
from graphengine.models.quantised.concatenate import are_same, joined_format, ordered_format
from graphengine.models.quantised.filling import is_of_weight, of_stack
from graphengine.models.quantised.readers import is_plain, read_order, read_weight
from graphengine.models.quantised.rounding import KIND_FORMATS, check_columns
from graphengine.models.quantised.schemes import HEAD, Quantisation, WeightScheme
from graphengine.models.weights import Stack, StoredLinear
from graphengine.options.checks import some


def stored_forms(
    checkpoint: Checkpoint,
    quantisation: Quantisation,
    linears: Sequence[StoredLinear],
    *,
    may_be_plain: bool = False,
) -> WeightForms:
    """The forms of a checkpoint's weights, if its config says that they are quantised.

    may_be_plain  whether linears may be stored in 16 or 32 bits though the config says otherwise,
                  as with draft modules that it does not mention

    Everything that follows from names, shapes and dtypes is checked. ValueError names linears that
    are computed as one but stored in different ways, and tensors that are missing, have a wrong
    shape or dtype for their format, or do not belong to it.
    """
    stored = _Stored.of(checkpoint)
    forms = {}
    for linear in linears:
        schemes = {name: quantisation.scheme(name) for name, _ in linear.parts}
        plain = [
            name
            for name, scheme in schemes.items()
            if scheme and is_plain(scheme, stored.dtypes, name)
        ]
        if plain and not (may_be_plain or linear.plain):
            raise ValueError(
                f"{checkpoint.path} has {plain[0]}.weight in {stored.dtypes[f'{plain[0]}.weight']},"
                f" and nothing beside it, but config.json says that it is quantised "
                f"({quantisation.method}); modules_to_not_convert or ignore would except it"
            )
        schemes |= dict.fromkeys(plain)
        try:
            form = _form(stored, schemes, linear)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from error
        if form is not None and not linear.plain:
            forms[linear.parts[0][0]] = form
    return WeightForms(forms)


def parted_names(quantisation: Quantisation, linears: Sequence[StoredLinear]) -> set[str]:
    """Parts of linears that the config stores in another format than the part before them.

    A block that can compute parts separately begins a new product at each of these.
    """
    found = set()
    for linear in linears:
        formats = [(name, _format(quantisation.scheme(name))) for name, _ in linear.parts]
        found |= {name for (_, before), (name, own) in pairwise(formats) if own != before}
    return found


class _Stored(NamedTuple):
    """A checkpoint's tensors by name.

    headers  the tensors without their values
    mapped   the tensors, each read when it is looked up
    below    names of the tensors under each linear's name
    """

    dtypes: Mapping[str, torch.dtype]
    headers: Mapping[str, Tensor]
    mapped: Mapping[str, Tensor]
    below: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        headers = {
            name: torch.empty(info.shape, dtype=info.dtype, device="meta")
            for name, info in checkpoint.tensors.items()
        }
        dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
        below: dict[str, list[str]] = {}
        for name in sorted(headers):
            below.setdefault(name.rpartition(".")[0], []).append(name)
        return cls(dtypes, headers, checkpoint.mapped(), below)


def _form(
    stored: _Stored, schemes: Mapping[str, WeightScheme | None], linear: StoredLinear
) -> PackedForm | None:
    found = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not found:
        return None
    formats = {name: _format(scheme) for name, scheme in schemes.items()}
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{name} as {kind}" for name, kind in formats.items())
        raise ValueError(f"linears that are computed as one are stored in different ways: {shown}")
    columns, first = linear.shape[1], next(iter(found.values()))
    parts = [
        _checked(stored, scheme, linear.stack, name, (rows, columns))
        for (name, rows), scheme in zip(linear.parts, found.values(), strict=True)
    ]
    dtypes = {part.scales.dtype for part in parts}
    same = len(dtypes) == 1
    joined = joined_format(first.format, [rows for _, rows in linear.parts])
    form = packed_form(
        ordered_format(joined, linear.order),
        dtypes.pop() if same else torch.float32,
        whole=first.whole is not None and same,
        ordered=_is_ordered(stored, found, columns),
    )
    try:
        empty_packed(form, linear.shape, swiglu=linear.swiglu, device="meta")
    except ValueError as error:
        raise ValueError(f"{', '.join(found)}: {error}") from error
    return form


def _checked(
    stored: _Stored,
    scheme: WeightScheme,
    stack: Stack | None,
    name: str,
    shape: tuple[int, int],
) -> QuantisedWeight:
    """A weight without values. ValueError for tensors under its name that do not belong to its
    format.

    A scale that nothing uses means that the weight has other values than the format gives.
    """
    found = read_weight(scheme, of_stack(stored.headers, stack), name, shape)
    below = [other for other in stored.below.get(name, ()) if is_of_weight(other)]
    left = [other for other in below if other not in found.names]
    if left:
        raise ValueError(
            f"{len(left)} tensors of {name} are none of its format, {scheme.format.label}: "
            f"{some(left)}"
        )
    return found.weight


def _is_ordered(stored: _Stored, schemes: Mapping[str, WeightScheme], columns: int) -> bool:
    """Whether columns are in another order. ValueError unless it is the same for all linears."""
    orders = {
        name: read_order(scheme, stored.mapped, name, columns) for name, scheme in schemes.items()
    }
    first, one = next(iter(orders.items()))
    for name, other in orders.items():
        if not are_same(one, other):
            raise ValueError(
                f"linears that are computed as one have their columns in different orders: "
                f"g_idx of {first} is not that of {name}"
            )
    return one is not None


def _format(scheme: WeightScheme | None) -> str:
    return "the model's dtype" if scheme is None else scheme.format.label


def rounded_forms(linears: Sequence[StoredLinear], kind: RoundedKind, *, head: bool) -> WeightForms:
    """The forms of weights in 16 or 32 bits that are rounded as they are loaded.

    head  whether lm_head is rounded, too

    ValueError, with the name and the number, for columns that the codes cannot have.
    """
    chosen = [
        linear for linear in linears if not linear.plain and (head or linear.parts[0][0] != HEAD)
    ]
    for linear in chosen:
        try:
            check_columns(KIND_FORMATS[kind], linear.shape[1])
        except ValueError as error:
            names = ", ".join(name for name, _ in linear.parts)
            raise ValueError(f"quantize={kind!r}: {names}: {error}") from error
    form = _rounded_form(KIND_FORMATS[kind])
    # lm_head has a form even if it is tied to the embedding: it then gets its own weight.
    first = [linear.parts[0][0] for linear in chosen] + ([HEAD] if head else [])
    return WeightForms(dict.fromkeys(first, form))


def _rounded_form(kind: WeightFormat) -> PackedForm:
    return packed_form(kind, torch.bfloat16 if kind.columns else torch.float32)
