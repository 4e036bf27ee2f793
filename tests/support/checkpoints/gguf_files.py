"""GGUF files of a checkpoint's weights, written with `gguf` as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.gguf_conversion import converted
from checkpoints.gguf_metadata import metadata_of

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Lfm2ForCausalLM": "lfm2",
    "SeedOssForCausalLM": "seed_oss",
    "Olmo2ForCausalLM": "olmo2",
    "Exaone4ForCausalLM": "exaone4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "PhiForCausalLM": "phi2",
    "GemmaForCausalLM": "gemma",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "OlmoForCausalLM": "olmo",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "starcoder",
    "GPTNeoXForCausalLM": "gptneox",
    "Starcoder2ForCausalLM": "starcoder2",
    "StableLmForCausalLM": "stablelm",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Glm4MoeForCausalLM": "glm4moe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "Qwen3NextForCausalLM": "qwen3next",
}
# Matrices that the converter leaves in 32 bits.
_KEPT = r"ffn_gate_inp|shortconv\.conv\.|position_embd|norm|ssm_(conv1d|a|d)\b|\.bias$"
# Where the scales of formats lie that the package does not write, in bytes of a block.
_SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", *_SCALES)
"""Formats that `written` writes; those from TQ1_0 on mostly take rows of 256."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """The file's architecture."""
    name = config["architectures"][0]
    if name == "NemotronHForCausalLM":
        kinds = config.get("layers_block_type") or config["layer_types"]
        return "nemotron_h_moe" if "moe" in kinds else "nemotron_h"
    return ARCHITECTURES[name]


Kinds = Callable[[str], str]


class Written(NamedTuple):
    """A GGUF file, and a checkpoint of the same values in float32."""

    file: Path
    plain: Path


def written(
    source: Path,
    folder: Path,
    kind: str | Kinds,
    *,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    rope_factors: Any = None,
    zeroed: bool = False,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    tensors_a_file: int = 0,
) -> Written:
    """Write a checkpoint's weights as `folder/model.gguf` and `folder/plain`.

    kind       format of matrices, or a function of a tensor's name in the file
    metadata   keys to add, or to change; None: to leave out
    tokenizer  adds a vocabulary
    zeroed     the first 32 columns of matrices are 0, and so are their scales
    tensors_a_file  splits the file; the first part then has the metadata alone. 0: one file
    """
    folder.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    arch = architecture_of(config)
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(
        file,
        arch,
        endianess=endianess,
        split_max_tensors=tensors_a_file,
        small_first_shard=tensors_a_file > 0,
    )
    for key, value in (metadata_of(arch, config) | (metadata or {})).items():
        if value is not None:
            writer.add_key_value(f"{arch}.{key}", value, _type(value))
    if tokenizer is not None:
        tokenizer(writer)
    tensors = _tensors(source, config)
    if zeroed:
        for tensor in tensors.values():
            tensor[..., :32] *= tensor.ndim < 2
    kinds = kind if callable(kind) else lambda _: kind
    _add_tensors(writer, arch, config, tensors, kinds)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_factors, dtype=np.float32))
    rope = config.get("rope_parameters") or {}
    for name in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        factors = np.asarray(rope[f"{name}_factor"], dtype=np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "plain").mkdir()
    save_file(tensors, folder / "plain" / "model.safetensors", {"format": "pt"})
    text = json.dumps({**config, "dtype": "float32"})
    (folder / "plain" / "config.json").write_text(text)
    if tensors_a_file:
        (file,) = folder.glob("model-00001-of-*.gguf")
    return Written(file, folder / "plain")


def vocabulary(
    library: tokenizers.Tokenizer,
    *,
    model: str = "gpt2",
    pre: str | None = None,
    rows: int = 0,
    scores: Sequence[float] | None = None,
    roles: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Callable[[gguf.GGUFWriter], None]:
    """A function that adds the tokens of `library` to a file.

    rows    the least number of tokens: unused ones fill up
    scores  of all tokens, for SentencePiece
    roles   tokens of "bos", "eos", "unknown" and "padding"
    more    other metadata
    """
    ids = library.get_vocab(with_added_tokens=True)
    count = max(rows, max(ids.values()) + 1)
    tokens = [f"[PAD{index}]" for index in range(count)]
    types = [gguf.TokenType.UNUSED] * count
    added = library.get_added_tokens_decoder()
    for token, index in ids.items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
        if index in added:
            special = added[index].special
            types[index] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        elif model == "llama" and re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[index] = gguf.TokenType.BYTE

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        merges = json.loads(library.to_str())["model"]["merges"]
        if scores is None:
            writer.add_token_merges([" ".join(merge) for merge in merges])
        else:
            writer.add_token_scores([*scores, *[0.0] * (count - len(scores))])
        for role, token in (roles or {}).items():
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", ids[token])
        for key, value in (more or {}).items():
            writer.add_key_value(f"tokenizer.{key}", value, _type(value))

    return add


def vocabulary_file(
    add: Callable[[gguf.GGUFWriter], None], file: Path, arch: str = "llama"
) -> Path:
    """A GGUF file of a vocabulary and one tensor."""
    writer = gguf.GGUFWriter(file, arch)
    add(writer)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.UINT32
    if isinstance(value, float):
        return gguf.GGUFValueType.FLOAT32
    return gguf.GGUFValueType.get_type(value)


def _tensors(source: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that a file has, too, in float32."""
    tensors: dict[str, Tensor] = {}
    for part in sorted(source.glob("*.safetensors")):
        tensors |= load_file(part)
    left_out = {"lm_head.weight"} if config.get("tie_word_embeddings", True) else set()
    return {
        name: tensor.float().clone()
        for name, tensor in tensors.items()
        if name not in left_out and not name.startswith("mtp.")
    }


def _add_tensors(
    writer: gguf.GGUFWriter,
    arch: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kinds: Kinds,
) -> None:
    """Add the tensors, and give them the values that the file has."""
    for each in [*converted(arch, config, tensors)]:
        values = each.values
        is_kept = values.ndim < 2 or re.search(_KEPT, each.name)
        kind = "F32" if is_kept else kinds(each.name)
        number = gguf.GGMLQuantizationType[kind]
        data = encoded(values.numpy(), kind)
        writer.add_tensor(each.name, data, raw_dtype=number)
        each.put(torch.from_numpy(gguf.dequantize(data, number).reshape(values.shape).copy()))


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """Values in a format; random codes with small scales in one that the package does not write."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALES:
        return gguf.quantize(values, number)
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    generator = np.random.default_rng(values.size)
    shape = (*values.shape[:-1], values.shape[-1] // block, nbytes)
    data = generator.integers(0, 256, shape, dtype=np.uint8)
    # Scales of super-blocks multiply others.
    size = 2e-3 if block == 32 else 6e-5
    for at in _SCALES[kind]:
        scales = generator.normal(0, size, shape[:-1]).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(*values.shape[:-1], -1)
