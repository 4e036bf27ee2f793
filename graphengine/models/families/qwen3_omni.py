"""The talkers of Qwen3-Omni and of Qwen3-TTS: a Qwen3 backbone, with experts or dense, whose step
gives a frame's first code, and a code predictor for the others. An embedding that streams in is
added to each frame.

The talker's own config is `talker_config` in a checkpoint of a whole model, all of `config.json` in
one of Qwen3-Omni's talker alone. Of a whole model, only the talker is read. The thinker, encoders,
codecs, and the layers that embed text for the talker are left to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphengine.models.decoder import DecoderConfig
from graphengine.models.families.qwen3 import NORMED
from graphengine.models.families.qwen3_5 import gated_experts
from graphengine.models.hf import hf_config
from graphengine.models.hf.config_schema import (
    EXPERT_KEYS,
    TALKER_KEYS,
    HfConfig,
    Key,
    check_neutral,
    read_keys,
    unsupported,
)
from graphengine.models.hf.decoder_config import (
    decoder_config,
    expert_count,
    read_attention,
    read_mlp,
    with_experts,
)
from graphengine.models.inner.inner_decoder import InnerDecoder, InnerNames
from graphengine.models.sublayers import usual_layer

_SHARED = Key("shared_expert_intermediate_size", "integer", (1, 2**22), default=None, null=True)
BACKBONE = hf_config.FamilyDefaults(
    max_positions=32_768, keys=(*EXPERT_KEYS, _SHARED), routes=True, fixed=NORMED
)
DENSE = hf_config.FamilyDefaults(max_positions=32_768, fixed=NORMED)
PREDICTOR = hf_config.FamilyDefaults(
    max_positions=32_768,
    keys=tuple(key for key in TALKER_KEYS if key.name == "num_code_groups"),
    fixed=NORMED,
)
# transformers' defaults for missing keys; in other families these keys must be there.
_BACKBONE_SIZES: Mapping[str, Any] = {
    "vocab_size": 3072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 384,
}
_PREDICTOR_SIZES: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# transformers' default where neither key is there.
_EXPERTS = 128
_SECTIONS = (24, 20, 20)
NAMES = InnerNames(
    frames="code_predictor.model.codec_embedding.{}",
    codes="code_predictor.model.codec_embedding.{}",
    projection="",
    layers="code_predictor.model.layers.",
    norm="code_predictor.model.norm",
    heads="code_predictor.lm_head.{}",
)
PROJECTED = NAMES._replace(projection="code_predictor.small_to_mtp_projection")
"""The names of Qwen3-TTS where the code predictor is narrower than the backbone."""
# Codes travel to the host as 16 bits.
_MOST_CODES = 2**15 - 1


def read_config(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of the talker of a `Qwen3OmniMoeForConditionalGeneration` checkpoint, or of a
    `Qwen3OmniMoeTalkerForConditionalGeneration`'s.
    """
    talker = config
    if architecture == "Qwen3OmniMoeForConditionalGeneration":
        talker = read_keys(config, TALKER_KEYS)["talker_config"] or {}
        if config.get("enable_audio_output") is False:
            raise unsupported("enable_audio_output", False, "true: else there is no talker")
    check_neutral({**talker, "quantization_config": None})
    settings = read_keys(talker, TALKER_KEYS)
    told = {**_BACKBONE_SIZES, **(settings["text_config"] or {})}
    of_backbone = hf_config.read_settings(hf_config.of_one_axis(told), BACKBONE)
    model = _both(settings, told, of_backbone, architecture, NAMES)
    return _with_experts(model, of_backbone)


def read_tts(config: HfConfig, architecture: str) -> DecoderConfig:
    """`DecoderConfig` of the talker of a `Qwen3TTSForConditionalGeneration` checkpoint.

    Its backbone is dense. If its code predictor is narrower, a linear connects the two.
    """
    talker = read_keys(config, TALKER_KEYS)["talker_config"] or {}
    settings = read_keys(talker, TALKER_KEYS)
    told = hf_config.of_one_axis(talker)
    of_backbone = hf_config.read_settings(told, DENSE)
    predictor = {**_PREDICTOR_SIZES, **(settings["code_predictor_config"] or {})}
    same = predictor["hidden_size"] == of_backbone["hidden_size"]
    return _both(settings, talker, of_backbone, architecture, NAMES if same else PROJECTED)


def _both(
    settings: Mapping[str, Any],
    told: HfConfig,
    of_backbone: dict[str, Any],
    architecture: str,
    names: InnerNames,
) -> DecoderConfig:
    """A dense backbone and its code predictor; `told` has the axes of the backbone's RoPE."""
    _check_codes("the talker's vocab_size", of_backbone["vocab_size"])
    model = decoder_config(
        of_backbone,
        architecture,
        read_attention(of_backbone, qk_norm=True),
        read_mlp(of_backbone),
        embedding_name="model.codec_embedding",
        inner=_inner(settings, of_backbone, names),
    )
    assert model.rope is not None
    axes = hf_config.with_axes(model.rope, told)
    rope = replace(axes, sections=axes.sections or _SECTIONS, interleaved=True)
    return replace(model, rope=rope, tie_embeddings=False)


def _with_experts(model: DecoderConfig, settings: dict[str, Any]) -> DecoderConfig:
    """The backbone with experts in every layer, as transformers has them, whatever
    `mlp_only_layers` and `decoder_sparse_step` say; dense where `num_experts` is 0.
    """
    given = {settings[name] for name in ("num_experts", "num_local_experts")} - {None}
    if len(given) > 1:
        local = settings["num_local_experts"]
        raise unsupported("text_config.num_local_experts", local, "as num_experts is")
    settings = settings | {"num_experts": given.pop() if given else _EXPERTS}
    if not expert_count(settings, "num_experts"):
        return model
    if settings["shared_expert_intermediate_size"] is None:
        raise ValueError(
            "config.json lacks text_config.shared_expert_intermediate_size, the width of the "
            "expert that all tokens go through"
        )
    experts = gated_experts(settings, normalised=settings["norm_topk_prob"])
    return with_experts(model, experts, range(model.num_layers))


def _inner(
    settings: Mapping[str, Any], backbone: Mapping[str, Any], names: InnerNames
) -> InnerDecoder:
    """The code predictor; ValueError if it does not fit the backbone."""
    given = {**_PREDICTOR_SIZES, **(settings["code_predictor_config"] or {})}
    own = hf_config.read_settings(given, PREDICTOR)
    steps, end = settings["num_code_groups"], settings["codec_eos_token_id"]
    inside = "code_predictor_config"
    widths = own["hidden_size"], backbone["hidden_size"]
    for name, found, wanted in (
        ("num_code_groups", own["num_code_groups"], steps),
        *([] if names.projection else [("hidden_size", *widths)]),
    ):
        if found != wanted:
            raise unsupported(f"{inside}.{name}", found, f"{wanted}, the talker's")
    if own["max_position_embeddings"] < steps:
        raise unsupported(
            f"{inside}.max_position_embeddings",
            own["max_position_embeddings"],
            f"num_code_groups={steps} or more",
        )
    _check_codes(f"{inside}.vocab_size", own["vocab_size"])
    if end >= backbone["vocab_size"]:
        raise unsupported(
            "codec_eos_token_id", end, f"below the talker's vocab_size={backbone['vocab_size']}"
        )
    layer = usual_layer(read_attention(own, qk_norm=True), read_mlp(own), post_norms=False)
    return InnerDecoder(
        steps=steps,
        codes=own["vocab_size"],
        first_codes=backbone["vocab_size"],
        width=backbone["hidden_size"],
        hidden_size=own["hidden_size"],
        norm_eps=own["rms_norm_eps"],
        layers=(layer,) * own["num_hidden_layers"],
        rope=hf_config.rope(own),
        end_code=end,
        # Only the first code says that a reply ends.
        judged=1,
        fed=True,
        projection_bias=bool(names.projection),
        names=names,
    )


def _check_codes(name: str, codes: int) -> None:
    if codes > _MOST_CODES:
        raise unsupported(name, codes, f"at most {_MOST_CODES} codes of a codebook")
