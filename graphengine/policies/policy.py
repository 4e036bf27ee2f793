"""`Policy`: a robot's policy whose chunk of actions is one CUDA graph replay."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from graphengine.buckets import BucketLadder, StaticBuffers, capture_all
from graphengine.buckets.threads import OwnThread
from graphengine.kernels.norm_rope.embedding import GIVEN
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.policies import MOST_STEPS, PolicyConfig, read_policy_config
from graphengine.models.quantised.config import quantisation_of
from graphengine.options.callers_tensors import plain_tensor
from graphengine.options.checks import check_at_least, is_int, shown
from graphengine.options.devices import DTYPES, check_device, usual_device
from graphengine.policies.action_step import ActionStep, policy_fields
from graphengine.policies.denoiser import counters_needed, denoiser_plans
from graphengine.policies.weights import PolicyWeights
from graphengine.prompt_embeds import check_embeds, rows_on_host
from graphengine.prompts import Chat, Prompt, PromptParts, prompt_ids
from graphengine.text.tokenizer import Tokenizer

Floats = np.ndarray[Any, np.dtype[np.float32]]

log = logging.getLogger(__name__)

_SMALLEST_BUCKET = 64


class Policy:
    """A policy that is ready to act: pi0, as transformers and LeRobot save it.

        with Policy.from_pretrained("path/to/pi0", max_prefix=1024) as policy:
            actions = policy.act(PromptParts(image_embeds, token_ids), state, seed=7)

    All memory is allocated and every graph captured by `from_pretrained`. It serves one robot: one
    chunk is computed at a time. The first thread that calls owns it, until that thread has ended;
    another one's call is a RuntimeError.

    config       sizes and steps
    max_prefix   the longest prefix, in positions
    prefix_buckets  prefix lengths with a graph of their own
    steps        denoising steps of a chunk
    dtype, device   of weights and KV
    """

    def __init__(
        self,
        config: PolicyConfig,
        weights: PolicyWeights,
        tokenizer: Tokenizer | None,
        *,
        buckets: BucketLadder,
        steps: int,
        device: torch.device,
    ) -> None:
        self.config, self.steps, self.device = config, steps, device
        self.dtype = weights.state.weight.dtype
        self._tokenizer, self._ladder = tokenizer, buckets
        plans = denoiser_plans(config, self.dtype, device)
        counters = counters_needed(config, plans)
        fields = policy_fields(config, self.max_prefix, self.dtype, counters=counters)
        self._buffers = StaticBuffers(fields, device, staging_blocks=2)
        self._launched, self._closed = 0, False
        self._check_thread = OwnThread("policy").check
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            torch.cuda.synchronize(device)
        with self._on_stream(), torch.no_grad():
            self._step = ActionStep(config, weights, self._buffers, steps, plans)
        names = {str(size): partial(self._run, size) for size in reversed(buckets.sizes)}
        with self._on_stream():
            self._graphs = capture_all(
                names,
                device=device,
                stream=self._stream,
                buffers=self._buffers,
                warmups=0 if self._stream is None else 2,
            )
            self._buffers.reset()
            self._load_constants()

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        device: str | None = None,
        dtype: str = "bfloat16",
        max_prefix: int = 1024,
        prefix_buckets: Sequence[int] | None = None,
        steps: int | None = None,
    ) -> Self:
        """Open a checkpoint: a directory or a hub id.

        device          "cpu", "cuda" or "cuda:N"; None: a GPU where there is one
        dtype           "bfloat16", "float16" or "float32", of weights and KV
        max_prefix      positions of the longest prefix: embeddings of images, and tokens
        prefix_buckets  prefix lengths with a graph of their own; the largest must be `max_prefix`.
                        None: `max_prefix` and its halves down to 64
        steps           denoising steps; None: as the checkpoint says

        ValueError, with the value found and the supported ones, for a checkpoint or an option that
        does not fit.
        """
        device = usual_device() if device is None else device
        check_device(device)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"dtype={shown(dtype)}: must be one of {', '.join(DTYPES)}")
        buckets = _ladder(max_prefix, prefix_buckets)
        checkpoint = Checkpoint.open(path)
        found = quantisation_of(checkpoint)
        if found is not None:
            raise ValueError(f"{checkpoint.path} has quantised weights ({found.method})")
        config = read_policy_config(checkpoint.config)
        if config.prefix.max_positions < buckets.sizes[-1] + 1 + config.horizon:
            raise ValueError(
                f"max_prefix={max_prefix}, a state and {config.horizon} actions exceed the "
                f"{config.prefix.max_positions} positions of the model"
            )
        if steps is not None:
            check_at_least("steps", steps, 1, MOST_STEPS)
        weights = PolicyWeights.allocate(config, device=device, dtype=DTYPES[dtype])
        weights.load(checkpoint)
        log.info("policy of %.2f GB, prefix buckets %s", weights.nbytes / 1e9, buckets.sizes)
        tokenizer = Tokenizer.from_directory(checkpoint.path) if checkpoint.has_tokenizer else None
        return cls(
            config,
            weights,
            tokenizer,
            buckets=buckets,
            steps=steps or config.steps,
            device=torch.device(device),
        )

    @property
    def max_prefix(self) -> int:
        return self._ladder.sizes[-1]

    @property
    def prefix_buckets(self) -> tuple[int, ...]:
        return tuple(self._ladder.sizes)

    def act(
        self,
        prefix: Prompt,
        state: ArrayLike | Tensor,
        *,
        seed: int = 0,
        noise: ArrayLike | Tensor | None = None,
        fixed: ArrayLike | Tensor | None = None,
    ) -> Tensor:
        """Denoise one chunk of actions.

        prefix  the policy's input: text, token ids, embeddings [n, W] of floating point on any
                device, or `PromptParts` of them. Embeddings are those of transformers'
                `embed_prefix`: of images after the projector, and in the place of `embed_tokens`.
                All positions see each other
        state   the robot's state, normalised as in training, up to `config.state_dim` values; the
                others are 0
        seed    of the noise, any int64. A chunk is a function of prefix, state, seed and `fixed`
        noise   float [horizon, action_dim] in place of the noise by seed
        fixed   [n, up to action_dim], n <= horizon: the first actions of the chunk are these, and
                the others are denoised beside them. So a chunk may begin with the actions that a
                robot is executing while this one is computed

        Returns float32 `[horizon, action_dim]`, normalised as in training, on the policy's device,
        in static memory: the next call overwrites it. It is ready for the caller's current stream;
        a copy to the host waits for it.

        ValueError, with the numbers, for arguments that do not fit, or that are not finite in the
        policy's dtype; then nothing is computed. Embeddings on a GPU are not checked: if they are
        not finite, no action is finite.
        """
        self._require_open()
        tokens, rows = self._read_prefix(prefix)
        length = len(tokens)
        values = {
            "state": _read_state(state, self.config.state_dim, self.dtype),
            "seed": [_checked_seed(seed)],
            **self._read_noise(noise),
            **self._read_fixed(fixed),
        }
        self._finish_last()
        M = self.config.horizon
        with self._on_stream(), torch.no_grad():
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            for first, part in rows:
                self._buffers["embeds"][first : first + len(part)].copy_(part, non_blocking=True)
            # Set before the load: if anything raises from here on, the next call may reuse the
            # block.
            self._launched += 1
            self._buffers.load(
                {
                    "tokens": np.asarray(tokens, dtype=np.int32),
                    "slot": [0],
                    "starts": [0, length, length + 1],
                    "counts": [length, 1, M],
                    "prefix_seen": np.full(length, length, dtype=np.int32),
                    "state_seen": [length + 1],
                    "action_seen": np.full(M, length + 1 + M, dtype=np.int32),
                    **values,
                },
                sequence=self._launched,
            )
        self._graphs[str(self._ladder.pick(length))].replay()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return self._buffers["actions"]

    def close(self) -> None:
        """Free graphs and memory; tensors that `act` returned must not be used any more."""
        if self._closed:
            return
        self._check_thread()
        self._finish_last()
        self._closed = True
        for graph in self._graphs.values():
            graph.close()
        del self._step
        self._buffers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, tokens: int) -> None:
        with torch.no_grad():
            self._step.run(tokens)

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the policy is closed")
        self._check_thread()

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream)

    def _finish_last(self) -> None:
        """Wait for the last replay, whose inputs the next load overwrites."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers.acknowledge(self._launched)

    def _load_constants(self) -> None:
        blocks = self._buffers["block_table"].shape[1]
        self._buffers.load({"block_table": [list(range(1, blocks + 1))]}, sequence=1)

    def _read_prefix(self, prefix: Prompt) -> tuple[list[int], list[tuple[int, Tensor]]]:
        """The token of each position, and embeddings with the position of their first row."""
        parts = prefix.parts if isinstance(prefix, PromptParts) else (prefix,)
        tokens: list[int] = []
        rows: list[tuple[int, Tensor]] = []
        for part in parts:
            if isinstance(part, Tensor) and (part.dim() != 1 or part.is_floating_point()):
                rows.append((len(tokens), self._checked_embeds(part)))
                first = len(tokens)
                tokens += [GIVEN - position for position in range(first, first + len(part))]
            elif isinstance(part, str | Sequence | Tensor) and not len(part):
                continue
            else:
                tokens += self._ids(cast("str | Sequence[int] | Chat", part), tokens)
            if len(tokens) > self.max_prefix:
                raise ValueError(
                    f"prefix of {len(tokens)} positions or more exceeds max_prefix="
                    f"{self.max_prefix}"
                )
        if not tokens:
            raise ValueError("the prefix is empty: it holds no position")
        return tokens, rows

    def _ids(self, part: str | Sequence[int] | Chat, before: Sequence[int]) -> tuple[int, ...]:
        return prompt_ids(
            part,
            tokenizer=self._tokenizer,
            vocab_size=self.config.prefix.vocab_size,
            max_seq_len=self.max_prefix,
            before=[token for token in before if token >= 0],
            room=0,
        )

    def _checked_embeds(self, part: Tensor) -> Tensor:
        """Embeddings without autograd history. On a GPU their values are not checked, as that would
        wait.
        """
        check_embeds(part, self.config.prefix.hidden_size)
        return rows_on_host(part, self.dtype) if part.device.type == "cpu" else part.detach()

    def _read_noise(self, noise: ArrayLike | Tensor | None) -> dict[str, Any]:
        if noise is None:
            return {"use_noise": [0]}
        found = _floats("noise", noise, self.dtype)
        shape = (self.config.horizon, self.config.action_dim)
        if found.shape != shape:
            raise ValueError(f"noise must be {list(shape)}, not {list(found.shape)}")
        return {"use_noise": [1], "given_noise": found}

    def _read_fixed(self, fixed: ArrayLike | Tensor | None) -> dict[str, Any]:
        if fixed is None:
            return {"fixed_rows": [0]}
        found = _floats("fixed", fixed, self.dtype)
        M, D = self.config.horizon, self.config.action_dim
        if found.ndim != 2 or len(found) > M or found.shape[1] > D:
            raise ValueError(
                f"fixed actions must be [n, d] with n up to {M} and d up to {D}, not "
                f"{list(found.shape)}"
            )
        values = np.zeros((len(found), D), dtype=np.float32)
        values[:, : found.shape[1]] = found
        return {"fixed_rows": [len(found)], "fixed": values}


def _read_state(state: ArrayLike | Tensor, most: int, dtype: torch.dtype) -> Floats:
    """A state filled up with zeros. ValueError if it is too long or not finite."""
    value = _floats("state", state, dtype)
    if value.ndim != 1 or len(value) > most:
        raise ValueError(f"state must have up to {most} values, not {list(value.shape)}")
    return np.pad(value, (0, most - len(value)))


def _floats(name: str, value: ArrayLike | Tensor, dtype: torch.dtype) -> Floats:
    """Numbers as float32 on the host. ValueError unless all are finite, in `dtype` too."""
    try:
        given = value if isinstance(value, Tensor | np.ndarray) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be numbers, not {shown(value)}: {error}") from error
    plain = plain_tensor(name, given)
    if plain.is_complex():
        raise ValueError(f"{name} must be real numbers, not {plain.dtype}")
    found = plain.float().cpu()
    if not found.to(dtype).isfinite().all():
        raise ValueError(f"{name} has values that are not finite in {dtype}")
    numbers: Floats = found.numpy()
    return numbers


def _checked_seed(seed: object) -> int:
    if not is_int(seed) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed={shown(seed)} must be an integer of 64 bits")
    return int(seed)


def _ladder(max_prefix: int, sizes: Sequence[int] | None) -> BucketLadder:
    """The prefix lengths with a graph."""
    check_at_least("max_prefix", max_prefix, 1)
    if sizes is None:
        sizes = [max_prefix]
        while sizes[0] // 2 >= _SMALLEST_BUCKET:
            sizes = [sizes[0] // 2, *sizes]
    if not isinstance(sizes, Sequence):
        raise ValueError(f"prefix_buckets={shown(sizes)} must be a list of prefix lengths")
    for size in sizes:
        check_at_least("prefix_buckets", size, 1)
    rising = all(first < second for first, second in pairwise(sizes))
    if not sizes or not rising or sizes[-1] != max_prefix:
        raise ValueError(
            f"prefix_buckets={list(sizes)} must rise and end with max_prefix={max_prefix}"
        )
    return BucketLadder(max_prefix, sizes)
