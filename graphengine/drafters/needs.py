"""A drafter's needs as data, by which the engine sizes, captures and schedules."""

from __future__ import annotations

from dataclasses import dataclass

from graphengine.models.states import LayerStates, cache_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftNeeds:
    """A drafter's needs, known as soon as it is made. The defaults ask for nothing."""

    length: int = 0
    """K: drafts a step, at most; with 0 it only observes."""
    depth: int = 0
    """Depth of its trees of drafts, whose nodes `length` counts; 0: its drafts are chains."""
    own_lanes: int = 0
    """Lanes of a row in its own widest launch, where they are more than the step's 1 + K."""
    prompt_lanes: int = 0
    """Lanes of each prompt in its widest launch after a prefill, where they are more than one."""
    states: tuple[LayerStates, ...] = ()
    """The states that each of its own layers keeps of a request. Paged ones are in blocks of one
    shape, numbered as the target's blocks; recurrent ones are among its own fields."""
    reserve: int = 0
    """Positions past the last verified one that it writes into its own KV."""
    tokens_after: int = 0
    """How many later tokens the KV at a position depends on, or is overwritten by."""
    notes: bool = False
    """Whether it reads the prompt's tokens; `note` then gets those that are not prefilled."""
    wants_hidden: bool = False
    """Whether `prepare` reads the hidden states of all tokens of a chunk."""
    reads_streams: bool = False
    """Whether it reads the target's residual stream after some layers, of every token."""
    host_drafts: bool = False
    """Whether the host writes `draft_tokens`, once it has the previous step's tokens."""
    guided: bool = False
    """Whether it drafts only for requests whose grammar the device follows: without any, steps have
    no drafts."""
    withholds: bool = False
    """Whether it leaves out drafts that are not worth verifying: a gate then also counts a row's
    steps without drafts."""
    prompts_only: bool = False
    """Whether a request ends after one sampled token, and is prefilled from its first token on."""
    collects: bool = False
    """Whether `collect` is called once the host has read the replay of a prompt chunk."""

    @property
    def tokens(self) -> int:
        """Tokens that a row emits in a step, at most."""
        return 1 + (self.depth or self.length)

    @property
    def lockstep(self) -> bool:
        """Whether each replay is read before the next is launched."""
        return self.host_drafts or self.prompts_only

    @property
    def lanes_of_row(self) -> int:
        """Lanes of each row in the widest launch, its own or the step's."""
        return max(1 + self.length, self.own_lanes)

    @property
    def lanes_of_prompt(self) -> int:
        """Lanes of each prompt in its widest launch after a prefill."""
        return max(1, self.prompt_lanes)

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        """Shape of a block of its own KV, [layers, 2, block_size, G, D]; [0] without any."""
        return cache_shape(self.states, block_size) if self.states else (0,)
