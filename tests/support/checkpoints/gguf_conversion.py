"""What llama.cpp's converter makes of a checkpoint's tensors: names, order of rows, stacks.

The names of tensors come from the package's own table, and the order of rows from the formulae of
the converter, so that neither is the engine's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor

_PAIRED = (
    *("llama", "granite", "smollm3", "olmo", "granitehybrid", "nemotron_h", "nemotron_h_moe"),
    "mistral3",
)
_PLUS_ONE = ("gemma", "gemma2", "gemma3", "qwen3next")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
# What the converter calls some tensors before it looks them up.
_RENAMED = (
    ("e_score_correction_bias", "e_score_correction.bias"),
    (".expert_bias", ".expert_bias.bias"),
    ("mixer.dt_bias", "mixer.dt.bias"),
    (".dt_bias", ".dt_proj.bias"),
    (".sinks", ".sinks.weight"),
)
_OLDER_NAMES = re.compile(r"model\.(layers\.\d+)\.\w+\.(experts\.w[123].*)")
_GATES_UPS = ("gate_proj", "up_proj")
Function = Callable[[Tensor], Tensor]


class Converted(NamedTuple):
    """A tensor of the file.

    views  of the checkpoint's tensors, whose values the file has one after the other
    shape  in the file
    write  makes the converter's values of those of the checkpoint, one by one
    read   undoes that
    """

    name: str
    views: Sequence[Tensor]
    shape: Sequence[int]
    write: Function = torch.clone
    read: Function = torch.clone

    @property
    def values(self) -> Tensor:
        """The values in the file, float32."""
        return torch.cat([self.write(view).flatten() for view in self.views]).reshape(*self.shape)

    def put(self, values: Tensor) -> None:
        """Set the checkpoint's tensors to values of the file."""
        parts = values.flatten().split([view.numel() for view in self.views])
        for view, part in zip(self.views, parts, strict=True):
            view.copy_(self.read(part).reshape(view.shape))


def name_in_file(names: gguf.TensorNameMap, name: str) -> str | None:
    """A tensor's name in the file; None: the package has none for it."""
    for old, new in _RENAMED:
        name = name.removesuffix(old) + new if name.endswith(old) else name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None and (older := _OLDER_NAMES.fullmatch(name)):
        # So it calls experts that it has stacked.
        found = names.get_name(f"{older[1]}.feed_forward.{older[2]}", try_suffixes=(".weight",))
    return found


def converted(
    arch: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[Converted]:
    """The tensors of the file of a checkpoint with these tensors, float32."""
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, layers_of(config))
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            stacks.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = tensor
            continue
        for named, views in _split(arch, config, name, tensor).items():
            stored = name_in_file(names, named)
            assert stored is not None, named
            yield _laid_out(arch, config, stored, views)
    for name, experts in stacks.items():
        # Nemotron's have another name by then.
        stored = name_in_file(names, re.sub(r"backbone(.*)mixer", r"model\1mlp", name))
        assert stored is not None, name
        views = [experts[index] for index in sorted(experts)]
        yield Converted(stored, views, (len(views), *views[0].shape))


def layers_of(config: Mapping[str, Any]) -> int:
    """The number of layers, whatever it is called."""
    counts = (config.get(name) for name in ("num_hidden_layers", "n_layer"))
    return next((count for count in counts if count), 0) or len(config["layers_block_type"])


def _split(
    arch: str, config: Mapping[str, Any], name: str, tensor: Tensor
) -> dict[str, Sequence[Tensor]]:
    """What the converter makes of one tensor: views of it, by names like those of others."""
    if arch == "gpt-oss" and "_proj" in name and "experts" in name:
        end = ".bias" if name.endswith("_bias") else ".weight"
        whole = tensor if end == ".bias" else tensor.transpose(1, 2)
        stem = name.removesuffix("_bias")
        if "gate_up" not in name:
            return {stem + end: [whole]}
        stem = stem.removesuffix("gate_up_proj")
        return {f"{stem}{each}{end}": [whole[:, i::2]] for i, each in enumerate(_GATES_UPS)}
    if ("_linear" in name and "mlp" in name) or "input_linear" in name:
        return _granite_feed_forward(config, name, tensor)
    if name.endswith("kv_b_proj.weight"):
        heads, value = config["num_attention_heads"], config["v_head_dim"]
        of_heads = tensor.view(heads, -1, tensor.shape[1])
        keys, values = of_heads.split([of_heads.shape[1] - value, value], dim=1)
        parts = {"k_b_proj": [keys.transpose(1, 2)], "v_b_proj": [values]}
        return {name.replace("kv_b_proj", part): views for part, views in parts.items()}
    if "in_proj_qkvz" in name:
        of_heads = tensor.view(config["linear_num_key_heads"], -1, tensor.shape[1])
        key = config["linear_key_head_dim"]
        value = (of_heads.shape[1] - 2 * key) // 2
        *qkv, z = of_heads.split([key, key, value, value], dim=1)
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): [z]}
    if arch == "gptneox" and "query_key_value" in name:
        of_heads = tensor.view(config["num_attention_heads"], 3, -1, *tensor.shape[1:])
        return {name: [*of_heads.unbind(1)]}
    return {name: [tensor]}


def _granite_feed_forward(
    config: Mapping[str, Any], name: str, tensor: Tensor
) -> dict[str, Sequence[Tensor]]:
    """Gates and ups of experts, or of the feed-forward of every token, by themselves."""
    module, _, last = name.removesuffix(".weight").rpartition(".")
    beside = "mlp.shared_expert" if config.get("num_local_experts") else "mlp"
    module = module.replace("shared_mlp", beside).replace("block_sparse_moe", "mlp.experts")
    if last == "output_linear":
        return {f"{module}.down_proj.weight": [tensor]}
    parts = tensor.chunk(2, dim=-2)
    return {f"{module}.{each}.weight": [part] for each, part in zip(_GATES_UPS, parts, strict=True)}


def _laid_out(
    arch: str, config: Mapping[str, Any], stored: str, views: Sequence[Tensor]
) -> Converted:
    """The values and the order of a tensor in the file."""
    whole = views[0]
    rows = sum(view.numel() for view in views) // (whole.shape[-1] if whole.ndim > 1 else 1)
    shape: Sequence[int] = whole.shape if len(views) == 1 else (rows, *whole.shape[2:])
    if len(views) == 1 and whole.ndim == 3 and "attn_gate" in stored:
        shape = (rows, whole.shape[-1])
    if len(views) > 1 and stored.endswith(".bias"):
        shape = (sum(view.numel() for view in views),)
    found = Converted(stored, views, shape)
    recurrent = arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe")
    if "shortconv.conv" in stored or "ssm_conv1d.weight" in stored:
        # The converter squeezes the taps of convolutions.
        return found._replace(shape=(whole.shape[0], whole.shape[2]))
    if stored.endswith("ssm_a"):
        found = found._replace(write=lambda a: -a.exp(), read=lambda a: (-a).log())
    if stored.endswith(("ssm_a", "ssm_d")):
        return found._replace(shape=(len(whole), 1) if recurrent else whole.shape)
    if "ssm_norm" in stored:
        groups = config.get("mamba_n_groups") or config.get("n_groups")
        return found._replace(shape=(groups, -1) if groups else whole.shape)
    if arch == "qwen2moe" and "ffn_gate_inp_shexp" in stored:
        # As older converters wrote it, and transformers reads it.
        return found._replace(shape=(whole.shape[1],))
    if arch in _PLUS_ONE and stored.endswith("norm.weight"):
        return found._replace(write=lambda norm: norm + 1, read=lambda norm: norm - 1)
    if arch == "gpt2" and re.search(r"attn_qkv|attn_output|ffn_", stored) and whole.ndim > 1:
        return found._replace(views=[whole.t()], shape=whole.t().shape)
    if arch in _PAIRED and (letter := re.search(r"attn_([qk])\.", stored)):
        key = "num_attention_heads" if letter[1] == "q" else "num_key_value_heads"
        heads = config.get(key) or config["num_attention_heads"]
        halves = whole.view(heads, 2, -1, *whole.shape[1:])
        return found._replace(views=[halves.swapaxes(1, 2)])
    return found
