"""The static fields of an engine: one table of the tensors that a replay sees, and how a plan fills
them.

Letters: S slots, B blocks of a slot's table, T tokens of the largest prefill bucket, E stop ids of
a slot, P pairs of a swap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from graphengine.buckets import Field, LaneUpdate, Owner
from graphengine.config import EngineConfig
from graphengine.drafters import Drafter, FieldSizes
from graphengine.host.rings import WindowRing
from graphengine.host.step_plan import Plan, PrefillChunk
from graphengine.kernels.core.lanes import BITS
from graphengine.models.contract import ModelConfig
from graphengine.models.inner.drawn import FrameCoder
from graphengine.models.states import LayerStates, recurrent_fields
from graphengine.program.feeds import fed_fields
from graphengine.program.frames import frame_fields
from graphengine.program.relaxed import relaxed_field
from graphengine.prompt_embeds import Run
from graphengine.requests.caller_drafts import NO_DRAFTS, CallerDrafts
from graphengine.requests.processing import processing_fields, processing_updates
from graphengine.requests.request import Request
from graphengine.sampling_params import SAMPLER_FIELDS

EMBEDS_FIELD = "prefill_embeds"
ROPE_SHIFT, ROPE_ROWS = "rope_shift", "prefill_rope_rows"
PROMPT_ROWS = "prefill_rows"
SEEN_FIELD = "prefill_seen"
ADAPTER_OF_SLOT, ADAPTER_OF_CHUNK = "adapter", "prefill_adapter"


def field_table(
    *,
    slots: int,
    table_blocks: int,
    prefill_tokens: int,
    stop_ids: int,
    swap_pairs: int,
    arrivals: int,
    drafts: int = 0,
    host_drafts: bool = False,
    prompt_logprobs: bool = False,
    record_routing: bool = False,
    prompts: int = 1,
) -> list[Field]:
    """Every tensor a replay can see, except the weights, the KV cache and the drafter's fields.

    drafts           K, drafts of a step at most
    host_drafts      whether the host writes them, rather than a drafter on the device
    prompt_logprobs  whether requests may ask for log-probabilities of their prompts
    record_routing   whether requests may replay records of experts
    prompts          P, most prompts whose chunks a prefill feeds
    """
    int32, int64 = torch.int32, torch.int64

    def host(name: str, *shape: int, dtype: torch.dtype, pad: float, meaning: str) -> Field:
        return Field(name=name, shape=shape, dtype=dtype, owner="host", pad=pad, meaning=meaning)

    def device(name: str, *shape: int, dtype: torch.dtype, meaning: str) -> Field:
        return Field(name=name, shape=shape, dtype=dtype, owner="device", pad=0, meaning=meaning)

    S, P = slots, prompts
    optional: list[Field] = []
    if prompt_logprobs or drafts:
        meaning = "prompt token after each chunk"
        optional.append(host("prefill_next", P, dtype=int32, pad=-1, meaning=meaning))
    if record_routing:
        meaning = "positions whose experts are given"
        optional.append(host("routing_len", S, dtype=int32, pad=0, meaning=meaning))
    if drafts:
        meaning = "drafts that the slot's next step verifies; -1 for none"
        owner: Owner = "host" if host_drafts else "device"
        optional.append(
            Field(
                name="draft_tokens",
                shape=(S, drafts),
                dtype=int32,
                owner=owner,
                pad=-1,
                meaning=meaning,
            )
        )
    return [
        *optional,
        host("slot_of_row", S, dtype=int32, pad=-1, meaning="slot of each decode row"),
        host("block_table", S, table_blocks, dtype=int32, pad=0, meaning="KV blocks of each slot"),
        host("command_epoch", S, dtype=int32, pad=0, meaning="a new epoch resets the slot"),
        *(
            host(name, S, dtype=field.dtype, pad=field.pad, meaning=field.meaning)
            for name, field in SAMPLER_FIELDS.items()
        ),
        host("stop_ids", S, stop_ids, dtype=int32, pad=-1, meaning="ids that end the request"),
        host("min_len", S, dtype=int32, pad=0, meaning="no stop id at a position below it"),
        host("max_len", S, dtype=int32, pad=0, meaning="prompt plus new tokens at most"),
        host("prefill_tokens", prefill_tokens, dtype=int32, pad=0, meaning="prompt chunks"),
        host("prefill_slot", P, dtype=int32, pad=-1, meaning="slot of each chunk"),
        host("prefill_start", P, dtype=int32, pad=0, meaning="position of its first token"),
        host("prefill_count", P, dtype=int32, pad=0, meaning="live tokens of the chunk"),
        host("prefill_final", P, dtype=int32, pad=0, meaning="1: sample the first new token"),
        host("swap_pairs", swap_pairs, 2, dtype=int32, pad=-1, meaning="blocks (from, to) to copy"),
        device("next_token", S, dtype=int32, meaning="token that the next step feeds"),
        device("kv_len", S, dtype=int32, meaning="tokens whose K and V are committed"),
        device("running", S, dtype=int32, meaning="1: the slot decodes"),
        device("epoch", S, dtype=int32, meaning="stay that the slot's state belongs to"),
        device("arrivals", arrivals, dtype=int32, meaning="programs done; 0 between kernels"),
        device("sequence", 1, dtype=int64, meaning="replays that have published"),
    ]


def _ring_fields(rings: Sequence[WindowRing], slots: int, table_blocks: int) -> list[Field]:
    """The block tables of layers that keep only the newest tokens."""
    return [
        Field(
            name=ring.table,
            shape=(slots, table_blocks),
            dtype=torch.int32,
            owner="host",
            pad=0,
            meaning=f"blocks of each slot's ring, of window {ring.window}",
            # Copied only when the requests in the slots change.
            group="rings",
        )
        for ring in rings
    ]


def engine_fields(
    config: EngineConfig,
    drafter: Drafter,
    sizes: FieldSizes,
    *,
    states: Sequence[LayerStates],
    vocab_size: int,
    hidden_size: int,
    table_blocks: int,
    swap_pairs: int,
    arrivals: int,
    rings: Sequence[WindowRing] = (),
    grids: bool = False,
    images: bool = False,
    deepstack: int = 0,
    inner: FrameCoder | None = None,
) -> list[Field]:
    """All static fields of an engine. Allocation makes them, and the budget adds them up."""
    drafts = drafter.needs.length
    fields = field_table(
        slots=sizes.slots,
        table_blocks=table_blocks,
        prefill_tokens=sizes.prefill_tokens,
        stop_ids=config.max_stop_ids,
        swap_pairs=swap_pairs,
        arrivals=arrivals,
        drafts=drafts,
        host_drafts=drafter.needs.host_drafts,
        prompt_logprobs=config.prompt_logprobs,
        record_routing=config.record_routing,
        prompts=config.packed_prompts,
    )
    fields += processing_fields(
        config, vocab_size=vocab_size, max_seq_len=sizes.max_seq_len, width=1 + drafts
    )
    fields += recurrent_fields(states, sizes.slots, 1 + drafts, sizes.dtype)
    fields += _ring_fields(rings, sizes.slots, table_blocks)
    fields += drafter.fields(sizes)
    if config.relaxed_acceptance is not None:
        fields.append(relaxed_field(sizes.slots))
    if config.prompt_logprobs_out:
        fields.append(_prompt_rows_field())
    if config.prompt_embeds:
        fields.append(_embeds_field(sizes, (1 + deepstack) * hidden_size, config.packed_prompts))
    if grids:
        fields += _rope_fields(sizes)
    if images:
        fields.append(_seen_field(sizes))
    if config.adapter_slots:
        fields += _adapter_fields(sizes, config.packed_prompts)
    if inner is not None:
        fields += frame_fields(inner, sizes)
        fields += fed_fields(inner, sizes, config.steps_per_launch)
    return fields


def takes_grids(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether prompts may have grids of embeddings, whose positions have three axes."""
    axes = model.rope_axes is not None
    return config.prompt_embeds and axes and config.data_parallel == 1


def takes_images(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether prompts may have images of embeddings that see each other."""
    return config.prompt_embeds and model.bidirectional_images


def _prompt_rows_field() -> Field:
    """The caller's memory for log-probabilities of the whole vocabulary."""
    return Field(
        name=PROMPT_ROWS,
        shape=(2,),
        dtype=torch.int64,
        owner="host",
        pad=0,
        meaning="address and row stride of the caller's memory for the chunk's logprobs",
    )


def prompt_rows_updates(plan: Plan) -> dict[str, Any]:
    """The field of `_prompt_rows_field`, where a plan changes it."""
    if plan.prefill is None:
        return {}
    rows = plan.prefill.request.job.prompt_rows
    return {PROMPT_ROWS: [0, 0] if rows is None else [rows.data_ptr(), rows.stride(0)]}


def _seen_field(sizes: FieldSizes) -> Field:
    """How many keys each lane of a chunk sees."""
    return Field(
        name=SEEN_FIELD,
        shape=(sizes.prefill_tokens,),
        dtype=torch.int32,
        owner="host",
        pad=0,
        meaning="keys that each lane of the chunk sees",
    )


def seen_updates(plan: Plan) -> dict[str, Any]:
    """The field of `_seen_field`, where a plan changes it."""
    if plan.prefill is None or plan.prefill.noted:
        return {}
    seen = [
        chunk.request.job.embeds.seen(chunk.start, chunk.start + chunk.count)
        for chunk in plan.chunks
    ]
    return {SEEN_FIELD: np.concatenate(seen)}


def _rope_fields(sizes: FieldSizes) -> list[Field]:
    """The rows of RoPE's tables that rotate tokens, in prompts with grids of embeddings."""
    return [
        Field(
            name=ROPE_SHIFT,
            shape=(sizes.slots,),
            dtype=torch.int32,
            owner="host",
            pad=0,
            meaning="row of RoPE's tables minus position, past the prompt",
        ),
        Field(
            name=ROPE_ROWS,
            shape=(sizes.prefill_tokens, 3),
            dtype=torch.int32,
            owner="host",
            pad=0,
            meaning="rows of RoPE's tables of the chunk, by axis",
        ),
    ]


def _adapter_fields(sizes: FieldSizes, prompts: int) -> list[Field]:
    """The adapters of the requests in the slots, and of the chunks of a prefill."""
    lanes = {ADAPTER_OF_SLOT: sizes.slots, ADAPTER_OF_CHUNK: prompts}
    return [
        Field(
            name=name,
            shape=(count,),
            dtype=torch.int32,
            owner="host",
            pad=-1,
            meaning="slot of the request's adapter; -1 for none",
        )
        for name, count in lanes.items()
    ]


def adapter_updates(plan: Plan, slots: Sequence[Request | None]) -> dict[str, Any]:
    """The fields of `_adapter_fields` that a plan changes."""
    updates: dict[str, Any] = {}
    if plan.slots_changed:
        updates[ADAPTER_OF_SLOT] = [request and _adapter_slot(request) for request in slots]
    if plan.prefill is not None:
        updates |= chunk_adapters(plan.chunks)
    return updates


def chunk_adapters(chunks: Sequence[PrefillChunk]) -> dict[str, Any]:
    """The field with the adapters of chunks."""
    return {ADAPTER_OF_CHUNK: [_adapter_slot(chunk.request) for chunk in chunks]}


def _adapter_slot(request: Request) -> int:
    adapter = request.job.adapter
    return -1 if adapter is None else adapter.slot


def rope_updates(plan: Plan, slots: Sequence[Request | None]) -> dict[str, Any]:
    """The fields of `_rope_fields` that a plan changes."""
    updates: dict[str, Any] = {}
    if plan.slots_changed:
        updates[ROPE_SHIFT] = [request and request.job.rope_shift for request in slots]
    rows = [
        chunk.request.job.embeds.rope_rows(chunk.start, chunk.start + chunk.count)
        for chunk in plan.chunks
    ]
    return updates | ({ROPE_ROWS: np.concatenate(rows)} if rows else {})


def _embeds_field(sizes: FieldSizes, width: int, prompts: int) -> Field:
    """Embeddings of each chunk's positions, and of the one after it, which draft modules read.

    width    values of a position: its embedding, then the features that are added to the stream
    prompts  most prompts whose chunks a prefill feeds

    The host writes bits, as NumPy does not know every dtype.
    """
    return Field(
        name=EMBEDS_FIELD,
        shape=(sizes.prefill_tokens + prompts, width),
        dtype=BITS[sizes.dtype.itemsize],
        owner="host",
        pad=0,
        meaning="embeddings of the chunks' positions that have no token",
        # Copied only with chunks that have embeddings.
        group="embeds",
    )


def host_updates(
    plan: Plan, slots: Sequence[Request | None], *, speculative: bool = False
) -> dict[str, Any]:
    """The host-owned fields that `plan` changes; lanes that hold no request are padded.

    speculative  whether the fields that drafting needs exist
    """
    updates: dict[str, Any] = {}
    if plan.rows_changed:
        updates["slot_of_row"] = [request.job.placed.slot for request in plan.rows]
    if plan.tables_changed:
        updates["block_table"] = [request and request.job.placed.blocks for request in slots]
    if plan.slots_changed:
        updates |= _slot_fields(slots)
        if plan.options_changed:
            updates |= processing_updates(
                [None if request is None else request.job.processing for request in slots]
            )
    if plan.prefill is not None:
        if plan.packed:
            updates |= packed_updates(plan.chunks, speculative=speculative)
        else:
            updates |= chunk_updates(plan.prefill, speculative=speculative)
    if plan.swap_out or plan.swap_in:
        updates["swap_pairs"] = plan.swap_out or plan.swap_in
    return updates


NO_CHUNK: dict[str, Any] = {
    "prefill_slot": [-1],
    "prefill_start": [0],
    "prefill_count": [0],
    "prefill_final": [0],
}
"""The fields of a prefill that feeds nothing."""


def chunk_updates(chunk: PrefillChunk, *, speculative: bool = False) -> dict[str, Any]:
    """The fields of a prefill of one prompt; `speculative` as in `host_updates`."""
    return _chunk_fields(chunk, speculative=speculative) | _embeds_update((chunk,))


def packed_updates(chunks: Sequence[PrefillChunk], *, speculative: bool = False) -> dict[str, Any]:
    """The fields of a prefill of several prompts, whose tokens follow each other; `speculative` as
    in `host_updates`.
    """
    of_chunks = [_chunk_fields(chunk, speculative=speculative) for chunk in chunks]
    fields = {name: list(chain(*(each[name] for each in of_chunks))) for name in of_chunks[0]}
    return fields | _embeds_update(chunks)


def _chunk_fields(chunk: PrefillChunk, *, speculative: bool = False) -> dict[str, Any]:
    """A chunk's fields, but for its embeddings."""
    request, end = chunk.request, chunk.start + chunk.count
    updates = {
        "prefill_tokens": _device_tokens(request, chunk.start, end),
        "prefill_slot": [request.job.placed.slot],
        "prefill_start": [chunk.start],
        "prefill_count": [chunk.count],
        "prefill_final": [int(chunk.final)],
    }
    if speculative or request.prompt_logprobs is not None:
        following = _device_tokens(request, end, end + 1)
        updates["prefill_next"] = following or [-1]
    return updates


def _device_tokens(request: Request, first: int, stop: int) -> Sequence[int]:
    """The prompt's tokens at these positions, up to the prompt's end, in the form that the device
    reads.
    """
    ids, embeds = request.prompt_token_ids[first:stop], request.job.embeds
    return embeds.tokens(ids, first) if embeds else ids


def _embeds_update(chunks: Sequence[PrefillChunk]) -> dict[str, Any]:
    """The embeddings of the chunks' positions and of the one after each, a row each: a chunk's rows
    follow those of the chunk before it.
    """
    found: list[Run] = []
    first = 0
    for chunk in chunks:
        embeds, stop = chunk.request.job.embeds, chunk.start + chunk.count + 1
        if embeds and not chunk.noted:
            runs = embeds.within(chunk.start, stop).runs
            found += [run._replace(start=run.start - chunk.start + first) for run in runs]
        first += chunk.count + 1
    if not found:
        return {}
    start, rows = found[0].start, found[0].rows
    if len(found) > 1:
        rows = rows.new_zeros(found[-1].stop - start, rows.shape[1])
        for run in found:
            rows[run.start - start : run.stop - start] = run.rows
    bits = rows.view(BITS[rows.element_size()]).numpy()
    return {EMBEDS_FIELD: LaneUpdate(start, bits)}


def ring_updates(
    slots: Sequence[Request | None], rings: Sequence[WindowRing], table_blocks: int
) -> dict[str, Any]:
    """The block tables of rings, which change with the requests in the slots."""
    updates = {ring.table: np.zeros((len(slots), table_blocks), np.int32) for ring in rings}
    for slot, request in enumerate(slots):
        held = None if request is None else request.job.placed.ring
        if held is not None:
            for ring in rings:
                updates[ring.table][slot] = ring.table_row(held.number, table_blocks)
    return updates


def draft_updates(
    plan: Plan, slots: Sequence[Request | None], counters: Counter[str]
) -> dict[str, Any]:
    """Take the drafts that the host holds for the plan's rows.

    Drafts of other requests wait for a step with these requests. A step of one token a row takes
    none. `drafts/stale` counts drafts whose positions were emitted before a step could feed them,
    and drafts beyond the number that the step verifies.
    """
    fed: dict[Request, tuple[int, ...]] = {}
    for request in plan.rows:
        job, said = request.job, request.job.tokens
        left = job.drafts.after(said)
        counters["drafts/stale"] += len(job.drafts.token_ids) - len(left)
        if plan.width > 1:
            most = plan.width - 1
            counters["drafts/stale"] += len(left[most:])
            fed[request], left = left[:most], ()
        job.drafts = CallerDrafts(left, len(said)) if left else NO_DRAFTS
    return {"draft_tokens": [request and fed.get(request, ()) for request in slots]}


def _slot_fields(slots: Sequence[Request | None]) -> dict[str, Any]:
    """Fields that are set when a request enters its slot."""
    options = {
        name: [request and field.number(getattr(request.params, name)) for request in slots]
        for name, field in SAMPLER_FIELDS.items()
    }
    return options | {
        "command_epoch": [request and request.job.placed.epoch for request in slots],
        # The engine draws a seed where the request has none.
        "seed": [request and request.seed for request in slots],
        "stop_ids": [request and request.job.stops.ids for request in slots],
        "min_len": [request and request.job.min_len for request in slots],
        "max_len": [request and request.job.max_len for request in slots],
    }
