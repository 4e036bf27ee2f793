"""The options that the embedding program sets once, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Literal

import torch

from graphengine.buckets import WaitMode
from graphengine.engine_sizes import USUAL_SEQ_LEN
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.plans import FMA_LANES, RowFamily
from graphengine.kernels.linear.prefill.lane_codes import ActivationKind
from graphengine.kernels.logits.logprobs_triton import MAX_LOGPROBS
from graphengine.options.adapters import adapter_pair, adapters_of_pairs, read_adapters
from graphengine.options.calibration import read_calibration
from graphengine.options.checks import INT32_MAX, check_path, is_finite, is_int
from graphengine.options.devices import DTYPES, check_device, usual_device
from graphengine.options.drafts.draft_schedule import DraftSchedule
from graphengine.options.logits_params import LogprobsMode
from graphengine.options.option_syntax import GRAMMAR, RELAXED_GRAMMAR
from graphengine.options.prefill_cut import PrefillCut
from graphengine.options.table import (
    NOT_NEGATIVE,
    SEED,
    SHARE,
    Bound,
    Flag,
    at_least,
    at_most,
    check_options,
    documented,
    option,
    read_integers,
    read_pairs,
    within,
)
from graphengine.rank_options import RankOptions
from graphengine.speculative import (
    GateOptions,
    RelaxedAcceptance,
    Speculative,
    check_rows,
    check_speculative,
    forced_acceptance,
)
from graphengine.speculative_text import parse_relaxed_acceptance, parse_speculative

KvDtype = Literal["auto", "fp8"]
StateDtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
SamplingDefaults = Literal["engine", "checkpoint"]
RoundedKind = Literal["fp8", "int8", "int4"]
"""Formats that weights can be rounded to while they are loaded."""

_BLOCK_SIZES = (8, 16, 32, 64, 128)
# Positions and blocks have 32-bit numbers on the device.
_INDEX = at_most(INT32_MAX)
_POSITIVE = Bound("be positive and finite", lambda value: value > 0 and is_finite(value))


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(RankOptions):
    """Sizes and policies of one engine. Every shape of every captured graph follows from this."""

    device: str = option(
        factory=usual_device,
        doc="""device: "cuda", "cpu" or one GPU, such as "cuda:1"; by default "cuda" if torch finds
        a GPU when the config is made, "cpu" otherwise""",
        flag=Flag(common=True),
    )
    dtype: torch.dtype | str | None = option(
        None,
        doc="""dtype of weights, and of KV with kv_dtype="auto": "float32", "bfloat16" or
        "float16"; "auto" or None: the checkpoint's on a GPU, float32 on a CPU""",
        flag=Flag(common=True),
    )
    tensor_parallel: int = option(
        1,
        within(1, 64),
        doc="""ranks that split the model; each takes a device of its own, counting up from
        `device` (on a CPU they share it); the engine starts a process for each rank but the
        first""",
        flag=Flag(),
    )
    pipeline_parallel: int = option(
        1,
        within(1, 64),
        doc="""stages that divide the model's layers, for a model that does not fit one device;
        each stage runs after the one before it, and takes a device of its own, counting up from
        `device` (on a CPU they share it); the engine starts a process for each stage but one""",
        flag=Flag(),
    )
    expert_parallel: bool = option(
        False,
        doc="""each rank of `tensor_parallel` holds some of a layer's experts whole, instead of a
        slice of every expert""",
        flag=Flag(),
    )
    data_parallel: int = option(
        1,
        within(1, 64),
        doc="""ranks that serve requests of their own, up to `max_batch` each, and share the
        model's experts (attention data parallelism with expert parallelism). Each rank holds some
        experts whole, which serve the requests of all ranks, and a copy of all other weights. Each
        takes a device of its own, counting up from `device` (on a CPU they share it)""",
        flag=Flag(),
    )
    load_format: LoadFormat = option(
        "auto",
        doc="""where weights come from: "auto" reads the checkpoint's, "dummy" draws random ones on
        the device, by tensor name, for measurements or until `update_weights` brings others. With
        "dummy", only configs and headers of the checkpoint are read; a drafter that has its own
        checkpoint is still read from it""",
        flag=Flag(),
    )
    quantize: RoundedKind | None = option(
        None,
        doc="""format that the linears' weights of 16 or 32 bits are rounded to, on the device
        while they are loaded, to nearest: "fp8" (e4m3) and "int8" have a scale per row, "int4" one
        per 128 columns of a row; embeddings and norms are not rounded; None: weights stay as the
        checkpoint has them, quantised or not""",
        flag=Flag(),
    )
    quantize_lm_head: bool = option(False, doc="`quantize` rounds lm_head, too", flag=Flag())
    activations: ActivationKind | None = option(
        None,
        doc="""format that prefill rounds the inputs of linears to if their weights are e4m3 with a
        scale per row or per block of 128 columns: "fp8" is e4m3, each token scaled by its largest
        value; it is faster on Hopper GPUs and less exact. Decode does not round inputs; None:
        inputs stay in dtype""",
        flag=Flag(),
    )
    adapters: Mapping[str, str | PathLike[str]] | None = option(
        None,
        doc="""LoRA adapters by name, the folders that peft saved: a request asks for one with
        `adapter`, and requests with different ones run in one step. The linears that they change
        get slots for `max_adapters`; `engine.load_adapter` loads others; None: none at first""",
        flag=Flag(
            name="adapter",
            metavar="NAME=PATH",
            parse=adapter_pair,
            many=True,
            collect=adapters_of_pairs,
            help="a LoRA adapter, the folder that peft saved; the command's requests use the first",
        ),
        hashed=False,
    )
    max_adapters: int | None = option(
        None,
        NOT_NEGATIVE,
        at_most(64),
        doc="""adapters that are loaded at the same time, at most. Without `adapters`, all linears
        that adapters can change get slots; None: 4, or as many as `adapters` has, and 0 without
        them""",
        flag=Flag(metavar="N"),
    )
    max_adapter_rank: int = option(
        32,
        within(1, 512),
        doc="""highest rank of an adapter: all slots have room for it, and every product takes as
        long as with this rank""",
        flag=Flag(metavar="N"),
    )
    merge_adapter: str | PathLike[str] | None = option(
        None,
        doc="""the folder of a LoRA adapter that is merged into the weights while they are loaded,
        before `quantize` rounds them: every request uses it, at no cost; None: none""",
        flag=Flag(metavar="PATH"),
    )
    max_batch: int = option(
        8,
        within(1, MAX_LANES),
        doc=f"slots, and the largest bucket: requests that run at once; at most {MAX_LANES}",
        flag=Flag(common=True, metavar="N"),
    )
    max_seq_len: int | None = option(
        None,
        _INDEX,
        at_least(2),
        doc="""longest request, prompt plus generated tokens; None: the model's limit, at most
        4,096""",
        flag=Flag(common=True, metavar="N"),
    )
    buckets: tuple[int, ...] | None = option(
        None,
        doc="""row buckets (batch sizes) that decode graphs are captured for; None: 1, 2, 4, 8,
        then steps of 8""",
        flag=Flag(parse=read_integers, metavar="N,..."),
    )
    prefill_buckets: tuple[int, ...] = option(
        (16, 64, 128, 256, 512, 1024),
        doc="""token buckets that prefill graphs are captured for; a prompt is cut at multiples of
        the largest. Adding 2,048 and 4,096 speeds up long prompts, but takes memory (`graphengine
        info` shows it) and lengthens the token gaps of other requests""",
        flag=Flag(parse=read_integers, metavar="N,..."),
    )
    max_prefill_tokens_per_step: int | None = option(
        None,
        _INDEX,
        at_least(1),
        doc="""most prompt tokens that one step feeds; it caps the largest token bucket, so that a
        long prompt delays other requests less; None: no cap""",
        flag=Flag(),
    )
    max_prefill_ms_per_step: float | None = option(
        None,
        _POSITIVE,
        doc="""most milliseconds that a step may spend on a chunk of a prompt, while all other
        requests wait. The engine times its prefill buckets when it opens, and cuts prompts into
        chunks of the largest bucket that is fast enough. Chunks get smaller further into a prompt,
        because attention reads all tokens before them. The cut does not depend on whether other
        requests run; None: no bound""",
        flag=Flag(),
    )
    prefill_cut: tuple[tuple[int, int], ...] | None = option(
        None,
        doc="""where prompts are cut into chunks, as pairs (position, tokens): ((0, 1024), (8192,
        512)) cuts chunks of 1,024 tokens up to position 8,192, and of 512 from there on. Each size
        is a prefill bucket, and each position a multiple of the size before it. The
        `engine.prefill_cut` of another engine repeats its cut, and so its bits; None: as measured
        for `max_prefill_ms_per_step`, or the largest bucket everywhere""",
        flag=Flag(parse=read_pairs),
    )
    prompts_per_prefill: int = option(
        1,
        within(1, 64),
        doc="""prompts whose chunks one prefill replay may take, if they fit its largest bucket""",
        flag=Flag(metavar="N"),
    )
    block_size: int = option(
        16,
        Bound("be a power of two from 8 to 128", lambda size: size in _BLOCK_SIZES),
        doc="tokens per KV block, a power of two from 8 to 128",
        flag=Flag(),
    )
    kv_blocks: int | None = option(
        None,
        _INDEX,
        at_least(1),
        doc="""KV blocks in the pool, not counting the dummy block 0; None: enough for every slot
        at max_seq_len, or as many as memory_fraction allows""",
        flag=Flag(),
    )
    swap_blocks: int | None = option(
        None,
        _INDEX,
        NOT_NEGATIVE,
        doc="""pinned host blocks that hold the KV of paused requests; None: as many as the pool
        can need, within half of the memory that the host, or its container's limit, has left""",
        flag=Flag(),
    )
    kv_dtype: KvDtype = option(
        "auto",
        doc="""format of the KV cache: "fp8" is e4m3, half the bytes of 16 bits and so twice the
        tokens. Its scales come from the checkpoint for each layer (`k_scale`, `v_scale`), else
        they are 1.0; "auto": dtype""",
        flag=Flag(),
    )
    kv_calibration: str | tuple[int, ...] | None = option(
        None,
        doc="""a prompt, text or token ids, that calibrates the scales of an fp8 KV cache, in place
        of the checkpoint's scales: the largest key and value of each head map to 448, the largest
        e4m3 number; None: no calibration""",
        flag=Flag(metavar="TEXT"),
    )
    prefix_caching: bool = option(
        False,
        doc="""keep the KV blocks of prompts, and reuse them for prompts that begin with the same
        tokens""",
        flag=Flag(),
    )
    session_blocks: int | None = option(
        None,
        _INDEX,
        NOT_NEGATIVE,
        doc="""most blocks of the pool that idle sessions and cached prefixes may hold; a session
        that is longer keeps its first blocks; None: all blocks that no request needs""",
        flag=Flag(),
    )
    state_dtype: StateDtype = option(
        "auto",
        doc="""dtype of the state of each head in recurrent layers, which is rounded after every
        token: "bfloat16" takes half the bytes and is less exact; "auto": as the checkpoint's
        config says, else float32""",
        flag=Flag(),
    )
    session_states: int = option(
        4,
        _INDEX,
        NOT_NEGATIVE,
        doc="""recurrent-state checkpoints, shared by all sessions and cached prefixes. With 0,
        each turn of a session prefills from its first token, and prefix_caching is refused; models
        without recurrent layers keep none""",
        flag=Flag(),
    )
    window_rings: bool = option(
        True,
        doc="""layers with a sliding window keep only the newest tokens, in a ring per slot, where
        that takes less than their part of the pool. With False, prefix_caching or
        pipeline_parallel they keep all tokens, which forks, snapshots and far rewinds of sessions
        resume from""",
        flag=Flag(
            name="no-window-rings",
            inverse=True,
            help="layers with a sliding window keep all tokens, too",
        ),
    )
    lookahead: int | None = option(
        None,
        within(0, 2),
        doc="""launches made before the oldest one is collected, 0 to 2. Requests whose grammar the
        host follows sit out of these. It is 0 beside a request with forced_tokens, and always with
        UserProvided and SaveHiddenStates; None: 1 on a GPU or with pipeline_parallel, else 0""",
        flag=Flag(),
    )
    steps_per_launch: int = option(
        1,
        within(1, 64),
        doc="""decode steps that one launch runs in a row, so that a busy host need not launch each.
        New requests, cancels, deadlines and stop strings wait for launches under way to end. A
        launch runs one step while a prompt is fed, while a grammar is made on the host, and where
        no request has as many tokens left""",
        flag=Flag(metavar="N"),
    )
    memory_fraction: float = option(
        0.9,
        SHARE,
        doc="fraction of the device's free memory that the engine may use",
        flag=Flag(),
    )
    releasable: bool = option(
        False,
        doc="""weights and KV cache lie in memory that `Engine.release_memory` gives back, and that
        `Engine.restore_memory` has again at the same addresses""",
    )
    max_waiting: int | None = option(
        None,
        at_least(1, or_none=True),
        doc="""most requests that wait for a slot, not counting those that can start at once; one
        more is refused with `QueueFull`; None: no limit""",
    )
    max_stop_ids: int = option(
        16, within(1, 1024), doc="most EOS and stop token ids of a request, up to 1,024"
    )
    max_logit_bias: int = option(300, within(1, 4096), doc="most ids in a request's logit_bias")
    max_bad_words: int = option(
        64, within(1, 1024), doc="most token sequences that a request's bad words expand to"
    )
    max_bad_word_tokens: int = option(8, within(1, 64), doc="most tokens of a bad word")
    max_stop_sequences: int = option(8, within(1, 64), doc="most stop token sequences of a request")
    max_stop_sequence_tokens: int = option(
        16, within(2, 64), doc="most tokens of a stop token sequence"
    )
    max_logprobs: int = option(
        MAX_LOGPROBS,
        within(0, MAX_LOGPROBS),
        doc=f"most logprobs and prompt_logprobs that a request may ask for, up to {MAX_LOGPROBS}",
    )
    prompt_logprobs: bool = option(
        False,
        doc="""requests may ask for log-probabilities of their prompts; this takes prefill graphs of
        its own""",
    )
    prompt_logprobs_out: bool = option(
        False,
        doc="""requests with `prompt_logprobs` may also have the log-probabilities of the whole
        vocabulary, written to memory that `submit` gets as `prompt_logprobs_out`""",
    )
    grammar_pool_mib: int = option(
        0, within(0, 4096), doc="MiB for grammars that the device follows; 0: none", flag=Flag()
    )
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        doc="""logits that log-probabilities are computed from, unless a request says otherwise:
        "raw_logprobs" takes the model's, "processed_logprobs" those after penalties, bias and bans
        (but, unlike vLLM's, before min_tokens, temperature and filters), "sampled_logprobs" those
        after all of these, which tokens are drawn from""",
        flag=Flag(),
    )
    sampling_defaults: SamplingDefaults = option(
        "engine",
        doc="""sampling options of a request without `SamplingParams`, and of a command line:
        "checkpoint" takes temperature, top_k, top_p, min_p and repetition_penalty from
        `generation_config.json`; "engine" keeps the defaults of `SamplingParams`""",
        flag=Flag(
            help='sampling options that are not given: "checkpoint" takes temperature, top-k, '
            "top-p, min-p and repetition-penalty from generation_config.json, which `chat` does; "
            '"engine" keeps the defaults below'
        ),
    )
    record_routing: bool = option(
        False,
        doc="""each `Result` has `routing`, the experts that every token took, and a request may
        replay such a record with its own `routing`. For models with experts; the last layer is
        then computed for all tokens of a prompt""",
        flag=Flag(),
    )
    pdl: bool = option(
        True,
        doc="use programmatic dependent launch between the kernels of a GPU",
        flag=Flag(name="no-pdl", inverse=True, help="do not use programmatic dependent launch"),
    )
    prompt_embeds: bool = option(
        False,
        doc="""prompts may have embeddings, tensors [n, hidden_size], alone or between tokens
        (`PromptParts`); this takes memory for the embeddings of a chunk""",
        flag=Flag(),
    )
    row_family: RowFamily | None = option(
        None,
        doc="""arithmetic of the decode kernels, part of the numerics: "fma", for 1 or 2 lanes a
        step (lanes are rows times k + 1 tokens; with drafts that is one row and k=1), or "dot";
        None: "fma" on a GPU if a step has one lane, "dot" otherwise""",
        flag=Flag(),
    )
    speculative: Speculative | str | None = option(
        None,
        doc="""the drafter: MTP(k=3), NGram(k=3), ..., or its text as on the command line, such as
        "mtp:3"; a step then feeds k + 1 tokens a row; None: no drafts""",
        flag=Flag(common=True, metavar="MODE", help=f"the drafter: {GRAMMAR} (default: off)"),
    )
    gate: GateOptions | None = option(
        None, doc="when to stop speculating and when to resume; None: always speculate"
    )
    draft_len_schedule: dict[int, int] | tuple[tuple[int, int], ...] | None = option(
        None,
        doc="""drafts per row, by the number of live requests: {1: 5, 4: 3} drafts 5 for one
        request, 3 for up to four, and none for more. The first entry has the drafter's k. With a
        gate, the smaller of the two numbers counts; None: k for any number of requests""",
        flag=Flag(
            metavar="LIVE:DRAFTS,...",
            parse=read_pairs,
            help="drafts per row, by the number of live requests: 1:5,4:3 drafts 5 for one "
            "request, 3 for up to four, and none for more; left out: the drafter's number "
            "for any number of requests",
        ),
    )
    relaxed_acceptance: RelaxedAcceptance | None = option(
        None,
        doc="""drafts that a greedy request accepts, while it thinks, besides the most probable
        token; None: tokens are those of plain decoding""",
        flag=Flag(
            metavar="IDS:IDS",
            parse=parse_relaxed_acceptance,
            help="drafts that a greedy request accepts, while it thinks, besides the most probable "
            f"token: {RELAXED_GRAMMAR}",
        ),
    )
    forced_acceptance: int | None = option(
        None,
        Bound("be an integer from 0 up, or None", lambda drafts: drafts >= 0, whole=True),
        doc="""drafts that every row accepts, right or wrong, or all if it has fewer; only for
        measuring speed""",
    )
    seed: int = option(
        0,
        SEED,
        doc="""seed of the generator that seeds requests without a seed of their own; processes
        with the same value, such as the default, draw the same seeds in the same order""",
        flag=Flag(
            common=True,
            name="engine-seed",
            metavar="N",
            help="draws the seeds of requests without --seed; every run with the same value draws "
            "the same seeds",
        ),
    )
    wait: WaitMode = option(
        "spin",
        doc="""how the host waits for the results of a step: "spin" polls, "yield" gives up its
        core between polls, "block" sleeps between polls""",
        flag=Flag(),
    )
    wait_limit_s: float = option(
        30.0,
        _POSITIVE,
        doc="seconds that a replay may take to publish its results; then the engine is broken",
    )
    collect_while_waiting: bool = option(
        True,
        doc="""a step that has to wait runs Python's garbage collector first, if a collection is
        due soon anyway, `gc` is enabled and the oldest replay is not done yet; full collections
        are left to Python""",
    )

    def __post_init__(self) -> None:
        self._check_device()
        if isinstance(self.speculative, str):
            object.__setattr__(self, "speculative", parse_speculative(self.speculative))
        check_options(self)
        for name in ("buckets", "prefill_buckets"):
            self._keep_sizes(name)
        self._check_calibration()
        self._check_adapters()
        if self.quantize_lm_head and self.quantize is None:
            raise ValueError("quantize_lm_head=True is for an engine with quantize, which is None")
        if self.prompt_logprobs_out and not self.prompt_logprobs:
            raise ValueError("prompt_logprobs_out=True is for an engine with prompt_logprobs=True")
        if self.prefill_cut is not None:
            self._keep_cut(self.prefill_cut)
        self._check_speculation()
        self.check_ranks()
        self.check_launches()
        if self.row_family == "fma" and self.lanes > FMA_LANES:
            raise ValueError(
                f"row_family='fma' serves up to {FMA_LANES} lanes a step, not {self.lanes_text}"
            )
        if self.prefix_caching and self.mode is not None and self.mode.whole_prompts:
            raise ValueError(
                f"prefix_caching=True, but speculative={self.speculative!r} needs the hidden "
                f"states of whole prompts"
            )

    def _check_device(self) -> None:
        check_device(self.device)
        if self.dtype not in (None, "auto") and self.torch_dtype not in DTYPES.values():
            raise ValueError(f"dtype={self.dtype}: must be one of {', '.join(DTYPES)}, auto")

    def _keep_sizes(self, name: str) -> None:
        """Keep the sizes of buckets as a tuple of Python's integers."""
        sizes = getattr(self, name)
        if sizes is None and name == "buckets":
            return
        if not isinstance(sizes, list | tuple) or not all(
            is_int(size) and size > 0 for size in sizes
        ):
            raise ValueError(f"{name}={sizes} must be positive integers")
        if max(sizes, default=0) > INT32_MAX:
            raise ValueError(f"{name}={sizes} must be at most {INT32_MAX}")
        if not sizes:
            raise ValueError(f"{name} must name at least one size")
        object.__setattr__(self, name, tuple(map(int, sizes)))

    def _check_adapters(self) -> None:
        given = read_adapters(self.adapters)
        if self.adapters is not None:
            object.__setattr__(self, "adapters", given)
        if len(given) > self.adapter_slots:
            raise ValueError(
                f"adapters has {len(given)} of them, and max_adapters={self.max_adapters}"
            )
        if self.merge_adapter is not None:
            check_path("merge_adapter", self.merge_adapter)

    def _check_calibration(self) -> None:
        if self.kv_calibration is None:
            return
        if self.kv_dtype != "fp8":
            raise ValueError(
                f"kv_calibration is for kv_dtype='fp8', not for kv_dtype={self.kv_dtype!r}"
            )
        prompt = read_calibration(self.kv_calibration, self.max_seq_len or USUAL_SEQ_LEN)
        object.__setattr__(self, "kv_calibration", prompt)

    def _keep_cut(self, given: object) -> None:
        steps = PrefillCut.given(given, self.max_prefill_ms_per_step).steps
        object.__setattr__(self, "prefill_cut", steps)

    def _check_speculation(self) -> None:
        check_speculative(self.speculative)
        for name in ("gate", "draft_len_schedule", "relaxed_acceptance", "forced_acceptance"):
            if getattr(self, name) is not None and not self.drafts:
                raise ValueError(
                    f"{name} is for an engine with drafts, not speculative={self.speculative!r}"
                )
        if self.draft_len_schedule is not None:
            self._keep_schedule(self.draft_len_schedule)
        gate = self.gate_options
        rows = self.widest_rows
        check_rows(rows, self.drafts_of(rows), None if gate is None else gate.max_live)
        if self.drafts:
            forced = forced_acceptance(self.forced_acceptance)
            object.__setattr__(self, "forced_acceptance", forced)
        if self.mode is not None and self.mode.lockstep:
            object.__setattr__(self, "lookahead", 0)

    def _keep_schedule(self, given: object) -> None:
        schedule, mode = DraftSchedule.read(given), self.mode
        schedule.check_mode(self.drafts, every_length=mode is None or mode.any_length)
        object.__setattr__(self, "draft_len_schedule", schedule.steps)

    def of_rank(self, device: str) -> EngineConfig:
        """The config of another rank on its own device, with the defaults resolved as here."""
        return replace(self, device=device, lookahead=self.launched_ahead, row_family=self.family)

    def check_eos_ids(self, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The checkpoint's end-of-sequence ids. ValueError if they exceed `max_stop_ids`."""
        if len(eos_ids) > self.max_stop_ids:
            raise ValueError(
                f"the checkpoint has {len(eos_ids)} end-of-sequence ids, but a request has at most "
                f"max_stop_ids={self.max_stop_ids} stop ids: max_stop_ids="
                f"{len(eos_ids)} holds them"
            )
        return eos_ids
