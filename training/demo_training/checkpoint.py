"""The demo checkpoint's folder in Hugging Face layout: writing it and reading it back."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo_training.corpus import Source
from demo_training.model import DEPTH, DemoConfig, DemoModel
from demo_training.tokenizer import END_OF_TEXT_ID, save_tokenizer

CARD = Path(__file__).with_name("model_card_template.md")


def hugging_face_config(config: DemoConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT_ID,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_positions,
        "max_window_layers": config.layers,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": END_OF_TEXT_ID,
        "rms_norm_eps": config.eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def rounded(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in bfloat16, on the CPU."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }


def save_weights(
    folder: Path, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    """model.safetensors, as the weights are, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes the file readable only by its owner.
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", config)


def save_model(
    folder: Path, config: DemoConfig, tokenizer: Tokenizer, weights: Mapping[str, torch.Tensor]
) -> None:
    """Everything transformers needs; the weights are rounded to bfloat16."""
    save_weights(folder, rounded(weights), hugging_face_config(config))
    generation = {"eos_token_id": [END_OF_TEXT_ID], "pad_token_id": END_OF_TEXT_ID}
    write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, max_positions=config.max_positions)


def load_model(folder: Path, *, device: torch.device | str = "cpu") -> DemoModel:
    """The exported weights in the training script's own model, in float32."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = DemoConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        layers=values["num_hidden_layers"],
        heads=values["num_attention_heads"],
        kv_heads=values["num_key_value_heads"],
        head_dim=values["head_dim"],
        ffn_size=values["intermediate_size"],
        rope_theta=values["rope_theta"],
        max_positions=values["max_position_embeddings"],
        eps=values["rms_norm_eps"],
    )
    model = DemoModel(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device).eval()


def save_card(folder: Path, metrics: Mapping[str, Any], sources: tuple[Source, ...]) -> None:
    """metrics.json and MODEL_CARD.md; neither names a path of this machine."""
    write_json(folder / "metrics.json", metrics)
    rows = [
        f"| {source.name} | {source.version} | {source.licence} | {source.files} "
        f"| {source.size / 1e6:.1f} |"
        for source in sources
    ]
    mtp = metrics["heldout"]["mtp"]
    depths = [
        f"| {depth} | {100 * mtp['agrees_with_target'][depth - 1]:.1f} % "
        f"| {100 * mtp['agrees_with_text'][depth - 1]:.1f} % |"
        for depth in range(1, DEPTH + 1)
    ]
    values = {**metrics, **{f"heldout_{name}": value for name, value in metrics["heldout"].items()}}
    card = Template(CARD.read_text(encoding="utf-8")).substitute(
        {
            name: f"{value:.4g}" if isinstance(value, float) else value
            for name, value in values.items()
        },
        depths="\n".join(depths),
        python=platform.python_version(),
        sources="\n".join(rows),
        percent_familiar=f"{100 * metrics['heldout_familiar_lines']:.1f}",
    )
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")
