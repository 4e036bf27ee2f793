"""Tensors that hold several linears interleaved by head, read as if each linear were stored alone.

Qwen3-Next has a gated delta net's projections in two linears. For each key head the rows of
`in_proj_qkvz` are its query, its key, and the values and then the z of its value heads; those of
`in_proj_ba` are b and a of its value heads. Qwen3.5's linears are parts of them. GPT-NeoX has each
head's query, key and value in one linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphengine.models.checkpoints.tensor_files import TensorInfo, TensorSlice
from graphengine.models.hf.config_schema import KEYS, QWEN3_5_KEYS, language_model, read_keys

_ATTENTION = ".attention.query_key_value."
_LINEARS: Mapping[str, tuple[str, ...]] = {
    ".in_proj_qkvz.": (".in_proj_qkv.", ".in_proj_z."),
    ".in_proj_ba.": (".in_proj_b.", ".in_proj_a."),
    _ATTENTION: tuple(f".attention.{letter}_proj." for letter in "qkv"),
}


def read_names(name: str) -> tuple[str, ...]:
    """The names by which a tensor is read: its own, or those of the linears that it has by head."""
    for fused, parts in _LINEARS.items():
        if fused in name:
            return tuple(name.replace(fused, part) for part in parts)
    return (name,)


def parts_of(
    directory: Path,
    names: Mapping[str, str],
    stored: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
) -> dict[str, TensorInfo]:
    """The part of its tensor that each of the `read_names` stands for.

    names   the stored name for each name by which a tensor is read
    config  of the model, which says how many heads there are

    ValueError, with names and numbers, unless a tensor has one row or scale for each of the heads'
    rows, or for each of equal blocks of them.
    """
    return {
        name: _part_of(directory, name, old, stored[old], config) for name, old in names.items()
    }


def _part_of(
    directory: Path, name: str, stored: str, info: TensorInfo, config: Mapping[str, Any]
) -> TensorInfo:
    fused = next((fused for fused in _LINEARS if fused in stored), None)
    if fused is None or info.shape in ((), (1,)):
        # Not fused, or one scale for all rows.
        return info
    pieces, heads = _pieces(fused, config)
    period = sum(pieces)
    rows, have = heads * period, info.shape[0]
    block = rows // have if have and rows % have == 0 else 0
    wanted = _wanted(fused, name)
    spans = [
        (head * period + sum(pieces[:place]), pieces[place])
        for place in wanted
        for head in range(heads)
    ]
    if not block or any(start % block or length % block for start, length in spans):
        raise ValueError(
            f"{directory} has {stored} with shape {[*info.shape]}: {heads} key heads have {period} "
            f"rows each, and rows that share a scale must be of one of {pieces}"
        )
    scaled = tuple((start // block, length // block) for start, length in spans)
    return info.part(TensorSlice(0, scaled, have))


def _pieces(fused: str, config: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """The rows of each piece of a key head, and the number of key heads."""
    if fused == _ATTENTION:
        sizes = read_keys(config, KEYS)
        count: int = sizes["num_attention_heads"]
        return (sizes["hidden_size"] // count,) * 3, count
    settings = read_keys(language_model(config), QWEN3_5_KEYS)
    keys, values = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    each = values // keys
    if fused == ".in_proj_ba.":
        return (each, each), keys
    width = each * settings["linear_value_head_dim"]
    return (*[settings["linear_key_head_dim"]] * 2, width, width), keys


def _wanted(fused: str, name: str) -> tuple[int, ...]:
    """The places of the pieces that belong to the linear of this name, in its order."""
    first = _LINEARS[fused][0]
    if fused == _ATTENTION:
        return (next(at for at, part in enumerate(_LINEARS[fused]) if part in name),)
    if fused == ".in_proj_ba.":
        return (0,) if first in name else (1,)
    return (0, 1, 2) if first in name else (3,)
