"""The groups in which docs/options.md shows options. Every option is in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphengine.config import EngineConfig
from graphengine.options.table import Row, rows
from graphengine.sampling_params import SamplingParams

Groups = Mapping[str, Sequence[str]]

REQUEST_GROUPS: Groups = {
    "Drawing a token": (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_n_sigma",
        "seed",
        "codes",
        "forced_codes",
        "feed",
    ),
    "Where the output ends": (
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "stop_token_sequences",
        "ignore_eos",
    ),
    "Penalties, bans and grammars": (
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
        "forced_tokens",
    ),
    "Text": ("include_stop_str_in_output", "skip_special_tokens", "remove_eos", "add_bos"),
    "Log-probabilities and routing": ("logprobs", "logprobs_mode", "prompt_logprobs", "routing"),
}
ENGINE_GROUPS: Groups = {
    "Devices and ranks": (
        "device",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "data_parallel",
    ),
    "Weights and formats": (
        "dtype",
        "load_format",
        "quantize",
        "quantize_lm_head",
        "activations",
        "kv_dtype",
        "kv_calibration",
        "state_dtype",
    ),
    "Adapters": ("adapters", "max_adapters", "max_adapter_rank", "merge_adapter"),
    "Batch, lengths and buckets": (
        "max_batch",
        "max_seq_len",
        "buckets",
        "max_waiting",
    ),
    "Long prompts": (
        "prefill_buckets",
        "max_prefill_tokens_per_step",
        "max_prefill_ms_per_step",
        "prefill_cut",
        "prompts_per_prefill",
    ),
    "Memory": (
        "memory_fraction",
        "block_size",
        "kv_blocks",
        "swap_blocks",
        "window_rings",
        "releasable",
    ),
    "Sessions and prefixes": ("prefix_caching", "session_blocks", "session_states"),
    "Speculation": (
        "speculative",
        "gate",
        "draft_len_schedule",
        "relaxed_acceptance",
        "forced_acceptance",
    ),
    "What requests may ask for": (
        "prompt_logprobs",
        "prompt_logprobs_out",
        "prompt_embeds",
        "record_routing",
        "grammar_pool_mib",
        "logprobs_mode",
        "max_logprobs",
        "max_stop_ids",
        "max_stop_sequences",
        "max_stop_sequence_tokens",
        "max_logit_bias",
        "max_bad_words",
        "max_bad_word_tokens",
        "sampling_defaults",
        "seed",
    ),
    "Host, latency and arithmetic": (
        "lookahead",
        "steps_per_launch",
        "wait",
        "wait_limit_s",
        "collect_while_waiting",
        "pdl",
        "row_family",
    ),
}
GROUPS: Mapping[type, Groups] = {SamplingParams: REQUEST_GROUPS, EngineConfig: ENGINE_GROUPS}


def grouped(table: type, groups: Groups) -> dict[str, list[Row]]:
    """The rows of a table by group. ValueError unless each is in exactly one group."""
    by_name = {row.name: row for row in rows(table)}
    named = [name for names in groups.values() for name in names]
    for name in sorted({*named, *by_name}):
        if named.count(name) != 1 or name not in by_name:
            raise ValueError(
                f"{table.__name__}.{name} is in {named.count(name)} groups of option_groups.py and "
                f"is {'an' if name in by_name else 'no'} option: each option is in one group"
            )
    return {group: [by_name[name] for name in names] for group, names in groups.items()}
