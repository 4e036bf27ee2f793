"""The budget's lines for everything but weights and caches."""

from __future__ import annotations

from collections.abc import Sequence

from graphengine.buckets import Field, MemoryBudget, buffer_bytes, field_groups
from graphengine.models.states import kv_scale_bytes
from graphengine.opening.budget.host_memory import host_bytes
from graphengine.opening.engine_shape import EngineShape
from graphengine.opening.inventory import RingShape, mailboxes
from graphengine.program.feeds import fed_fields
from graphengine.program.fields import EMBEDS_FIELD, engine_fields, takes_grids, takes_images
from graphengine.program.frames import frame_fields
from graphengine.requests.processing import processing_fields


def add_state(budget: MemoryBudget, shape: EngineShape, counters: int) -> int:
    """Add all else that `allocate` makes, sized for the longest possible swap.

    counters  arrival counters that the launches of a step share

    Returns the bytes of the largest copy of host-owned fields.
    """
    fields = _most_fields(shape, counters)
    _add_fields(budget, shape, fields)
    # Each group is an allocation; its image is in pageable memory.
    groups = [buffer_bytes(group)[1] for group in field_groups(fields)]
    _add_host_owned(budget, shape, groups)
    _add_mailboxes(budget, shape)
    _add_other_ranks(budget, shape, sum(groups))
    return max(groups)


def _most_fields(shape: EngineShape, counters: int) -> list[Field]:
    """Every static field, for the longest possible swap."""
    config, model, drafter = shape.config, shape.model, shape.drafter
    swap_pairs = config.max_batch * shape.table_blocks
    if config.swap_blocks is not None:
        swap_pairs = max(1, min(swap_pairs, config.swap_blocks))
    return engine_fields(
        config,
        drafter,
        shape.field_sizes,
        states=model.states,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        table_blocks=shape.table_blocks,
        rings=shape.rings,
        swap_pairs=swap_pairs,
        arrivals=counters,
        grids=takes_grids(config, model),
        images=takes_images(config, model),
        deepstack=model.deepstack,
        inner=model.inner,
    )


def _add_fields(budget: MemoryBudget, shape: EngineShape, fields: Sequence[Field]) -> None:
    """Add the fields that replays see; fields that only some options need have their own lines."""
    config, drafter, model = shape.config, shape.drafter, shape.model
    options = processing_fields(
        config,
        vocab_size=shape.model.vocab_size,
        max_seq_len=shape.max_seq_len,
        width=1 + drafter.needs.length,
    )
    apart = {"request options": sum(field.nbytes for field in options)}
    if config.mode is not None:
        apart["drafter's state"] = sum(field.nbytes for field in drafter.fields(shape.field_sizes))
    if model.inner is not None:
        own = frame_fields(model.inner, shape.field_sizes)
        apart["state of frames"] = sum(field.nbytes for field in own)
        if model.inner.fed:
            codes = model.inner.fed_books
            apart["codes that stream in" if codes else "embeddings of frames"] = _fed_bytes(shape)
    if config.prompt_embeds:
        apart["prompt embeddings"] = next(
            field.nbytes for field in fields if field.name == EMBEDS_FIELD
        )
    if config.grammar_pool_mib:
        apart["request options"] -= config.grammar_pool_mib * 2**20
        apart["automata of grammars"] = config.grammar_pool_mib * 2**20
    on_device, _ = buffer_bytes(fields)
    rest = on_device - sum(apart.values()) + _table_bytes(shape)
    budget.add("state and tables", rest, shape.where)
    for name, size in apart.items():
        budget.add(name, size, shape.where)


def _table_bytes(shape: EngineShape) -> int:
    """Tables that the model and its drafter make, and the scales of their KV."""
    model, drafter = shape.model, shape.drafter
    tables = model.table_bytes(shape.max_seq_len) + drafter.table_bytes(shape.max_seq_len)
    tables += kv_scale_bytes(model.states) + kv_scale_bytes(drafter.needs.states)
    if model.inner is not None:
        tables += model.inner.table_bytes(shape.config.max_batch)
    relaxed = shape.config.relaxed_acceptance
    if relaxed is not None:
        tables += 4 * (len(relaxed.begin_token_ids) + len(relaxed.end_token_ids))
    return tables


def _add_host_owned(budget: MemoryBudget, shape: EngineShape, groups: Sequence[int]) -> None:
    """Add the staging blocks of these groups, and the images that they are filled from."""
    staged = sum(host_bytes(size, pinned=shape.on_gpu) for size in groups)
    budget.add("staging", shape.config.staging_blocks * staged, shape.pinned)
    images = sum(groups) + _mask_bytes(shape) + _fed_bytes(shape)
    budget.add("images of what the host owns", images, "host")


def _fed_bytes(shape: EngineShape) -> int:
    """Rows that stream into frames, which the host also keeps by slot."""
    inner, steps = shape.model.inner, shape.config.steps_per_launch
    fields = [] if inner is None else fed_fields(inner, shape.field_sizes, steps)
    return sum(field.nbytes for field in fields)


def _mask_bytes(shape: EngineShape) -> int:
    width = 1 + shape.drafter.needs.length
    return shape.config.max_batch * width * -(-shape.model.vocab_size // 32) * 4


def _add_mailboxes(budget: MemoryBudget, shape: EngineShape) -> None:
    length = shape.drafter.needs.length
    rings = mailboxes(
        shape.config,
        tokens_per_step=1 + length,
        prefill_tokens=shape.chunk,
        routed=shape.recorded,
        inner=shape.model.inner,
    )
    # Includes the table of drafts from which a grammar's masks are made.
    drafts = host_bytes(4 * shape.config.max_batch * length, pinned=shape.on_gpu)
    budget.add("mailbox", _ring_bytes(shape, rings.tokens) + drafts, shape.pinned)
    logprobs = _ring_bytes(shape, rings.logprobs, rings.prompt_logprobs)
    budget.add("log-probabilities", logprobs, shape.pinned)
    if rings.codes is not None:
        codes = _ring_bytes(shape, rings.codes, rings.codes_logprobs)
        budget.add("codes of frames", codes, shape.pinned)
        given = host_bytes(_given_code_bytes(shape), pinned=shape.on_gpu)
        budget.add("codes that requests give", given, shape.pinned)
    if shape.recorded is not None:
        routes = _ring_bytes(shape, rings.routes, rings.prompt_routes)
        budget.add("experts of tokens", routes, shape.pinned)
        replayed = host_bytes(_replayed_bytes(shape), pinned=shape.on_gpu)
        budget.add("experts that requests replay", replayed, shape.pinned)


def _ring_bytes(shape: EngineShape, *rings: RingShape | None) -> int:
    """Bytes of all rings that are not None, each an allocation of its own."""
    return sum(host_bytes(ring.nbytes, pinned=shape.on_gpu) for ring in rings if ring)


def _given_code_bytes(shape: EngineShape) -> int:
    """The table of codes that requests give; 0 where a step emits tokens."""
    steps = 0 if shape.model.inner is None else shape.model.inner.steps
    return 2 * shape.config.max_batch * shape.max_seq_len * steps


def _replayed_bytes(shape: EngineShape) -> int:
    """The table of experts that requests replay; 0 where none are recorded."""
    if shape.recorded is None:
        return 0
    ids = shape.recorded.layers * shape.recorded.chosen
    return 2 * shape.config.max_batch * shape.max_seq_len * ids


def _add_other_ranks(budget: MemoryBudget, shape: EngineShape, host_owned: int) -> None:
    """Add the driver's copies of the other data parallel ranks' fields: host-owned fields with
    their staging, and the expert routes that requests replay.
    """
    others = shape.config.data_parallel - 1
    if others:
        copies = (2 + shape.config.staging_blocks) * host_owned
        each = copies + _mask_bytes(shape) + _replayed_bytes(shape)
        budget.add(f"fields of {others} other rank{'s' * (others > 1)}", others * each, "host")
