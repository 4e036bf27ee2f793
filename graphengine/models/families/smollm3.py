"""SmolLM3: Llama without RoPE in every fourth layer (NoPE)."""

from __future__ import annotations

from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import SMOLLM3_KEYS, HfConfig, unsupported
from graphengine.models.hf.decoder_config import composed, read_attention, read_mlp
from graphengine.models.sublayers import usual_layer

DEFAULTS = hf_config.FamilyDefaults(
    max_positions=32_768,
    windows="switched",
    keys=SMOLLM3_KEYS,
    biases=("attention_bias", "mlp_bias"),
)
# transformers' defaults for missing keys, where other families have different ones.
_MISSING = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2_000_000.0}


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of a `SmolLM3ForCausalLM` checkpoint."""
    settings = hf_config.read_settings({**_MISSING, **config}, DEFAULTS)
    if settings["windows"]:
        raise unsupported("use_sliding_window", True, "False")
    mlp, nope = read_mlp(settings, bias=settings["mlp_bias"]), _nope_layers(settings)
    layers = tuple(
        usual_layer(read_attention(settings, nope=index in nope), mlp, post_norms=False)
        for index in range(settings["num_hidden_layers"])
    )
    return composed(settings, architecture, layers, mlp=mlp)


def _nope_layers(settings: dict[str, Any]) -> tuple[int, ...]:
    """The layers without RoPE: 0 in `no_rope_layers`, or else one in `no_rope_layer_interval`."""
    layers, marks = settings["num_hidden_layers"], settings["no_rope_layers"]
    if marks is None:
        every = settings["no_rope_layer_interval"]
        return tuple(range(every - 1, layers, every))
    if len(marks) < layers:
        raise unsupported(
            "no_rope_layers", list(marks), f"null, or a value for each of {layers} layers"
        )
    return tuple(index for index in range(layers) if not marks[index])
