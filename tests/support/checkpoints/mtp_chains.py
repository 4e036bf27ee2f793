"""Random models with draft modules, and transformers' `MtpModel`, which says what these draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

HAS_CHAINS = hasattr(MtpModel, "forward_layer")
"""Whether this version of transformers can run one module by itself."""

VOCAB, HIDDEN, LAYERS = 97, 72, 2
TOLERANCE = 1e-4
"""Tolerance of logits that are the best or as good, relative to the largest."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 56,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "eos_token_id": 0, "initializer_range": 0.15,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 28, "num_experts_per_tok": 3, "norm_topk_prob": True,
}  # fmt: skip
GROUPS: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 10, "n_shared_experts": 1, "n_group": 5, "topk_group": 2,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT: dict[str, Any] = GROUPS | {
    "num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 44, "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16, "v_head_dim": 24, "head_dim": 16,
}  # fmt: skip
# The last layer attends, as a module's does.
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
DELTA_KINDS = ("qwen3.5", "qwen3.5-moe", "qwen3-next")


def _target(kind: str, modules: int) -> PreTrainedModel:
    sizes = SIZES | {"num_mtp_layers": modules}
    full = {"mtp_layer_types": ["full_attention"] * modules}
    match kind:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**sizes))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**sizes, **full))
        case "qwen3-windows":
            # The window is shorter than a block.
            layers = ["sliding_attention", "full_attention"]
            windows = {"use_sliding_window": True, "sliding_window": 5, "layer_types": layers}
            return Qwen3ForCausalLM(Qwen3Config(**sizes, **full, **windows))
        case "qwen3.5":
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **full, **DELTA))
        case "qwen3-next":
            experts = EXPERTS | {"shared_expert_intermediate_size": 36, "num_experts": 5}
            following = Qwen3NextConfig(**sizes, **full, **DELTA, **experts)
            return Qwen3NextForCausalLM._from_config(following, experts_implementation="eager")
        case "qwen3-moe":
            config = Qwen3MoeConfig(**sizes, **EXPERTS, num_experts=5)
            return Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")
        case "deepseek-v3":
            latent = DeepseekV3Config(**(sizes | LATENT))
            return DeepseekV3ForCausalLM._from_config(latent, experts_implementation="eager")
        case "qwen3.5-moe":
            experts = EXPERTS | {"shared_expert_intermediate_size": 36, "num_experts": 5}
            del sizes["intermediate_size"], experts["norm_topk_prob"]
            routed = Qwen3_5MoeTextConfig(**sizes, **full, **DELTA, **experts)
            return Qwen3_5MoeForCausalLM._from_config(routed, experts_implementation="eager")
        case "glm4-moe-lite":
            sparse = {"mtp_mlp_layer_types": ["sparse"] * modules}
            lite = Glm4MoeLiteConfig(**(sizes | LATENT | sparse))
            return Glm4MoeLiteForCausalLM._from_config(lite, experts_implementation="eager")
        case "glm4-moe":
            glm = Glm4MoeConfig(**(sizes | GROUPS), attention_bias=True, use_qk_norm=True)
            return Glm4MoeForCausalLM._from_config(glm, experts_implementation="eager")
    raise ValueError(kind)


def random_target(kind: str) -> Any:
    """A model without modules whose next token follows mostly from the last one."""
    torch.manual_seed(0)
    model: Any = _target(kind, 0).float().eval()
    _draw(kind, list(model.named_parameters()), list(model.named_buffers()))
    return model


def _draw(
    kind: str, parameters: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]]
) -> None:
    """Random weights; what layers add is small."""
    generator = torch.Generator().manual_seed(1)
    corrections = [each for each in buffers if each[0].endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, weight in [*parameters, *corrections]:
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                # Norms of Qwen3.5 and Qwen3-Next add 1, but for those of heads of values.
                lacks_one = kind in DELTA_KINDS and "linear_attn" not in name
                weight.copy_((0 if lacks_one else 1) + 0.06 * noise)
            elif name.endswith("eh_proj.weight"):
                token = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
                weight.copy_(token + 0.04 * noise)
            elif name.endswith(
                ("o_proj.weight", "down_proj.weight", "out_proj.weight", "experts.down_proj")
            ):
                weight.copy_(0.01 * noise)
            else:
                weight.copy_(noise * (0.9 if "embed_tokens" in name else 0.15))


class Chains:
    """A random model, its modules, and the checkpoint of both in DeepSeek-V3's layout.

    The next token follows mostly from the last one, for the modules too: so drafts are accepted now
    and then, and rejected. The rest of what decides is the hidden state that a module reads.
    """

    def __init__(self, folder: Path, kind: str, modules: int) -> None:
        torch.manual_seed(modules)
        self.kind = kind
        self.target: Any = _target(kind, modules).float().eval()
        self.mtp: Any = MtpModel(self.target, modules).float().eval()
        self._draw()
        self.path = folder
        self.target.save_pretrained(folder)
        file = folder / "config.json"
        config = json.loads(file.read_text()) | {"num_nextn_predict_layers": modules}
        file.write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors") | self._tensors()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _draw(self) -> None:
        everything = [*self.target.named_parameters(), *self.mtp.layers.named_parameters()]
        buffers = [*self.target.named_buffers(), *self.mtp.layers.named_buffers()]
        _draw(self.kind, everything, buffers)

    def _tensors(self) -> dict[str, Tensor]:
        """The modules', by their names in the layout."""
        own = {"post_norm.weight": "shared_head.norm.weight"}
        named = {}
        for name, tensor in self.mtp.layers.state_dict().items():
            index, rest = name.split(".", 1)
            rest = own.get(rest, rest.removeprefix("mtp_block."))
            for part, value in _by_expert(rest, tensor).items():
                named[f"model.layers.{LAYERS + int(index)}.{part}"] = value.contiguous()
        return named

    @torch.no_grad()
    def check(self, sequence: list[int], drafts: list[int], *, eagle: bool = False) -> list[Tensor]:
        """Each draft after `sequence` must be the best token of its module, or as good as that;
        the values [G, T, D], or latents [1, T, R], of every module's cache.

        All rows anew, so what is true by now is what is seen. With `eagle` the first module makes
        all drafts, each from its own output and the draft before.
        """
        hidden = self.target.model(torch.tensor([sequence[:-1]])).last_hidden_state
        ids = torch.tensor([sequence[1:]])
        position = torch.arange(1, len(sequence))[None]
        cache = MtpCache(config=self.target.config.get_mtp_config())
        for index, draft in enumerate(drafts):
            module = 0 if eagle else index
            hidden = self.mtp.forward_layer(module, hidden, position, cache, input_ids=ids)
            logits = self.mtp._project_to_logits(hidden[:, -1])[0]
            near = TOLERANCE * float(logits.abs().max())
            assert float(logits[draft]) >= float(logits.max()) - near, f"{index=} {drafts=}"
            ids = torch.cat([ids[:, 1:], torch.tensor([[draft]])], dim=1)
            position = position + 1
            if eagle:
                hidden, ids, position = hidden[:, -1:], ids[:, -1:], position[:, -1:]
        layers = cache.layers[: 1 if eagle else len(drafts)]
        # Of latent attention, latents are the keys, and what is rotated of a key is the value.
        is_latent = hasattr(self.target.config, "kv_lora_rank")
        return [(layer.keys if is_latent else layer.values)[0] for layer in layers]


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What checkpoints have of a tensor of all experts: one of each; of another one itself."""
    prefix, _, last = name.rpartition("experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
    if parts is None or not prefix:
        return {name: tensor}
    return {
        f"{prefix}experts.{index}.{part}.weight": value
        for index, whole in enumerate(tensor)
        for part, value in zip(parts, whole.chunk(len(parts)), strict=True)
    }
