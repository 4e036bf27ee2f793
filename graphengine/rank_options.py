"""Checks of the options that spread an engine over several ranks."""

from __future__ import annotations

import torch

from graphengine.engine_sizes import EngineSizes


class RankOptions(EngineSizes):
    """The options of `EngineConfig` that ask for several ranks, and those that some kinds of ranks
    cannot serve. They are declared here; `EngineConfig` has their table.
    """

    __slots__ = ()

    expert_parallel: bool
    kv_dtype: str
    max_prefill_ms_per_step: float | None
    prompt_embeds: bool
    prompt_logprobs_out: bool
    record_routing: bool

    def check_ranks(self) -> None:
        """ValueError for options that need several ranks, or that these ranks cannot serve."""
        if self.prompt_logprobs_out and self.ranks > 1:
            # The other ranks are processes of their own, which cannot write the caller's tensor.
            raise ValueError(
                f"prompt_logprobs_out=True is for an engine of one rank, not for "
                f"{self.ranks_option}"
            )
        if self.grammar_pool_mib and self.ranks > 1:
            raise ValueError(
                f"grammar_pool_mib={self.grammar_pool_mib} is for an engine of one rank, not for "
                f"{self.ranks_option}"
            )
        if self.pipeline_parallel > 1:
            self._check_stages()
        if self.data_parallel > 1:
            self._check_data_ranks()
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError("expert_parallel=True is for several ranks, not tensor_parallel=1")

    def _check_data_ranks(self) -> None:
        """ValueError for options that ranks with requests of their own cannot serve."""
        ranks = self.data_parallel
        if self.tensor_parallel > 1:
            raise ValueError(
                f"data_parallel={ranks} and tensor_parallel={self.tensor_parallel}: ranks either "
                f"have requests of their own, or split all of them"
            )
        if self.expert_parallel:
            raise ValueError(
                f"expert_parallel=True is for tensor_parallel: with data_parallel={ranks} ranks "
                f"have whole experts anyway"
            )
        mode = self.mode
        simple = mode is None or mode.on_data_ranks
        self._check_alone("ranks that have the same requests", speculative=not simple)

    def _check_stages(self) -> None:
        """ValueError for options that the stages of a pipeline cannot serve."""
        stages = self.pipeline_parallel
        if self.data_parallel > 1:
            raise ValueError(
                f"pipeline_parallel={stages} and data_parallel={self.data_parallel}: all ranks of "
                f"a pipeline have the same requests, so one of them is 1"
            )
        if self.tensor_parallel > 1 and torch.device(self.device).type != "cpu":
            raise ValueError(
                f"{self.ranks_option} is for ranks on a CPU, not for device={self.device!r}: "
                f"stages on GPUs have one rank each"
            )
        mode = self.mode
        if mode is not None and not mode.in_stages:
            raise ValueError(
                f"speculative={mode!r} reads the stream after layers of several stages: it is for "
                f"an engine of one stage, not for pipeline_parallel={stages}"
            )
        self._check_alone(
            "an engine of one stage",
            record_routing=self.record_routing,
            speculative=mode is not None and mode.shape is not None,
        )

    def _check_alone(self, others: str, **more: bool) -> None:
        """ValueError if an option is set that data-parallel ranks and pipeline stages lack.

        others  the kind of engine that has these options, for the message
        more    further options that the caller's ranks lack, and whether each is set
        """
        asked = {
            "kv_dtype": self.kv_dtype != "auto",
            "max_prefill_ms_per_step": self.max_prefill_ms_per_step is not None,
            "prompt_embeds": self.prompt_embeds,
            **more,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for {others}, not for {self.ranks_option}"
                )
