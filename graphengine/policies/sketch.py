"""The launches of a policy's replay, recorded over tensors without memory."""

from __future__ import annotations

from functools import partial

import torch

from graphengine.buckets import StaticBuffers
from graphengine.kernels.core.devices import H200, assumed
from graphengine.models.policies import PolicyConfig
from graphengine.observe.op_table import OpRow, row_maker
from graphengine.policies.action_step import ActionStep, policy_fields
from graphengine.policies.denoiser import counters_needed, denoiser_plans
from graphengine.policies.weights import PolicyWeights
from graphengine.program.launch_lists import describe_launches


def policy_rows(config: PolicyConfig, tokens: int, dtype: torch.dtype) -> list[OpRow]:
    """The launches of a chunk after a prefix of `tokens` positions, on an H200; torch's products
    are left out.
    """
    device = torch.device("meta")
    weights = PolicyWeights.allocate(config, device="meta", dtype=dtype)
    with assumed(H200), torch.inference_mode():
        plans = denoiser_plans(config, dtype, device)
        fields = policy_fields(config, tokens, dtype, counters=counters_needed(config, plans))
        buffers = StaticBuffers(fields, device, staging_blocks=2)
        step = ActionStep(config, weights, buffers, config.steps, plans)
        describe = row_maker(weights.named(), [step.cache])
        return describe_launches(partial(step.run, tokens), describe)
