"""Triton kernels, each with a plain PyTorch reference beside it.

One convention holds for all of them. A launch has N lanes, decode rows or tokens of a prefill
chunk; the device tensor `slot_N` says which request each belongs to, -1 for a padded lane. Of a
padded lane nothing is read and for it nothing is written, and no lane's bits depend on another
lane, on its own index or on N. On a GPU the Triton kernel runs, elsewhere its `*_reference` twin.
"""

from graphengine.kernels.activation import swiglu, swiglu_reference
from graphengine.kernels.attention import (
    paged_attention,
    paged_attention_reference,
    paged_attention_workspace_bytes,
)
from graphengine.kernels.embedding import embed, embed_reference
from graphengine.kernels.linear import MAX_LANES, linear, linear_reference
from graphengine.kernels.norm import rms_norm, rms_norm_reference
from graphengine.kernels.philox import philox_uint32
from graphengine.kernels.prefill_attention import (
    paged_prefill_attention,
    paged_prefill_attention_reference,
)
from graphengine.kernels.rope import RopeConfig, rope_append, rope_append_reference, rope_tables
from graphengine.kernels.sampling import SamplingTensors, sample, sample_reference
from graphengine.kernels.state import (
    EMITTED,
    INVALID,
    LENGTH,
    STOP,
    DecodeLanes,
    PrefillLanes,
    SlotState,
    StopTensors,
    apply_commands,
    commit_decode,
    commit_prefill,
    gather_decode,
    gather_prefill,
    publish,
)
from graphengine.kernels.swap import copy_blocks, copy_blocks_reference

__all__ = [
    "EMITTED",
    "INVALID",
    "LENGTH",
    "MAX_LANES",
    "STOP",
    "DecodeLanes",
    "PrefillLanes",
    "RopeConfig",
    "SamplingTensors",
    "SlotState",
    "StopTensors",
    "apply_commands",
    "commit_decode",
    "commit_prefill",
    "copy_blocks",
    "copy_blocks_reference",
    "embed",
    "embed_reference",
    "gather_decode",
    "gather_prefill",
    "linear",
    "linear_reference",
    "paged_attention",
    "paged_attention_reference",
    "paged_attention_workspace_bytes",
    "paged_prefill_attention",
    "paged_prefill_attention_reference",
    "philox_uint32",
    "publish",
    "rms_norm",
    "rms_norm_reference",
    "rope_append",
    "rope_append_reference",
    "rope_tables",
    "sample",
    "sample_reference",
    "swiglu",
    "swiglu_reference",
]
