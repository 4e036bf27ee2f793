"""A controller that ticks at a fixed rate and decodes in the time that is left.

    python examples/robot_loop.py

`step(timeout=0)` never waits for the GPU: it returns the events of a step that is done, or none. A
newer observation cancels the reply about the old one. On a CPU a step is computed inside the call,
so that a tick takes at least as long.
"""

from __future__ import annotations

import time

from graphengine import Engine, Request, SamplingParams

TICK_S = 0.02
PARAMS = SamplingParams(temperature=0, max_tokens=24)


def control_loop(engine: Engine, observations: dict[int, str], ticks: int) -> list[Request]:
    """Run the loop; every request that it made, the cancelled ones too."""
    requests: list[Request] = []
    text = ""
    for tick in range(ticks):
        deadline = time.perf_counter() + TICK_S
        if tick in observations:
            if requests:
                requests[-1].cancel()  # takes effect at the next step
            requests.append(engine.submit(observations[tick], PARAMS, deadline_s=5.0))
            text = ""
        # ... read sensors, move motors ...
        for event in engine.step(timeout=0):
            if event.request is requests[-1]:
                text += event.text
                if event.finish_reason:
                    print(f"tick {tick}: {event.finish_reason}: {text!r}")
        time.sleep(max(0.0, deadline - time.perf_counter()))
    return requests


def main() -> list[Request]:
    with Engine.from_pretrained("demo", max_batch=2, max_seq_len=128) as engine:
        requests = control_loop(engine, {0: "def grip(", 5: "def release("}, ticks=40)
        while engine.busy:
            engine.step()
    return requests


if __name__ == "__main__":
    main()
