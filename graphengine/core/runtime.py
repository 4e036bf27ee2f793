"""A runtime: the part of an engine that one GPU holds, and the operations on it.

It owns the static buffers, the caches, the mailboxes, the captured graphs and the stream. The host
decides; a runtime loads what the host changed, replays a graph by its key, and waits for what the
graph published. One of them serves one rank. What all ranks do alike is a command (`commands.py`).

On a CPU device there is no stream, and a replay calls the step that would have been captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from graphengine.buckets import CapturedGraph, CaptureReport, capture_all
from graphengine.config import EngineConfig
from graphengine.core.chunk_times import ChunkTimer, longest_prompt
from graphengine.core.commands import (
    Command,
    ReadBlocks,
    ReadScales,
    ReadStates,
    ReplayGraph,
    SlotOperations,
    Swap,
    WriteBlocks,
    WriteStates,
)
from graphengine.core.fingerprints import fingerprint, updated_fingerprint
from graphengine.core.waits import Waits
from graphengine.drafters import Drafter
from graphengine.host.state_checkpoints import BlockCopy, Copy, StateCopy
from graphengine.kernels.core.lanes import BITS
from graphengine.kernels.core.paged import FP8_KV
from graphengine.kernels.core.triton_versions import bits_of_triton
from graphengine.models.adapters.adapter import AdapterPart
from graphengine.models.checkpoints.given_tensors import GivenTensors
from graphengine.models.checkpoints.kv_scales import scales_id, scales_of_ranks
from graphengine.models.contract import Model
from graphengine.models.launches import RankGroup
from graphengine.models.plans.choosing import numerics_id
from graphengine.models.weights import StoredWeights
from graphengine.observe.rank_times import OneRank, RankTimes
from graphengine.observe.tracing import span
from graphengine.opening.allocation import (
    Allocation,
    allocate,
    ask_for_cache,
    compile_steps,
    graph_steps,
    swap_blocks,
)
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.opening.draft_updating import load_drafts
from graphengine.opening.records import RecordMemory
from graphengine.opening.releasable import ReleasableMemory, drop_cached_memory, not_filled_by
from graphengine.opening.updating import LoadedWeights
from graphengine.options.prefill_cut import ChunkTimes, PrefillCut, cut_within, measure_chunks
from graphengine.program.graph_key import GraphKey
from graphengine.program.stages import StageGroup
from graphengine.requests.grammar_pool import GrammarPool


class Graph(Protocol):
    """A graph that a runtime replays: a `CapturedGraph` or a stand-in for one."""

    def replay(self) -> None: ...


StandIn = TypeVar("StandIn", bound=Graph)
Operation = Callable[[Any, Any], Any]
"""Executes a command on a runtime."""


class Runtime(SlotOperations, Waits):
    """Allocates what `memory` planned for `model`, and captures every graph.

    All tensors keep their addresses until `close()`. Only one thread may call it. `group` has the
    ranks of the model, including this one, and `stages` the stages of its pipeline; None: there are
    no others. `records` is the memory of the mailboxes, if another process reads them.

    model         weights and tables
    buffers       every tensor that a replay can see, except weights and caches
    caches        pairs (KV of every block of the pool, including the dummy block 0; its swap area):
                  the target's, then the drafter's if it has one
    state_checkpoints
                  places for the states of recurrent layers
    mailbox       tokens and flags of each replay
    logprobs      the log-probabilities that requests asked for
    masks         the host's side of the masks for grammars and allowed ids
    routing       experts recorded of tokens, and experts for tokens to replay; None if experts are
                  not recorded
    codes         codes of frames; None where a step emits tokens
    program       the captured steps
    adapters      slots of adapters; None: there are none
    grammar_pool  the pool for automata of grammars; None: there is none
    cache_memory  the memory of all KV caches, if the engine can release it
    plans         the plan of each linear; `plan_sources` says where each came from
    graphs        graphs by key; `replaced` substitutes others
    captured      the graphs in the order of their capture; `captures` says what each took
    compilation   the kernels compiled for them; None on a CPU
    prefill_cut   where prompts are cut
    chunk_times   the times that the cut was chosen by; None if nothing was measured
    group         the model's ranks; None: there is one
    numerics_id   `Engine.numerics_id`
    stream        the stream of all replays and copies; None on a CPU
    device        the device of all of this
    launched      publishing steps so far: the sequence number of the last one
    rank_times    times of other ranks, for the recorder
    operations    executes each command, on this rank alone
    """

    rank_times: RankTimes = OneRank()
    # Only of an engine that has them: one attribute more would make every step slower.
    cache_memory: ReleasableMemory | None = None
    grammar_pool: GrammarPool | None = None

    def __init__(
        self,
        model: Model,
        memory: MemoryPlan,
        config: EngineConfig,
        drafter: Drafter,
        *,
        group: RankGroup | None = None,
        stages: StageGroup | None = None,
        records: RecordMemory | None = None,
    ) -> None:
        held = allocate(model, memory, config, drafter, group, stages, records)
        self.model, self.group = model, group
        self.plans, self.plan_sources = held.plans, held.plan_sources
        self.buffers, self.mailbox, self.logprobs = held.buffers, held.mailbox, held.logprobs
        self.masks, self.routing = held.masks, held.routing
        if held.codes is not None:
            self.codes = held.codes
        self.caches, self.program = held.caches, held.program
        self.state_checkpoints = held.state_checkpoints
        self.adapters = held.adapters
        if held.grammar_pool is not None:
            self.grammar_pool = held.grammar_pool
        if held.cache_memory is not None:
            self.cache_memory = held.cache_memory
        self.stream = held.stream
        self._copies = self._watched = held.stream
        self.launched, self.data_room = 0, memory.load_bytes
        # Fingerprints of the model's weights and of the drafter's once they are updated.
        self._updated = ("", "")
        self.device = memory.device
        self._mode, self._limit = config.wait, config.wait_limit_s
        self.graphs: dict[GraphKey, Graph] = {}
        self._capture(memory)
        try:
            self.prefill_cut, self.chunk_times = self._cut_prompts(memory, config, group)
        except BaseException:
            self.close()
            raise
        self.numerics_id = _numerics_id(
            model, memory, held, self.prefill_cut, config, self.kv_scales(group)
        )

    def _capture(self, memory: MemoryPlan) -> None:
        """Compile, warm up and capture every graph, largest first, with padded rows only."""
        steps = graph_steps(self.program, memory)
        # The pairs are padded, so nothing is copied.
        pairs = min(1, memory.swap_blocks)
        swap = partial(swap_blocks, self.caches, self.buffers, pairs, pairs)
        with self.on_stream():
            if memory.state_places:
                # Torch loads its kernels for these copies now, and not in the first step.
                self.state_checkpoints.copy([StateCopy(0, 0, 1, back) for back in (False, True)])
                self.state_checkpoints.copy([BlockCopy(0, 0)])
            self.buffers.reset()
            self.compilation = compile_steps(steps, memory.device, {"swap": swap})
            self.buffers.reset()
            swap()
            graphs = capture_all(
                {key.name: step for key, step in steps.items()},
                device=memory.device,
                stream=self.stream,
                buffers=self.buffers,
                warmups=0 if self.stream is None else 2,
                adjust=partial(ask_for_cache, self.plans.family, memory.device),
                around=self._around_capture,
            )
            if self.stream is None:
                # Nothing is compiled or captured: run the smallest step of each kind, as a check.
                for key in {(key.kind, key.variant): key for key in steps}.values():
                    steps[key]()
        self.graphs.update(zip(steps, graphs.values(), strict=True))
        self.captured: tuple[CapturedGraph, ...] = tuple(graphs.values())
        self.captures: tuple[CaptureReport, ...] = tuple(each.report for each in self.captured)
        self._clear()

    def _around_capture(self, name: str) -> AbstractContextManager[object]:
        """A context around the warm-up and capture of a graph."""
        return span(f"capture/{name}")

    def _cut_prompts(
        self, memory: MemoryPlan, config: EngineConfig, group: RankGroup | None
    ) -> tuple[PrefillCut, ChunkTimes | None]:
        """The prefill cut that the config names or bounds, else one at multiples of the largest
        bucket; and the times measured for it. ValueError if the smallest bucket exceeds the bound.

        Ranks measure together, and of each chunk's time all take the slowest rank's, so all go on
        alike. Only the driver cuts prompts, so only there an exceeded bound is an error.
        """
        sizes, bound = memory.prefill_ladder.sizes, config.max_prefill_ms_per_step
        longest = longest_prompt(memory)
        usual = PrefillCut(config.prefill_cut or ((0, sizes[-1]),)).within(longest, sizes[-1])
        if bound is None:
            return usual, None
        graphs = dict(zip(self.graphs, self.captured, strict=True))
        vocabulary = self.model.config.vocab_size
        with span("measure prefill"), self.on_stream():
            timer = ChunkTimer(graphs, self.buffers, self.caches, memory, config, vocabulary)
            chunk_ms = timer if group is None else partial(_slowest, timer, group, self.device)
            times = measure_chunks(chunk_ms, sizes, longest=longest, bound=bound)
            timer.clear()
        self._clear()
        if group is not None and group.share.rank:
            return usual, times
        return cut_within(times, longest=longest, bound=bound).within(longest), times

    def _clear(self) -> None:
        """Undo everything that graphs did before the first request."""
        with self.on_stream():
            self.buffers.reset()
        self.synchronize()
        self.mailbox.clear()
        self.logprobs.clear()
        if self.routing is not None:
            self.routing.clear()
        if self.codes is not None:
            self.codes.clear()

    # Calls of a step.

    def run(self, command: Command) -> Any:
        """Execute a command on all ranks; returns its result on this one."""
        return self.operations[type(command)](self, command)

    @property
    def next_replay(self) -> int:
        """The sequence number of the next step."""
        return self.launched + 1

    def replay(self, key: GraphKey) -> None:
        """Queue a graph on the stream; each of its steps takes the next sequence number."""
        self.run(ReplayGraph(key))

    def acknowledge(self, sequence: int) -> None:
        """Note that replays up to this one have published, so their loads have arrived."""
        self.buffers.acknowledge(sequence)

    def fetch_drafts(self) -> None:
        """Queue the copy of the drafts to the host, where a grammar's masks depend on them."""
        with self.on_stream():
            self._launch(partial(self.masks.fetch_drafts, self.launched))

    def _launch(self, work: Callable[[], object]) -> None:
        """Queue work on the stream; on a CPU, do it at once."""
        work()

    def wait_drafts(self, timeout: float | None) -> bool | None:
        """True once the drafts that were fetched after acknowledged replays are on the host; waits
        like `Waits`.
        """
        read = self.buffers.acknowledged
        return self.masks.wait(read, timeout=timeout, mode=self._mode, limit=self._limit)

    # Calls from outside a step.

    def on_stream(self) -> AbstractContextManager[Any]:
        """A context in which the stream is current; does nothing on a CPU."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        if self.stream is not None:
            self.stream.synchronize()

    def wait_for_caller(self) -> None:
        """Have the stream wait for what the caller's current stream has queued."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def fingerprints(self) -> tuple[str, str]:
        """Fingerprints of the model's weights and the drafter's; "" for a drafter without weights.

        Updated weights have a new fingerprint, which draft modules from the model's checkpoint
        share.
        """
        drafter, (updated, updated_drafts) = self.program.drafter, self._updated
        if updated and drafter.weights is not None and drafter.own_checkpoint is None:
            return updated, updated
        drafts = updated_drafts or self._drafter_fingerprint()
        return updated or self._model_fingerprint(), drafts

    def _model_fingerprint(self) -> str:
        """Fingerprint of the weights that were loaded when the engine was opened."""
        return fingerprint(self.model.weights)

    def _drafter_fingerprint(self) -> str:
        drafted = self.program.drafter.weights
        return "" if drafted is None else fingerprint(drafted)

    def note_update(self, loaded: LoadedWeights, given: GivenTensors) -> None:
        """Change the fingerprints, for an `update_weights` with the same arguments."""
        values, whole = loaded.used(given)
        updated, drafts = self._updated
        before = "" if whole else updated or self._model_fingerprint()
        self._updated = updated_fingerprint(before, loaded.whole, values), drafts

    def note_draft_update(self, given: GivenTensors) -> None:
        """Change the drafter's fingerprint, for an `update_drafts` with the same argument."""
        updated, drafts = self._updated
        before = drafts or self._drafter_fingerprint()
        self._updated = updated, updated_fingerprint(before, given.config, given.values)

    def update_weights(self, loaded: LoadedWeights, given: GivenTensors) -> None:
        """Fill weights with these values in place, and refresh what was derived from them.

        No replay may be in flight. It waits until the weights are filled, and before that for the
        work of the caller's stream on the values.
        """

        def fill() -> None:
            loaded.load(given)
            self.model.refresh()
            self.program.drafter.refresh()

        self._fill(fill)

    def update_drafts(self, given: GivenTensors) -> None:
        """Fill the weights of a drafter with a checkpoint of its own, like `update_weights`."""
        self._fill(partial(load_drafts, self.program.drafter, given))

    def _fill(self, fill: Callable[[], object]) -> None:
        """Write weights on the stream, after the caller's stream, and wait until it is done."""
        self.wait_for_caller()
        with self.on_stream(), torch.no_grad():
            fill()
        self.synchronize()
        if self.stream is not None:
            # Free the temporary memory of the update, which is not in the budget.
            torch.cuda.empty_cache()

    def load_adapter(
        self, loaded: LoadedWeights, slot: int, folder: Path, parts: Mapping[str, AdapterPart]
    ) -> None:
        """Copy an adapter, which was checked, into a slot, after everything that was queued."""
        assert self.adapters is not None, f"no slots for {folder}"
        with self.on_stream(), torch.no_grad():
            self.adapters.fill(slot, parts, loaded.adaptable)
        self.synchronize()

    def save_memory(self, loaded: LoadedWeights, *, drop: bool) -> None:
        """Copy the weights to the host; with `drop` only those that no update brings.

        RuntimeError where the host lacks the memory.
        """
        assert loaded.memory is not None, "not opened with releasable=True"
        self.synchronize()
        with self.on_stream():
            loaded.memory.save(not_filled_by(loaded.filled()) if drop else None)
        self.synchronize()

    def release_memory(self, loaded: LoadedWeights, *, cache: bool) -> int:
        """Give the memory of the saved weights back, and with `cache` that of the KV cache; returns
        how many bytes. It waits for everything that was queued.
        """
        assert loaded.memory is not None and self.cache_memory is not None
        self.synchronize()
        released = loaded.memory.release()
        if cache:
            released += self.cache_memory.release()
        drop_cached_memory(self.device)
        return released

    def restore_memory(self, loaded: LoadedWeights, *, cache: bool) -> None:
        """Have the memory of the weights again, or with `cache` that of the KV cache.

        RuntimeError where the device lacks it; then the call can be repeated.
        """
        memory = self.cache_memory if cache else loaded.memory
        assert memory is not None, "not opened with releasable=True"
        with self.on_stream():
            memory.restore()
        self.synchronize()

    def kv_scales(self, group: RankGroup | None = None) -> list[Tensor]:
        """Scales of all layers of each fp8 cache, `[ranks, L, 2, G]` on the host; only this rank's
        without a group.
        """
        drafter = self.program.drafter
        has_scales = self.caches[0][0].dtype == FP8_KV
        held: list[StoredWeights] = [self.model.weights] if has_scales else []
        if has_scales and drafter.needs.states:
            assert drafter.weights is not None, "a drafter with KV has weights"
            held.append(drafter.weights)
        with self.on_stream():
            return [scales_of_ranks(each, group) for each in held]

    def scales_id(self) -> str:
        """Digest of the scales of fp8 caches that one rank with all heads would have."""
        found: str = self.run(ReadScales())
        return found

    # Saved KV and states, in the layout of one rank that has the whole model.

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a block of each cache in `read_blocks`, layers first."""
        return tuple((cache.shape[0], *cache.shape[2:]) for cache, _ in self.caches)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the tensors that `read_states` returns."""
        return self.state_checkpoints.shapes

    @property
    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors that `read_states` returns."""
        return self.state_checkpoints.dtypes

    def read_blocks(self, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy KV blocks to the host, [layers, blocks, ...] for each cache; waits for it."""
        found: tuple[Tensor, ...] = self.run(ReadBlocks(tuple(blocks)))
        return found

    def write_blocks(self, blocks: Sequence[int], whole: Sequence[Tensor]) -> None:
        """Copy what `read_blocks` returned into these blocks, after everything that was queued."""
        self.run(WriteBlocks(tuple(blocks), whole))

    def read_states(self, place: int) -> tuple[Tensor, ...]:
        """Copy the states kept at this place to the host, [D, ...] each; waits for it."""
        found: tuple[Tensor, ...] = self.run(ReadStates(place))
        return found

    def write_states(self, place: int, whole: Sequence[Tensor]) -> None:
        """Copy what `read_states` returned to this place, after everything that was queued."""
        self.run(WriteStates(place, whole))

    # Operations on this rank, by command.

    def _swap(self, command: Swap) -> None:
        with self.on_stream():
            self._launch(partial(swap_blocks, self.caches, self.buffers, *command))

    def _copy(self, command: Copy) -> None:
        with self.on_stream():
            self._launch(partial(self.state_checkpoints.copy, (command,)))

    def _replay(self, command: ReplayGraph) -> None:
        self._launch(self.graphs[command.key].replay)
        self.launched += command.key.steps

    def _scales_id(self, command: ReadScales) -> str:
        return scales_id(layer for cache in self.kv_scales() for layer in cache[0])

    def _read_blocks(self, command: ReadBlocks) -> tuple[Tensor, ...]:
        with self.on_stream():
            index = torch.tensor(command.blocks, dtype=torch.int64, device=self.device)
            # A layer at a time, as the gathered blocks take device memory outside the budget.
            return tuple(_read_cache(cache, index) for cache, _ in self.caches)

    def _write_blocks(self, command: WriteBlocks) -> None:
        assert command.whole is not None, f"{command.blocks=}"
        with self.on_stream():
            index = torch.tensor(command.blocks, dtype=torch.int64, device=self.device)
            for (cache, _), parts in zip(self.caches, command.whole, strict=True):
                for layer, part in zip(_bits(cache), _bits(parts), strict=True):
                    layer.index_copy_(0, index, part.to(self.device))

    def _read_states(self, command: ReadStates) -> tuple[Tensor, ...]:
        with self.on_stream():
            return self.state_checkpoints.read(command.place)

    def _write_states(self, command: WriteStates) -> None:
        assert command.whole is not None, f"{command.place=}"
        with self.on_stream():
            self.state_checkpoints.write(command.place, command.whole)

    operations: ClassVar[dict[type[Command], Operation]] = {
        Swap: _swap,
        StateCopy: _copy,
        BlockCopy: _copy,
        ReplayGraph: _replay,
        ReadScales: _scales_id,
        ReadBlocks: _read_blocks,
        WriteBlocks: _write_blocks,
        ReadStates: _read_states,
        WriteStates: _write_states,
    }

    @contextmanager
    def replaced(
        self, replacement: Callable[[GraphKey, CapturedGraph], StandIn]
    ) -> Iterator[dict[GraphKey, StandIn]]:
        """Inside, replays run `replacement(key, graph)` for each captured graph; yields the
        replacements.

        For tools that time, compare or imitate replays. Enter and leave with no replay in flight.
        """
        before = dict(self.graphs)
        made = {
            key: replacement(key, graph) for key, graph in zip(before, self.captured, strict=True)
        }
        self.graphs.update(made)
        try:
            yield made
        finally:
            self.graphs.update(before)

    def close(self) -> None:
        """Free graphs, then their pool, buffers, caches and weights. Nothing works afterwards."""
        for graph in self.captured:
            graph.close()
        self.buffers.close()
        del self.graphs, self.captured, self.program, self.model, self.caches
        del self.state_checkpoints, self.adapters, self.masks, self.mailbox, self.logprobs
        del self.routing, self.buffers
        for name in ("cache_memory", "grammar_pool", "codes"):
            vars(self).pop(name, None)


def _read_cache(cache: Tensor, index: Tensor) -> Tensor:
    read = [layer.index_select(0, index).cpu() for layer in _bits(cache)]
    if not read:
        # All layers have rings.
        return cache.new_empty((0, len(index), *cache.shape[2:]), device="cpu")
    return torch.stack(read).view(cache.dtype)


def _bits(cache: Tensor) -> Tensor:
    """The cache's memory as integers, a dtype that every operation supports."""
    return cache.view(BITS[cache.element_size()])


def _slowest(
    chunk_ms: Callable[[int, int], float],
    group: RankGroup,
    device: torch.device,
    tokens: int,
    start: int,
) -> float:
    """The longest `chunk_ms` of all ranks."""
    own = torch.tensor([[chunk_ms(tokens, start)]], dtype=torch.float32, device=device)
    return float(group.gather(own).max())


def _numerics_id(
    model: Model,
    memory: MemoryPlan,
    held: Allocation,
    prefill_cut: PrefillCut,
    config: EngineConfig,
    kv_scales: Sequence[Tensor],
) -> str:
    """Hash of everything that the bits of an engine depend on."""
    prefill = memory.prefill_ladder.sizes
    ranks, stages = config.tensor_parallel, config.pipeline_parallel
    # The usual cut follows from the buckets, so it is not part of the hash.
    usual = prefill_cut.steps == ((0, prefill[-1]),)
    fp8: dict[str, str] = {}
    if memory.kv_dtype == FP8_KV:
        fp8 = {"kv_dtype": str(memory.kv_dtype), "kv_scales": scales_id(kv_scales[0].flatten(0, 1))}
    return numerics_id(
        model.config.linears,
        held.plans,
        dtype=memory.dtype,
        extra={
            "attention_split": held.program.launch.split_tokens,
            "block_size": memory.block_size,
            "prefill_buckets": ",".join(map(str, prefill)),
            **fp8,
            **bits_of_triton(memory.device.type),
            **({} if memory.activations is None else {"activations": memory.activations}),
            **({} if usual else {"prefill_cut": str(prefill_cut)}),
            **({"prefill_lanes": "any"} if held.program.launch.any_lanes else {}),
            **({} if ranks == 1 else {"tensor_parallel": ranks}),
            **({} if stages == 1 else {"pipeline_parallel": stages}),
            **({"expert_parallel": True} if config.expert_parallel else {}),
            **({} if memory.adapters is None else {"adapter_rank": memory.adapters.rank}),
            **({} if config.data_parallel == 1 else {"data_parallel": config.data_parallel}),
            **({} if held.program.frames is None else {"inner": held.program.frames.numerics}),
            **model.numerics(prefill),
        },
    )
