"""Makes the scheduler of an engine, or of a rank with requests of its own."""

from __future__ import annotations

from collections import Counter

from graphengine.config import EngineConfig
from graphengine.drafters import DraftNeeds
from graphengine.host.scheduler import Scheduler
from graphengine.opening.budget.memory_plan import MemoryPlan
from graphengine.options.prefill_cut import PrefillCut


def new_scheduler(
    memory: MemoryPlan,
    config: EngineConfig,
    needs: DraftNeeds,
    cut: PrefillCut,
    counters: Counter[str] | None = None,
) -> Scheduler:
    """The scheduler of an engine with these sizes, whose prompts end their chunks at `cut`.

    A recurrent layer's state depends on every earlier token: without state checkpoints no blocks
    are kept.
    """
    nothing = memory.recurrent and not memory.state_places
    return Scheduler(
        slots=config.max_batch,
        kv_blocks=memory.kv_blocks,
        swap_blocks=memory.swap_blocks,
        block_size=memory.block_size,
        max_chunk=memory.prefill_ladder.sizes[-1],
        cut=cut,
        tokens_per_step=memory.tokens_per_step,
        reserve_extra=needs.reserve,
        max_seq_len=memory.max_seq_len,
        ladder=memory.ladder,
        max_waiting=config.max_waiting,
        lookahead=config.launched_ahead,
        steps_per_launch=config.steps_per_launch,
        prompts_per_prefill=config.packed_prompts,
        prefix_caching=config.prefix_caching,
        kept_blocks=0 if nothing else config.session_blocks,
        tokens_after=needs.tokens_after,
        note_all=config.relaxed_acceptance is not None or needs.notes,
        rings=memory.rings,
        state_places=memory.state_places,
        counters=counters,
    )
