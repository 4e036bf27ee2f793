"""A model with its options, and the sizes that follow from them before any memory is counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphengine.buckets import BucketLadder, Where
from graphengine.config import EngineConfig
from graphengine.drafters import Drafter, FieldSizes
from graphengine.host.rings import WindowRing
from graphengine.kernels.core.paged import FP8_KV
from graphengine.models.contract import ModelConfig, ModelWeights
from graphengine.models.weights import RoutedExperts
from graphengine.opening.inventory import prefill_ladder, state_places
from graphengine.opening.requirements import (
    check_packing,
    check_requirements,
    recorded_experts,
)
from graphengine.options.prefill_cut import PrefillCut


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineShape:
    """A model, its options and its drafter, with the sizes that the budget is made from.

    weights   the model's weights, on the meta device
    dtype     dtype of weights and activations
    kv_dtype  dtype of the caches
    recorded  the model's experts, if they are recorded
    rings     rings of layers with a window whose KV is not in the pool
    """

    model: ModelConfig
    config: EngineConfig
    drafter: Drafter
    weights: ModelWeights
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_seq_len: int
    ladder: BucketLadder
    prefill_ladder: BucketLadder
    recorded: RoutedExperts | None
    rings: tuple[WindowRing, ...] = ()

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        drafter: Drafter,
        checkpoint_dtype: torch.dtype,
    ) -> EngineShape:
        """A shape without rings. ValueError like `check_requirements`, for a sequence length beyond
        the model's, and for records of experts of a model without experts.

        checkpoint_dtype  used on a GPU where the config names no dtype; a CPU computes in float32
        """
        device = torch.device(config.device)
        dtype = config.torch_dtype or (checkpoint_dtype if device.type == "cuda" else torch.float32)
        check_requirements(model, config, drafter.needs, device, dtype)
        max_seq_len = config.sequence_limit(model.max_positions)
        ladder = BucketLadder(config.max_batch, config.buckets)
        chunks = prefill_ladder(config, max_seq_len)
        if config.prefill_cut is not None:
            _check_cut(config, chunks, max_seq_len)
        weights = model.allocate(device="meta", dtype=dtype)
        check_packing(model, config, drafter, device, dtype)
        return cls(
            model=model,
            config=config,
            drafter=drafter,
            weights=weights,
            device=device,
            dtype=dtype,
            kv_dtype=FP8_KV if config.kv_dtype == "fp8" else dtype,
            max_seq_len=max_seq_len,
            ladder=ladder,
            prefill_ladder=chunks,
            recorded=recorded_experts(model, config, weights.routed),
        )

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def where(self) -> Where:
        """The kind of memory that replays see."""
        return "device" if self.on_gpu else "host"

    @property
    def pinned(self) -> Where:
        """The kind of host memory that a GPU copies from or to."""
        return "pinned" if self.on_gpu else "host"

    @property
    def chunk(self) -> int:
        """Tokens of the largest prefill bucket."""
        return self.prefill_ladder.sizes[-1]

    @property
    def table_blocks(self) -> int:
        """Blocks of the longest request."""
        return -(-self.max_seq_len // self.config.block_size)

    @property
    def state_places(self) -> int:
        """Number of places that keep states of recurrent layers."""
        return state_places(self.model, self.config, self.drafter.needs, self.rings)

    @property
    def field_sizes(self) -> FieldSizes:
        return FieldSizes(self.config.max_batch, self.max_seq_len, self.chunk, self.dtype)


def _check_cut(config: EngineConfig, chunks: BucketLadder, max_seq_len: int) -> None:
    """ValueError for a `prefill_cut` whose chunks are not among the given buckets."""
    assert config.prefill_cut is not None
    given, most = config.prefill_buckets, config.max_prefill_tokens_per_step
    beyond = [size for size in given if size > max_seq_len]
    limit = f"max_seq_len={max_seq_len}" if beyond else None
    if most is not None and most < min(max_seq_len, max(given)):
        beyond, limit = [], f"max_prefill_tokens_per_step={most}"
    PrefillCut(config.prefill_cut).check_sizes(chunks.sizes, beyond, limit)
