"""What the embedding program chooses once, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypedDict, get_args

import torch

from graphengine.buckets import BucketLadder
from graphengine.checks import INT32_MAX, check_number, is_finite, is_int, keep_plain_numbers
from graphengine.kernels import FMA_LANES, MAX_LANES, MAX_LOGPROBS, RowFamily, row_family
from graphengine.speculative import (
    AUTO_MAX_LIVE,
    Auto,
    GateOptions,
    Mode,
    RelaxedAcceptance,
    SaveHiddenStates,
    Speculative,
    UserProvided,
    check_rows,
    check_speculative,
    forced_acceptance,
    resolve_auto,
)

WaitMode = Literal["spin", "yield", "block"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

# What one request may ask for at most, and the most that a kernel holds of it.
_LIMITS = {
    "max_stop_ids": (1, 1024),
    "max_logit_bias": (1, 4096),
    "max_bad_words": (1, 1024),
    "max_bad_word_tokens": (1, 64),
    "max_stop_sequences": (1, 64),
    "max_stop_sequence_tokens": (2, 64),
    "max_logprobs": (0, MAX_LOGPROBS),
}

_OPTIONAL = (
    "max_seq_len",
    "max_prefill_tokens_per_step",
    "kv_blocks",
    "swap_blocks",
    "session_blocks",
    "max_waiting",
)
_INTEGERS = ("max_batch", "block_size", "lookahead", "seed", *_LIMITS, *_OPTIONAL)
_NUMBERS = ("memory_fraction", "wait_limit_s")
# Positions and blocks have 32-bit numbers on the device.
_INDEXED = tuple(name for name in _OPTIONAL if name != "max_waiting")


def _usual_device() -> str:
    """Asked for each config, never at import: a process that has asked the driver may not fork."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and policies of one engine. Every shape of every captured graph follows from this.

    device                 "cuda", "cuda:1" or "cpu"; by default "cuda" where torch finds one as the
                           config is made
    dtype                  of weights and KV; None or "auto": the checkpoint's on a GPU, float32 on
                           a CPU
    max_batch              slots, and the largest bucket; at most 64
    max_seq_len            prompt plus generated tokens of one request; None: the model's limit, at
                           most 4,096
    buckets                row buckets to capture; None: 1, 2, 4, 8, then steps of 8
    prefill_buckets        token buckets; a prompt is cut at multiples of the largest
    max_prefill_tokens_per_step
                           prompt tokens that one step may feed: the largest token bucket is cut
                           to it, so that a long prompt lengthens others' gaps by less; None: no cut
    block_size             tokens of one KV block, a power of two from 8 to 128
    kv_blocks              blocks of the pool, the dummy block 0 not counted; None: enough for every
                           slot at max_seq_len, or what memory_fraction leaves
    swap_blocks            pinned host blocks for paused requests; None: what a short pool can need,
                           within half of what the host, or a limit of the container, leaves
    prefix_caching         whether the blocks of a prompt's KV are kept, and found again by prompts
                           that begin with the same tokens
    session_blocks         blocks of the pool that idle sessions and cached prefixes hold at most,
                           of a longer session the first; None: as many as nobody else needs
    lookahead              replays launched before the oldest one is collected, 0 or 1; it is 0
                           while a request with a grammar holds a slot, and always with
                           UserProvided and SaveHiddenStates, which set it to 0
    memory_fraction        share of the device's free memory that the engine may plan with
    max_waiting            requests that may wait for a slot, those submitted since the last step
                           among them; one more is refused with `QueueFull`. None: any number
    max_stop_ids           EOS and stop token ids that one request may have, up to 1,024
    max_logit_bias         ids that one request's logit_bias may name
    max_bad_words          sequences of tokens that its bad words may come to, and the tokens of one
    max_bad_word_tokens
    max_stop_sequences     its stop token sequences, and the tokens of one
    max_stop_sequence_tokens
    max_logprobs           its logprobs and prompt_logprobs, up to 20
    prompt_logprobs        whether requests may ask for those of their prompts, which takes prefill
                           graphs of their own
    logprobs_mode          of which logits log-probabilities are: "raw_logprobs", the model's, or
                           "processed_logprobs", behind penalties, bias and bans (but, unlike
                           vLLM's, in front of min_tokens, temperature and filters)
    pdl                    programmatic dependent launch between the kernels of a GPU
    row_family             "fma" (1 or 2 rows) or "dot": the decode kernels' arithmetic, part of the
                           numerics; None: "fma" where a step has a single lane, else "dot"
    speculative            who drafts, of `graphengine.speculative`: MTP(k=3), NGram(k=3), ...; a
                           step then feeds k + 1 tokens a row. None: nobody
    gate                   when to stop speculating and when to try again; None: always speculate
    relaxed_acceptance     drafts that a thinking, greedy request takes beside its best token;
                           None: the tokens are those of plain decoding
    forced_acceptance      drafts that every row takes, right or wrong, or all that it has: for
                           measuring speed alone
    seed                   of the generator that seeds requests which bring no seed of their own
    wait                   how the host waits for the mailbox
    wait_limit_s           seconds after which a replay that published nothing breaks the engine
    collect_while_waiting  whether a step that has to wait first runs Python's garbage collector,
                           if that is due soon anyway (all but full collections), `gc` is enabled
                           and the oldest replay is not done yet
    """

    device: str = field(default_factory=_usual_device)
    dtype: torch.dtype | str | None = None
    max_batch: int = 8
    max_seq_len: int | None = None
    buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] = (16, 64, 128, 256, 512, 1024)
    max_prefill_tokens_per_step: int | None = None
    block_size: int = 16
    kv_blocks: int | None = None
    swap_blocks: int | None = None
    prefix_caching: bool = False
    session_blocks: int | None = None
    lookahead: int = 1
    memory_fraction: float = 0.9
    max_waiting: int | None = None
    max_stop_ids: int = 16
    max_logit_bias: int = 300
    max_bad_words: int = 64
    max_bad_word_tokens: int = 8
    max_stop_sequences: int = 8
    max_stop_sequence_tokens: int = 16
    max_logprobs: int = MAX_LOGPROBS
    prompt_logprobs: bool = False
    logprobs_mode: LogprobsMode = "raw_logprobs"
    pdl: bool = True
    row_family: RowFamily | None = None
    speculative: Speculative | None = None
    gate: GateOptions | None = None
    relaxed_acceptance: RelaxedAcceptance | None = None
    forced_acceptance: int | None = None
    seed: int = 0
    wait: WaitMode = "spin"
    wait_limit_s: float = 30.0
    collect_while_waiting: bool = True

    def __post_init__(self) -> None:
        device_type = str(self.device).partition(":")[0]
        if device_type not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: must be 'cpu', 'cuda' or 'cuda:N'")
        if device_type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}, but torch finds no CUDA device")
        if self.dtype not in (None, "auto") and self.torch_dtype not in DTYPES.values():
            raise ValueError(f"dtype={self.dtype}: must be one of {', '.join(DTYPES)}, auto")
        for name in _INTEGERS:
            value = getattr(self, name)
            if not is_int(value) and (value is not None or name not in _OPTIONAL):
                raise ValueError(f"{name}={value!r} must be an integer")
        for name in _INDEXED:
            value = getattr(self, name)
            if value is not None and value > INT32_MAX:
                raise ValueError(f"{name}={value} must be at most {INT32_MAX}")
        for name in ("buckets", "prefill_buckets"):
            sizes = getattr(self, name)
            if sizes is None and name == "buckets":
                continue
            if not isinstance(sizes, list | tuple) or not all(
                is_int(size) and size > 0 for size in sizes
            ):
                raise ValueError(f"{name}={sizes} must be positive integers")
            if max(sizes, default=0) > INT32_MAX:
                raise ValueError(f"{name}={sizes} must be at most {INT32_MAX}")
            object.__setattr__(self, name, tuple(map(int, sizes)))
        for name in _NUMBERS:
            check_number(name, getattr(self, name))
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ValueError(f"memory_fraction={self.memory_fraction} must be in (0, 1]")
        if not (self.wait_limit_s > 0 and is_finite(self.wait_limit_s)):
            raise ValueError(f"wait_limit_s={self.wait_limit_s} must be positive and finite")
        keep_plain_numbers(self)
        if not 1 <= self.max_batch <= MAX_LANES:
            raise ValueError(f"max_batch={self.max_batch} must be in [1, {MAX_LANES}]")
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ValueError(f"max_seq_len={self.max_seq_len} must be at least 2")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"block_size={self.block_size} must be a power of two from 8 to 128")
        if not self.prefill_buckets:
            raise ValueError("prefill_buckets must name at least one size")
        if self.max_prefill_tokens_per_step is not None and self.max_prefill_tokens_per_step < 1:
            raise ValueError(
                f"max_prefill_tokens_per_step={self.max_prefill_tokens_per_step} must be at least 1"
            )
        if self.lookahead not in (0, 1):
            raise ValueError(f"lookahead={self.lookahead} must be 0 or 1")
        if self.max_waiting is not None and self.max_waiting < 1:
            raise ValueError(f"max_waiting={self.max_waiting} must be at least 1, or None")
        for name, (least, most) in _LIMITS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must be in [{least}, {most}]")
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise ValueError(
                f"logprobs_mode={self.logprobs_mode!r} must be one of "
                f"{', '.join(map(repr, get_args(LogprobsMode)))}"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be in [0, 2**63)")
        if self.wait not in ("spin", "yield", "block"):
            raise ValueError(f"wait={self.wait!r} must be 'spin', 'yield' or 'block'")
        for name in ("pdl", "prompt_logprobs", "prefix_caching", "collect_while_waiting"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.row_family not in (None, "fma", "dot"):
            raise ValueError(f"row_family={self.row_family!r} must be 'fma', 'dot' or None")
        self._check_speculation()
        if self.row_family == "fma" and self.lanes > FMA_LANES:
            raise ValueError(
                f"row_family='fma' serves up to {FMA_LANES} rows, not max_batch={self.max_batch}"
                + (f" of {1 + self.drafts} tokens each" if self.drafts else "")
            )
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise ValueError(f"kv_blocks={self.kv_blocks} must be at least 1")
        for name in ("swap_blocks", "session_blocks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        if self.prefix_caching and isinstance(self.speculative, SaveHiddenStates):
            raise ValueError(
                f"prefix_caching=True, but speculative={self.speculative!r} needs the hidden "
                f"states of whole prompts"
            )

    def _check_speculation(self) -> None:
        check_speculative(self.speculative)
        kinds = {
            "gate": GateOptions,
            "relaxed_acceptance": RelaxedAcceptance,
            "forced_acceptance": int,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise ValueError(f"{name}={value!r} must be {kind.__name__} or None")
            if value is not None and not self.drafts:
                raise ValueError(
                    f"{name} is for an engine with drafts, not speculative={self.speculative!r}"
                )
        gate = self.gate_options
        check_rows(self.draft_rows, self.drafts, None if gate is None else gate.max_live)
        if self.drafts:
            forced = forced_acceptance(self.forced_acceptance)
            object.__setattr__(self, "forced_acceptance", forced)
        if isinstance(self.speculative, UserProvided | SaveHiddenStates) and self.lookahead:
            # Drafts follow from the tokens of the step before; and hidden states are copied out
            # before the next prompt's overwrite them.
            object.__setattr__(self, "lookahead", 0)

    @property
    def mode(self) -> Mode | None:
        """`speculative`, with `Auto` resolved."""
        mode = self.speculative
        return resolve_auto(self.max_batch) if isinstance(mode, Auto) else mode

    @property
    def drafts(self) -> int:
        """K: drafts a step feeds behind each row's last token, at most."""
        return 0 if self.mode is None else self.mode.k

    @property
    def gate_options(self) -> GateOptions | None:
        """`gate`, or the one that `Auto` goes with: it looks at the number of requests alone."""
        if self.gate is not None or not isinstance(self.speculative, Auto):
            return self.gate
        sizes = BucketLadder(self.max_batch, self.buckets).sizes
        most = min(AUTO_MAX_LIVE, MAX_LANES // (1 + self.drafts))
        fitting = max((size for size in sizes if size <= most), default=most)
        return GateOptions(off_below=0.0, on_above=0.0, max_live=fitting)

    @property
    def draft_rows(self) -> int:
        """The largest bucket whose rows may bring drafts: the gate keeps them from larger ones."""
        gate = self.gate_options
        if gate is None or gate.max_live is None:
            return self.max_batch
        return BucketLadder(self.max_batch, self.buckets).pick(min(gate.max_live, self.max_batch))

    @property
    def lanes(self) -> int:
        """Tokens that the widest decode step feeds."""
        return max(self.max_batch, self.draft_rows * (1 + self.drafts))

    @property
    def family(self) -> RowFamily:
        """The row family of the engine: the one asked for, or what the lanes of a step call for."""
        return self.row_family or row_family(self.lanes)

    @property
    def staging_blocks(self) -> int:
        """Copies of what the host owns that may be on their way to the device at once."""
        return self.lookahead + 2

    @property
    def mailbox_entries(self) -> int:
        """Replays whose records a mailbox holds."""
        return 2 * (self.lookahead + 2)

    def sequence_limit(self, max_positions: int) -> int:
        """Tokens of the longest request with a model of so many positions; ValueError if
        `max_seq_len` asks for more.
        """
        if self.max_seq_len is None:
            return min(max_positions, 4096)
        if self.max_seq_len > max_positions:
            raise ValueError(
                f"max_seq_len={self.max_seq_len} exceeds the model's "
                f"max_position_embeddings={max_positions}"
            )
        return self.max_seq_len

    def check_eos_ids(self, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The checkpoint's end-of-sequence ids. ValueError if a request cannot have so many."""
        if len(eos_ids) > self.max_stop_ids:
            raise ValueError(
                f"the checkpoint has {len(eos_ids)} end-of-sequence ids, and at most "
                f"max_stop_ids={self.max_stop_ids} of a request stop it: max_stop_ids="
                f"{len(eos_ids)} holds them"
            )
        return eos_ids

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """`dtype`, whose name may be given instead; None where the checkpoint decides."""
        return DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` as keyword arguments."""

    device: str
    dtype: torch.dtype | str | None
    max_batch: int
    max_seq_len: int | None
    buckets: tuple[int, ...] | None
    prefill_buckets: tuple[int, ...]
    max_prefill_tokens_per_step: int | None
    block_size: int
    kv_blocks: int | None
    swap_blocks: int | None
    prefix_caching: bool
    session_blocks: int | None
    lookahead: int
    memory_fraction: float
    max_waiting: int | None
    max_stop_ids: int
    max_logit_bias: int
    max_bad_words: int
    max_bad_word_tokens: int
    max_stop_sequences: int
    max_stop_sequence_tokens: int
    max_logprobs: int
    prompt_logprobs: bool
    logprobs_mode: LogprobsMode
    pdl: bool
    row_family: RowFamily | None
    speculative: Speculative | None
    gate: GateOptions | None
    relaxed_acceptance: RelaxedAcceptance | None
    forced_acceptance: int | None
    seed: int
    wait: WaitMode
    wait_limit_s: float
    collect_while_waiting: bool
