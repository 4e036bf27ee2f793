"""Small random models of Moshi in transformers' class, and its own frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MimiConfig, MoshiConfig, MoshiForConditionalGeneration

TEXT, CODES, HIDDEN = 53, 29, 48
Codes = NDArray[np.integer[Any]]
BACKBONE: dict[str, Any] = {
    "vocab_size": TEXT, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "ffn_dim": 140, "max_position_embeddings": 128,
    "sliding_window": 128, "rms_norm_eps": 1e-5, "audio_vocab_size": CODES,
}  # fmt: skip
DEPTH: dict[str, Any] = {
    "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 76,
    "sliding_window": 40, "max_position_embeddings": 40, "rms_norm_eps": 1e-4,
}  # fmt: skip


def moshi_config(
    books: int, *, backbone: dict[str, Any] | None = None, depth: dict[str, Any] | None = None
) -> Any:
    codec = MimiConfig(
        num_quantizers=books, codebook_size=32, codebook_dim=8, hidden_size=16, num_filters=4,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
        vector_quantization_hidden_dimension=8, head_dim=8, upsample_groups=16,
    )  # fmt: skip
    return MoshiConfig(
        num_codebooks=books,
        audio_encoder_config=codec.to_dict(),
        depth_decoder_config=DEPTH | (depth or {}),
        **BACKBONE | (backbone or {}),
    )


def new_moshi(books: int, *, seed: int = 0, **sizes: Any) -> Any:
    """A random model in float32, whose weights are large enough for frames to vary."""
    model = MoshiForConditionalGeneration(moshi_config(books, **sizes)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.startswith("audio_encoder"):
                continue
            if tensor.ndim > 1:
                tensor.normal_(std=0.5 if "embed" in name else tensor.shape[-1] ** -0.5)
            elif "norm" in name:
                tensor.uniform_(0.5, 1.5)
        model.decoder.lm_head.weight *= 3
        model.depth_decoder.lm_heads.weight *= 3
    return model


def write_moshi(path: Path, books: int, **options: Any) -> Any:
    """The model of `new_moshi`, once it is saved to `path`."""
    model = new_moshi(books, **options)
    model.save_pretrained(path)
    return model


def beginning(books: int) -> Codes:
    """The frame [1, 1 + 2 * K] that transformers puts before everything."""
    return np.array([[TEXT, *[CODES] * (2 * books)]])


def frames_of(model: Any, prompt: Codes, blank: Codes, frames: int) -> Codes:
    """[frames, 1 + K]: transformers' greedy frames, as they are fed back, after the beginning and a
    prompt [n, 1 + 2 * K] of frames of sound, in which the user is silent: says `blank`.
    """
    found, start = _generate(model, prompt, blank, frames), 1 + len(prompt)
    text, codes = found.sequences[0, start:], model.generated_audio_codes[0, :, start:]
    return torch.cat([text[None], codes]).T.numpy()


def _generate(model: Any, prompt: Codes, blank: Codes, frames: int) -> Any:
    books = model.num_codebooks
    ids, own, theirs = np.split(torch.as_tensor(prompt).numpy(), [1, 1 + books], axis=1)
    given = {
        "input_ids": torch.tensor(ids.T),
        "moshi_audio_codes": torch.tensor(own.T)[None],
        "user_audio_codes": torch.tensor(theirs.T)[None],
    }
    silence = torch.tensor(blank).view(1, books, 1)
    encode, model.audio_encoder.encode = model.audio_encoder.encode, lambda *_, **__: (silence,)
    try:
        # Its defaults of lengths are set, too, and it warns that one of two is used.
        model.generation_config.max_length = None
        found = model.generate(
            **given if len(prompt) else {},
            max_new_tokens=frames,
            do_sample=False,
            return_audio_waveforms=False,
            return_audio_codes=True,
        )
    finally:
        model.audio_encoder.encode = encode
    return found


def sound_of(model: Any, prompt: Codes, blank: Codes, frames: int) -> Codes:
    """[frames, K]: the frames of sound that transformers gives the codec, prompt included."""
    return _generate(model, prompt, blank, frames).audio_codes[0].T.numpy()


@torch.no_grad()
def frames_by_hand(model: Any, prompt: Codes, heard: Codes, frames: int, **options: Any) -> Codes:
    """`frames_of` by a plain loop without caches, after positions [n, 1 + 2 * K] as they are fed.

    heard   [frames, K]: what the user says with each frame, as it is fed
    first   [K - 1]: the late codes of the first frame; None: they are drawn
    """
    first, books = options.get("first"), model.num_codebooks
    fed, said = torch.as_tensor(prompt), []
    for frame in range(frames):
        embedded = model.decoder.model.embed_tokens(fed[:, 0])
        for place in range(2 * books):
            embedded = embedded + model.embed_tokens[place](fed[:, 1 + place])
        hidden = model.decoder.model(inputs_embeds=embedded[None]).last_hidden_state[:, -1:]
        codes = [int(model.decoder.lm_head(hidden)[0, 0].argmax())]
        for place in range(books):
            ids = torch.tensor([codes])
            causal = torch.ones(1, place + 1).long()
            logits = model.depth_decoder(
                input_ids=ids,
                last_hidden_state=hidden.expand(1, place + 1, -1),
                attention_mask=causal,
            ).logits
            codes.append(int(logits[0, -1].argmax()))
        if frame == 0 and first is not None:
            codes[2:] = first
        said.append(codes)
        row = torch.tensor([[*codes, *np.asarray(heard[frame]).tolist()]])
        fed = torch.cat([fed, row])
    return np.array(said)
