"""Keyword arguments of `Engine.from_pretrained`, for type checkers and editors.

Made by `python -m graphengine.cli.option_files`: change the table there, not this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TypedDict

import torch

from graphengine.buckets import WaitMode
from graphengine.config import KvDtype, LoadFormat, RoundedKind, SamplingDefaults, StateDtype
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.prefill.lane_codes import ActivationKind
from graphengine.options.logits_params import LogprobsMode
from graphengine.speculative import GateOptions, RelaxedAcceptance, Speculative


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`."""

    device: str
    """device: "cuda", "cpu" or one GPU, such as "cuda:1"; by default "cuda" if torch finds a GPU
    when the config is made, "cpu" otherwise
    """

    dtype: torch.dtype | str | None
    """dtype of weights, and of KV with kv_dtype="auto": "float32", "bfloat16" or "float16"; "auto"
    or None: the checkpoint's on a GPU, float32 on a CPU
    """

    tensor_parallel: int
    """ranks that split the model; each takes a device of its own, counting up from `device` (on a
    CPU they share it); the engine starts a process for each rank but the first
    """

    pipeline_parallel: int
    """stages that divide the model's layers, for a model that does not fit one device; each stage
    runs after the one before it, and takes a device of its own, counting up from `device` (on a
    CPU they share it); the engine starts a process for each stage but one
    """

    expert_parallel: bool
    """each rank of `tensor_parallel` holds some of a layer's experts whole, instead of a slice of
    every expert
    """

    data_parallel: int
    """ranks that serve requests of their own, up to `max_batch` each, and share the model's
    experts (attention data parallelism with expert parallelism). Each rank holds some experts
    whole, which serve the requests of all ranks, and a copy of all other weights. Each takes a
    device of its own, counting up from `device` (on a CPU they share it)
    """

    load_format: LoadFormat
    """where weights come from: "auto" reads the checkpoint's, "dummy" draws random ones on the
    device, by tensor name, for measurements or until `update_weights` brings others. With
    "dummy", only configs and headers of the checkpoint are read; a drafter that has its own
    checkpoint is still read from it
    """

    quantize: RoundedKind | None
    """format that the linears' weights of 16 or 32 bits are rounded to, on the device while they
    are loaded, to nearest: "fp8" (e4m3) and "int8" have a scale per row, "int4" one per 128
    columns of a row; embeddings and norms are not rounded; None: weights stay as the checkpoint
    has them, quantised or not
    """

    quantize_lm_head: bool
    """`quantize` rounds lm_head, too"""

    activations: ActivationKind | None
    """format that prefill rounds the inputs of linears to if their weights are e4m3 with a scale
    per row or per block of 128 columns: "fp8" is e4m3, each token scaled by its largest value;
    it is faster on Hopper GPUs and less exact. Decode does not round inputs; None: inputs stay
    in dtype
    """

    adapters: Mapping[str, str | PathLike[str]] | None
    """LoRA adapters by name, the folders that peft saved: a request asks for one with `adapter`,
    and requests with different ones run in one step. The linears that they change get slots for
    `max_adapters`; `engine.load_adapter` loads others; None: none at first
    """

    max_adapters: int | None
    """adapters that are loaded at the same time, at most. Without `adapters`, all linears that
    adapters can change get slots; None: 4, or as many as `adapters` has, and 0 without them
    """

    max_adapter_rank: int
    """highest rank of an adapter: all slots have room for it, and every product takes as long as
    with this rank
    """

    merge_adapter: str | PathLike[str] | None
    """the folder of a LoRA adapter that is merged into the weights while they are loaded, before
    `quantize` rounds them: every request uses it, at no cost; None: none
    """

    max_batch: int
    """slots, and the largest bucket: requests that run at once; at most 64"""

    max_seq_len: int | None
    """longest request, prompt plus generated tokens; None: the model's limit, at most 4,096"""

    buckets: tuple[int, ...] | None
    """row buckets (batch sizes) that decode graphs are captured for; None: 1, 2, 4, 8, then steps
    of 8
    """

    prefill_buckets: tuple[int, ...]
    """token buckets that prefill graphs are captured for; a prompt is cut at multiples of the
    largest. Adding 2,048 and 4,096 speeds up long prompts, but takes memory (`graphengine info`
    shows it) and lengthens the token gaps of other requests
    """

    max_prefill_tokens_per_step: int | None
    """most prompt tokens that one step feeds; it caps the largest token bucket, so that a long
    prompt delays other requests less; None: no cap
    """

    max_prefill_ms_per_step: float | None
    """most milliseconds that a step may spend on a chunk of a prompt, while all other requests
    wait. The engine times its prefill buckets when it opens, and cuts prompts into chunks of
    the largest bucket that is fast enough. Chunks get smaller further into a prompt, because
    attention reads all tokens before them. The cut does not depend on whether other requests
    run; None: no bound
    """

    prefill_cut: tuple[tuple[int, int], ...] | None
    """where prompts are cut into chunks, as pairs (position, tokens): ((0, 1024), (8192, 512))
    cuts chunks of 1,024 tokens up to position 8,192, and of 512 from there on. Each size is a
    prefill bucket, and each position a multiple of the size before it. The `engine.prefill_cut`
    of another engine repeats its cut, and so its bits; None: as measured for
    `max_prefill_ms_per_step`, or the largest bucket everywhere
    """

    prompts_per_prefill: int
    """prompts whose chunks one prefill replay may take, if they fit its largest bucket"""

    block_size: int
    """tokens per KV block, a power of two from 8 to 128"""

    kv_blocks: int | None
    """KV blocks in the pool, not counting the dummy block 0; None: enough for every slot at
    max_seq_len, or as many as memory_fraction allows
    """

    swap_blocks: int | None
    """pinned host blocks that hold the KV of paused requests; None: as many as the pool can need,
    within half of the memory that the host, or its container's limit, has left
    """

    kv_dtype: KvDtype
    """format of the KV cache: "fp8" is e4m3, half the bytes of 16 bits and so twice the tokens.
    Its scales come from the checkpoint for each layer (`k_scale`, `v_scale`), else they are
    1.0; "auto": dtype
    """

    kv_calibration: str | tuple[int, ...] | None
    """a prompt, text or token ids, that calibrates the scales of an fp8 KV cache, in place of the
    checkpoint's scales: the largest key and value of each head map to 448, the largest e4m3
    number; None: no calibration
    """

    prefix_caching: bool
    """keep the KV blocks of prompts, and reuse them for prompts that begin with the same tokens"""

    session_blocks: int | None
    """most blocks of the pool that idle sessions and cached prefixes may hold; a session that is
    longer keeps its first blocks; None: all blocks that no request needs
    """

    state_dtype: StateDtype
    """dtype of the state of each head in recurrent layers, which is rounded after every token:
    "bfloat16" takes half the bytes and is less exact; "auto": as the checkpoint's config says,
    else float32
    """

    session_states: int
    """recurrent-state checkpoints, shared by all sessions and cached prefixes. With 0, each turn
    of a session prefills from its first token, and prefix_caching is refused; models without
    recurrent layers keep none
    """

    window_rings: bool
    """layers with a sliding window keep only the newest tokens, in a ring per slot, where that
    takes less than their part of the pool. With False, prefix_caching or pipeline_parallel they
    keep all tokens, which forks, snapshots and far rewinds of sessions resume from
    """

    lookahead: int | None
    """launches made before the oldest one is collected, 0 to 2. Requests whose grammar the host
    follows sit out of these. It is 0 beside a request with forced_tokens, and always with
    UserProvided and SaveHiddenStates; None: 1 on a GPU or with pipeline_parallel, else 0
    """

    steps_per_launch: int
    """decode steps that one launch runs in a row, so that a busy host need not launch each. New
    requests, cancels, deadlines and stop strings wait for launches under way to end. A launch
    runs one step while a prompt is fed, while a grammar is made on the host, and where no
    request has as many tokens left
    """

    memory_fraction: float
    """fraction of the device's free memory that the engine may use"""

    releasable: bool
    """weights and KV cache lie in memory that `Engine.release_memory` gives back, and that
    `Engine.restore_memory` has again at the same addresses
    """

    max_waiting: int | None
    """most requests that wait for a slot, not counting those that can start at once; one more is
    refused with `QueueFull`; None: no limit
    """

    max_stop_ids: int
    """most EOS and stop token ids of a request, up to 1,024"""

    max_logit_bias: int
    """most ids in a request's logit_bias"""

    max_bad_words: int
    """most token sequences that a request's bad words expand to"""

    max_bad_word_tokens: int
    """most tokens of a bad word"""

    max_stop_sequences: int
    """most stop token sequences of a request"""

    max_stop_sequence_tokens: int
    """most tokens of a stop token sequence"""

    max_logprobs: int
    """most logprobs and prompt_logprobs that a request may ask for, up to 20"""

    prompt_logprobs: bool
    """requests may ask for log-probabilities of their prompts; this takes prefill graphs of its
    own
    """

    prompt_logprobs_out: bool
    """requests with `prompt_logprobs` may also have the log-probabilities of the whole vocabulary,
    written to memory that `submit` gets as `prompt_logprobs_out`
    """

    grammar_pool_mib: int
    """MiB for grammars that the device follows; 0: none"""

    logprobs_mode: LogprobsMode
    """logits that log-probabilities are computed from, unless a request says otherwise:
    "raw_logprobs" takes the model's, "processed_logprobs" those after penalties, bias and bans
    (but, unlike vLLM's, before min_tokens, temperature and filters), "sampled_logprobs" those
    after all of these, which tokens are drawn from
    """

    sampling_defaults: SamplingDefaults
    """sampling options of a request without `SamplingParams`, and of a command line: "checkpoint"
    takes temperature, top_k, top_p, min_p and repetition_penalty from `generation_config.json`;
    "engine" keeps the defaults of `SamplingParams`
    """

    record_routing: bool
    """each `Result` has `routing`, the experts that every token took, and a request may replay
    such a record with its own `routing`. For models with experts; the last layer is then
    computed for all tokens of a prompt
    """

    pdl: bool
    """use programmatic dependent launch between the kernels of a GPU"""

    prompt_embeds: bool
    """prompts may have embeddings, tensors [n, hidden_size], alone or between tokens
    (`PromptParts`); this takes memory for the embeddings of a chunk
    """

    row_family: RowFamily | None
    """arithmetic of the decode kernels, part of the numerics: "fma", for 1 or 2 lanes a step
    (lanes are rows times k + 1 tokens; with drafts that is one row and k=1), or "dot"; None:
    "fma" on a GPU if a step has one lane, "dot" otherwise
    """

    speculative: Speculative | str | None
    """the drafter: MTP(k=3), NGram(k=3), ..., or its text as on the command line, such as "mtp:3";
    a step then feeds k + 1 tokens a row; None: no drafts
    """

    gate: GateOptions | None
    """when to stop speculating and when to resume; None: always speculate"""

    draft_len_schedule: dict[int, int] | tuple[tuple[int, int], ...] | None
    """drafts per row, by the number of live requests: {1: 5, 4: 3} drafts 5 for one request, 3 for
    up to four, and none for more. The first entry has the drafter's k. With a gate, the smaller
    of the two numbers counts; None: k for any number of requests
    """

    relaxed_acceptance: RelaxedAcceptance | None
    """drafts that a greedy request accepts, while it thinks, besides the most probable token;
    None: tokens are those of plain decoding
    """

    forced_acceptance: int | None
    """drafts that every row accepts, right or wrong, or all if it has fewer; only for measuring
    speed
    """

    seed: int
    """seed of the generator that seeds requests without a seed of their own; processes with the
    same value, such as the default, draw the same seeds in the same order
    """

    wait: WaitMode
    """how the host waits for the results of a step: "spin" polls, "yield" gives up its core
    between polls, "block" sleeps between polls
    """

    wait_limit_s: float
    """seconds that a replay may take to publish its results; then the engine is broken"""

    collect_while_waiting: bool
    """a step that has to wait runs Python's garbage collector first, if a collection is due soon
    anyway, `gc` is enabled and the oldest replay is not done yet; full collections are left to
    Python
    """
