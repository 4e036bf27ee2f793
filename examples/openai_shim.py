"""Completions over HTTP in the form of OpenAI's, for clients that speak nothing else.

    python examples/openai_shim.py            # then: curl localhost:8000/v1/completions -d ...

The standard library alone. The engine stays in one thread: handlers put jobs into a queue, and the
loop in the main thread steps the engine and hands out events. There is no authentication, so it
listens on this machine only.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from graphengine import Engine, Event, SamplingParams

Job = tuple[str, SamplingParams, "queue.Queue[Event | Exception]"]


class Loop:
    """What handlers may use: `submit` from any thread, while `run` steps the engine in its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: queue.Queue[Job] = queue.Queue()
        self.stopping = threading.Event()

    def submit(self, prompt: str, params: SamplingParams) -> Iterator[Event]:
        """The request's events; ValueError as the engine raises it."""
        events: queue.Queue[Event | Exception] = queue.Queue()
        self._jobs.put((prompt, params, events))
        while True:
            event = events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if event.finish_reason:
                return

    def run(self) -> None:
        while not self.stopping.is_set():
            with contextlib.suppress(queue.Empty):
                self._take(self._jobs.get(timeout=0 if self._engine.busy else 0.1))
            if self._engine.busy:
                self._engine.step()

    def _take(self, job: Job) -> None:
        prompt, params, events = job
        try:
            self._engine.submit(prompt, params, on_event=events.put)
        except (ValueError, RuntimeError) as error:
            events.put(error)


def handler(loop: Loop) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                names = ("temperature", "top_p", "max_tokens", "seed", "stop")
                params = SamplingParams(**{name: asked[name] for name in names if name in asked})
                events = list(loop.submit(asked["prompt"], params))
            except (ValueError, KeyError, TypeError) as error:
                return self._answer(400, {"error": {"message": str(error)}})
            except RuntimeError as error:  # a full queue, or a broken engine
                return self._answer(503, {"error": {"message": str(error)}})
            text = "".join(event.text for event in events)
            choice = {"index": 0, "text": text, "finish_reason": events[-1].finish_reason}
            return self._answer(200, {"object": "text_completion", "choices": [choice]})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def serve(engine: Engine, port: int = 8000) -> tuple[Loop, ThreadingHTTPServer]:
    """The loop, which the caller runs, and a server whose threads are up; port 0 takes any."""
    loop = Loop(engine)
    server = ThreadingHTTPServer(("127.0.0.1", port), handler(loop))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return loop, server


def main() -> None:
    with Engine.from_pretrained("demo", max_waiting=32) as engine:
        loop, server = serve(engine)
        print(f"http://127.0.0.1:{server.server_port}/v1/completions")
        try:
            loop.run()
        except KeyboardInterrupt:
            server.shutdown()


if __name__ == "__main__":
    main()
