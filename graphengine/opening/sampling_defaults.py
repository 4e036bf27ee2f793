"""Sampling options that a checkpoint recommends, in its `generation_config.json`."""

from __future__ import annotations

from typing import Any

from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.sampling_params import SamplingParams

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The options that are read. (vLLM reads `max_new_tokens` too.)"""


def recommended_sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """The options of `SamplingParams` that the checkpoint's file names, by name.

    `do_sample: false` stands for temperature 0, as in transformers. ValueError, with the file, for
    values that no request can have.
    """
    told = checkpoint.generation_config
    found = {name: told[name] for name in NAMES if told.get(name) is not None}
    if told.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path / 'generation_config.json'}: {error}") from error
    return found
