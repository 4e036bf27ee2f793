"""`adapter_config.json` of a LoRA adapter, as peft saves it: keys that change the arithmetic are
read or refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphengine.models.checkpoints.json_files import read_json_object
from graphengine.options.checks import is_int, is_number, shown

CONFIG_FILE = "adapter_config.json"

# The largest number in 16 bits: a product that is multiplied by more is not finite.
_LARGEST = 65_504
# Keys that do not affect a saved adapter's arithmetic: its tensors tell which linears it changes.
_HARMLESS = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "eva_config",
    "exclude_modules",
    # peft sets it by the layout of a weight; the matrices are the same either way.
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
}
_REASONS = {
    "use_dora": "DoRA scales each row of the whole weight by its norm",
    "modules_to_save": "it has whole weights of other modules",
    "lora_bias": "it adds a bias",
    "target_parameters": "it changes the experts' stacked weights",
    "trainable_token_indices": "it changes rows of the embedding",
    "alora_invocation_tokens": "it is active only after some tokens",
    "layer_replication": "its model repeats layers",
}
# Initialisations that change the base model, too. Case is ignored: peft accepts "OLoRA".
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """The ranks and scales of an adapter's matrices, from its config.

    file     where it was read, for errors
    rank     r, of linears that `ranks` does not name
    alpha    lora_alpha, of linears that `alphas` does not name
    ranks    by regular expressions for a linear's full name, or for the end of it after a dot
    rooted   whether the scale is alpha / sqrt(r), as rsLoRA has it
    """

    file: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rooted: bool

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read a folder's config.

        FileNotFoundError where there is none, ValueError for anything that is not understood.
        """
        file = folder / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no {CONFIG_FILE}: it is no LoRA adapter of peft")
        found = read_json_object(file)
        kind = found.get("peft_type")
        if kind != "LORA":
            raise ValueError(f"{file} has peft_type={shown(kind)}: only 'LORA' is read")
        _check_keys(file, found)
        return cls(
            file=file,
            rank=_count(file, "r", found.get("r", 8)),
            alpha=_number(file, "lora_alpha", found.get("lora_alpha", 8)),
            ranks={
                name: _count(file, f"rank_pattern[{name}]", rank)
                for name, rank in _patterns(file, found, "rank_pattern")
            },
            alphas={
                name: _number(file, f"alpha_pattern[{name}]", alpha)
                for name, alpha in _patterns(file, found, "alpha_pattern")
            },
            rooted=_switch(file, "use_rslora", found.get("use_rslora")),
        )

    def rank_of(self, linear: str) -> int:
        """The rank of the matrices for the linear with this full name in the base model."""
        return int(_matching(self.ranks, linear, self.rank))

    def scale_of(self, linear: str) -> float:
        """The factor of the matrices' product."""
        rank, alpha = self.rank_of(linear), _matching(self.alphas, linear, self.alpha)
        return float(alpha / (math.sqrt(rank) if self.rooted else rank))


def _check_keys(file: Path, found: Mapping[str, Any]) -> None:
    bias, begun = found.get("bias", "none"), found.get("init_lora_weights")
    if bias != "none":
        raise ValueError(f"{file} has bias={shown(bias)}: adapters with biases are not read")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASES):
        raise ValueError(
            f"{file} has init_lora_weights={begun!r}, which changes the base model, too: save the "
            f"adapter converted to LoRA (path_initial_model_for_weight_conversion of peft)"
        )
    for key, value in found.items():
        if key in _HARMLESS or not value:
            continue
        reason = _REASONS.get(key, "nothing here knows what that changes")
        raise ValueError(f"{file} has {key}={shown(value)}, which is not served: {reason}")


def _patterns(file: Path, found: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    value = found.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{file} has {key}={shown(value)}: must be an object of linears' names")
    for name in value:
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(f"{file}: {key} has {shown(name)}: {error}") from error
    return [*value.items()]


def _matching(patterns: Mapping[str, Any], linear: str, otherwise: Any) -> Any:
    """The value of the first pattern that fits the linear's full name, or its end, as in peft."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", linear):
            return value
    return otherwise


def _count(file: Path, name: str, value: object) -> int:
    if not is_int(value) or value < 1:
        raise ValueError(f"{file} has {name}={shown(value)}: must be an integer from 1 up")
    return int(value)


def _switch(file: Path, name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{file} has {name}={shown(value)}: must be true or false")
    return bool(value)


def _number(file: Path, name: str, value: object) -> float:
    if not is_number(value) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(
            f"{file} has {name}={shown(value)}: must be a number in [-{_LARGEST}, {_LARGEST}]"
        )
    return float(value)
