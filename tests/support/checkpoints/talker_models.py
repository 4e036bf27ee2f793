"""Small random models of Qwen3-Omni's talker in transformers' class, and its own frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
    Qwen3OmniMoeTalkerTextMLP,
)

END = 44
"""The code that ends a reply; weights are drawn so that it seldom comes."""
FIRST_CODES, CODES = 53, 37
HIDDEN = 72
BACKBONE: dict[str, Any] = {
    "vocab_size": FIRST_CODES, "hidden_size": HIDDEN, "intermediate_size": 100,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 28, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}  # fmt: skip
PREDICTOR: dict[str, Any] = {
    "vocab_size": CODES, "hidden_size": HIDDEN, "intermediate_size": 68, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12, "rms_norm_eps": 1e-4,
    "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}  # fmt: skip


def talker_config(
    groups: int,
    *,
    backbone: dict[str, Any] | None = None,
    predictor: dict[str, Any] | None = None,
) -> Any:
    return Qwen3OmniMoeTalkerConfig(
        num_code_groups=groups,
        codec_eos_token_id=END,
        thinker_hidden_size=24,
        spatial_merge_size=2,
        text_config=BACKBONE | (backbone or {}),
        code_predictor_config=PREDICTOR | {"num_code_groups": groups} | (predictor or {}),
    )


def new_talker(groups: int, *, dense: bool = False, seed: int = 0, **sizes: Any) -> Any:
    """A random talker in float32, whose weights are large enough for frames to vary.

    dense  the backbone's layers have a SwiGLU in place of experts
    """
    config = talker_config(groups, **sizes)
    model = Qwen3OmniMoeTalkerForConditionalGeneration(config).eval()
    torch.manual_seed(seed)
    if dense:
        text = config.text_config
        for layer in model.model.layers:
            layer.mlp = Qwen3OmniMoeTalkerTextMLP(text, text.intermediate_size)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1:
                tensor.normal_(std=0.5 if "embedding" in name else tensor.shape[-1] ** -0.5)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
        model.codec_head.weight[END] = 0
        model.codec_head.weight *= 3
    return model


def write_talker(path: Path, groups: int, **options: Any) -> Any:
    """The model of `new_talker`, once it is saved to `path`."""
    model = new_talker(groups, **options)
    if options.get("dense"):
        model.config.text_config.num_experts = 0
    model.save_pretrained(path)
    return model


def write_tts(path: Path, groups: int, width: int) -> Any:
    """A dense talker whose code predictor has this width, saved as Qwen3-TTS has its own."""
    model = new_talker(groups, dense=True, predictor={"hidden_size": width})
    predictor = model.code_predictor
    embeddings = [torch.nn.Embedding(CODES, HIDDEN) for _ in range(groups - 1)]
    predictor.model.codec_embedding = torch.nn.ModuleList(embeddings)
    if width != HIDDEN:
        predictor.small_to_mtp_projection = torch.nn.Linear(HIDDEN, width)
    model.requires_grad_(False)
    for embedding in embeddings:
        embedding.weight.mul_(0.5)
    tensors = {f"talker.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["talker.model.text_embedding.weight"] = torch.zeros(5, 24)
    tensors["speaker_encoder.fc.weight"] = torch.zeros(3, 3)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tts_model_type": "base",
        "talker_config": {
            **{name: BACKBONE[name] for name in BACKBONE if "expert" not in name},
            "num_code_groups": groups,
            "codec_eos_token_id": END,
            "text_hidden_size": 24,
            "code_predictor_config": PREDICTOR | {"num_code_groups": groups, "hidden_size": width},
        },
    }
    del config["talker_config"]["moe_intermediate_size"]  # type: ignore[attr-defined]
    (path / "config.json").write_text(json.dumps(config))
    return model


@torch.no_grad()
def frames_by_hand(
    model: Any, prompt: torch.Tensor, rows: torch.Tensor, pad: torch.Tensor, frames: int
) -> torch.Tensor:
    """`frames_of`, by a plain loop without a cache over transformers' layers; for talkers whose
    code predictor has a width of its own, which transformers does not have. It does not end early.
    """
    predictor = model.code_predictor
    project = getattr(predictor, "small_to_mtp_projection", torch.nn.Identity())
    tables = [model.model.codec_embedding, *predictor.model.codec_embedding]
    stream, said = prompt, []
    for frame in range(frames):
        hidden = model.model(inputs_embeds=stream[None]).last_hidden_state[0, -1]
        codes = [int(model.codec_head(hidden).argmax())]
        inner = hidden[None]
        for table, head in zip(tables, predictor.lm_head, strict=False):
            inner = torch.cat([inner, table.weight[codes[-1]][None]])
            output = predictor.model(inputs_embeds=project(inner)[None]).last_hidden_state
            codes.append(int(head(output[0, -1]).argmax()))
        said.append(codes)
        embedded = torch.stack(
            [table.weight[code] for table, code in zip(tables, codes, strict=True)]
        )
        row = rows[frame] if frame < len(rows) else pad
        stream = torch.cat([stream, (embedded.sum(0) + row)[None]])
    return torch.tensor(said)


def frames_of(
    model: Any,
    prompt: torch.Tensor,
    rows: torch.Tensor,
    pad: torch.Tensor,
    frames: int,
    **options: Any,
) -> torch.Tensor:
    """[frames, K]: transformers' greedy frames after a prompt [n, H], with these rows [t, H] of
    text. A frame that ends the reply is none of them.
    """
    with torch.no_grad():
        found = model.generate(
            inputs_embeds=prompt[None],
            trailing_text_hidden=rows[None],
            tts_pad_embed=pad[None, None],
            # The codes of the last step are not made.
            max_new_tokens=frames + 1,
            do_sample=False,
            eos_token_id=END,
            output_hidden_states=True,
            return_dict_in_generate=True,
            **options,
        )
    codes = [step[-1] for step in found.hidden_states if step[-1] is not None]
    return torch.cat(codes) if codes else torch.zeros(0, model.config.num_code_groups).long()
