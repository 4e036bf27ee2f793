"""How a step of a model draws the codes of a frame: by an inner decoder, or by parallel heads.

Both have the number of codes (`steps`) and of a codebook (`codes`), the id that stands for the
frame that ends a request (`end_token`), and weights with the embeddings of codes (`frames`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.models.inner.parallel_heads import HeadsWeights, ParallelHeads, allocate_heads
from graphengine.models.inner.weights import InnerWeights, allocate_inner

FrameCoder = InnerDecoder | ParallelHeads
FrameWeights = InnerWeights | HeadsWeights


def allocate_frames(
    config: FrameCoder, embedding: Tensor, *, device: str, dtype: torch.dtype
) -> FrameWeights:
    """Uninitialised weights; `device="meta"` allocates nothing.

    embedding  the model's, which may also be that of an inner decoder's first codebook
    """
    if isinstance(config, ParallelHeads):
        return allocate_heads(config, device=device, dtype=dtype)
    return allocate_inner(config, embedding, device=device, dtype=dtype)
