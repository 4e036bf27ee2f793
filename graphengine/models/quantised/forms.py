"""How a model's weights are going to lie in memory, before any of them is read.

It follows from what a checkpoint's config says of its linears and from the headers of its tensors,
or from what the user wants them rounded to. Only the orders of columns, which are small, are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphengine.config import RoundedKind
from graphengine.kernels import PackedForm, WeightFormat, packed_form
from graphengine.models.checkpoint import Checkpoint
from graphengine.models.contract import StoredLinear, WeightForms
from graphengine.models.quantised.concatenate import joined_format
from graphengine.models.quantised.readers import has_order, is_plain
from graphengine.models.quantised.rounding import KIND_FORMATS
from graphengine.models.quantised.schemes import HEAD, Quantisation, WeightScheme
from graphengine.models.quantised.stored_tensors import LinearTensors


def stored_forms(
    checkpoint: Checkpoint,
    quantisation: Quantisation,
    linears: Sequence[StoredLinear],
    *,
    may_be_plain: bool = False,
) -> WeightForms:
    """Those of a checkpoint whose config says that weights are quantised.

    may_be_plain  whether linears may be stored in 16 or 32 bits though the config says otherwise,
                  as draft modules' are that it is silent about

    ValueError names the linears that are computed as one and stored in different ways, and those
    whose codes or scales are missing.
    """
    forms = {}
    for linear in linears:
        names = [name for name, _ in linear.parts]
        schemes = {name: quantisation.scheme(name) for name in names}
        plain = _plain(checkpoint, schemes)
        if plain and not may_be_plain:
            raise ValueError(
                f"{checkpoint.path} has {plain[0]}.weight in "
                f"{checkpoint.tensors[f'{plain[0]}.weight'].dtype}, and nothing beside it, but "
                f"config.json says that it is quantised ({quantisation.method}); "
                f"modules_to_not_convert or ignore would except it"
            )
        schemes |= dict.fromkeys(plain)
        form = _form(checkpoint, schemes, linear)
        if form is not None:
            forms[names[0]] = form
    return WeightForms(forms)


def _plain(checkpoint: Checkpoint, schemes: Mapping[str, WeightScheme | None]) -> list[str]:
    """The linears that have a scheme and are stored without."""
    dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
    return [name for name, scheme in schemes.items() if scheme and is_plain(scheme, dtypes, name)]


def _form(
    checkpoint: Checkpoint, schemes: Mapping[str, WeightScheme | None], linear: StoredLinear
) -> PackedForm | None:
    found = [scheme for scheme in schemes.values() if scheme is not None]
    if not found:
        return None
    formats = {name: _format(scheme) for name, scheme in schemes.items()}
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{name} as {kind}" for name, kind in formats.items())
        raise ValueError(
            f"{checkpoint.path} stores linears that are computed as one in different ways: {shown}"
        )
    dtypes = {_scales_dtype(checkpoint, name, scheme) for name, scheme in schemes.items() if scheme}
    same, first = len(dtypes) == 1, found[0]
    mapped, columns = checkpoint.mapped(), linear.shape[1]
    return packed_form(
        joined_format(first.format, [rows for _, rows in linear.parts]),
        dtypes.pop() if same else torch.float32,
        whole=first.whole is not None and same,
        ordered=any(
            has_order(scheme, mapped, name, columns) for name, scheme in schemes.items() if scheme
        ),
    )


def _format(scheme: WeightScheme | None) -> str:
    return "the model's dtype" if scheme is None else scheme.format.label


def _scales_dtype(checkpoint: Checkpoint, name: str, scheme: WeightScheme) -> torch.dtype:
    """As readers give them. ValueError where codes or scales are missing."""
    there = LinearTensors(checkpoint.tensors, name)
    there.name(*scheme.codes)
    dtype = checkpoint.tensors[there.name(*scheme.scales)].dtype
    return torch.uint8 if dtype == torch.float8_e8m0fnu else dtype


def rounded_forms(linears: Sequence[StoredLinear], kind: RoundedKind, *, head: bool) -> WeightForms:
    """Those of weights in 16 or 32 bits that are rounded as they are loaded.

    head  whether lm_head is, too
    """
    names = [linear.parts[0][0] for linear in linears]
    chosen = [name for name in names if name != HEAD] + ([HEAD] if head else [])
    return WeightForms(dict.fromkeys(chosen, _rounded_form(KIND_FORMATS[kind])))


def _rounded_form(kind: WeightFormat) -> PackedForm:
    return packed_form(kind, torch.bfloat16 if kind.columns else torch.float32)
