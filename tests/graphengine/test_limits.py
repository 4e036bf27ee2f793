"""Limits that are written down twice, as options must not import torch to know their own."""

from __future__ import annotations

from graphengine import kernels, logits_params


def test_a_request_may_ask_for_as_many_logprobs_as_the_kernels_publish() -> None:
    assert logits_params.MAX_LOGPROBS == kernels.MAX_LOGPROBS
