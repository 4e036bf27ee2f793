"""Completions and chats over HTTP in the form of OpenAI's, for clients that speak nothing else.

    python examples/openai_shim.py            # then: curl localhost:8000/v1/models

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.completions.create(model="demo", prompt="def fib(", max_tokens=32, stream=True)

The standard library alone. The engine stays in one thread: handlers put jobs into a queue, and the
loop in the main thread steps the engine and hands out events. There is no authentication, so it
listens on this machine only. Unknown fields and values are answered with 400, and never ignored.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from graphengine import Chat, Engine, Event, Logprob, Request, SamplingParams

Prompt = str | list[int] | Chat
Work = tuple[Prompt, SamplingParams]
Body = dict[str, Any]
Token = Callable[[int], tuple[str, bytes]]


# The engine's thread.


class Loop:
    """The handlers' access to the engine: `submit` from any thread, while `run` steps the engine in
    its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self.stopping = threading.Event()

    def submit(self, works: Sequence[Work]) -> Generator[tuple[int, Event], None, None]:
        """Events, each with its place in `works`, until all have ended; errors as the engine's.

        Closing the iterator early cancels the requests that still run.
        """
        found: queue.Queue[tuple[int, Event] | Exception] = queue.Queue()
        requests: list[Request] = []
        self._jobs.put(lambda: self._start(works, requests, found))
        running = len(works)
        try:
            while running:
                if self.stopping.is_set() and found.empty():
                    raise RuntimeError("the server is stopping")
                try:
                    item = found.get(timeout=1)
                except queue.Empty:
                    continue
                if isinstance(item, Exception):
                    raise item
                place, event = item
                if event.finish_reason not in (None, "stop", "length"):
                    raise RuntimeError(f"choice {place} ended as {event.finish_reason!r}")
                running -= event.finish_reason is not None
                yield item
        finally:
            for request in requests:
                request.cancel()  # allowed from any thread; one that has ended is left as it is

    def _start(
        self,
        works: Sequence[Work],
        requests: list[Request],
        found: queue.Queue[tuple[int, Event] | Exception],
    ) -> None:
        def report(place: int) -> Callable[[Event], None]:
            return lambda event: found.put((place, event))

        try:
            for place, (prompt, params) in enumerate(works):
                requests.append(self._engine.submit(prompt, params, on_event=report(place)))
        except (ValueError, RuntimeError) as error:
            for request in requests:
                request.cancel()  # here, so that the next step frees their places
            found.put(error)

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                with contextlib.suppress(queue.Empty):
                    self._jobs.get(timeout=0 if self._engine.busy else 0.1)()
                if self._engine.busy:
                    self._engine.step()
        finally:
            self.stopping.set()

    def token(self, token_id: int) -> tuple[str, bytes]:
        """Name and bytes of a token: its text or, of a part of a character, "bytes:\\xe2"."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        data = tokenizer.token_bytes(token_id)
        if data is None or data == text.encode():
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


# Requests.


class Refused(ValueError):
    """The request asks for `param` in a way that cannot be served."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request's body, read: each of `works` gives one choice."""

    chat: bool
    works: Sequence[Work]
    logprobs: int | None
    stream: bool
    usage: bool  # a last chunk of the stream has it
    model: str
    prompts: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


SAMPLING = ("temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty")
# Read by `read`. `user` and `metadata` say who asks, and change nothing.
READ = {"model", "n", "stream", "stream_options", "logprobs", "max_tokens", "logit_bias"}
READ |= {"user", "metadata", *SAMPLING}
MOST_CHOICES = 32
"""Most choices of one request body: as many requests as the engine lets wait."""
# Not served, but these values ask for nothing.
NOTHING: dict[str, Any] = {
    "echo": False, "best_of": 1, "suffix": "", "tools": [], "tool_choice": "none", "store": False,
    "response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto",
}  # fmt: skip


def read(body: object, *, chat: bool, model: str) -> Asked:
    """ValueError, most often `Refused`, for a request that cannot be served."""
    if not isinstance(body, dict):
        raise Refused(f"the body is a {type(body).__name__}, not an object")
    asked: Body = {name: value for name, value in body.items() if value is not None}
    known = READ | ({"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt"})
    for name, value in asked.items():
        if name not in known and (name not in NOTHING or value != NOTHING[name]):
            raise Refused(f"{name}={value!r} is not supported", name)
    if asked.get("model", model) != model:
        raise Refused(f"model={asked['model']!r}: this server has {model!r} alone", "model")
    prompts = [read_messages(asked)] if chat else read_prompts(asked)
    n = integer(asked, "n", 1, least=1, most=MOST_CHOICES)
    if n * len(prompts) > MOST_CHOICES:
        raise Refused(f"{len(prompts)} prompts with n={n} are above {MOST_CHOICES} choices", "n")
    logprobs = read_logprobs(asked, chat)
    options = {name: asked[name] for name in SAMPLING if name in asked}
    bias = asked.get("logit_bias", {})
    if not isinstance(bias, dict) or not all(token.isdecimal() for token in bias):
        raise Refused(f"logit_bias={bias!r} is not an object of token ids", "logit_bias")
    if "max_tokens" in asked and "max_completion_tokens" in asked:
        raise Refused("max_tokens and max_completion_tokens are the same limit", "max_tokens")
    limit = asked.get("max_completion_tokens", asked.get("max_tokens", None if chat else 16))
    params = SamplingParams(
        **options,
        max_tokens=limit,
        logprobs=logprobs,
        logit_bias={int(token): value for token, value in bias.items()} or None,
    )
    # Choices of one prompt differ: with a seed, in that.
    seeds = [None if params.seed is None else (params.seed + choice) % 2**63 for choice in range(n)]
    streaming = asked.get("stream_options", {})
    if not isinstance(streaming, dict) or streaming.keys() - {"include_usage"}:
        raise Refused(f"stream_options={streaming!r} is not supported", "stream_options")
    stream = boolean(asked, "stream")
    if streaming and not stream:
        raise Refused("stream_options needs stream=true", "stream_options")
    return Asked(
        chat=chat,
        works=[(prompt, replace(params, seed=seed)) for prompt in prompts for seed in seeds],
        logprobs=logprobs,
        stream=stream,
        usage=boolean(streaming, "include_usage"),
        model=model,
        prompts=len(prompts),
    )


def integer(asked: Body, name: str, default: int, *, least: int, most: int) -> int:
    value = asked.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{name}={value!r} must be an integer in [{least}, {most}]", name)
    return value


def boolean(asked: Body, name: str) -> bool:
    value = asked.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"{name}={value!r} must be true or false", name)
    return value


def read_logprobs(asked: Body, chat: bool) -> int | None:
    """How many of the most probable tokens to return with each token; None: no
    log-probabilities.
    """
    if not chat:
        return integer(asked, "logprobs", 0, least=0, most=20) if "logprobs" in asked else None
    if boolean(asked, "logprobs"):
        return integer(asked, "top_logprobs", 0, least=0, most=20)
    if "top_logprobs" in asked:
        raise Refused("top_logprobs needs logprobs=true", "top_logprobs")
    return None


def read_prompts(asked: Body) -> list[Prompt]:
    """A text, token ids, or a list of either."""
    found = asked.get("prompt")
    if isinstance(found, str) or (isinstance(found, list) and found and isinstance(found[0], int)):
        found = [found]
    if not isinstance(found, list) or not found:
        raise Refused(
            f"prompt={found!r} is neither text nor token ids nor a list of them", "prompt"
        )
    for prompt in found:
        ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not isinstance(prompt, str) and not ids:
            raise Refused(f"prompt: {prompt!r} is neither text nor token ids", "prompt")
    return found


def read_messages(asked: Body) -> Chat:
    """Content may be text or parts of text."""
    found = asked.get("messages")
    if not isinstance(found, list) or not found:
        raise Refused(f"messages={found!r} is not a list of messages", "messages")
    messages = []
    for message in found:
        if not isinstance(message, dict):
            raise Refused(f"messages: {message!r} is not an object", "messages")
        said = {name: value for name, value in message.items() if value is not None}
        for name in said.keys() - {"role", "content"}:
            raise Refused(f"messages: {name}={said[name]!r} is not supported", "messages")
        if isinstance(parts := said.get("content"), list):
            for part in parts:
                text = isinstance(part, dict) and part.get("type") == "text"
                if not text or not isinstance(part.get("text"), str):
                    raise Refused(f"messages: {part!r} is not a part of text", "messages")
            said["content"] = "".join(part["text"] for part in parts)
        messages.append(said)
    return Chat(messages=messages)


# Responses.


class Choice:
    """One choice: its text, tokens and log-probabilities so far."""

    def __init__(self, index: int, asked: Asked, token: Token) -> None:
        self.index = index
        self.request: Request | None = None
        self._asked = asked
        self._token = token
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")

    def part(self, events: Sequence[Event], *, delta: bool, first: bool = False) -> Body:
        """These events in OpenAI's form: as a whole choice, or as a `delta` of a stream."""
        self.request = events[-1].request
        text = "".join(event.text for event in events)
        body: Body = {"index": self.index, "finish_reason": events[-1].finish_reason}
        tokens = [pair for event in events for pair in self._tokens(event)]
        body["logprobs"] = None
        if self._asked.logprobs is not None:
            body["logprobs"] = (self._of_chat if self._asked.chat else self._of_text)(tokens)
        if not self._asked.chat:
            return {**body, "text": text}
        role = {"role": "assistant"} if first or not delta else {}
        return {**body, "delta" if delta else "message": {**role, "content": text}}

    def _tokens(self, event: Event) -> Iterator[tuple[int, Mapping[int, Logprob]]]:
        return zip(event.token_ids, event.logprobs or (), strict=False)

    def _most_probable(self, found: Mapping[int, Logprob]) -> Iterator[tuple[int, float]]:
        for token, (logprob, rank) in sorted(found.items(), key=lambda item: item[1].rank):
            if rank <= (self._asked.logprobs or 0):
                yield token, logprob

    def _of_text(self, tokens: Sequence[tuple[int, Mapping[int, Logprob]]]) -> Body:
        """Like OpenAI's, it always includes the token that was sampled, even below the top ones."""
        names, offsets = [], []
        for token, _ in tokens:
            name, data = self._token(token)
            names.append(name)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
        return {
            "tokens": names,
            "token_logprobs": [found[token].logprob for token, found in tokens],
            "top_logprobs": [
                {
                    self._token(each)[0]: logprob
                    for each, logprob in (*self._most_probable(found), (came, found[came].logprob))
                }
                for came, found in tokens
            ],
            "text_offset": offsets,
        }

    def _of_chat(self, tokens: Sequence[tuple[int, Mapping[int, Logprob]]]) -> Body:
        def entry(token: int, logprob: float) -> Body:
            name, data = self._token(token)
            return {"token": name, "logprob": logprob, "bytes": list(data)}

        return {
            "refusal": None,
            "content": [
                {
                    **entry(token, found[token].logprob),
                    "top_logprobs": [entry(*each) for each in self._most_probable(found)],
                }
                for token, found in tokens
            ],
        }


def chunks(asked: Asked, events: Iterator[tuple[int, Event]], token: Token) -> Iterator[Body]:
    """The parts of a stream: one of a choice for each event that has news, then the usage."""
    choices = [Choice(index, asked, token) for index in range(len(asked.works))]
    for place, event in events:
        if event.text or event.finish_reason or event.logprobs:
            first = choices[place].request is None
            part = choices[place].part([event], delta=True, first=first)
            yield envelope(asked, chunk=True) | {"choices": [part]}
    if asked.usage:
        yield envelope(asked, chunk=True) | {"choices": [], "usage": usage(asked, choices)}


def whole(asked: Asked, events: Iterator[tuple[int, Event]], token: Token) -> Body:
    choices = [Choice(index, asked, token) for index in range(len(asked.works))]
    found: list[list[Event]] = [[] for _ in choices]
    for place, event in events:
        found[place].append(event)
    parts = [choice.part(own, delta=False) for choice, own in zip(choices, found, strict=True)]
    return envelope(asked) | {"choices": parts, "usage": usage(asked, choices)}


def envelope(asked: Asked, *, chunk: bool = False) -> Body:
    kind = "chat.completion" + ".chunk" * chunk if asked.chat else "text_completion"
    return {
        "id": ("chatcmpl-" if asked.chat else "cmpl-") + asked.id,
        "object": kind,
        "created": asked.created,
        "model": asked.model,
    }


def usage(asked: Asked, choices: Sequence[Choice]) -> Body:
    """A prompt counts once, however many choices it has."""
    requests = [choice.request for choice in choices if choice.request is not None]
    apart = requests[:: len(choices) // asked.prompts]
    prompt = sum(len(request.prompt_token_ids) for request in apart)
    completion = sum(len(request.token_ids) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def error(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> Body:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def handler(loop: Loop, model: str) -> type[BaseHTTPRequestHandler]:
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "graphengine"}
    paths: dict[str, Body] = {
        "/v1/models": {"object": "list", "data": [card]},
        f"/v1/models/{model}": card,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # The name of a model may have a slash, which clients write as %2F.
            if (found := paths.get(unquote(self.path))) is None:
                return self._not_found()
            return self._answer(200, found)

        def do_POST(self) -> None:
            try:
                # Closing a connection with unread bytes would cost the client the answer.
                data = self.rfile.read(max(0, int(self.headers.get("Content-Length", 0))))
                if self.path not in ("/v1/completions", "/v1/chat/completions"):
                    return self._not_found()
                chat = self.path == "/v1/chat/completions"
                asked = read(json.loads(data), chat=chat, model=model)
                with contextlib.closing(loop.submit(asked.works)) as events:
                    # The engine's refusals are raised here, before anything is sent.
                    return self._serve(asked, itertools.chain([next(events)], events))
            except (ValueError, TypeError, RecursionError) as cause:
                param = cause.param if isinstance(cause, Refused) else None
                kind = "invalid_request_error"
                return self._answer(400, error(str(cause), kind=kind, param=param))
            except RuntimeError as cause:  # a full queue, or a broken engine
                return self._answer(503, error(str(cause), kind="server_error"))
            except ConnectionError:  # the client went away, and its requests were cancelled
                return None

        def _serve(self, asked: Asked, events: Iterator[tuple[int, Event]]) -> None:
            if not asked.stream:
                return self._answer(200, whole(asked, events, loop.token))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()  # HTTP/1.0: the stream ends with the connection
            try:
                for chunk in chunks(asked, events, loop.token):
                    self._send(json.dumps(chunk))
            except RuntimeError as cause:  # too late for a status
                self._send(json.dumps(error(str(cause), kind="server_error")))
            return self._send("[DONE]")

        def _send(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())

        def send_error(
            self, code: int, message: str | None = None, explain: str | None = None
        ) -> None:
            """Refusals of `http.server` itself, such as unknown methods, in OpenAI's form."""
            self._answer(code, error(message or str(code), kind="invalid_request_error"))

        def _not_found(self) -> None:
            known = ", ".join(("/v1/completions", "/v1/chat/completions", *paths))
            message = f"{self.path} is not here: there are {known}"
            self._answer(404, error(message, kind="invalid_request_error"))

        def _answer(self, status: int, body: Body) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def serve(
    engine: Engine, port: int = 8000, model: str = "demo"
) -> tuple[Loop, ThreadingHTTPServer]:
    """The loop, which the caller runs, and a server whose threads are up; port 0 takes any."""
    loop = Loop(engine)
    server = ThreadingHTTPServer(("127.0.0.1", port), handler(loop, model))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return loop, server


def main() -> None:
    with Engine.from_pretrained("demo", max_waiting=MOST_CHOICES) as engine:
        loop, server = serve(engine)
        print(f"http://127.0.0.1:{server.server_port}/v1")
        try:
            loop.run()
        except KeyboardInterrupt:
            server.shutdown()


if __name__ == "__main__":
    main()
