"""Small models whose linears are stored in 8 or 4 bits, as people have them, and what they mean.

A `Store` writes one linear with random codes. What it means is what a public package says, or a
plain formula over the same numbers.

Letters: M weight rows, K input features, G groups of columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints.bitsandbytes_weights import four_bit_tensors, int8_tensors
from checkpoints.compressed import compressed, config_of, weight_args
from checkpoints.packed_weights import awq_tensors, gptq_tensors, meaning
from graphengine.kernels.linear.kinds import E2M1

Tensors = dict[str, Tensor]
SIZE = 0.25
"""About the largest number of a weight: with it logits spread."""
HEAD = "lm_head"


class Stored(NamedTuple):
    """A linear's tensors, by their last names, and the weight [M, K] that they stand for."""

    tensors: Tensors
    meant: Tensor


Store = Callable[[str, int, int], Stored]
"""Writes the linear of a name with M rows and K columns."""


class Kind(NamedTuple):
    """config  `quantization_config`"""

    config: dict[str, Any]
    store: Store


class Written(NamedTuple):
    """A checkpoint and transformers' model of what it means, in float32."""

    path: Path
    model: PreTrainedModel


def compressed_kind(name: str, **weights: Any) -> Kind:
    """A format of compressed-tensors, by the package's own compressor."""
    args = weight_args(weights)

    def store(linear: str, M: int, K: int) -> Stored:
        return Stored(*compressed(name, args, M, K, SIZE))

    return Kind(config_of(name, args), store)


def fp8_kind(block: int | None, scales: torch.dtype = torch.float32) -> Kind:
    """The method "fp8": a scale for each block, or one for all of a weight."""

    def store(linear: str, M: int, K: int) -> Stored:
        codes = (torch.rand(M, K) * 2 - 1).mul(448).to(torch.float8_e4m3fn)
        rows, columns = (block, block) if block else (M, K)
        shape = (-(-M // rows), -(-K // columns))
        steps = (SIZE * (0.5 + torch.rand(shape)) / 448).to(scales)
        spread = steps.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        meant = codes.float() * spread[:M, :K]
        steps = steps if block else steps.reshape(())
        return Stored({"weight": codes, "weight_scale_inv": steps}, meant)

    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return Kind(config | ({"weight_block_size": [block, block]} if block else {}), store)


def integers(M: int, K: int, columns: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [M, K], zero points and scales [M, G], the group of each column)."""
    groups = torch.arange(K) // (columns or K)
    G = int(groups[-1]) + 1
    middle = 2 ** (bits - 1)
    zeros = torch.randint(middle - 2, middle + 3, (M, G))
    scales = (SIZE * (0.5 + torch.rand(M, G)) / middle).half()
    return torch.randint(0, 2**bits, (M, K)), zeros, scales, groups


def awq_kind(columns: int) -> Kind:
    def store(linear: str, M: int, K: int) -> Stored:
        codes, zeros, scales, groups = integers(M, K, columns, 4)
        return Stored(
            below(awq_tensors, codes, zeros, scales), meaning(codes, zeros, scales, groups)
        )

    config = {"quant_method": "awq", "bits": 4, "group_size": columns, "zero_point": True}
    return Kind(config | {"version": "gemm"}, store)


def below(write: Callable[..., Tensors], *arguments: Any, **options: Any) -> Tensors:
    """The tensors that a packer makes, by their last names."""
    tensors = write("x", *arguments, **options)
    return {name.removeprefix("x."): tensor for name, tensor in tensors.items()}


def gptq_kind(
    columns: int,
    *,
    bits: int = 4,
    version: int = 1,
    symmetric: bool = False,
    desc_act: bool = False,
    static_groups: bool = False,
) -> Kind:
    """static_groups  whether groups are of neighbours, though columns were rounded by activation"""

    def store(linear: str, M: int, K: int) -> Stored:
        codes, zeros, scales, groups = integers(M, K, columns, bits)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        if desc_act and not static_groups:
            groups = groups[torch.randperm(K, generator=input_seed(linear))]
        meant = meaning(codes, zeros, scales, groups)
        less_one = version == 1
        parts = (codes, zeros, scales, groups, bits)
        return Stored(below(gptq_tensors, *parts, less_one=less_one), meant)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": columns,
        "sym": symmetric,
        "desc_act": desc_act,
        "static_groups": static_groups,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    return Kind(config, store)


def autoround_kind(packing: str, columns: int = 32) -> Kind:
    """AutoRound's symmetric rounding: of each group the number farthest from 0 has the code 0, so
    that the scale of a group whose largest number is positive is negative.
    """

    def store(linear: str, M: int, K: int) -> Stored:
        weight = (torch.randn(M, K) * SIZE / 2).view(M, -1, columns)
        farthest = weight.gather(2, weight.abs().argmax(2, keepdim=True))
        scales = (farthest[:, :, 0] / -8).half()
        assert (scales < 0).any() and (scales > 0).any()
        codes = (torch.round(weight / scales.float()[:, :, None]) + 8).clamp(0, 15)
        codes, zeros = codes.view(M, K).long(), torch.full(scales.shape, 8)
        groups = torch.arange(K) // columns
        meant = meaning(codes, zeros, scales, groups)
        if packing.endswith("awq"):
            return Stored(below(awq_tensors, codes, zeros, scales), meant)
        return Stored(below(gptq_tensors, codes, zeros, scales, groups, 4, less_one=True), meant)

    config = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": columns,
        "sym": True,
        "data_type": "int",
        "autoround_version": "0.9.2",
        "block_name_to_quantize": "model.layers",
    }
    return Kind(config, store)


def input_seed(linear: str) -> torch.Generator:
    """A seed that is equal for linears of one input, whose columns are rounded in one order."""
    block, _, name = linear.rpartition(".")
    first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(name, name)
    return torch.Generator().manual_seed(sum(map(ord, f"{block}{first}")))


def mxfp4_kind() -> Kind:
    """The kind whose tensors are named as gpt-oss names them."""

    def store(linear: str, M: int, K: int) -> Stored:
        blocks = torch.randint(0, 256, (M, K // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (M, K // 32), dtype=torch.uint8)
        meant = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
        return Stored({"weight_blocks": blocks, "weight_scales": scales}, meant[0].T.contiguous())

    return Kind({"quant_method": "mxfp4"}, store)


def modelopt_nvfp4_kind() -> Kind:
    def store(linear: str, M: int, K: int) -> Stored:
        packed = torch.randint(0, 256, (M, K // 2), dtype=torch.uint8)
        numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
        values = numbers[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]
        scales = (100 + 300 * torch.rand(M, K // 16)).to(torch.float8_e4m3fn)
        # Each of the linears that are computed as one has its own.
        whole = SIZE / 6 / 400 * (0.5 + torch.rand(()))
        meant = values * (scales.float() * whole).repeat_interleave(16, dim=1)
        tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
        return Stored(tensors | {"input_scale": torch.tensor(0.5)}, meant)

    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return Kind(config | {"ignore": [HEAD]}, store)


def modelopt_mxfp8_kind() -> Kind:
    def store(linear: str, M: int, K: int) -> Stored:
        codes = (torch.rand(M, K) * 2 - 1).mul(448).to(torch.float8_e4m3fn)
        scales = torch.randint(115, 118, (M, K // 32), dtype=torch.uint8)
        meant = codes.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, dim=1)
        return Stored({"weight": codes, "weight_scale": scales}, meant)

    config = {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32}
    return Kind(config | {"ignore": [HEAD]}, store)


def mixed_modelopt_kind(algorithms: Mapping[str, str]) -> Kind:
    """Linears whose names end so in these formats of ModelOpt; a config of "MIXED_PRECISION", whose
    layers are listed under the names that a language model has beside a vision tower.
    """
    kinds = {
        "FP8": modelopt_fp8_kind(),
        "MXFP8": modelopt_mxfp8_kind(),
        "W4A16_NVFP4": modelopt_nvfp4_kind(),
    }
    layers: dict[str, Any] = {}

    def store(linear: str, M: int, K: int) -> Stored:
        algorithm = algorithms[linear.rpartition(".")[2]]
        name = linear.replace("model.", "model.language_model.", 1)
        layers[name] = {"quant_algo": algorithm}
        return kinds[algorithm].store(linear, M, K)

    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    return Kind(config | {"quantized_layers": layers}, store)


def beside_a_tower(config: dict[str, Any], tensors: Tensors) -> None:
    """Renames the tensors of a language model as those of one beside a vision tower are, and puts
    its config inside.
    """
    text = dict(config)
    quantization = text.pop("quantization_config")
    config.clear()
    config |= {"text_config": text, "quantization_config": quantization}
    config["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)


def modelopt_fp8_kind() -> Kind:
    """With the scales of an fp8 KV cache, as ModelOpt names them."""
    whole = fp8_kind(None).store

    def store(linear: str, M: int, K: int) -> Stored:
        found = whole(linear, M, K)
        scales = {"weight_scale": found.tensors["weight_scale_inv"], "input_scale": torch.ones(())}
        if linear.endswith(("k_proj", "v_proj")):
            scales[f"{linear[-6]}_scale"] = torch.tensor(0.5)
        return Stored({"weight": found.tensors["weight"], **scales}, found.meant)

    config = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    return Kind(config | {"exclude_modules": [HEAD]}, store)


def fbgemm_kind() -> Kind:
    def store(linear: str, M: int, K: int) -> Stored:
        codes = (torch.rand(M, K) * 2 - 1).mul(448).to(torch.float8_e4m3fn)
        scales = SIZE * (0.5 + torch.rand(M, 1)) / 448
        bound = torch.tensor([1200.0])
        tensors = {"weight": codes, "weight_scale": scales, "input_scale_ub": bound}
        return Stored(tensors, codes.float() * scales)

    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    return Kind(config | {"modules_to_not_convert": [HEAD]}, store)


def int8_kind() -> Kind:
    """LLM.int8 of bitsandbytes."""

    def store(linear: str, M: int, K: int) -> Stored:
        return Stored(*int8_tensors(M, K, SIZE))

    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return Kind(config | {"_load_in_8bit": True, "llm_int8_skip_modules": None}, store)


def nf4_kind(*, nested: bool) -> Kind:
    """Weights of bitsandbytes in 4 bits, which are widened."""

    def store(linear: str, M: int, K: int) -> Stored:
        return Stored(*four_bit_tensors(M, K, SIZE, nested=nested))

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Kind(config | {"bnb_4bit_use_double_quant": nested}, store)


def torchao_kind(columns: int) -> Kind:
    """torchao's int8 with a scale per row, or per group of columns; zero points are 0 or not."""

    def store(linear: str, M: int, K: int) -> Stored:
        codes = torch.randint(-128, 128, (M, K), dtype=torch.int8)
        groups = (M, K // (columns or K))
        scales = SIZE * (0.5 + torch.rand(groups)) / 128
        zeros = torch.randint(-3, 4, groups, dtype=torch.int8) * bool(columns)
        spread = [each.repeat_interleave(columns or K, 1) for each in (zeros, scales)]
        names = ("_weight_qdata", "_weight_scale", "_weight_zero_point")
        tensors = dict(zip(names, (codes, scales, zeros), strict=True))
        return Stored(tensors, (codes.float() - spread[0]) * spread[1])

    made = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": None}}
    return Kind({"quant_method": "torchao", "quant_type": {"default": made}}, store)


def torchao_fp8_kind(block: int | None) -> Kind:
    """torchao's Float8Tensor with a scale per row, or per block."""

    def store(linear: str, M: int, K: int) -> Stored:
        codes = (torch.rand(M, K) * 2 - 1).mul(448).to(torch.float8_e4m3fn)
        rows, columns = (block, block) if block else (1, K)
        scales = SIZE * (0.5 + torch.rand(-(-M // rows), -(-K // columns))) / 448
        spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return Stored({"_weight_qdata": codes, "_weight_scale": scales}, codes.float() * spread)

    made = {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}}
    return Kind({"quant_method": "torchao", "quant_type": {"default": made}}, store)


GROUP = {"strategy": "group"}
KINDS: dict[str, Kind] = {
    "fp8 tensor": fp8_kind(None),
    "fp8 blocks": fp8_kind(128),
    "fp8 blocks of powers of two": fp8_kind(128, torch.float8_e8m0fnu),
    "float-quantized tensor": compressed_kind("float-quantized", type="float", strategy="tensor"),
    "float-quantized channel": compressed_kind("float-quantized", type="float", strategy="channel"),
    "float-quantized blocks": compressed_kind(
        "float-quantized", type="float", strategy="block", block_structure=[128, 128]
    ),
    "int-quantized channel": compressed_kind("int-quantized", strategy="channel"),
    "int-quantized zeros": compressed_kind("int-quantized", strategy="channel", symmetric=False),
    "packed int4 of 32": compressed_kind("pack-quantized", num_bits=4, group_size=32, **GROUP),
    "packed int4 of 64 zeros": compressed_kind(
        "pack-quantized", num_bits=4, group_size=64, symmetric=False, **GROUP
    ),
    "packed int4 of 128": compressed_kind("pack-quantized", num_bits=4, group_size=128, **GROUP),
    "packed int4 of 128 zeros": compressed_kind(
        "pack-quantized", num_bits=4, group_size=128, symmetric=False, **GROUP
    ),
    "packed int4 channel": compressed_kind("pack-quantized", num_bits=4, strategy="channel"),
    "packed int8 of 32": compressed_kind("pack-quantized", group_size=32, **GROUP),
    "packed int8 of 128 zeros": compressed_kind(
        "pack-quantized", group_size=128, symmetric=False, **GROUP
    ),
    "nvfp4-pack-quantized": compressed_kind(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    ),
    "mxfp4-pack-quantized": compressed_kind(
        "mxfp4-pack-quantized", num_bits=4, type="float", group_size=32, **GROUP
    ),
    "awq of 32": awq_kind(32),
    "awq of 128": awq_kind(128),
    "gptq": gptq_kind(128),
    "gptq symmetric": gptq_kind(64, symmetric=True),
    "gptq v2": gptq_kind(32, version=2),
    "gptq of 8 bits": gptq_kind(32, bits=8),
    "gptq desc_act": gptq_kind(32, desc_act=True),
    "gptq desc_act v2 symmetric": gptq_kind(64, desc_act=True, version=2, symmetric=True),
    "gptq desc_act static groups": gptq_kind(64, desc_act=True, static_groups=True),
    "mxfp4": mxfp4_kind(),
    "modelopt NVFP4": modelopt_nvfp4_kind(),
    "modelopt MXFP8": modelopt_mxfp8_kind(),
    "modelopt FP8": modelopt_fp8_kind(),
    "fbgemm_fp8": fbgemm_kind(),
    "torchao fp8": torchao_fp8_kind(None),
    "torchao fp8 blocks": torchao_fp8_kind(64),
    "torchao int8": torchao_kind(0),
    "torchao int8 of 32 zeros": torchao_kind(32),
    "bitsandbytes int8": int8_kind(),
    "bitsandbytes nf4": nf4_kind(nested=False),
    "bitsandbytes nested nf4": nf4_kind(nested=True),
    "autoround as gptq": autoround_kind("auto_round:auto_gptq"),
    "autoround as awq": autoround_kind("auto_round:auto_awq"),
}
"""By name."""

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}


def write_model(
    folder: Path,
    kind: Kind,
    *,
    family: str = "llama",
    plain: tuple[str, ...] = (HEAD,),
    edit: Callable[[dict[str, Any], Tensors], object] = lambda config, tensors: None,
    files: int = 1,
    **sizes: Any,
) -> Written:
    """A checkpoint whose linears are stored so.

    plain  parts of names of linears that stay in bfloat16
    edit   changes config and tensors before they are written
    files  over which the tensors are spread, in the order of their names
    """
    torch.manual_seed(len(str(kind.config)))
    if family == "qwen3.5":
        # The oldest transformers that the package admits has no such model.
        make_config, make_model = transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM
        sizes = HYBRID | sizes
    else:
        make_config, make_model = FAMILIES[family]
    config = make_config(**SIZES | sizes)
    model: PreTrainedModel = make_model(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.3 if "norm" in name or "bias" in name else 0.6 * SIZE
            parameter.add_(torch.randn_like(parameter) * size)
            parameter.copy_(parameter.bfloat16())
    tensors = {name: value.bfloat16() for name, value in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in plain):
            del tensors[f"{name}.weight"]
            stored = kind.store(name, *module.weight.shape)
            module.weight.data = stored.meant
            tensors |= {f"{name}.{end}": tensor for end, tensor in stored.tensors.items()}
        elif hasattr(module, "gate_up_proj"):
            tensors |= _store_experts(name, module, kind, tensors)
    written = json.loads(config.to_json_string(use_diff=False))
    written["architectures"] = [make_model.__name__]
    written["quantization_config"] = deepcopy(kind.config)
    edit(written, tensors)
    save(folder, written, tensors, files)
    return Written(folder, model)


def _store_experts(name: str, module: Any, kind: Kind, tensors: Tensors) -> Tensors:
    """Store each expert of a module that has all of them in two tensors, which are removed."""
    found: Tensors = {}
    places = {"gate_proj": module.gate_up_proj, "up_proj": module.gate_up_proj}
    ffn = module.down_proj.shape[2]
    rows = {"gate_proj": slice(ffn), "up_proj": slice(ffn, None), "down_proj": slice(None)}
    for index in range(len(module.down_proj)):
        for linear, place in (places | {"down_proj": module.down_proj}).items():
            part = place.data[index, rows[linear]]
            stored = kind.store(f"{name}.{index}.{linear}", *part.shape)
            part.copy_(stored.meant)
            found |= {
                f"{name}.{index}.{linear}.{end}": each for end, each in stored.tensors.items()
            }
    del tensors[f"{name}.gate_up_proj"], tensors[f"{name}.down_proj"]
    return found


def save(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], files: int = 1
) -> None:
    """A checkpoint, with an index where there are several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names, places = sorted(tensors), {}
    for index in range(files):
        chosen, file = names[index::files], f"model-{index + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        places |= dict.fromkeys(chosen, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": places}))
