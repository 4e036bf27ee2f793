"""Small random models of Higgs Audio v2 in transformers' classes, without their codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

BEGIN, SOUND, DELAY = 290, 291, 292
"""Ids of prompts: the begin of sound, and the places of frames and of frames that are delayed at
the end; text is below."""
TEXT = 307
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rope_parameters": LLAMA3, "rms_norm_eps": 1e-4, "initializer_range": 0.5,
}  # fmt: skip


def new_higgs(
    codebooks: int, codes: int = 37, *, seed: int = 0, ends: bool = False, **options: Any
) -> Any:
    """A random model in float32, whose weights are large enough for frames to vary; its last two
    codes fill delays.

    ends  whether it may draw end codes
    """
    torch.manual_seed(seed)
    config = transformers.HiggsAudioV2Config(
        **SIZES | options,
        num_codebooks=codebooks,
        codebook_size=codes,
        vocab_size=TEXT,
        audio_token_id=SOUND,
        audio_bos_token_id=BEGIN,
        audio_delay_token_id=DELAY,
        audio_stream_bos_id=codes - 2,
        audio_stream_eos_id=codes - 1,
        eos_token_id=300,
        pad_token_id=301,
        bos_token_id=302,
    )
    model = transformers.HiggsAudioV2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1:
                tensor.normal_(std=0.5 if "embed" in name else tensor.shape[-1] ** -0.5)
            elif "norm" in name:
                tensor.uniform_(0.7, 1.3)
        if not ends:
            # One of the other logits is greater than 0.
            model.audio_lm_head.weight[codes - 1 :: codes] = 0
    # Nobody reads the head of text, which some checkpoints have.
    model.text_lm_head = torch.nn.Linear(config.hidden_size, TEXT, bias=False)
    return model


def write_higgs(path: Path, codebooks: int, codes: int = 37, **options: Any) -> Any:
    """The model of `new_higgs`, once it is saved to `path`."""
    model = new_higgs(codebooks, codes, **options)
    model.save_pretrained(path)
    return model


def frames_of(model: Any, ids: list[int], frames: int, sound: Any = None) -> torch.Tensor:
    """[frames, K]: greedy frames of transformers' `generate`, after this prompt, whose places of
    sound have these frames.
    """
    given = {}
    if sound is not None:
        sound = torch.as_tensor(sound).long()[None]
        given = {
            "audio_input_ids": sound,
            "audio_input_ids_mask": torch.ones(sound.shape[:2], dtype=torch.bool),
        }
    with torch.no_grad():
        found = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            **given,
            do_sample=False,
            max_new_tokens=frames,
            use_cache=True,
        )
    first = 0 if sound is None else sound.shape[1]
    made: torch.Tensor = found[0, first:]
    return made
