"""Muon for the matrices of the layers, AdamW for the embedding and the norm gains.

Muon is Keller Jordan's (momentum, then the nearest orthogonal matrix by Newton-Schulz), with the
update size of Moonlight (arXiv 2502.16982), so that both optimisers take rates of one scale.
torch.optim.Muon updates the matrices one by one, and for these small ones the time is all launches;
here matrices of one shape form a batch.
"""

import torch
from torch import nn


def newton_schulz(matrices_NRC: torch.Tensor, *, iterations: int = 5) -> torch.Tensor:
    """Approximately the nearest semi-orthogonal matrices, R <= C; singular values 0.7 to 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices_NRC / (matrices_NRC.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: torch.Tensor = x.float()
    return orthogonal


class Muon:
    """Matrices of equal shape (up to a transpose) are updated together."""

    def __init__(
        self, parameters: list[nn.Parameter], *, weight_decay: float, momentum: float = 0.95
    ) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for parameter in parameters:
            rows, columns = sorted(parameter.shape)
            self.groups.setdefault((rows, columns), []).append(parameter)
        self.velocity = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            gradients = [p.grad for p in group if p.grad is not None]
            assert len(gradients) == len(group), f"{len(gradients)=} {len(group)=}"
            gradient = torch.stack([wide(g) for g in gradients])
            velocity = self.velocity[shape].lerp_(gradient, 1 - self.momentum)
            update = newton_schulz(gradient.lerp_(velocity, self.momentum))
            steps = [
                u if p.shape[0] <= p.shape[1] else u.mT
                for u, p in zip(update.unbind(), group, strict=True)
            ]
            values: list[torch.Tensor] = [p.data for p in group]
            torch._foreach_mul_(values, 1 - rate * self.weight_decay)
            torch._foreach_add_(values, steps, alpha=-rate * 0.2 * max(shape) ** 0.5)


def wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


class Optimiser:
    """Both optimisers, after clipping the gradients. Rates are given at each step."""

    def __init__(self, model: nn.Module, *, weight_decay: float) -> None:
        embedding = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.ndim == 2 and id(p) not in embedding]
        others = [p for p in parameters if p.ndim != 2 or id(p) in embedding]
        self.parameters = parameters
        self.muon = Muon(matrices, weight_decay=weight_decay)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, *, muon_rate: float, adam_rate: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.muon.step(muon_rate)
        self.adam.param_groups[0]["lr"] = adam_rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
