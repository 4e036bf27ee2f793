"""What llama.cpp's converter makes of a checkpoint's tensors: names, order of rows, stacks.

The names of tensors come from the package's own table, and the order of rows from the formulae of
the converter, so that neither is the engine's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor

PAIRED = ("llama", "granite", "smollm3", "olmo")
_PLUS_ONE = ("gemma", "gemma2", "gemma3")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
# What the converter calls some tensors before it looks them up.
_RENAMED = (
    ("e_score_correction_bias", "e_score_correction.bias"),
    (".expert_bias", ".expert_bias.bias"),
)
_OLDER_NAMES = re.compile(r"model\.(layers\.\d+)\.\w+\.(experts\.w[123].*)")
Back = Callable[[Tensor], dict[str, Tensor]]


class Converted(NamedTuple):
    """A tensor of the file.

    values  as the converter writes them, float32
    back    the checkpoint's tensors, by their names there, of values in that layout
    """

    name: str
    values: Tensor
    back: Back


def name_in_file(names: gguf.TensorNameMap, name: str) -> str | None:
    """A tensor's name in the file; None: the package has none for it."""
    for old, new in _RENAMED:
        name = name.replace(old, new) if name.endswith(old) else name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None and (older := _OLDER_NAMES.fullmatch(name)):
        # So it calls experts that it has stacked.
        found = names.get_name(f"{older[1]}.feed_forward.{older[2]}", try_suffixes=(".weight",))
    return found


def converted(
    arch: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[Converted]:
    """The tensors of the file of a checkpoint with these tensors."""
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config.get("num_hidden_layers") or config["n_layer"])
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            stacks.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = tensor
            continue
        if name.startswith("mtp.") or (name == "lm_head.weight" and config["tie_word_embeddings"]):
            continue
        stored = name_in_file(names, name)
        assert stored is not None, name
        values, back = _converted(arch, config, name, stored, tensor.float())
        yield Converted(stored, values, back)
    for name, experts in stacks.items():
        stored = name_in_file(names, name)
        assert stored is not None, name
        stack = torch.stack([experts[index] for index in sorted(experts)]).float()
        yield Converted(stored, stack, _unstacked(name))


def _unstacked(name: str) -> Back:
    module, _, last = name.removesuffix(".weight").rpartition(".")
    return lambda stack: {
        f"{module}.{index}.{last}.weight": each.clone() for index, each in enumerate(stack)
    }


def _converted(
    arch: str, config: Mapping[str, Any], name: str, stored: str, tensor: Tensor
) -> tuple[Tensor, Back]:
    """The values of one tensor as the converter writes them, and the way back."""
    if "shortconv.conv" in stored:
        # The converter squeezes the taps of convolutions.
        return tensor.squeeze(1), lambda read: {name: read.reshape(tensor.shape)}
    if arch == "qwen2moe" and "ffn_gate_inp_shexp" in stored:
        # As older converters wrote it, and transformers reads it.
        return tensor.squeeze(0), lambda read: {name: read.reshape(tensor.shape)}
    if arch in _PLUS_ONE and stored.endswith("norm.weight"):
        return tensor + 1, lambda read: {name: read - 1}
    if arch == "gpt2" and re.search(r"attn_qkv|attn_output|ffn_", stored) and tensor.ndim > 1:
        return tensor.t(), lambda read: {name: read.t().contiguous()}
    if arch == "gptneox" and "attn_qkv" in stored:
        heads, shape = config["num_attention_heads"], tensor.shape
        parts = tensor.reshape(heads, 3, -1, *shape[1:]).swapaxes(0, 1)
        return parts.reshape(shape), lambda read: {
            name: read.reshape(3, heads, -1, *shape[1:]).swapaxes(0, 1).reshape(shape).contiguous()
        }
    if arch in PAIRED and (found := re.search(r"attn_([qk])\.", stored)):
        key = "num_attention_heads" if found[1] == "q" else "num_key_value_heads"
        heads = config.get(key) or config["num_attention_heads"]
        return permuted(tensor, heads), lambda read: {name: _unpermuted(read, heads)}
    return tensor, lambda read: {name: read.reshape(tensor.shape)}


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """`permute` of llama.cpp's converter."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape).contiguous()
