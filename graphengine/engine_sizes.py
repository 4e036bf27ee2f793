"""Sizes that follow from an engine's options: its ranks, its drafts by live requests, the lanes of
its widest step, its row family, and how many launches may be under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import torch

from graphengine.buckets import BucketLadder
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.plans import FMA_TOKENS, RowFamily, row_family
from graphengine.options.adapters import USUAL_ADAPTERS, read_adapters
from graphengine.options.devices import DEVICE_DEFAULTS, DTYPES, DeviceDefaults
from graphengine.options.drafts.draft_schedule import DraftSchedule
from graphengine.options.drafts.mode import Mode
from graphengine.speculative import (
    AUTO_MAX_LIVE,
    Auto,
    GateOptions,
    Speculative,
    resolve_auto,
)

USUAL_SEQ_LEN = 4096
"""Tokens of the longest request where `max_seq_len` is left out, if the model holds as many."""


class EngineSizes:
    """Sizes that follow from the options of `EngineConfig`. The options that they depend on are
    declared here; `EngineConfig` has their table.
    """

    __slots__ = ()

    device: str
    dtype: torch.dtype | str | None
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    max_batch: int
    max_seq_len: int | None
    buckets: tuple[int, ...] | None
    lookahead: int | None
    steps_per_launch: int
    prompts_per_prefill: int
    row_family: RowFamily | None
    speculative: Speculative | str | None
    gate: GateOptions | None
    draft_len_schedule: dict[int, int] | tuple[tuple[int, int], ...] | None
    adapters: Mapping[str, str | PathLike[str]] | None
    max_adapters: int | None
    grammar_pool_mib: int

    @property
    def ranks(self) -> int:
        """Processes of the engine, including this one."""
        return max(self.tensor_parallel, self.data_parallel) * self.pipeline_parallel

    @property
    def ranks_option(self) -> str:
        """The options that ask for several ranks, for messages."""
        names = ("tensor_parallel", "data_parallel", "pipeline_parallel")
        counts = {name: getattr(self, name) for name in names}
        return " and ".join(f"{name}={count}" for name, count in counts.items() if count > 1)

    @property
    def adapter_slots(self) -> int:
        """Adapters that are loaded at the same time, at most."""
        if self.max_adapters is not None:
            return self.max_adapters
        given = len(read_adapters(self.adapters))
        return max(USUAL_ADAPTERS, given) if given else 0

    @property
    def mode(self) -> Mode | None:
        """`speculative`, with `Auto` resolved."""
        mode = self.speculative
        assert not isinstance(mode, str), f"{mode=}"
        return resolve_auto(self.max_batch) if isinstance(mode, Auto) else mode

    @property
    def drafts(self) -> int:
        """K: drafts a step feeds after each row's last token, at most."""
        return 0 if self.mode is None else self.mode.k

    @property
    def jumps(self) -> bool:
        """Whether drafts are made of the text that grammars force."""
        return self.grammar_pool_mib > 0 and self.mode is not None and self.mode.jumps

    @property
    def gate_options(self) -> GateOptions | None:
        """`gate`, or the one of `Auto`, which looks only at the number of requests."""
        if self.gate is not None or not isinstance(self.speculative, Auto):
            return self.gate
        sizes = BucketLadder(self.max_batch, self.buckets).sizes
        most = min(AUTO_MAX_LIVE, MAX_LANES // (1 + self.drafts))
        fitting = max((size for size in sizes if size <= most), default=most)
        return GateOptions(off_below=0.0, on_above=0.0, max_live=fitting)

    @property
    def schedule(self) -> DraftSchedule | None:
        """`draft_len_schedule` as it was read."""
        steps = self.draft_len_schedule
        return None if steps is None else DraftSchedule.read(steps)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Draft lengths that decode graphs verify, ascending; (0,) for an engine without drafts."""
        schedule = self.schedule
        return tuple(sorted({0, self.drafts})) if schedule is None else schedule.lengths

    def drafts_for(self, live: int) -> int:
        """Most drafts a row in a step with `live` requests."""
        gate, schedule = self.gate_options, self.schedule
        if gate is not None and gate.max_live is not None and live > gate.max_live:
            return 0
        return self.drafts if schedule is None else schedule.drafts(live)

    def drafts_of(self, rows: int) -> int:
        """Most drafts a row in the bucket of `rows`: those for the fewest requests it serves."""
        sizes = BucketLadder(self.max_batch, self.buckets).sizes
        return self.drafts_for(1 + max((size for size in sizes if size < rows), default=0))

    @property
    def draft_rows(self) -> int:
        """The largest bucket whose rows may have drafts."""
        sizes = BucketLadder(self.max_batch, self.buckets).sizes
        return max((rows for rows in sizes if self.drafts_of(rows)), default=sizes[0])

    @property
    def drafted_rows(self) -> int:
        """Most rows that a replay drafts for: a bucket's, or the prompts of a prefill."""
        return max(self.draft_rows, self.packed_prompts)

    @property
    def widest_rows(self) -> int:
        """The bucket with drafts that feeds the most tokens; among equals, the largest."""
        sizes = BucketLadder(self.max_batch, self.buckets).sizes
        drafting = [rows for rows in sizes if rows <= self.draft_rows]
        return max(drafting, key=lambda rows: (rows * (1 + self.drafts_of(rows)), rows))

    @property
    def lanes(self) -> int:
        """Tokens that the widest decode step feeds."""
        rows = self.widest_rows
        return max(self.max_batch, rows * (1 + self.drafts_of(rows)))

    @property
    def lanes_text(self) -> str:
        """`lanes` as a product of its factors, for messages."""
        rows = self.widest_rows
        tokens = 1 + self.drafts_of(rows)
        if rows * tokens < self.lanes or tokens == 1:
            return f"the {self.lanes} of max_batch={self.max_batch}"
        count = "1 row" if rows == 1 else f"{rows} rows"
        return (
            f"the {self.lanes} of {count} with {tokens} tokens each, the newest one and "
            f"k={tokens - 1} drafts (max_batch={self.max_batch})"
        )

    @property
    def family(self) -> RowFamily:
        """The engine's row family: `row_family`, the device's, or the one that fits its lanes."""
        return self._family_of(self.lanes)

    @property
    def chain_family(self) -> RowFamily:
        """Row family of drafts that follow a draft: their launch has one lane a row, however many
        lanes verification has. With long requests it is `family`, whose kernels surround them; with
        several ranks, too: `of_rank` passes on only one.
        """
        short = (self.max_seq_len or USUAL_SEQ_LEN) <= FMA_TOKENS
        return self._family_of(self.max_batch) if short and self.ranks == 1 else self.family

    def _family_of(self, lanes: int) -> RowFamily:
        return self.row_family or self.device_defaults.row_family or row_family(lanes)

    @property
    def launched_ahead(self) -> int:
        """Replays launched before the oldest is collected: `lookahead`, or the device's default.
        A pipeline's default is 1 on any device, as its replays run in other processes.
        """
        usual = 1 if self.pipeline_parallel > 1 else self.device_defaults.lookahead
        return usual if self.lookahead is None else self.lookahead

    @property
    def device_defaults(self) -> DeviceDefaults:
        """Defaults of options for this kind of device."""
        return DEVICE_DEFAULTS[torch.device(self.device).type]

    @property
    def staging_blocks(self) -> int:
        """Copies of host-owned fields that may be in flight to the device at the same time."""
        return (self.launched_ahead + 2) * self._loads_of_step

    @property
    def launch_lengths(self) -> tuple[int, ...]:
        """Steps that a launch of decode may run, ascending."""
        return tuple(sorted({1, self.steps_per_launch}))

    @property
    def mailbox_entries(self) -> int:
        """Steps whose records a mailbox holds. Each step of a launch has a record of its own, and a
        launch of several steps has no prompt's chunk before it.
        """
        of_launch = max(self._launches_of_step, self.steps_per_launch)
        return of_launch * (self.launched_ahead + 2)

    @property
    def sends_in_flight(self) -> int:
        """Streams that a stage may have sent before the next stage takes the oldest."""
        return self._launches_of_step * (self.launched_ahead + 2)

    def check_launches(self) -> None:
        """ValueError for options that launches of several steps cannot serve."""
        steps, mode = self.steps_per_launch, self.mode
        if steps == 1:
            return
        if mode is not None and mode.lockstep:
            raise ValueError(
                f"speculative={mode!r} has the host read each step before the next one is "
                f"launched: it is for steps_per_launch=1, not {steps}"
            )
        if self.data_parallel > 1:
            raise ValueError(
                f"steps_per_launch={steps} is for ranks that have the same requests, not for "
                f"data_parallel={self.data_parallel}: a prompt of one rank would delay all others"
            )

    @property
    def packed_prompts(self) -> int:
        """Most prompts of a prefill replay: as many as there are slots for."""
        return min(self.prompts_per_prefill, self.max_batch)

    @property
    def _launches_of_step(self) -> int:
        """Most launches a step: a decode, and a chunk for each data-parallel rank, as the chunks of
        ranks may take different graphs.
        """
        return 1 + self.data_parallel

    @property
    def _loads_of_step(self) -> int:
        """Most loads a step. With data-parallel ranks: one before each kind of chunk, one before
        decode.
        """
        return 1 if self.data_parallel == 1 else 3

    def sequence_limit(self, max_positions: int) -> int:
        """Tokens of the longest request with a model of `max_positions`; ValueError if
        `max_seq_len` asks for more.
        """
        if self.max_seq_len is None:
            return min(max_positions, USUAL_SEQ_LEN)
        if self.max_seq_len > max_positions:
            raise ValueError(
                f"max_seq_len={self.max_seq_len} exceeds the model's {max_positions} positions "
                f"(max_position_embeddings, with dynamic RoPE times its factor)"
            )
        return self.max_seq_len

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """`dtype` as torch has it, also if it was given by name; None: the checkpoint decides."""
        return DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
