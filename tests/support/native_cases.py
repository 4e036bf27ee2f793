"""Which cases of a matrix the native suite tries, when it does not try all.

Each case of these tests is a model, a format or a plan with kernels of its own, which are compiled
for seconds. What the code looks at differs little between many of them, and a CPU tries them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar
from zlib import crc32

Case = TypeVar("Case")

CASES = {
    "tests/graphengine/core/test_chunk_times.py": {
        "test_a_measurement_leaves_nothing_behind": 2,
    },
    "tests/graphengine/drafters/block/test_block.py": {
        "test_on_a_gpu_graphs_hold_kernels_alone": 1,
        "test_tokens_are_those_without": 1,
    },
    "tests/graphengine/drafters/eagle3/test_eagle3.py": {
        "test_on_a_gpu_graphs_hold_kernels_alone": 1,
        "test_tokens_are_those_without": 1,
        "test_tokens_with_trees_are_those_without": 1,
    },
    "tests/graphengine/drafters/modules/test_trees.py": {
        "test_every_depth_of_who_cannot_be_wrong_is_accepted": 1,
        "test_the_first_path_is_a_chain": 1,
    },
    "tests/graphengine/drafters/mtp/test_layer.py": {
        "test_decode_one_token_at_a_time": 2,
    },
    "tests/graphengine/drafters/suffix/test_suffix_drafts.py": {
        "test_drafts_are_those_of_a_plain_search": 2,
    },
    "tests/graphengine/drafters/test_chain_family.py": {
        "test_an_engine_of_one_row_drafts_as_well": 1,
    },
    "tests/graphengine/drafters/test_confidence.py": {
        "test_tokens_are_those_of_plain_decoding": 1,
    },
    "tests/graphengine/drafters/test_draft_schedule.py": {
        "test_a_chain_is_as_long_as_the_step_s_drafts": 2,
        "test_tokens_are_those_of_plain_decoding": 2,
    },
    "tests/graphengine/drafters/test_drafts.py": {
        "test_all_drafts_of_who_cannot_be_wrong_are_accepted": 2,
    },
    "tests/graphengine/drafters/test_speculation.py": {
        "test_a_drafter_at_the_end_of_the_table": 1,
        "test_odd_random_checkpoints": 1,
        "test_random_checkpoints_with_a_module_for_each_draft": 1,
        "test_random_checkpoints_with_modules": 1,
        "test_the_demo_model_in_bfloat16": 1,
        "test_the_demo_model_says_what_it_says_without_drafts": 1,
        "test_the_held_out_text": 1,
        "test_the_sampled_distribution_is_that_of_the_model": 1,
    },
    "tests/graphengine/drafters/test_speculation_churn.py": {
        "test_a_pause_costs_no_accepted_draft": 3,
        "test_each_request_says_what_it_says_alone_without_drafts": 1,
    },
    "tests/graphengine/drafters/test_speculation_counts.py": {
        "test_an_event_has_the_tokens_of_a_step": 3,
    },
    "tests/graphengine/drafters/test_speculation_graphs.py": {
        "test_a_speculative_graph_is_one_chain_of_kernels": 4,
        "test_eager_steps_give_the_tokens_of_the_graphs": 3,
        "test_poison_around_a_prompt_chunk": 4,
        "test_poison_around_a_speculative_step": 3,
        "test_speculative_steps_allocate_and_synchronise_nothing": 2,
    },
    "tests/graphengine/drafters/test_speculation_options.py": {
        "test_a_drafter_keeps_up_while_it_is_off": 1,
        "test_forced_steps_take_so_many_drafts": 1,
        "test_relaxed_steps_are_those_of_a_plain_simulation": 2,
        "test_without_slack_relaxed_is_strict": 2,
    },
    "tests/graphengine/host/test_churn.py": {
        "test_contexts_of_all_lengths_get_the_tokens_they_get_alone": 1,
        "test_each_request_gets_the_tokens_it_gets_alone": 1,
        "test_states_are_those_of_the_requests_alone": 1,
    },
    "tests/graphengine/models/quantised/test_gpu_engines.py": {
        "test_a_crowd_drafts_and_pauses_change_no_token": 1,
        "test_a_gpu_says_nearly_what_a_cpu_says": 2,
    },
    "tests/graphengine/models/test_dense_families.py": {
        "test_logits_and_greedy_tokens": 8,
        "test_neighbours_chunks_drafts_and_pauses_change_no_token": 5,
    },
    "tests/graphengine/models/test_experts.py": {
        "test_logits_and_greedy_tokens": 2,
        "test_neighbours_chunks_drafts_and_pauses_change_no_token": 1,
    },
    "tests/graphengine/models/test_experts_gpu.py": {
        "test_a_crowd_drafts_and_pauses_change_no_token": 1,
        "test_records_of_a_crowd_with_drafts_and_pauses_are_those_of_requests_alone": 1,
    },
    "tests/graphengine/models/test_gemma3.py": {
        "test_a_gpu_in_half_precision_is_near_float32": 1,
        "test_drafts_change_no_token": 1,
        "test_half_precision_replays_what_it_computes_eagerly": 1,
        "test_logits_and_greedy_tokens": 1,
    },
    "tests/graphengine/models/test_glm4_moe.py": {
        "test_logits_and_greedy_tokens": 1,
        "test_packed_rows_are_exchanged_as_plain_ones": 1,
    },
    "tests/graphengine/models/test_gpt_oss.py": {
        "test_half_precision_replays_what_it_computes_eagerly": 1,
        "test_it_drafts_for_itself": 1,
        "test_logits_and_greedy_tokens": 1,
        "test_mxfp4_experts_on_a_gpu": 1,
    },
    "tests/graphengine/models/test_head_sizes.py": {
        "test_logits_and_greedy_tokens": 8,
    },
    "tests/graphengine/models/test_hybrids.py": {
        "test_a_model_drafts_for_itself": 1,
        "test_a_session_goes_on": 1,
        "test_chunks_and_batches": 1,
        "test_drafts_change_no_token": 1,
        "test_drafts_of_which_some_are_right_change_no_token": 2,
        "test_half_precision": 8,
        "test_half_precision_is_near_float32": 1,
        "test_half_precision_replays_what_it_computes_eagerly": 1,
        "test_logits_and_greedy_tokens": 2,
        "test_paused_requests_resume_with_the_same_tokens": 1,
        "test_prompts_of_many_lengths": 1,
    },
    "tests/graphengine/models/test_latent.py": {
        "test_logits_and_greedy_tokens": 1,
        "test_records_are_transformers_own_routes_and_are_replayed": 2,
    },
    "tests/graphengine/models/test_multimodal_rope.py": {
        "test_neighbours_pauses_and_drafts_change_no_token": 3,
        "test_tokens_after_pictures_are_those_of_transformers": 3,
    },
    "tests/graphengine/models/test_parity.py": {
        "test_batches_of_mixed_prompts": 4,
        "test_logits_and_greedy_tokens": 2,
    },
    "tests/graphengine/models/test_precision.py": {
        "test_random_models": 3,
    },
    "tests/graphengine/models/test_prefill_kernels.py": {
        "test_a_turn_after_a_long_context_splits_its_keys": 1,
    },
    "tests/graphengine/models/test_published_configs.py": {
        "test_shrunk_configs_say_what_transformers_does": 14,
    },
    "tests/graphengine/models/test_random_models.py": {
        "test_logits_and_greedy_tokens": 12,
    },
    "tests/graphengine/models/test_routing.py": {
        "test_records_are_transformers_own_routes": 1,
    },
    "tests/graphengine/models/test_window_rings.py": {
        "test_drafts_change_no_token": 1,
        "test_half_precision_has_the_bits_of_an_engine_without_rings": 1,
        "test_tokens_are_those_of_transformers_far_beyond_the_ring": 2,
        "test_turns_go_on_in_their_sessions_ring": 1,
    },
    "tests/graphengine/models/test_windows.py": {
        "test_drafts_change_no_token": 1,
        "test_half_precision_replays_what_it_computes_eagerly": 1,
        "test_logits_and_greedy_tokens": 1,
    },
    "tests/graphengine/opening/test_compilation.py": {
        "test_nothing_is_compiled_after_the_pass": 1,
    },
    "tests/graphengine/parallel/test_data_parallel_gpu.py": {
        "test_sixteen_bits_travel_as_they_are": 1,
        "test_tokens_are_those_of_transformers": 1,
    },
    "tests/graphengine/parallel/test_ranks_gpu.py": {
        "test_a_rank_that_is_gone_in_a_chunk_ends_the_engine": 1,
        "test_drafts_change_no_token": 1,
        "test_ranks_have_some_experts_each": 1,
    },
    "tests/graphengine/program/test_decode_step.py": {
        "test_a_decode_graph_is_one_chain_of_kernels": 3,
        "test_both_samplers_give_a_request_the_same_tokens": 5,
        "test_overlapping_kernels_compute_the_bits_of_kernels_in_turn": 1,
        "test_poisoned_intermediates_change_no_token": 4,
        "test_the_report_says_which_kernels_run_and_why": 1,
    },
    "tests/graphengine/program/test_golden_graphs.py": {
        "test_captured": 2,
    },
    "tests/graphengine/program/test_graphs.py": {
        "test_a_replay_equals_the_eager_step": 1,
        "test_a_trace_of_the_driver_shows_one_launch_a_step_and_no_wait": 1,
        "test_padded_lanes_of_a_prefill_step": 5,
        "test_padded_rows_of_a_decode_step": 2,
        "test_steps_allocate_and_synchronise_nothing": 2,
    },
    "tests/graphengine/program/test_option_parity.py": {
        "test_a_mixed_batch_says_what_transformers_says_of_each": 1,
    },
    "tests/graphengine/program/test_request_options.py": {
        "test_tokens_and_logprobs_are_those_of_transformers": 7,
    },
    "tests/graphengine/test_fp8_kv.py": {
        "test_a_conversation_says_what_requests_of_the_whole_of_it_say": 1,
        "test_drafts_and_pauses_change_no_token": 1,
    },
    "tests/graphengine/test_prompt_embeds.py": {
        "test_drafts_change_no_token": 2,
        "test_tokens_are_those_of_inputs_embeds": 2,
    },
    "tests/graphengine/testing/test_planted_faults.py": {
        "test_a_planted_fault_is_caught_natively": 2,
    },
    "tests/kernels/attention/test_decode.py": {
        "test_a_lane_has_the_same_bits_anywhere": 1,
        "test_edges_of_splits_and_blocks": 2,
        "test_equals_the_definition": 1,
        "test_lengths_from_1_to_131072_in_one_batch": 1,
        "test_norms_may_be_in_float32": 1,
        "test_programs_that_share_splits_set_no_bit": 1,
        "test_the_grid_sets_no_bit": 2,
    },
    "tests/kernels/attention/test_decode_gluon.py": {
        "test_copies_begin_before_the_wait_and_products_are_of_16_rows": 3,
    },
    "tests/kernels/attention/test_decode_rows.py": {
        "test_captured_rows_replay_the_eager_bits": 1,
        "test_equals_the_reference": 1,
        "test_every_offset_to_the_ends_of_splits_and_blocks": 1,
        "test_few_programs": 1,
        "test_groups_of_heads": 1,
        "test_siblings_are_not_read_from_the_cache": 1,
    },
    "tests/kernels/attention/test_decode_trees.py": {
        "test_paths_have_the_bits_of_chains": 1,
    },
    "tests/kernels/attention/test_large_caches.py": {
        "test_decode_attention": 2,
    },
    "tests/kernels/attention/test_latent.py": {
        "test_a_lane_knows_of_no_other": 1,
    },
    "tests/kernels/attention/test_latent_prefill.py": {
        "test_packed_chunks_have_the_bits_of_launches_of_their_own": 2,
    },
    "tests/kernels/attention/test_prefill.py": {
        "test_chunks_have_the_bits_of_the_whole": 2,
        "test_equals_the_definition": 2,
        "test_the_height_of_a_tile_is_not_seen": 2,
        "test_tokens_outside_the_block_table_are_nan": 4,
    },
    "tests/kernels/attention/test_prefill_gluon.py": {
        "test_sums_are_under_way_while_scores_become_weights": 3,
        "test_the_same_bits_every_time": 2,
    },
    "tests/kernels/attention/test_prefill_seen.py": {
        "test_equals_the_definition": 5,
    },
    "tests/kernels/attention/test_rings.py": {
        "test_a_chunk": 6,
        "test_decode": 2,
    },
    "tests/kernels/attention/test_scores.py": {
        "test_a_lane_has_the_same_bits_anywhere": 1,
        "test_chunks_have_the_bits_of_the_whole": 2,
        "test_decode_equals_the_definition": 1,
        "test_gluon_equals_the_definition_in_emulation": 1,
        "test_prefill_equals_the_definition": 3,
    },
    "tests/kernels/core/test_pdl.py": {
        "test_dot_loads_its_inputs_after_the_wait_and_multiplies_by_mma": 5,
        "test_linear_gives_the_same_bits": 5,
        "test_linear_sample_gives_the_same_bits": 5,
    },
    "tests/kernels/core/test_tree_compiled.py": {
        "test_what_is_new_is_read_after_the_wait": 4,
    },
    "tests/kernels/draft/test_vanilla.py": {
        "test_dtypes_and_widths": 3,
    },
    "tests/kernels/experts/test_experts.py": {
        "test_chunks_in_the_tiles_that_prompts_take": 2,
        "test_compiled_kernels_have_the_same_bits_grouped_and_not": 1,
        "test_grouped_pairs_have_the_bits_of_single_ones": 1,
    },
    "tests/kernels/experts/test_packed_experts.py": {
        "test_a_chunk_means_what_the_weights_mean": 8,
        "test_decode_means_what_the_weights_mean": 2,
    },
    "tests/kernels/experts/test_packed_experts_gluon.py": {
        "test_a_gpu_adds_what_is_held_alone": 1,
        "test_a_gpu_matches_the_reference_at_the_shape_of_gpt_oss": 1,
        "test_a_gpu_matches_the_reference_in_every_format": 3,
        "test_experts_mean_what_their_weights_mean": 1,
    },
    "tests/kernels/linear/test_linear.py": {
        "test_bits_do_not_depend_on_company": 2,
        "test_large_weights": 4,
        "test_split_k": 9,
    },
    "tests/kernels/linear/test_linear_residual.py": {
        "test_large_weights": 8,
        "test_split_k": 5,
    },
    "tests/kernels/linear/test_linear_sample.py": {
        "test_large_vocabularies": 1,
        "test_noise_and_stop_ids_are_those_of_the_position_ahead": 3,
    },
    "tests/kernels/linear/test_linear_squares.py": {
        "test_product_of_every_family": 2,
    },
    "tests/kernels/linear/test_packed_chunk.py": {
        "test_a_gpu_gives_the_same_bits_at_every_number_of_lanes": 2,
        "test_a_gpu_matches_the_reference": 13,
        "test_other_gpus_run_the_kernel_of_decode_natively": 16,
    },
    "tests/kernels/linear/test_packed_chunk_fp8.py": {
        "test_a_gpu_gives_the_same_bits_at_every_number_of_lanes": 1,
        "test_a_gpu_matches_the_reference": 5,
        "test_a_gpu_matches_the_reference_in_every_tile": 4,
        "test_matches_reference": 3,
    },
    "tests/kernels/linear/test_packed_linear.py": {
        "test_a_gpu_gives_the_same_bits_at_every_number_of_lanes": 4,
    },
    "tests/kernels/lora/test_lora.py": {
        "test_is_added_to_products": 8,
    },
    "tests/kernels/recurrent/test_mamba2.py": {
        "test_prefill_is_the_definition": 4,
    },
    "tests/kernels/sample/test_sampling.py": {
        "test_draws_follow_the_exact_distribution": 4,
        "test_the_tiling_changes_no_bit": 1,
    },
    "tests/kernels/step/test_begin.py": {
        "test_bits_of_a_lane_do_not_depend_on_the_drafts": 4,
        "test_drafts_become_lanes": 1,
    },
    "tests/profiles/test_planted.py": {
        "test_planted_causes_are_found_on_a_gpu": 2,
    },
}
"""How many cases of a test are tried, by file and name."""


def spread(count: int) -> list[int]:
    """The numbers below `count` in an order whose every beginning is spread over all of them."""
    golden = 0.6180339887
    return sorted(range(count), key=lambda number: (number * golden) % 1.0)


def chosen(
    cases: Sequence[Case], values: Sequence[Sequence[Hashable]], count: int, name: str = ""
) -> list[Case]:
    """So many of the cases, in their order: each value of each parameter is met as often as can be.

    `values` holds each case's parameters, in the same order for all. Tests of the same cases that
    have other names begin with other ones.
    """
    met: Counter[tuple[int, Hashable]] = Counter()
    begin = crc32(name.encode()) % max(len(cases), 1)
    left, kept = [(each + begin) % len(cases) for each in spread(len(cases))], []
    while left and len(kept) < count:
        # min takes the first of those that are equal: the one that spreads.
        best = min(left, key=lambda case: [met[pair] for pair in enumerate(values[case])])
        met.update(enumerate(values[best]))
        left.remove(best)
        kept.append(best)
    return [cases[number] for number in sorted(kept)]
