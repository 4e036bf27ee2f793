"""Where a checkpoint has a layer's experts, by name.

Letters: E experts, H hidden, F ffn width of an expert.
"""

from __future__ import annotations

from typing import NamedTuple


class ExpertNames(NamedTuple):
    """Names of a checkpoint's tensors, below the block's prefix.

    router       without ".weight"
    correction   of the scores by which experts are chosen
    products     linears of each expert, where "{}" is its index: gates, ups and down, or for
                 experts without gates ups and down; or two tensors of all experts: gates with ups
                 (or ups), and down
    ending       of the names of tensors of all experts
    alternating  whether in those each gate stands next to its up, with inputs before outputs:
                 [E, H, 2F] and [E, F, H], or in 4 bits the rows of a linear for each expert; else
                 gates come first, with outputs before inputs: [E, 2F, H] and [E, H, F]
    transposed   whether, with gates first, inputs come before outputs: [E, H, 2F] and [E, F, H]
    shared       prefix of the shared feed-forward's tensors
    latents      linears between the stream and the experts' latent: the first maps the stream to
                 the latent, the second maps the experts' sum back
    shared_gate  of the gate on the shared feed-forward's output, without ".weight"
    other        the names, or the layout, in other checkpoints of the family; None: all have the
                 same
    """

    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    products: tuple[str, ...] = (
        "experts.{}.gate_proj",
        "experts.{}.up_proj",
        "experts.{}.down_proj",
    )
    ending: str = ".weight"
    alternating: bool = False
    transposed: bool = False
    shared: str = "shared_experts."
    shared_gate: str = "shared_expert_gate"
    latents: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    other: ExpertNames | None = None

    @property
    def stacked(self) -> bool:
        """Whether all experts of a layer are in one tensor."""
        return "{}" not in self.products[0]

    def of_expert(self, index: int) -> tuple[str, ...]:
        """Names of the linears of an expert, or of all, without ".weight"."""
        return tuple(name.format(index) for name in self.products)


QWEN_NAMES = ExpertNames()
"""The names of Qwen3-MoE and DeepSeek-V3."""
