"""Which cases of a matrix the native suite tries, when it does not try all.

Each case of these tests is a model, a format or a plan with kernels of its own, which are compiled
for seconds. What the code looks at differs little between many of them, and a CPU tries them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Case = TypeVar("Case")

CASES = {
    "tests/graphengine/core/test_chunk_times.py": {
        "test_a_measurement_leaves_nothing_behind": 3,
    },
    "tests/graphengine/drafters/test_block.py": {
        "test_on_a_gpu_graphs_hold_kernels_alone": 2,
    },
    "tests/graphengine/drafters/test_confidence.py": {
        "test_tokens_are_those_of_plain_decoding": 2,
    },
    "tests/graphengine/drafters/test_draft_schedule.py": {
        "test_tokens_are_those_of_plain_decoding": 3,
    },
    "tests/graphengine/drafters/test_drafts.py": {
        "test_all_drafts_of_who_cannot_be_wrong_are_accepted": 5,
    },
    "tests/graphengine/drafters/test_eagle3.py": {
        "test_on_a_gpu_graphs_hold_kernels_alone": 1,
    },
    "tests/graphengine/drafters/test_speculation.py": {
        "test_odd_random_checkpoints": 3,
        "test_random_checkpoints_with_a_module_for_each_draft": 2,
        "test_the_demo_model_in_bfloat16": 4,
        "test_the_demo_model_says_what_it_says_without_drafts": 12,
    },
    "tests/graphengine/drafters/test_speculation_churn.py": {
        "test_a_pause_costs_no_accepted_draft": 4,
        "test_each_request_says_what_it_says_alone_without_drafts": 5,
    },
    "tests/graphengine/drafters/test_speculation_counts.py": {
        "test_an_event_has_the_tokens_of_a_step": 5,
    },
    "tests/graphengine/drafters/test_speculation_graphs.py": {
        "test_eager_steps_give_the_tokens_of_the_graphs": 8,
        "test_poison_around_a_prompt_chunk": 6,
        "test_poison_around_a_speculative_step": 14,
    },
    "tests/graphengine/drafters/test_speculation_options.py": {
        "test_a_drafter_keeps_up_while_it_is_off": 3,
        "test_forced_steps_take_so_many_drafts": 6,
    },
    "tests/graphengine/drafters/test_suffix_drafts.py": {
        "test_drafts_are_those_of_a_plain_search": 3,
    },
    "tests/graphengine/models/quantised/test_gpu_engines.py": {
        "test_a_crowd_drafts_and_pauses_change_no_token": 2,
    },
    "tests/graphengine/models/test_experts.py": {
        "test_logits_and_greedy_tokens": 2,
    },
    "tests/graphengine/models/test_experts_gpu.py": {
        "test_a_crowd_drafts_and_pauses_change_no_token": 2,
    },
    "tests/graphengine/models/test_gemma3.py": {
        "test_a_gpu_in_half_precision_is_near_float32": 3,
        "test_drafts_change_no_token": 1,
        "test_half_precision_replays_what_it_computes_eagerly": 2,
        "test_logits_and_greedy_tokens": 2,
    },
    "tests/graphengine/models/test_gpt_oss.py": {
        "test_half_precision_replays_what_it_computes_eagerly": 1,
    },
    "tests/graphengine/models/test_hybrids.py": {
        "test_a_model_drafts_for_itself": 2,
        "test_a_session_goes_on": 4,
        "test_chunks_and_batches": 3,
        "test_drafts_change_no_token": 2,
        "test_half_precision_is_near_float32": 4,
        "test_half_precision_replays_what_it_computes_eagerly": 6,
        "test_logits_and_greedy_tokens": 4,
        "test_prompts_of_many_lengths": 2,
    },
    "tests/graphengine/models/test_latent.py": {
        "test_logits_and_greedy_tokens": 2,
    },
    "tests/graphengine/models/test_mtp_module.py": {
        "test_decode_one_token_at_a_time": 3,
    },
    "tests/graphengine/models/test_parity.py": {
        "test_batches_of_mixed_prompts": 6,
        "test_logits_and_greedy_tokens": 8,
    },
    "tests/graphengine/models/test_precision.py": {
        "test_random_models": 4,
    },
    "tests/graphengine/models/test_window_rings.py": {
        "test_half_precision_has_the_bits_of_an_engine_without_rings": 4,
    },
    "tests/graphengine/models/test_windows.py": {
        "test_half_precision_replays_what_it_computes_eagerly": 4,
        "test_logits_and_greedy_tokens": 3,
    },
    "tests/graphengine/opening/test_compilation.py": {
        "test_nothing_is_compiled_after_the_pass": 2,
    },
    "tests/graphengine/parallel/test_ranks_gpu.py": {
        "test_drafts_change_no_token": 2,
    },
    "tests/graphengine/program/test_decode_step.py": {
        "test_a_decode_graph_is_one_chain_of_kernels": 6,
        "test_both_samplers_give_a_request_the_same_tokens": 7,
        "test_overlapping_kernels_compute_the_bits_of_kernels_in_turn": 3,
    },
    "tests/graphengine/program/test_golden_graphs.py": {
        "test_captured": 3,
    },
    "tests/graphengine/program/test_graphs.py": {
        "test_a_replay_equals_the_eager_step": 9,
        "test_padded_lanes_of_a_prefill_step": 7,
        "test_padded_rows_of_a_decode_step": 10,
    },
    "tests/graphengine/program/test_option_parity.py": {
        "test_a_mixed_batch_says_what_transformers_says_of_each": 3,
    },
    "tests/graphengine/program/test_request_options.py": {
        "test_tokens_and_logprobs_are_those_of_transformers": 10,
    },
    "tests/graphengine/test_fp8_kv.py": {
        "test_drafts_and_pauses_change_no_token": 2,
    },
    "tests/graphengine/test_prompt_embeds.py": {
        "test_drafts_change_no_token": 2,
        "test_tokens_are_those_of_inputs_embeds": 3,
    },
    "tests/graphengine/testing/test_planted_faults.py": {
        "test_a_planted_fault_is_caught_natively": 8,
    },
    "tests/kernels/attention/test_decode.py": {
        "test_a_lane_has_the_same_bits_anywhere": 6,
        "test_edges_of_splits_and_blocks": 8,
        "test_the_grid_sets_no_bit": 2,
    },
    "tests/kernels/attention/test_decode_gluon.py": {
        "test_copies_begin_before_the_wait_and_products_are_of_16_rows": 4,
    },
    "tests/kernels/attention/test_decode_rows.py": {
        "test_captured_rows_replay_the_eager_bits": 3,
        "test_every_offset_to_the_ends_of_splits_and_blocks": 2,
        "test_few_programs": 2,
        "test_groups_of_heads": 3,
    },
    "tests/kernels/attention/test_large_caches.py": {
        "test_decode_attention": 2,
    },
    "tests/kernels/attention/test_prefill.py": {
        "test_chunks_have_the_bits_of_the_whole": 3,
        "test_the_height_of_a_tile_is_not_seen": 3,
        "test_tokens_outside_the_block_table_are_nan": 5,
    },
    "tests/kernels/attention/test_prefill_gluon.py": {
        "test_sums_are_under_way_while_scores_become_weights": 4,
        "test_the_same_bits_every_time": 3,
    },
    "tests/kernels/attention/test_prefill_seen.py": {
        "test_equals_the_definition": 7,
    },
    "tests/kernels/attention/test_rings.py": {
        "test_decode": 4,
    },
    "tests/kernels/attention/test_scores.py": {
        "test_a_lane_has_the_same_bits_anywhere": 2,
        "test_chunks_have_the_bits_of_the_whole": 2,
        "test_decode_equals_the_definition": 10,
        "test_prefill_equals_the_definition": 12,
    },
    "tests/kernels/core/test_pdl.py": {
        "test_dot_loads_its_inputs_after_the_wait_and_multiplies_by_mma": 7,
        "test_linear_gives_the_same_bits": 7,
    },
    "tests/kernels/core/test_tree_compiled.py": {
        "test_what_is_new_is_read_after_the_wait": 5,
    },
    "tests/kernels/draft/test_vanilla.py": {
        "test_dtypes_and_widths": 4,
    },
    "tests/kernels/experts/test_experts.py": {
        "test_chunks_in_the_tiles_that_prompts_take": 2,
    },
    "tests/kernels/experts/test_packed_experts.py": {
        "test_decode_means_what_the_weights_mean": 6,
    },
    "tests/kernels/experts/test_packed_experts_gluon.py": {
        "test_a_gpu_matches_the_reference_at_the_shape_of_gpt_oss": 3,
        "test_a_gpu_matches_the_reference_in_every_format": 11,
        "test_experts_mean_what_their_weights_mean": 3,
    },
    "tests/kernels/linear/test_linear.py": {
        "test_bits_do_not_depend_on_company": 2,
        "test_large_weights": 6,
        "test_split_k": 14,
    },
    "tests/kernels/linear/test_linear_residual.py": {
        "test_split_k": 7,
    },
    "tests/kernels/linear/test_linear_sample.py": {
        "test_large_vocabularies": 2,
        "test_noise_and_stop_ids_are_those_of_the_position_ahead": 4,
    },
    "tests/kernels/linear/test_linear_squares.py": {
        "test_product_of_every_family": 3,
    },
    "tests/kernels/linear/test_packed_chunk.py": {
        "test_a_gpu_gives_the_same_bits_at_every_number_of_lanes": 3,
        "test_a_gpu_matches_the_reference": 20,
    },
    "tests/kernels/linear/test_packed_chunk_fp8.py": {
        "test_a_gpu_matches_the_reference": 8,
        "test_a_gpu_matches_the_reference_in_every_tile": 10,
        "test_matches_reference": 4,
    },
    "tests/kernels/linear/test_packed_linear.py": {
        "test_a_gpu_gives_the_same_bits_at_every_number_of_lanes": 10,
    },
    "tests/kernels/sample/test_sampling.py": {
        "test_draws_follow_the_exact_distribution": 6,
        "test_the_tiling_changes_no_bit": 3,
    },
}
"""How many cases of a test are tried, by file and name."""


def spread(count: int) -> list[int]:
    """The numbers below `count` in an order whose every beginning is spread over all of them."""
    golden = 0.6180339887
    return sorted(range(count), key=lambda number: (number * golden) % 1.0)


def chosen(cases: Sequence[Case], values: Sequence[Sequence[Hashable]], count: int) -> list[Case]:
    """So many of the cases, in their order: each value of each parameter is met as often as can be.

    `values` holds each case's parameters, in the same order for all.
    """
    met: Counter[tuple[int, Hashable]] = Counter()
    left, kept = spread(len(cases)), []
    while left and len(kept) < count:
        # min takes the first of those that are equal: the one that spreads.
        best = min(left, key=lambda case: [met[pair] for pair in enumerate(values[case])])
        met.update(enumerate(values[best]))
        left.remove(best)
        kept.append(best)
    return [cases[number] for number in sorted(kept)]
