"""Compares an engine's log-probabilities with those of the torch model that a trainer has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphengine.testing.arguments import number
from graphengine.testing.errors import GraphCheckError, hide_frame

__tracebackhide__ = hide_frame

# Options that change the logits of a request before the filters, and their neutral values.
_CHANGES = {
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "logit_bias": None, "bad_words": None, "allowed_token_ids": None, "structured_outputs": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogprobAgreement:
    """Gaps |engine - model| between the log-probabilities of the tokens that an engine sampled.

    tokens            how many were compared
    mean, max         of their gaps
    prompt, position  the prompt and the token of the output with the largest gap, from 0
    token_id          that token, and both its log-probabilities
    """

    tokens: int
    mean: float
    max: float
    prompt: int
    position: int
    token_id: int
    engine_logprob: float
    model_logprob: float

    def __str__(self) -> str:
        return (
            f"mean gap {self.mean:.3g}, max {self.max:.3g} over {self.tokens} tokens; the largest "
            f"is at token {self.position} of prompt {self.prompt}, id {self.token_id}: "
            f"{self.engine_logprob:.5f} of the engine, {self.model_logprob:.5f} of the model"
        )


def logprob_agreement(
    engine: Any,
    model: Any,
    prompts: Sequence[Any],
    *,
    max_gap: float,
    mean_gap: float | None = None,
    params: Any = None,
    max_tokens: int = 32,
) -> LogprobAgreement:
    """GraphCheckError if the model gives other log-probabilities to the tokens the engine samples.

    engine      a `graphengine.Engine`; it generates from all prompts at once
    model       callable with ids int64 [1, T], which returns logits [1, T, V], or an object that
                has them as `logits`: a model of transformers. It is called without gradients, and
                with ids on the device of its first parameter
    prompts     as for `engine.generate`, without embeddings
    max_gap     bound of the largest gap; `mean_gap` of the mean, None for no bound
    params      sampling parameters; None: the engine's defaults with `max_tokens` new tokens

    The mode of the log-probabilities is that of `params` or the engine: with "sampled_logprobs" the
    model's logits are divided by the temperature first. ValueError for parameters whose effect on
    the logits the model does not know: penalties, bans and biases, except with "raw_logprobs";
    filters and min_tokens with "sampled_logprobs". Also ValueError where there is nothing to
    compare.

    The gaps are those of whole models: they do not tell which layer, or which kind of layer, a
    difference comes from, since an engine keeps no hidden states while it decodes. For prompts, an
    engine opened with `SaveHiddenStates` saves the residual stream after chosen layers.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts={prompts!r:.99} must be a sequence of prompts, not one prompt")
    if not callable(model):
        raise ValueError(f"model={model!r:.99} must be callable with ids")
    bounds = {"max_gap": number("max_gap", max_gap)}
    if mean_gap is not None:
        bounds["mean_gap"] = number("mean_gap", mean_gap)
    if params is None:
        params = dataclasses.replace(engine.default_params, max_tokens=max_tokens)
    params = dataclasses.replace(params, logprobs=params.logprobs or 0)
    temperature = _temperature(params, params.logprobs_mode or engine.config.logprobs_mode)
    gaps: list[tuple[float, int, int, int, float, float]] = []
    for index, result in enumerate(engine.generate([*prompts], params)):
        if result.finish_reason not in ("stop", "length"):
            raise GraphCheckError(
                f"prompt {index} ended with {result.finish_reason!r} after "
                f"{len(result.token_ids)} tokens: there is nothing to compare"
            )
        logprobs = _model_logprobs(model, result, temperature)
        for position, (token, row) in enumerate(
            zip(result.token_ids, result.logprobs, strict=True)
        ):
            ours, theirs = row[token].logprob, float(logprobs[position, token])
            gaps.append((abs(ours - theirs), index, position, token, ours, theirs))
    if not gaps:
        raise ValueError(f"{len(prompts)} prompts gave no token to compare")
    # A NaN is the largest gap.
    worst = max(gaps, key=lambda gap: (gap[0] != gap[0], gap[0]))
    found = LogprobAgreement(
        tokens=len(gaps),
        mean=sum(gap[0] for gap in gaps) / len(gaps),
        max=worst[0],
        prompt=worst[1],
        position=worst[2],
        token_id=worst[3],
        engine_logprob=worst[4],
        model_logprob=worst[5],
    )
    for name, bound in bounds.items():
        if not getattr(found, name.removesuffix("_gap")) <= bound:
            raise GraphCheckError(f"{found}: above {name}={bound:g}")
    return found


def _temperature(params: Any, mode: str) -> float:
    """The divisor of the model's logits; ValueError for parameters whose effect the model cannot
    know.
    """
    changed = {} if mode == "raw_logprobs" else _CHANGES
    if mode == "sampled_logprobs" and params.min_tokens:
        changed = {**changed, "min_tokens": 0}
    for name, neutral in changed.items():
        value = getattr(params, name)
        # An empty list or dict changes nothing.
        if value != neutral and not (neutral is None and not value):
            raise ValueError(f"{name}={value!r} changes {mode}, and the model does not know it")
    if mode != "sampled_logprobs":
        return 1.0
    if params.filtered:
        raise ValueError(
            f"top_k={params.top_k}, top_p={params.top_p}, min_p={params.min_p}, "
            f"top_n_sigma={params.top_n_sigma} change {mode}, and the model does not know them"
        )
    return float(params.temperature) or 1.0


def _model_logprobs(model: Any, result: Any, temperature: float) -> Tensor:
    """float32 [tokens, V]: the model's log-probabilities after each token's predecessors."""
    ids = [*result.prompt_token_ids, *result.token_ids]
    parameter = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    device = None if parameter is None else parameter.device
    with torch.no_grad():
        output = model(torch.tensor([ids[:-1]], dtype=torch.int64, device=device))
    logits = getattr(output, "logits", output)
    fits = isinstance(logits, Tensor) and logits.shape[:2] == (1, len(ids) - 1)
    if not fits or logits.shape[-1] <= max(ids):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the model gave {shape} for {len(ids) - 1} ids: logits are [1, T, V], of V above "
            f"{max(ids)}"
        )
    last = logits[0, len(result.prompt_token_ids) - 1 :].float()
    return torch.log_softmax(last / temperature, dim=-1).cpu()
