"""Triton kernels, each with a plain PyTorch reference.

One convention holds for all of them. A launch has N lanes, decode rows or tokens of a prefill
chunk; the device tensor `slot_N` says which request each lane belongs to, -1 if it is padded.
Padded lanes are neither read nor written, and no lane's bits depend on another lane, on its own
index or on N. On a GPU the Triton kernel runs, elsewhere its `*_reference` twin.

A folder holds the operations of one kind. An operation's module has its contract: the function that
is called, what it checks, and how its work is cut. Kernel and twin are in the same file, or, if
they are long, in files of their own: `x_triton.py`, `x_gluon.py`, and `reference.py` for the
folder.
"""

# ruff: noqa: E402  (every kernel is imported between `put_in_place` and `remove`)
from graphengine.kernels.core import stand_in

_stood_in = stand_in.put_in_place()

from graphengine.kernels.attention.decode import (
    TREE_SPLIT,
    decode_attention,
    decode_attention_arrivals,
    decode_attention_workspace_bytes,
)
from graphengine.kernels.attention.head_gate import gate_heads, gate_heads_reference
from graphengine.kernels.attention.head_product import head_product, head_product_reference
from graphengine.kernels.attention.latent import (
    LATENT_TILE,
    MAX_LATENT,
    MAX_ROTATED,
    check_latent_sizes,
    latent_append,
    latent_attention,
)
from graphengine.kernels.attention.latent_decode import (
    latent_values,
    latent_values_workspace_bytes,
)
from graphengine.kernels.attention.latent_reference import (
    latent_append_reference,
    latent_attention_reference,
)
from graphengine.kernels.attention.prefill import (
    PREFILL_ARRIVALS,
    paged_prefill_attention,
    prefill_attention_workspace_bytes,
)
from graphengine.kernels.attention.reference import (
    decode_attention_reference,
    paged_prefill_attention_reference,
)
from graphengine.kernels.comm.add_parts_norm import (
    LANE_PROGRAMS,
    add_parts_rms_norm,
    split_has_room,
    split_lanes,
    split_normed,
)
from graphengine.kernels.comm.all_reduce import all_reduce
from graphengine.kernels.comm.flags import FlaggedMemory
from graphengine.kernels.comm.items import PROGRAMS as PUSH_PROGRAMS
from graphengine.kernels.comm.items import UNIT as PUSH_UNIT
from graphengine.kernels.comm.items import PeerItems, Peers
from graphengine.kernels.comm.layout import PeerLayout
from graphengine.kernels.comm.push import push_gather, push_own_sum, push_sum
from graphengine.kernels.comm.push_candidates import push_candidates
from graphengine.kernels.comm.push_lanes import ExpertLanes, lane_units, push_lanes
from graphengine.kernels.comm.push_residual import (
    push_own_to_residual,
    push_to_residual,
    push_units,
)
from graphengine.kernels.comm.sums import sum_parts, sum_parts_reference
from graphengine.kernels.core.devices import (
    H200,
    Device,
    assumed,
    device_of,
    overlaps_launches,
)
from graphengine.kernels.core.lanes import BITS
from graphengine.kernels.core.launching import (
    ALONE,
    KernelCompilation,
    Launch,
    ZeroedMemory,
    compile_kernels,
)
from graphengine.kernels.core.op import Op, ops_handed_to, own_kernels, recorded_ops
from graphengine.kernels.core.paged import FP8_KV, FP8_MAX
from graphengine.kernels.core.tree import TreeLanes, TreeTables
from graphengine.kernels.core.triton_versions import bits_of_triton, warn_if_untried
from graphengine.kernels.draft.block import (
    BlockDraft,
    begin_block_draft,
    begin_block_draft_reference,
    commit_block_draft,
    commit_block_draft_reference,
)
from graphengine.kernels.draft.confidence import (
    follow_acceptance,
    follow_acceptance_reference,
    withhold_drafts,
    withhold_drafts_reference,
)
from graphengine.kernels.draft.defer import defer_filtered, defer_filtered_reference
from graphengine.kernels.draft.draft import (
    DraftTiles,
    FirstDraft,
    Fusion,
    NextDraft,
    advance_module_draft,
    begin_module_draft,
    begin_module_draft_reference,
    combine_hidden,
    combine_hidden_reference,
    commit_draft,
    commit_draft_reference,
)
from graphengine.kernels.draft.dynamic_tree import (
    DraftedTrees,
    Expanded,
    expand_tree,
    expand_tree_reference,
    keep_best,
    keep_best_reference,
)
from graphengine.kernels.draft.markov import (
    MAX_RANK,
    MarkovHead,
    markov_draft,
    markov_draft_reference,
    markov_logits,
    markov_logits_reference,
)
from graphengine.kernels.draft.model_draft import (
    ModelDraft,
    advance_model_draft,
    begin_model_draft,
    begin_model_draft_reference,
)
from graphengine.kernels.draft.ngram import (
    ngram_prompt,
    ngram_prompt_reference,
    ngram_propose,
    ngram_propose_reference,
)
from graphengine.kernels.draft.relaxed_acceptance import (
    relaxed_acceptance,
    relaxed_acceptance_reference,
    relaxed_delta_prompt,
    relaxed_delta_prompt_reference,
    update_relaxed_delta,
    update_relaxed_delta_reference,
)
from graphengine.kernels.draft.spread import spread_logits, spread_logits_reference
from graphengine.kernels.draft.suffix import (
    MAX_CORPUS,
    suffix_propose,
    suffix_propose_reference,
)
from graphengine.kernels.draft.top_drafts import (
    MAX_CHILDREN,
    TopDrafts,
    top_drafts,
    top_drafts_reference,
)
from graphengine.kernels.draft.tree import (
    ParentRun,
    TreeLevel,
    grow_tree,
    grow_tree_reference,
)
from graphengine.kernels.draft.tree_candidates import Candidates, Children
from graphengine.kernels.draft.vanilla import (
    DraftChain,
    Emitted,
    ModuleInput,
    ModuleRun,
    Recycled,
    advance_vanilla_draft,
    advance_vanilla_draft_reference,
    begin_vanilla_draft,
    begin_vanilla_draft_reference,
    new_draft_chain,
)
from graphengine.kernels.experts.experts import (
    expert_part,
    expert_residual,
    expert_sum,
    expert_swiglu,
    residual_arrivals,
)
from graphengine.kernels.experts.grouping import Grouping, group_pairs
from graphengine.kernels.experts.packed import PackedExperts, empty_experts
from graphengine.kernels.experts.plans import (
    ProductTile,
    chunk_tile,
    decode_block,
    expert_plan,
    groups_pairs,
)
from graphengine.kernels.experts.records import given_routes, publish_routes, route_items
from graphengine.kernels.experts.router import (
    MAX_EXPERTS,
    Router,
    RouterScores,
    Routes,
    route,
    route_reference,
)
from graphengine.kernels.experts.router_product import route_product
from graphengine.kernels.linear.lane_codes import (
    ActivationKind,
    LaneCodes,
    code_bytes,
    new_lane_codes,
    quantise_lanes,
    quantise_lanes_reference,
)
from graphengine.kernels.linear.linear import (
    MAX_LANES,
    arrivals_needed,
    residual_groups,
)
from graphengine.kernels.linear.linear_swiglu import (
    fuses_swiglu,
    linear_swiglu,
    linear_swiglu_reference,
)
from graphengine.kernels.linear.packed import (
    BLOCK_ROWS,
    PackedForm,
    PackedWeight,
    empty_packed,
    first_rows,
    pack,
    packed_form,
    rows_of,
    select_rows,
)
from graphengine.kernels.linear.packed_chunk import packed_chunk_product
from graphengine.kernels.linear.packed_chunk_fp8 import packed_chunk_fp8_product, takes_fp8
from graphengine.kernels.linear.packed_linear import PACKED_COLUMNS, packed_plan
from graphengine.kernels.linear.plans import (
    FMA_LANES,
    USUAL_PROCESSORS,
    LinearKind,
    LinearPlan,
    RowFamily,
    attention_split,
    heuristic_plan,
    row_family,
)
from graphengine.kernels.linear.products import (
    AnyWeight,
    in_order,
    linear,
    linear_residual,
    linear_sample,
    linear_squares,
)
from graphengine.kernels.linear.quantised import QuantisedWeight, WeightFormat
from graphengine.kernels.linear.reference import (
    linear_reference,
    linear_residual_reference,
    linear_squares_reference,
)
from graphengine.kernels.linear.residual import (
    Kept,
    Product,
    Residual,
    add_to_residual_reference,
    new_residual,
    sums_of_squares,
)
from graphengine.kernels.linear.residual_sum import add_to_residual
from graphengine.kernels.logits.logits import (
    LogitsTensors,
    process_logits,
    process_logits_reference,
)
from graphengine.kernels.logits.logits_triton import (
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_GRAMMAR,
    USES_MASK,
    USES_REPETITION,
)
from graphengine.kernels.logits.logprobs import (
    LogprobTensors,
    RankedLogits,
    TokenLogprobs,
    rank_logits,
    rank_logits_reference,
    token_log_probabilities,
    token_log_probabilities_reference,
)
from graphengine.kernels.logits.logprobs_mailbox import (
    logprob_items,
    publish_logprobs,
    publish_logprobs_reference,
)
from graphengine.kernels.logits.logprobs_triton import MAX_LOGPROBS
from graphengine.kernels.megatron.rewind import (
    mamba_state_selective_copy,
    mamba_state_selective_copy_reference,
    rewind_kv_cache,
    rewind_kv_cache_reference,
)
from graphengine.kernels.megatron.verify import (
    prepare_next_forward_pass,
    prepare_next_forward_pass_reference,
    verify_speculative_tokens,
    verify_speculative_tokens_reference,
)
from graphengine.kernels.norm_rope.activation import (
    Activation,
    ClampedSwiglu,
    squared_relu,
    squared_relu_reference,
    swiglu,
    swiglu_reference,
)
from graphengine.kernels.norm_rope.embedding import GIVEN, GivenRows, embed, embed_reference
from graphengine.kernels.norm_rope.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from graphengine.kernels.norm_rope.post_norm import (
    add_normed,
    add_normed_reference,
    add_normed_rms_norm,
    add_normed_rms_norm_reference,
)
from graphengine.kernels.norm_rope.rope import (
    RopeConfig,
    RopeKind,
    rope_append,
    rope_append_reference,
    rope_tables,
)
from graphengine.kernels.recurrent.conv import causal_conv_chunk
from graphengine.kernels.recurrent.gated_delta import gated_delta_decode, gated_delta_prefill
from graphengine.kernels.recurrent.gated_delta_sizes import GatedDeltaParams, GatedDeltaSizes
from graphengine.kernels.recurrent.mamba2 import (
    mamba2_decode,
    mamba2_decode_gated,
    mamba2_norm,
    mamba2_prefill,
)
from graphengine.kernels.recurrent.mamba2_reference import (
    mamba2_decode_reference,
    mamba2_norm_reference,
    mamba2_prefill_reference,
)
from graphengine.kernels.recurrent.mamba2_sizes import Mamba2Params, Mamba2Sizes
from graphengine.kernels.recurrent.short_conv import short_conv_decode, short_conv_prefill
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import (
    sample,
    sample_reference,
    sample_tiles,
    sample_tiles_reference,
)
from graphengine.kernels.step.begin import RowTrees, gather_and_embed, gather_and_embed_reference
from graphengine.kernels.step.finish import verify_commit_publish
from graphengine.kernels.step.finish_reference import (
    FinishedStep,
    verify_commit_publish_reference,
)
from graphengine.kernels.step.handover import HandOver, hand_over, hand_over_reference
from graphengine.kernels.step.move import move_path, move_path_reference
from graphengine.kernels.step.noted import (
    note_prompt,
    note_prompt_reference,
    note_tokens,
    note_tokens_reference,
)
from graphengine.kernels.step.publish import publish
from graphengine.kernels.step.record import MAX_DRAFTS, pack_state, unpack_state
from graphengine.kernels.step.state import (
    EMITTED,
    INVALID,
    LENGTH,
    STOP,
    DecodeLanes,
    PrefillLanes,
    SlotState,
    StopSequences,
    StopTensors,
    apply_commands,
    commit_prefill,
    gather_prefill,
)
from graphengine.kernels.step.stop_sequences import (
    StopMatch,
    match_stop_sequences,
    match_stop_sequences_reference,
)
from graphengine.kernels.step.swap import copy_blocks, copy_blocks_reference
from graphengine.kernels.step.walk import AcceptedPath

stand_in.remove(_stood_in)

__all__ = [
    "ALONE",
    "BITS",
    "BLOCK_ROWS",
    "EMITTED",
    "FMA_LANES",
    "FP8_KV",
    "FP8_MAX",
    "GIVEN",
    "H200",
    "INVALID",
    "LANE_PROGRAMS",
    "LATENT_TILE",
    "LENGTH",
    "MAX_CHILDREN",
    "MAX_CORPUS",
    "MAX_DRAFTS",
    "MAX_EXPERTS",
    "MAX_LANES",
    "MAX_LATENT",
    "MAX_LOGPROBS",
    "MAX_RANK",
    "MAX_ROTATED",
    "PACKED_COLUMNS",
    "PREFILL_ARRIVALS",
    "PUSH_PROGRAMS",
    "PUSH_UNIT",
    "STOP",
    "TREE_SPLIT",
    "USES_BAD_WORDS",
    "USES_BIAS",
    "USES_COUNTS",
    "USES_GRAMMAR",
    "USES_MASK",
    "USES_REPETITION",
    "USUAL_PROCESSORS",
    "AcceptedPath",
    "Activation",
    "ActivationKind",
    "AnyWeight",
    "BlockDraft",
    "Candidates",
    "Children",
    "ClampedSwiglu",
    "DecodeLanes",
    "Device",
    "DraftChain",
    "DraftTiles",
    "DraftedTrees",
    "Emitted",
    "Expanded",
    "ExpertLanes",
    "FinishedStep",
    "FirstDraft",
    "FlaggedMemory",
    "Fusion",
    "GatedDeltaParams",
    "GatedDeltaSizes",
    "GivenRows",
    "Grouping",
    "HandOver",
    "Kept",
    "KernelCompilation",
    "LaneCodes",
    "Launch",
    "LinearKind",
    "LinearPlan",
    "LogitsTensors",
    "LogprobTensors",
    "Mamba2Params",
    "Mamba2Sizes",
    "MarkovHead",
    "ModelDraft",
    "ModuleInput",
    "ModuleRun",
    "NextDraft",
    "Op",
    "PackedExperts",
    "PackedForm",
    "PackedWeight",
    "ParentRun",
    "PeerItems",
    "PeerLayout",
    "Peers",
    "PrefillLanes",
    "Product",
    "ProductTile",
    "QuantisedWeight",
    "RankedLogits",
    "Recycled",
    "Residual",
    "RopeConfig",
    "RopeKind",
    "Router",
    "RouterScores",
    "Routes",
    "RowFamily",
    "RowTrees",
    "SamplingTensors",
    "SlotState",
    "StopMatch",
    "StopSequences",
    "StopTensors",
    "TokenLogprobs",
    "TopDrafts",
    "TreeLanes",
    "TreeLevel",
    "TreeTables",
    "WeightFormat",
    "ZeroedMemory",
    "add_normed",
    "add_normed_reference",
    "add_normed_rms_norm",
    "add_normed_rms_norm_reference",
    "add_parts_rms_norm",
    "add_rms_norm",
    "add_rms_norm_reference",
    "add_to_residual",
    "add_to_residual_reference",
    "advance_model_draft",
    "advance_module_draft",
    "advance_vanilla_draft",
    "advance_vanilla_draft_reference",
    "all_reduce",
    "apply_commands",
    "arrivals_needed",
    "assumed",
    "attention_split",
    "begin_block_draft",
    "begin_block_draft_reference",
    "begin_model_draft",
    "begin_model_draft_reference",
    "begin_module_draft",
    "begin_module_draft_reference",
    "begin_vanilla_draft",
    "begin_vanilla_draft_reference",
    "bits_of_triton",
    "causal_conv_chunk",
    "check_latent_sizes",
    "chunk_tile",
    "code_bytes",
    "combine_hidden",
    "combine_hidden_reference",
    "commit_block_draft",
    "commit_block_draft_reference",
    "commit_draft",
    "commit_draft_reference",
    "commit_prefill",
    "compile_kernels",
    "copy_blocks",
    "copy_blocks_reference",
    "decode_attention",
    "decode_attention_arrivals",
    "decode_attention_reference",
    "decode_attention_workspace_bytes",
    "decode_block",
    "defer_filtered",
    "defer_filtered_reference",
    "device_of",
    "embed",
    "embed_reference",
    "empty_experts",
    "empty_packed",
    "expand_tree",
    "expand_tree_reference",
    "expert_part",
    "expert_plan",
    "expert_residual",
    "expert_sum",
    "expert_swiglu",
    "first_rows",
    "follow_acceptance",
    "follow_acceptance_reference",
    "fuses_swiglu",
    "gate_heads",
    "gate_heads_reference",
    "gated_delta_decode",
    "gated_delta_prefill",
    "gather_and_embed",
    "gather_and_embed_reference",
    "gather_prefill",
    "given_routes",
    "group_pairs",
    "groups_pairs",
    "grow_tree",
    "grow_tree_reference",
    "hand_over",
    "hand_over_reference",
    "head_product",
    "head_product_reference",
    "heuristic_plan",
    "in_order",
    "keep_best",
    "keep_best_reference",
    "lane_units",
    "latent_append",
    "latent_append_reference",
    "latent_attention",
    "latent_attention_reference",
    "latent_values",
    "latent_values_workspace_bytes",
    "linear",
    "linear_reference",
    "linear_residual",
    "linear_residual_reference",
    "linear_sample",
    "linear_squares",
    "linear_squares_reference",
    "linear_swiglu",
    "linear_swiglu_reference",
    "logprob_items",
    "mamba2_decode",
    "mamba2_decode_gated",
    "mamba2_decode_reference",
    "mamba2_norm",
    "mamba2_norm_reference",
    "mamba2_prefill",
    "mamba2_prefill_reference",
    "mamba_state_selective_copy",
    "mamba_state_selective_copy_reference",
    "markov_draft",
    "markov_draft_reference",
    "markov_logits",
    "markov_logits_reference",
    "match_stop_sequences",
    "match_stop_sequences_reference",
    "move_path",
    "move_path_reference",
    "new_draft_chain",
    "new_lane_codes",
    "new_residual",
    "ngram_prompt",
    "ngram_prompt_reference",
    "ngram_propose",
    "ngram_propose_reference",
    "note_prompt",
    "note_prompt_reference",
    "note_tokens",
    "note_tokens_reference",
    "ops_handed_to",
    "overlaps_launches",
    "own_kernels",
    "pack",
    "pack_state",
    "packed_chunk_fp8_product",
    "packed_chunk_product",
    "packed_form",
    "packed_plan",
    "paged_prefill_attention",
    "paged_prefill_attention_reference",
    "prefill_attention_workspace_bytes",
    "prepare_next_forward_pass",
    "prepare_next_forward_pass_reference",
    "process_logits",
    "process_logits_reference",
    "publish",
    "publish_logprobs",
    "publish_logprobs_reference",
    "publish_routes",
    "push_candidates",
    "push_gather",
    "push_lanes",
    "push_own_sum",
    "push_own_to_residual",
    "push_sum",
    "push_to_residual",
    "push_units",
    "quantise_lanes",
    "quantise_lanes_reference",
    "rank_logits",
    "rank_logits_reference",
    "recorded_ops",
    "relaxed_acceptance",
    "relaxed_acceptance_reference",
    "relaxed_delta_prompt",
    "relaxed_delta_prompt_reference",
    "residual_arrivals",
    "residual_groups",
    "rewind_kv_cache",
    "rewind_kv_cache_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope_append",
    "rope_append_reference",
    "rope_tables",
    "route",
    "route_items",
    "route_product",
    "route_reference",
    "row_family",
    "rows_of",
    "sample",
    "sample_reference",
    "sample_tiles",
    "sample_tiles_reference",
    "select_rows",
    "short_conv_decode",
    "short_conv_prefill",
    "split_has_room",
    "split_lanes",
    "split_normed",
    "spread_logits",
    "spread_logits_reference",
    "squared_relu",
    "squared_relu_reference",
    "suffix_propose",
    "suffix_propose_reference",
    "sum_parts",
    "sum_parts_reference",
    "sums_of_squares",
    "swiglu",
    "swiglu_reference",
    "takes_fp8",
    "token_log_probabilities",
    "token_log_probabilities_reference",
    "top_drafts",
    "top_drafts_reference",
    "unpack_state",
    "update_relaxed_delta",
    "update_relaxed_delta_reference",
    "verify_commit_publish",
    "verify_commit_publish_reference",
    "verify_speculative_tokens",
    "verify_speculative_tokens_reference",
    "warn_if_untried",
    "withhold_drafts",
    "withhold_drafts_reference",
]
