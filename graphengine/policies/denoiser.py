"""The velocity of a chunk's actions, by the kernels with which decode steps multiply.

Letters: M actions of a chunk, D values of an action, H width of the expert.
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
from graphengine.policies.weights import PolicyWeights

MOST_ACTIONS = MAX_LANES
"""The longest chunk whose products these kernels take."""


def denoiser_linears(config: PolicyConfig) -> Linears:
    """The products of a denoising step: those of the expert's layers, and what is around them."""
    H = config.expert.hidden_size
    of_layers = {name: each for name, each in config.expert.linears.items() if name != "lm_head"}
    around = {
        "mixed": Linear("residual", H, H),
        "velocity": Linear("store", config.action_dim, H),
    }
    return of_layers | around


def denoiser_plans(config: PolicyConfig, dtype: torch.dtype, device: torch.device) -> LinearPlans:
    """How each of these products is cut."""
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
            # Of decode attention, which a chunk does not have.
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

        joined  what actions and time give together, before the product that mixes them
        states  of prefix and expert; receives the actions' keys and values
        """
        weights, launch, slot = self.weights, self.launch, lanes.slot
        x = torch.zeros_like(joined_MH, dtype=torch.float32)
        stream = Residual(x, torch.empty_like(joined_MH), x.new_empty(1, len(x)))
        weight, bias = weights.mixed
        mixed = launch.call("mixed", joined_MH, weight, slot, bias=bias)
        residual = linear(mixed, AddResidual(stream, self.expert.first_norm))
        residual = decode_chunk(self.expert, lanes, residual, states, attention, launch)
        eps, (weight, bias) = self.config.expert.norm_eps, weights.velocity
        return linear(launch.call("velocity", residual, weight, slot, eps=eps, bias=bias), STORE)
