"""One replay of a policy: prefix and state once, then all denoising steps.

The prefix runs through the language model as one chunk whose positions all see each other, and
leaves its KV. The state is one position after the prefix and sees the prefix and itself. Its KV
does not depend on the denoising step, so it is computed once. Then the M actions run through the
expert once a step, at the positions after the state: they see the prefix, the state and each other,
and overwrite the KV of the step before (Black et al. 2024, "pi0: A Vision-Language-Action Flow
Model for General Robot Control").

Letters: T positions of the prefix's bucket, M actions of a chunk, D values of an action, S values
of a state, H width of the expert, W width of the language model, B blocks of KV.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from graphengine.buckets import Field, StaticBuffers
from graphengine.kernels.attention.prefill import paged_prefill_attention
from graphengine.kernels.core.launching import Launch
from graphengine.kernels.flow.euler import euler_step
from graphengine.kernels.flow.noise import normal_noise
from graphengine.kernels.norm_rope.embedding import GivenRows
from graphengine.kernels.step.state import PrefillLanes, gather_prefill
from graphengine.models.contract import Model
from graphengine.models.launches import ChunkAttention, PrefillLaunch
from graphengine.models.linears import LinearPlans
from graphengine.models.policies import PolicyConfig
from graphengine.models.states import StateTensors, cache_shape
from graphengine.policies.denoiser import MOST_ACTIONS, Denoiser
from graphengine.policies.weights import PolicyWeights

PREFIX, STATE, ACTIONS = range(3)
"""The parts of a sequence, in order."""
BLOCK_SIZE = 16
"""Positions of a block of KV."""
START_TIME = 1.0
"""The time of pure noise; actions have time 0."""


def positions_of(config: PolicyConfig, max_prefix: int) -> int:
    """The most positions of a sequence: prefix, state, actions."""
    return max_prefix + 1 + config.horizon


def policy_fields(
    config: PolicyConfig, max_prefix: int, dtype: torch.dtype, *, counters: int
) -> list[Field]:
    """The static fields of a policy whose longest prefix has T = `max_prefix` positions.

    counters  that programs of a launch share, as `counters_needed` says
    """
    M, D = config.horizon, config.action_dim
    blocks = -(-positions_of(config, max_prefix) // BLOCK_SIZE)
    int32, float32 = torch.int32, torch.float32
    return [
        Field(name="tokens", shape=(max_prefix,), dtype=int32, meaning="ids, or GIVEN - position"),
        Field(name="slot", shape=(1,), dtype=int32, pad=-1, meaning="0; -1: nothing is computed"),
        Field(name="starts", shape=(3,), dtype=int32, meaning="position of prefix, state, actions"),
        Field(name="counts", shape=(3,), dtype=int32, meaning="positions of each of them"),
        Field(name="prefix_seen", shape=(max_prefix,), dtype=int32, meaning="keys that each sees"),
        Field(name="state_seen", shape=(1,), dtype=int32, meaning="keys that the state sees"),
        Field(name="action_seen", shape=(M,), dtype=int32, meaning="keys that each action sees"),
        Field(name="state", shape=(config.state_dim,), dtype=float32, meaning="the robot's state"),
        Field(name="seed", shape=(1,), dtype=torch.int64, meaning="of the noise"),
        Field(name="use_noise", shape=(1,), dtype=int32, meaning="whether noise is given"),
        Field(name="given_noise", shape=(M, D), dtype=float32, meaning="noise, where it is given"),
        Field(name="fixed_rows", shape=(1,), dtype=int32, meaning="actions that are fixed"),
        Field(name="fixed", shape=(M, D), dtype=float32, meaning="their values"),
        Field(name="block_table", shape=(1, blocks), dtype=int32, meaning="blocks of KV, in order"),
        Field(name="embeds", shape=(max_prefix, config.prefix.hidden_size), dtype=dtype,
              owner="device", meaning="embeddings of positions without a token"),
        Field(name="arrivals", shape=(counters,), dtype=int32, owner="device",
              meaning="counters of a launch's programs, 0 between launches"),
        Field(name="noise", shape=(M, D), dtype=float32, owner="device", meaning="at time 1"),
        Field(name="actions", shape=(M, D), dtype=float32, owner="device",
              meaning="noise at first, actions once the replay has ended"),
        Field(name="action_input", shape=(M, D), dtype=dtype, owner="device",
              meaning="the same, as the expert reads it"),
    ]  # fmt: skip


class ActionStep:
    """The captured program of a policy; allocates only intermediates.

    Its tables of time are computed once: time is the same in each replay.

    plans  of the denoising steps, as `denoiser_plans` makes them
    """

    def __init__(
        self,
        config: PolicyConfig,
        weights: PolicyWeights,
        buffers: StaticBuffers,
        steps: int,
        plans: LinearPlans,
    ) -> None:
        self.config, self.weights, self.buffers = config, weights, buffers
        blocks = buffers["block_table"].shape[1]
        max_seq_len = blocks * BLOCK_SIZE
        self.prefix: Model = weights.prefix.open(max_seq_len=max_seq_len)
        self.expert: Model = weights.expert.open(max_seq_len=max_seq_len)
        self._denoiser = None
        if config.horizon <= MOST_ACTIONS:
            self._denoiser = Denoiser(config, weights, self.expert, plans, buffers["arrivals"])
        shape = cache_shape(config.prefix.states, BLOCK_SIZE)
        # Block 0 is never written, as in an engine's cache.
        self.cache = torch.zeros(
            (shape[0], blocks + 1, *shape[1:]), dtype=self.prefix.dtype, device=buffers.device
        )
        self.states = StateTensors(self.cache, buffers["block_table"])
        self.dt = -1.0 / steps
        self.times = [START_TIME + step * self.dt for step in range(steps)]
        self._time_rows = self._embedded_times()
        self._launch = Launch(arrivals=buffers["arrivals"])

    def _embedded_times(self) -> list[Tensor]:
        """The addition of each step's time to `joined`, [H] in the weights' dtype."""
        H, (shortest, longest) = self.config.expert.hidden_size, self.config.periods
        joined, device = self.weights.joined, self.buffers.device
        fraction = torch.linspace(0.0, 1.0, H // 2, dtype=torch.float32)
        frequency = 2 * math.pi / (shortest * (longest / shortest) ** fraction)
        rows = []
        for time in self.times:
            angle = torch.tensor(time, dtype=torch.float32) * frequency
            embedded = torch.cat([angle.sin(), angle.cos()]).to(joined.weight.dtype).to(device)
            row = joined.weight[:, H:].float() @ embedded.float() + joined.bias.float()
            rows.append(row.to(joined.weight.dtype))
        return rows

    def run(self, tokens: int) -> None:
        """Fill `actions` for a prefix of at most `tokens` positions."""
        buffers = self.buffers
        self._read_prefix(tokens)
        self._read_state()
        noise, x, rounded = (buffers[name] for name in ("noise", "actions", "action_input"))
        normal_noise(buffers["seed"], buffers["given_noise"], buffers["use_noise"], noise)
        x.copy_(noise)
        rounded.copy_(noise)
        lanes = self._lanes(ACTIONS, torch.zeros_like(buffers["action_seen"]))
        attention = self._attention(ACTIONS, lanes, buffers["action_seen"])
        for step, row in enumerate(self._time_rows):
            euler_step(
                x,
                self._velocity(rounded, row, lanes, attention),
                dt=self.dt,
                # The last step ends exactly at 0, whatever rounding the sum of times has.
                time=[*self.times, 0.0][step + 1],
                noise_MD=noise,
                fixed_MD=buffers["fixed"],
                fixed_1=buffers["fixed_rows"],
                out_MD=rounded,
            )

    def _read_prefix(self, tokens: int) -> None:
        buffers = self.buffers
        lanes = self._lanes(PREFIX, buffers["tokens"][:tokens])
        given = GivenRows(buffers["embeds"], buffers["starts"][:1], self.weights.prefix.given_scale)
        self.prefix.prefill(
            lanes,
            self.states,
            self._attention(PREFIX, lanes, buffers["prefix_seen"][:tokens]),
            launch=PrefillLaunch(given=given),
        )

    def _read_state(self) -> None:
        buffers, project = self.buffers, self.weights.state
        lanes = self._lanes(STATE, torch.zeros_like(buffers["state_seen"]))
        state = buffers["state"][None].to(project.weight.dtype)
        attention = self._attention(STATE, lanes, buffers["state_seen"])
        if self._denoiser is not None:
            self._denoiser.read_state(state, lanes, self.states, attention)
        else:
            self.expert.prefill(lanes, self.states, attention, stream=project(state).float())

    def _velocity(
        self, rounded: Tensor, time_row: Tensor, lanes: PrefillLanes, attention: ChunkAttention
    ) -> Tensor:
        """The velocity of each action, [M, D], at the time of `time_row`."""
        weights, H = self.weights, self.config.expert.hidden_size
        joined = F.linear(weights.action(rounded), weights.joined.weight[:, :H], time_row)
        joined = F.silu(joined)
        if self._denoiser is not None:
            return self._denoiser.velocity(joined, lanes, self.states, attention)
        # Too many lanes for the kernels of decode: the expert reads actions as a prompt's chunk.
        stream = weights.mixed(joined).float()
        end = self.expert.prefill(lanes, self.states, attention, all_lanes=True, stream=stream)
        assert end.hidden is not None, "all_lanes=True"
        return weights.velocity(end.hidden)

    def _lanes(self, part: int, tokens: Tensor) -> PrefillLanes:
        """The lanes of a part."""
        buffers = self.buffers
        start, count = (buffers[name][part : part + 1] for name in ("starts", "counts"))
        return gather_prefill(tokens, buffers["slot"], start, count)

    def _attention(self, part: int, lanes: PrefillLanes, seen: Tensor) -> ChunkAttention:
        """Attention of a part's lanes, each over the keys that it sees."""
        attend: Callable[..., Tensor] = partial(
            paged_prefill_attention,
            query_start_P1=lanes.query_start,
            slot_P=self.buffers["slot"],
            position_P=self.buffers["starts"][part : part + 1],
            seen_N=seen,
            launch=self._launch,
            few_lanes=part != PREFIX,
        )
        return attend
