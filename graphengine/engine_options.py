"""Keyword arguments of `Engine.from_pretrained`, for type checkers and editors.

Made by `python -m graphengine.cli.option_files`: change the table there, not this file.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from graphengine.buckets import WaitMode
from graphengine.config import KvDtype, LoadFormat, LogprobsMode, RoundedKind, StateDtype
from graphengine.kernels import ActivationKind, RowFamily
from graphengine.speculative import GateOptions, RelaxedAcceptance, Speculative


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`."""

    device: str
    """one of "cuda", "cuda:1", "cpu"; by default "cuda" where torch finds a GPU when the config is
    made
    """

    dtype: torch.dtype | str | None
    """dtype of weights, and of KV with kv_dtype="auto": "float32", "bfloat16" or "float16"; "auto"
    or None: the checkpoint's on a GPU, float32 on a CPU
    """

    tensor_parallel: int
    """ranks that the model is split among, each with a device of its own from `device` on (on a
    CPU all have it): the engine starts a process for each but the first
    """

    pipeline_parallel: int
    """stages that the model's layers are split among, one after the other, each with a device of
    its own from `device` on (on a CPU all have it): for a model that does not fit one; the
    engine starts a process for each but one
    """

    expert_parallel: bool
    """whether each rank of `tensor_parallel` has some of a layer's experts as a whole, in place of
    a part of each
    """

    data_parallel: int
    """ranks that have requests of their own, up to `max_batch` each, and share the experts of a
    model: each has all other weights and some whole experts, which work for the requests of all
    (attention data parallelism with expert parallelism), and a device of its own from `device`
    on (on a CPU all have it)
    """

    load_format: LoadFormat
    """what weights are: "auto": as the checkpoint has them; "dummy": random, drawn on the device
    by their names, for measurements, and for weights that `update_weights` brings: of the
    checkpoint's files only configs and headers are read; drafters with a checkpoint of their
    own are read from it all the same
    """

    quantize: RoundedKind | None
    """what the linears' weights of 16 or 32 bits are rounded to on the device while they are
    loaded, to the nearest: "fp8" (e4m3) and "int8" with a scale a row, "int4" with one for 128
    columns of a row; embeddings and norms stay as they are; None: weights are as the checkpoint
    has them, quantised ones too
    """

    quantize_lm_head: bool
    """whether `quantize` rounds lm_head, too"""

    activations: ActivationKind | None
    """what prefill rounds the inputs of linears to whose weights are e4m3, with a scale a row or
    for blocks of 128 columns: "fp8" is e4m3, each token relative to its largest value, which is
    faster on Hopper GPUs, and less exact; decode does not; None: dtype
    """

    max_batch: int
    """slots, and the largest bucket; at most 64"""

    max_seq_len: int | None
    """prompt plus generated tokens of one request; None: the model's limit, at most 4,096"""

    buckets: tuple[int, ...] | None
    """row buckets to capture; None: 1, 2, 4, 8, then steps of 8"""

    prefill_buckets: tuple[int, ...]
    """token buckets; a prompt is cut at multiples of the largest. 2,048 and 4,096 besides feed
    long prompts faster, for memory (`graphengine info` shows it) and longer gaps of others
    """

    max_prefill_tokens_per_step: int | None
    """prompt tokens that one step may feed: the largest token bucket is cut to it, so that a long
    prompt delays other requests less; None: no cut
    """

    max_prefill_ms_per_step: float | None
    """most milliseconds that a step may spend on a chunk of a prompt, for which all other requests
    wait: the engine times its prefill buckets when it opens, and cuts prompts into chunks of
    the largest one that is fast enough; after more tokens that is a smaller one, as attention
    reads all of them; whether others run changes nothing; None: no bound
    """

    prefill_cut: tuple[tuple[int, int], ...] | None
    """where prompts are cut into chunks: pairs (position, tokens), such as ((0, 1024), (8192,
    512)) for chunks of 1,024 tokens up to position 8,192 and of 512 from there on; each size is
    a prefill bucket, each position a multiple of the size before it; the `engine.prefill_cut`
    of another engine repeats its cut, and so its bits; None: as measured for
    `max_prefill_ms_per_step`, or the largest bucket everywhere
    """

    block_size: int
    """tokens of one KV block, a power of two from 8 to 128"""

    kv_blocks: int | None
    """blocks of the pool, the dummy block 0 not counted; None: enough for every slot at
    max_seq_len, or what memory_fraction leaves
    """

    swap_blocks: int | None
    """pinned host blocks for paused requests; None: what a short pool can need, within half of
    what the host, or a limit of the container, leaves
    """

    kv_dtype: KvDtype
    """what KV is kept in: "fp8" is e4m3, half the bytes of 16 bits and so twice the tokens, with
    scales of each layer from the checkpoint (`k_scale`, `v_scale`), else 1.0; "auto": dtype
    """

    kv_calibration: str | tuple[int, ...] | None
    """a prompt, text or token ids, that sets the scales of an fp8 KV in place of the checkpoint's:
    the largest key and value of each head become the largest of e4m3, 448; None: no prompt
    """

    prefix_caching: bool
    """whether the blocks of a prompt's KV are kept, and found again by prompts that begin with the
    same tokens
    """

    session_blocks: int | None
    """most blocks of the pool that idle sessions and cached prefixes may hold; a longer session
    keeps its first; None: all that no request needs
    """

    state_dtype: StateDtype
    """what the states of recurrent layers' heads are kept in, rounded after every token:
    "bfloat16" is half the bytes, and less exact; "auto": as the checkpoint's config says, else
    float32
    """

    session_states: int
    """points of sessions and cached prefixes at which the states of a model's recurrent layers are
    kept, of all of them together: without one a turn prefills everything, and prefix_caching is
    refused; no other model keeps any
    """

    window_rings: bool
    """whether layers with a window keep the newest tokens alone, in a ring for each slot, where
    that is less than their part of the pool; False, or with prefix_caching: they keep all,
    which forks, snapshots and far rewinds of sessions go on from
    """

    lookahead: int | None
    """replays launched before the oldest one is collected, 0 or 1; it is 0 while a request with a
    grammar holds a slot, and always with UserProvided and SaveHiddenStates, which set it to 0;
    None: 1 on a GPU or with pipeline_parallel, else 0
    """

    memory_fraction: float
    """share of the device's free memory that the engine may plan with"""

    max_waiting: int | None
    """requests that may wait for a slot, not counting those for which one is vacant; one more is
    refused with `QueueFull`; None: any number
    """

    max_stop_ids: int
    """EOS and stop token ids that one request may have, up to 1,024"""

    max_logit_bias: int
    """ids that one request's logit_bias may name"""

    max_bad_words: int
    """token sequences that one request's bad words may expand to"""

    max_bad_word_tokens: int
    """tokens of one bad word"""

    max_stop_sequences: int
    """stop token sequences that one request may have"""

    max_stop_sequence_tokens: int
    """tokens of one stop token sequence"""

    max_logprobs: int
    """logprobs and prompt_logprobs that one request may ask for, up to 20"""

    prompt_logprobs: bool
    """whether requests may ask for log-probabilities of their prompts; this takes separate prefill
    graphs
    """

    logprobs_mode: LogprobsMode
    """the logits used for log-probabilities: "raw_logprobs", the model's, or "processed_logprobs",
    those after penalties, bias and bans (but, unlike vLLM's, before min_tokens, temperature and
    filters)
    """

    record_routing: bool
    """whether each `Result` has `routing`, the experts that every token took, and a request may
    replay such a record with its own `routing`: for a model with experts. Of prompts the last
    layer is then computed for all tokens
    """

    pdl: bool
    """programmatic dependent launch between the kernels of a GPU"""

    prompt_embeds: bool
    """whether prompts may have embeddings, tensors [n, hidden_size], alone or between tokens
    (`PromptParts`); this takes room for those of a chunk
    """

    row_family: RowFamily | None
    """the decode kernels' arithmetic, part of the numerics: "fma" (1 or 2 lanes a step; lanes are
    rows times k + 1 tokens: with drafts a single row, and k=1) or "dot"; None: "fma" on a GPU
    where a step has a single lane and max_seq_len is at most 4,096, "dot" elsewhere
    """

    speculative: Speculative | str | None
    """the drafter: MTP(k=3), NGram(k=3), ..., or its text as for the command line, "mtp:3"; a step
    then feeds k + 1 tokens a row; None: no drafts
    """

    gate: GateOptions | None
    """when to stop speculating and when to try again; None: always speculate"""

    draft_len_schedule: dict[int, int] | tuple[tuple[int, int], ...] | None
    """drafts a row by live requests: {1: 5, 4: 3} drafts 5 for one request, 3 for up to four, and
    none for more; the first are the drafter's k; None: k for any number. With a gate a step has
    the smaller number of both
    """

    relaxed_acceptance: RelaxedAcceptance | None
    """drafts that a thinking, greedy request accepts besides its best token; None: tokens are
    those of plain decoding
    """

    forced_acceptance: int | None
    """drafts that every row accepts, right or wrong, or all if it has fewer: only for measuring
    speed
    """

    seed: int
    """seed of the generator that seeds requests without a seed: processes with the same one, such
    as the default, give the same seeds in the same order
    """

    wait: WaitMode
    """how the host waits for the mailbox"""

    wait_limit_s: float
    """seconds after which a replay that published nothing breaks the engine"""

    collect_while_waiting: bool
    """whether a step that must wait first runs Python's garbage collector, if that is due soon
    anyway (all but full collections), `gc` is enabled and the oldest replay is not done yet
    """
