"""The part of a step in which the codes of a frame after the first are drawn.

    begin     the embedding of the last frame begins a decode step's stream
    draw      the first code's tiles -> all codes that are not given, and the frame's token
    publish   the codes go to the host, once the step has published its token

`InnerStep` draws them one after the other, by an inner decoder; `heads_step.py` draws all at once.

Code k of the frame whose token will sit at position p is drawn with the noise of position
p + k * 2**24, which no token has: so it depends on the request's seed, the frame and the code
alone.

Letters: N lanes, S slots, K codes of a frame, V codes of a codebook, C tiles of a codebook, H
hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphengine.buckets import Field, StaticBuffers
from graphengine.drafters import FieldSizes
from graphengine.kernels.experts.records import publish_routes
from graphengine.kernels.frames.codes import FrameEnd, FrameToken, end_frame, take_code
from graphengine.kernels.frames.embed import embed_frames
from graphengine.kernels.frames.given import given_codes
from graphengine.kernels.linear.epilogues import LOGITS, SampleTiles
from graphengine.kernels.linear.linear import linear
from graphengine.kernels.linear.plans import RowFamily
from graphengine.kernels.linear.residual import Residual
from graphengine.kernels.sample.candidates import SamplingTensors
from graphengine.kernels.sample.sampling import sample_tiles
from graphengine.kernels.step.state import DecodeLanes
from graphengine.models.inner.drawn import FrameCoder, FrameWeights
from graphengine.models.inner.inner_decoder import InnerDecoder
from graphengine.models.inner.steps import InnerSteps
from graphengine.models.inner.weights import InnerWeights
from graphengine.models.launches import DecodeLaunch
from graphengine.models.linears import LinearPlans
from graphengine.models.plans.choosing import choose_plans
from graphengine.options.code_sampling import DrawnCode
from graphengine.program.code_logprobs import CodeLogprobs
from graphengine.program.feeds import fed_rows
from graphengine.program.graph_key import Sampler
from graphengine.requests.request import Request

CODES_FIELD, CACHE_FIELD = "frame_codes", "inner_cache"
GIVEN_FIELD = "codes_given"
DRAWN_FIELDS = {name: f"codes_{name}" for name in DrawnCode._fields}
"""Fields of how codes after the first are drawn, by the name of the option."""
# Slots of a row are padded to whole 16 bytes, as kernels are compiled for where a row begins.
ALIGNED = 4
CODE_STRIDE = 2**24
"""Distance in noise positions from one code of a frame to the next."""
MOST_POSITIONS = CODE_STRIDE
MOST_STEPS = 2**31 // CODE_STRIDE - 1


def inner_fields(config: FrameCoder, sizes: FieldSizes) -> list[Field]:
    """The codes of each slot's last frame, an inner decoder's cache, and how codes are drawn."""

    def device(name: str, shape: tuple[int, ...], dtype: torch.dtype, meaning: str) -> Field:
        return Field(name=name, shape=shape, dtype=dtype, owner="device", pad=0, meaning=meaning)

    def host(name: str, dtype: torch.dtype, pad: float) -> Field:
        shape = (config.steps - 1, -(-sizes.slots // ALIGNED) * ALIGNED)
        meaning = f"{name} of each code after the first, by slot"
        name = DRAWN_FIELDS[name]
        return Field(
            name=name,
            shape=shape,
            dtype=dtype,
            owner="host",
            pad=pad,
            meaning=meaning,
            # Copied only when the requests in the slots change.
            group="codes",
        )

    given = Field(
        name=GIVEN_FIELD,
        shape=(sizes.slots,),
        dtype=torch.int32,
        owner="host",
        pad=0,
        meaning="position at which the slot's given frames end",
        group="codes",
    )
    codes = sizes.slots, config.steps
    fields = [given, device(CODES_FIELD, codes, torch.int32, "codes of the slot's last frame")]
    if config.steps > 1:
        fields += [
            host("temperature", torch.float32, 0),
            host("top_k", torch.int32, 0),
            host("top_p", torch.float32, 1),
        ]
    if isinstance(config, InnerDecoder):
        cache = config.cache_shape(sizes.slots)
        fields.append(
            device(CACHE_FIELD, cache, sizes.dtype, "keys and values of the inner decoder")
        )
    return fields


def drawn_updates(
    requests: Sequence[Request | None], config: FrameCoder
) -> dict[str, NDArray[Any]]:
    """The fields of how codes are drawn, where a plan changes the requests in the slots."""
    if config.steps == 1:
        return {}
    count, slots = config.steps - 1, -(-len(requests) // ALIGNED) * ALIGNED
    nothing = (DrawnCode(0.0, 0, 1.0),) * count
    drawn = [nothing if request is None else request.job.drawn_codes for request in requests]
    drawn += [nothing] * (slots - len(drawn))
    return {
        name: np.array([[getattr(code, option) for code in each] for each in drawn]).T
        for option, name in DRAWN_FIELDS.items()
    }


class Frame(NamedTuple):
    """The codes that a step has drawn for its lanes; valid until the next replay."""

    token: FrameToken
    code: Tensor
    """int32 [K, N]: the codes of the live lanes, -1 where none could be drawn."""
    logprob: Tensor | None
    """float32 [K, N], in lanes that want them; None where no lane may."""


class FrameStep(ABC):
    """Draws the codes of frames in the steps of its model.

    launch    how the model's kernels are launched
    family    of the products
    eps       of the model's final norm
    given     int16 [S, P, K]: codes of frames by position, -1 where they are drawn
    mailbox   receives the codes, in the layout of experts' ids: K layers of one id each
    logprobs  receives their log-probabilities, K items for each lane
    sampled   whether these may be those of the distribution that codes are drawn from
    first_codes  codes of the first codebook where these are the model's ids, else 0
    """

    plans: LinearPlans

    def __init__(
        self,
        weights: FrameWeights,
        buffers: StaticBuffers,
        launch: DecodeLaunch,
        *,
        family: RowFamily,
        eps: float,
        given: Tensor,
        mailbox: Tensor,
        logprobs: Tensor,
        sampled: bool,
    ) -> None:
        self._frames, self._launch = weights.frames, launch
        self._first_book = weights.first_book
        self._fed = fed_rows(weights, buffers)
        self.first_codes = weights.config.first_codes
        self._codes, self._eps = buffers[CODES_FIELD], eps
        self._given, self._given_until = given, buffers[GIVEN_FIELD]
        self._mailbox, self._sequence = mailbox, buffers["sequence"]
        self._sampling = SamplingTensors(*(buffers[name] for name in SamplingTensors._fields))
        steps, slots = weights.config.steps, len(self._codes)
        # There are no fields for the codes after the first where there is only one.
        drawn = {option: buffers[name] for option, name in DRAWN_FIELDS.items() if steps > 1}
        self._sampling_of = [
            self._sampling._replace(**{name: rows[row, :slots] for name, rows in drawn.items()})
            for row in range(steps - 1)
        ]
        self._logprobs = CodeLogprobs(
            buffers, (self._sampling, *self._sampling_of), logprobs, sampled=sampled
        )
        self._prepare(weights, buffers, family)

    @abstractmethod
    def _prepare(self, weights: Any, buffers: StaticBuffers, family: RowFamily) -> None:
        """Prepare the products and buffers that draw the codes; sets `plans`."""

    @property
    def numerics(self) -> str:
        """The plans of the products: codes' bits depend on them and on the model."""
        return ", ".join(f"{name} {plan}" for name, plan in self.plans.items())

    def begin(self, lanes: DecodeLanes, norm_H: Tensor, residual: Residual) -> None:
        """Begin a decode step's stream with the embedding of each lane's last frame, plus the row
        that streams into it.
        """
        embed_frames(
            self._codes,
            self._frames,
            lanes.slot,
            norm_H,
            residual,
            first_UH=self._first_book,
            fed=self._fed,
            position_N=lanes.position,
            pdl=self._launch.pdl,
        )

    @abstractmethod
    def draw(
        self,
        best_NC: Tensor,
        health_NC: Tensor,
        lanes: DecodeLanes,
        hidden: Residual | Tensor,
        *,
        sampler: Sampler,
        logits: Tensor | None,
        pdl: bool,
    ) -> Frame:
        """Draw a frame whose first code has these tiles.

        hidden   the model's stream, scaled for its final norm, or `[N, H]` after it
        sampler  of the later codes; "full" applies the requests' filters
        logits   of the first code; None without "full", and where no lane may want
                 log-probabilities
        """

    def _note(
        self,
        place: int,
        logits: Tensor | None,
        frame: Tensor,
        lanes: DecodeLanes,
        out: Tensor | None,
        pdl: bool,
    ) -> None:
        """Note the log-probabilities of the codes at this place, where lanes may want them."""
        if logits is not None and out is not None:
            self._logprobs.note(place, logits, frame[place], lanes, out, pdl=pdl)

    def publish(self, frame: Frame, count_R: Tensor, slot_R: Tensor, *, pdl: bool) -> None:
        """Publish the codes of the rows that have a frame; the step itself has published."""
        code = frame.code[:, :, None]
        publish_routes(self._mailbox, self._sequence, count_R, slot_R, code, pdl=pdl)
        if frame.logprob is not None:
            self._logprobs.publish(frame.logprob, count_R, slot_R, pdl=pdl)


class InnerStep(FrameStep):
    """An inner decoder in the steps of its model."""

    def _prepare(self, weights: InnerWeights, buffers: StaticBuffers, family: RowFamily) -> None:
        config = weights.config
        self.config, self._weights = config, weights
        self._steps = InnerSteps(weights, buffers[CACHE_FIELD], len(self._codes))
        dtype = weights.norm.dtype
        self.plans, _ = choose_plans(config.linears, dtype, family, buffers.device)
        self._launch = self._steps.launch_with(self._launch, self.plans)
        self._end = FrameEnd(config.end_code, config.judged, config.end_token)
        # The first codebook as the inner decoder reads it.
        self._inner_first = weights.first_book if weights.own_first is None else weights.own_first

    def draw(
        self,
        best_NC: Tensor,
        health_NC: Tensor,
        lanes: DecodeLanes,
        hidden: Residual | Tensor,
        *,
        sampler: Sampler,
        logits: Tensor | None,
        pdl: bool,
    ) -> Frame:
        """Draw a frame, one run of the inner decoder after the other."""
        config, slot = self.config, lanes.slot
        lanes_count, launch = slot.numel(), replace(self._launch, pdl=pdl)
        frame = given_codes(self._given, self._given_until, slot, lanes.position, pdl=pdl)
        x = torch.empty(
            (2 - config.per_run, lanes_count, config.hidden_size),
            dtype=torch.float32,
            device=slot.device,
        )
        logprob = None if logits is None else self._logprobs.new(lanes_count)
        tiles = best_NC, health_NC
        embedded = self._taken(tiles, slot, frame, x, 0, pdl)
        self._note(0, logits, frame, lanes, logprob, pdl)
        if not config.per_run:
            self._steps.begin(hidden, self._eps, slot, x[0], launch)
        for place in range(1, config.steps):
            if config.per_run:
                output = self._steps.run_own(place, hidden, self._eps, slot, embedded, launch)
            else:
                stream = x[1] if place == 1 else x[0]
                output = self._steps.run(place, embedded, slot, stream, launch)
            tiles, logits = self._tiles(place, output, lanes, sampler, launch)
            if place < config.steps - 1:
                # By now the previous position's output has been read.
                x = torch.empty_like(x[:1])
                embedded = self._taken(tiles, slot, frame, x, place, pdl)
                self._note(place, logits, frame, lanes, logprob, pdl)
        token = end_frame(*tiles, slot, frame, self._codes, self._end, pdl=pdl)
        self._note(config.steps - 1, logits, frame, lanes, logprob, pdl)
        return Frame(token, frame, logprob)

    def _taken(
        self,
        tiles: tuple[Tensor, Tensor],
        slot: Tensor,
        frame: Tensor,
        x: Tensor,
        place: int,
        pdl: bool,
    ) -> Tensor:
        """Note the code that these tiles choose; returns its embedding, or the stream that it
        begins.
        """
        config = self.config
        return take_code(
            *(*tiles, slot, frame, self._codes, self._weights.codes, x),
            place=place,
            first_UH=self._inner_first,
            book_rows=config.book_rows if config.per_run else 0,
            seeds=config.per_run,
            pdl=pdl,
        )

    def _tiles(
        self,
        place: int,
        output: Residual,
        lanes: DecodeLanes,
        sampler: Sampler,
        launch: DecodeLaunch,
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """The best code of each tile at this place of the frame, and whether it is valid; then the
        logits, None where the sampler keeps them out of memory.
        """
        call = self._steps.head(place, output, lanes.slot, launch)
        ahead, sampling = 1 + place * CODE_STRIDE, self._sampling_of[place - 1]
        if sampler == "fast":
            return linear(call, SampleTiles(lanes.position, sampling, ahead=ahead)), None
        logits = linear(call, LOGITS)
        tiles = sample_tiles(
            logits, lanes.slot, lanes.position, sampling, ahead=ahead, pdl=launch.pdl
        )
        return tiles, logits
