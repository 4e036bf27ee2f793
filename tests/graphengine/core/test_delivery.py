"""Plain tokens are delivered without a call for each lane, exactly as `Delivery.read` does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.small_engine import PROMPT, greedy, run
from graphengine import Engine
from graphengine.core.delivery import Delivery
from graphengine.demo import checkpoint_path
from graphengine.host.scheduler import finish
from graphengine.host.step_plan import Replay
from graphengine.kernels.step.record import pack_state
from graphengine.kernels.step.state import EMITTED, INVALID, LENGTH, STOP
from graphengine.requests.job import Job
from graphengine.requests.request import Request
from graphengine.requests.stop_tokens import Stops
from graphengine.sampling_params import SamplingParams
from graphengine.text.tokenizer import TextStream, Tokenizer

TOKENIZER = Tokenizer.from_directory(checkpoint_path())
BYTES = {TOKENIZER.token_bytes(index): index for index in range(TOKENIZER.vocab_size)}
EOS = 5
WORDS = [BYTES[byte] for byte in (b"a", b"b", b" ")]
# The bytes of one character, the end-of-sequence token, and an id without a token.
TOKENS = [*WORDS, *(BYTES[bytes([byte])] for byte in "😀".encode()), EOS, 10**6]

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": lambda: {"stream": TextStream(TOKENIZER)},
    "silent": dict,
    "stop string": lambda: {"stream": TextStream(TOKENIZER, ["ab"])},
    "scored": lambda: {"stream": TextStream(TOKENIZER), "scores": True},
    "frames": lambda: {"codes": [(index,) for index in range(20)], "frame_size": 1},
    "heard": lambda: {"stream": TextStream(TOKENIZER)},
    "private": lambda: {"stream": TextStream(TOKENIZER), "private": True},
}
FLAGS = [EMITTED] * 6 + [EMITTED | STOP, EMITTED | LENGTH, INVALID, 0]

Lane = tuple[int, int, bool]
"""A lane's token and flags, and whether its epoch is the request's."""


class World:
    """Requests of these kinds, and the delivery of their tokens."""

    def __init__(self, kinds: Sequence[str]) -> None:
        scheduler: Any = SimpleNamespace(counters=Counter(), retire=finish)
        recorder: Any = SimpleNamespace(recording=False)
        self.heard: list[tuple[Any, ...]] = []
        self.delivery = Delivery(scheduler, None, recorder, forced=False, withholds=False)
        self.requests = tuple(
            Request(
                request_id=number,
                prompt_token_ids=[1],
                params=SamplingParams(),
                seed=0,
                submitted=0.0,
                cancelled=self.delivery.cancelled,
                job=Job(
                    prompt_len=1,
                    max_len=99,
                    stops=Stops(ids=(EOS,), eos_ids=(EOS,)),
                    **KINDS[kind](),
                ),
                callback=self._hear if kind in ("heard", "private") else None,
            )
            for number, kind in enumerate(kinds)
        )

    def _hear(self, event: Any) -> None:
        self.heard.append(seen(event))

    def replay(self, sequence: int) -> Replay:
        epochs = tuple(request.id + 70_000 for request in self.requests)
        # A plan that was made anew has rows of its own, which are the same.
        return Replay(sequence, (*self.requests,), epochs, 1, len(epochs))

    def state(self) -> list[Any]:
        """Everything that a caller may see of it, and what is counted."""
        events = [seen(event) for event in self.delivery.take()]
        return [
            events,
            list(self.heard),
            dict(self.delivery.counters),
            *(
                (
                    request.token_ids,
                    request.text,
                    request.timings,
                    request.finish_reason,
                    request.stop_reason,
                    request.phase,
                    request.job.halted,
                    stream and stream.ends(),
                )
                for request in self.requests
                for stream in [request.job.stream]
            ),
        ]


def seen(event: Any) -> tuple[Any, ...]:
    assert type(event.text) is str and type(event.token_ids) is tuple
    return (event.request.id, *event[1:])


def record_of(replay: Replay, lanes: Sequence[Lane]) -> list[tuple[int, ...]]:
    return [
        (token, pack_state(epoch + (not own), 1, int(bool(flags & EMITTED)), flags))
        for epoch, (token, flags, own) in zip(replay.epochs, lanes, strict=True)
    ]


def lane_of(token: int, flags: int, own: bool) -> Lane:
    """A lane that only an end-of-sequence token stops."""
    return (EOS if flags & STOP else token), flags, own


LANE = st.builds(
    lane_of,
    st.sampled_from(TOKENS),
    st.sampled_from(FLAGS),
    st.sampled_from([True] * 9 + [False]),
)


@settings(max_examples=200, deadline=None)
@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5), data=st.data())
def test_whole_records_are_delivered_as_their_lanes_are(
    kinds: list[str], data: st.DataObject
) -> None:
    """Between replays a request may be cancelled, and callbacks run."""
    whole, lane_by_lane = World(kinds), World(kinds)
    for sequence in range(1, data.draw(st.integers(1, 12))):
        lanes = data.draw(st.lists(LANE, min_size=len(kinds), max_size=len(kinds)))
        cancelled = data.draw(st.one_of(st.none(), st.integers(0, 4 * len(kinds))))
        for world in (whole, lane_by_lane):
            replay, now = world.replay(sequence), float(sequence)
            if cancelled is not None and cancelled < len(kinds):
                world.requests[cancelled].cancel()
            if world is whole:
                logprobs = data.draw(st.sampled_from([None, [None] * len(kinds)]))
                world.delivery.read_replay(replay, record_of(replay, lanes), logprobs, now)
            else:
                given = world.delivery._read_lanes(replay, record_of(replay, lanes), None, now)
                if sum(given):
                    world.delivery.counters["tokens"] += sum(given)
            world.delivery.run_callbacks()
        assert whole.state() == lane_by_lane.state()


def test_no_call_delivers_a_plain_token() -> None:
    """As long as nothing is cancelled and each token's text is known."""
    world = World(["text", "silent", "heard"])
    replay = world.replay(1)
    plain = record_of(replay, [(WORDS[0], EMITTED, True)] * 3)
    world.delivery.read_replay(replay, plain, None, 1.0)
    read: list[Request] = []
    world.delivery.read = lambda request, *_: read.append(request) or 0  # type: ignore
    world.delivery.read_replay(replay, plain, None, 2.0)
    assert not read and [len(request.token_ids) for request in world.requests] == [2, 2, 2]
    character = record_of(replay, [(BYTES[b"\xf0"], EMITTED, True)] * 3)
    world.requests[1].cancel()
    world.delivery.read_replay(replay, character, None, 3.0)
    assert read == list(world.requests)


def test_other_rows_get_their_own_tokens(engine: Engine) -> None:
    """Rows come and go while the others go on."""
    first = engine.submit(PROMPT, greedy(9))
    for _ in range(4):
        engine.step()
    second, third = (engine.submit(PROMPT, greedy(count)) for count in (3, 12))
    run(engine)
    whole = third.token_ids
    assert first.token_ids == whole[:9] and second.token_ids == whole[:3] and len(whole) == 12
    for request in (first, second, third):
        assert len(request.timings.tokens) == len(request.token_ids)
        assert request.text == TOKENIZER.decode(request.token_ids)
