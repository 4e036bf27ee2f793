"""The velocity of a chunk's actions, by the kernels with which decode steps multiply.

Letters: N lanes, M actions of a chunk, D values of an action, S values of a state, H width of the
expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphengine.kernels.attention.prefill import PREFILL_ARRIVALS
from graphengine.kernels.core.devices import overlaps_launches
from graphengine.kernels.linear.call import MAX_LANES
from graphengine.kernels.linear.epilogues import STORE, AddResidual
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import arrivals_needed
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.step.state import PrefillLanes
from graphengine.models.contract import Model
from graphengine.models.inner.chunk import decode_chunk
from graphengine.models.launches import ChunkAttention, DecodeLaunch
from graphengine.models.linears import Linear, LinearPlans, Linears
from graphengine.models.plans.choosing import choose_plans
from graphengine.models.policies import PolicyConfig
from graphengine.models.states import StateTensors
from graphengine.policies.weights import PolicyWeights, Projection

MOST_ACTIONS = MAX_LANES
"""The longest chunk whose products these kernels take."""


def denoiser_linears(config: PolicyConfig) -> Linears:
    """The products that read state and actions: those of the expert's layers, and around them."""
    H = config.expert.hidden_size
    of_layers = {name: each for name, each in config.expert.linears.items() if name != "lm_head"}
    around = {
        "state": Linear("residual", H, config.state_dim),
        "mixed": Linear("residual", H, H),
        "velocity": Linear("store", config.action_dim, H),
    }
    return of_layers | around


def denoiser_plans(config: PolicyConfig, dtype: torch.dtype, device: torch.device) -> LinearPlans:
    """The plan of each of these products."""
    return choose_plans(denoiser_linears(config), dtype, "dot", device)[0]


def counters_needed(config: PolicyConfig, plans: LinearPlans) -> int:
    """Arrival counters that the launches of a replay share."""
    linears = denoiser_linears(config)
    split = (arrivals_needed(plan, linears[name].rows) for name, plan in plans.items())
    return max(PREFILL_ARRIVALS, *split)


class Denoiser:
    """The expert with the products around it, ready to run once for each denoising step.

    expert  of `weights`, opened
    plans   of its products
    """

    def __init__(
        self,
        config: PolicyConfig,
        weights: PolicyWeights,
        expert: Model,
        plans: LinearPlans,
        arrivals: Tensor,
    ) -> None:
        self.config, self.weights, self.expert = config, weights, expert
        self.launch = DecodeLaunch(
            plans=plans,
            # A size for decode attention, which a chunk does not use.
            split_tokens=0,
            arrivals=arrivals,
            pdl=overlaps_launches(arrivals.device),
        )

    def velocity(
        self,
        joined_MH: Tensor,
        lanes: PrefillLanes,
        states: StateTensors,
        attention: ChunkAttention,
    ) -> Tensor:
        """New [M, D]: the velocity of each action.

        joined_MH  the projections of actions and time together, before the product that mixes them
        states     of prefix and expert; receives the actions' keys and values
        """
        launch, eps = self.launch, self.config.expert.norm_eps
        residual = self._begun("mixed", joined_MH, self.weights.mixed, lanes)
        residual = decode_chunk(self.expert, lanes, residual, states, attention, launch)
        weight, bias = self.weights.velocity
        call = launch.call("velocity", residual, weight, lanes.slot, eps=eps, bias=bias)
        return linear(call, STORE)

    def read_state(
        self, state_1S: Tensor, lanes: PrefillLanes, states: StateTensors, attention: ChunkAttention
    ) -> None:
        """Leave the keys and values of the robot's state, [1, S]; arguments as for `velocity`."""
        residual = self._begun("state", state_1S, self.weights.state, lanes)
        launch = self.launch
        decode_chunk(self.expert, lanes, residual, states, attention, launch, states_alone=True)

    def _begun(
        self, name: str, x_NK: Tensor, projection: Projection, lanes: PrefillLanes
    ) -> Residual:
        """A stream that begins with the projection of `x_NK`, scaled for the first norm."""
        weight, bias = projection
        x = torch.zeros(len(x_NK), len(weight), dtype=torch.float32, device=x_NK.device)
        stream = Residual(x, torch.empty_like(x, dtype=x_NK.dtype), x.new_empty(1, len(x)))
        call = self.launch.call(name, x_NK, weight, lanes.slot, bias=bias)
        return linear(call, AddResidual(stream, self.expert.first_norm))
