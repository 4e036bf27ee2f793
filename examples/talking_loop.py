"""A voice that speaks frame by frame, is interrupted, and continues from the last heard frame
(barge-in).

    python examples/talking_loop.py [talk.wav]

The model is a tiny CSM with random weights, so that its sound is noise; with a folder of CSM 1B,
`AutoProcessor` makes the prompts, and `codec` is the model's own. The codec of transformers (Mimi)
makes sound of the frames. The session keeps the KV of everything that was said and heard.
"""

from __future__ import annotations

import sys
import tempfile
import wave
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from graphengine import Engine, PromptParts, SamplingParams, Session

CODES, CODEBOOKS, RATE = 64, 4, 240  # codes of a codebook, codes of a frame, samples a second
AHEAD = 3  # frames that are made before they are heard
PARAMS = SamplingParams(temperature=0.9, seed=1, max_tokens=20, ignore_eos=True)


class Talk(NamedTuple):
    """The heard part of a talk: the frames of each turn, and all of it as sound."""

    turns: list[np.ndarray[Any, Any]]
    kept: list[int]
    sound: np.ndarray[Any, Any]


def tiny_model(folder: str) -> Any:
    """A model with random weights, which it also saves; returns its codec."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, **heads}
    sizes |= {"vocab_size": CODES, "num_codebooks": CODEBOOKS}
    codec = {
        "model_type": "mimi", "sampling_rate": RATE, "hidden_size": 16, "num_filters": 4,
        "upsampling_ratios": [3, 2], "codebook_size": CODES, "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8, "num_quantizers": CODEBOOKS,
        "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16, "upsample_groups": 16,
    }  # fmt: skip
    library: Any = transformers
    config = library.CsmConfig(
        **sizes, text_vocab_size=256, max_position_embeddings=256, codec_config=codec,
        audio_token_id=250, audio_eos_token_id=251, pad_token_id=252, bos_token_id=253,
        codebook_pad_token_id=CODES - 1, codebook_eos_token_id=0, initializer_range=0.3,
        depth_decoder_config={**sizes, "backbone_hidden_size": 48, "max_position_embeddings": 8},
    )  # fmt: skip
    torch.manual_seed(0)
    model = library.CsmForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    return model.codec_model


def say(session: Session, text: list[int], heard_until: int | None = None) -> np.ndarray[Any, Any]:
    """One turn: the frames that the listener heard before an interruption, or all of them."""
    session.append(text)
    start, frames = len(session), list[tuple[int, ...]]()
    for event in session.stream(PARAMS):
        if event.codes is not None:
            frames.append(event.codes)
        if heard_until is not None and len(frames) == heard_until + AHEAD:
            # The user begins to speak. No more frames are made, and unheard ones are dropped.
            session.interrupt()
    heard = frames[:heard_until]
    session.rewind(len(session) - start - len(heard))
    return np.array(heard, dtype=np.int64)


def converse(engine: Engine, codec: Any) -> Talk:
    """Two turns, the first of which is interrupted."""
    end = engine.embed_frames(np.zeros((1, CODEBOOKS), np.int64))
    with engine.session() as session:
        first = say(session, [253, 5, 17, 8], heard_until=6)
        # A frame of zeros ends sound, also sound that was cut off.
        session.append(PromptParts(end))
        kept = [0, session.cached_tokens]
        second = say(session, [253, 31, 77])
    turns = [first, second]
    codes = torch.from_numpy(np.concatenate(turns)).T[None]
    with torch.no_grad():
        sound = codec.decode(codes).audio_values[0, 0].numpy()
    return Talk(turns, kept, sound)


def write(path: Path, sound: np.ndarray[Any, Any]) -> None:
    """A WAV file of 16 bits, one channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())


def main(path: str = "talk.wav") -> Talk:
    with tempfile.TemporaryDirectory() as folder:
        codec = tiny_model(folder)
        with Engine.from_pretrained(
            folder, max_batch=1, max_seq_len=128, block_size=8, prompt_embeds=True, dtype="float32"
        ) as engine:
            talk = converse(engine, codec)
    write(Path(path), talk.sound)
    first, second = (len(turn) for turn in talk.turns)
    print(
        f"{first} frames until the interruption, then {second}: {len(talk.sound)} samples in {path}"
    )
    return talk


if __name__ == "__main__":
    main(*sys.argv[1:2])
