"""Small random models of CSM in transformers' classes, their codec included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

END_OF_AUDIO, AUDIO = 302, 301
TEXT = 307
"""Ids of prompts: text below `AUDIO`."""
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
DEPTH_LLAMA3 = LLAMA3 | {"original_max_position_embeddings": 8, "low_freq_factor": 0.5}
BACKBONE: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rope_parameters": LLAMA3,
}  # fmt: skip
DEPTH: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 68, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 12, "rope_parameters": DEPTH_LLAMA3,
}  # fmt: skip


def codec(codes: int, codebooks: int) -> dict[str, Any]:
    """A config of Mimi with a few values in each layer; it makes 25 frames of 120 samples."""
    return {
        "model_type": "mimi", "sampling_rate": 240, "hidden_size": 16, "num_filters": 4,
        "upsampling_ratios": [3, 2], "codebook_size": codes, "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8, "num_quantizers": codebooks,
        "num_semantic_quantizers": 1, "num_hidden_layers": 1, "intermediate_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "sliding_window": 16, "upsample_groups": 16,
    }  # fmt: skip


def new_csm(
    codebooks: int,
    codes: int = 37,
    *,
    backbone: dict[str, Any] | None = None,
    depth: dict[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """A random model in float32, whose weights are large enough for frames to vary."""
    torch.manual_seed(seed)
    sizes = {
        "num_codebooks": codebooks,
        "vocab_size": codes,
        "rms_norm_eps": 1e-4,
        "initializer_range": 0.5,
    }
    chosen = BACKBONE | (backbone or {})
    of_depth = DEPTH | {"max_position_embeddings": codebooks + 1} | sizes | (depth or {})
    config = transformers.CsmConfig(
        **sizes | chosen | options,
        text_vocab_size=TEXT,
        audio_token_id=AUDIO,
        audio_eos_token_id=END_OF_AUDIO,
        pad_token_id=303,
        bos_token_id=300,
        codebook_pad_token_id=codes - 1,
        codebook_eos_token_id=0,
        depth_decoder_config=of_depth | {"backbone_hidden_size": chosen["hidden_size"]},
        codec_config=codec(1 << (codes.bit_length() - 1), codebooks),
    )
    model = _tied(transformers.CsmForConditionalGeneration(config).eval())
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.startswith("codec_model.") and tensor.ndim > 1:
                tensor.normal_(std=0.5 if "embed" in name else tensor.shape[-1] ** -0.5)
    return model


def _tied(model: Any) -> Any:
    """The model with its codebooks tied where its config says so: transformers 5.17 forgets it."""
    if model.config.tie_codebooks_embeddings:
        embed = model.backbone_model.embed_tokens
        embed.embed_audio_tokens.weight = model.depth_decoder.model.embed_tokens.weight
    return model


def read_csm(path: Path) -> Any:
    """The model that `write_csm` has saved."""
    return _tied(transformers.CsmForConditionalGeneration.from_pretrained(path).eval())


def write_csm(path: Path, codebooks: int, codes: int = 37, **options: Any) -> Any:
    """The model of `new_csm`, once it is saved to `path`."""
    model = new_csm(codebooks, codes, **options)
    model.save_pretrained(path)
    return model


def embeds_of(model: Any, prompt: Sequence[Any]) -> torch.Tensor:
    """[1, positions, H]: a prompt of token ids and of frames, each a tensor [frames, K]."""
    parts = [
        model.backbone_model.embed_tokens(part[None])
        if isinstance(part, torch.Tensor)
        else model.embed_text_tokens(torch.tensor([[part]]))
        for part in prompt
    ]
    return torch.cat(parts, dim=1)


def logits_of(model: Any, prompt: Sequence[Any], codes: torch.Tensor) -> torch.Tensor:
    """[frames, K, V]: logits of each code of these frames after a prompt of text and frames."""
    with torch.no_grad():
        embeds = embeds_of(model, [*prompt, codes])
        hidden = model.backbone_model(inputs_embeds=embeds)[0][0, -1 - len(codes) : -1]
        fed = torch.nn.functional.pad(codes[:, :-1], (1, 0))
        depth = model.depth_decoder(input_ids=fed, backbone_last_hidden_state=hidden).logits
        return torch.cat([model.lm_head(hidden)[:, None], depth], dim=1).float()


def frames_of(model: Any, **inputs: Any) -> torch.Tensor:
    """[frames, K]: greedy frames of transformers' `generate`."""
    count = inputs.pop("frames")
    with torch.no_grad():
        found = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=count,
            depth_decoder_do_sample=False,
            use_cache=True,
        )
    sequences: torch.Tensor = found if isinstance(found, torch.Tensor) else found.sequences
    return sequences[0]
