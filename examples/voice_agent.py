"""An asyncio agent that speaks while it decodes, and stops when it is interrupted (barge-in).

    python examples/voice_agent.py

The reply is a task of its own. The listener cancels it when the user begins to speak; a cancelled
task cancels its request, and the session stays as it was before that turn.
"""

from __future__ import annotations

import asyncio

from graphengine import Engine, SamplingParams, Session

PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=64, ignore_eos=True)


async def speak(session: Session, question: str, voice: asyncio.Queue[str]) -> None:
    """One turn: each piece of text goes to the voice as it comes."""
    session.append(question)
    async for event in session.astream(PARAMS):
        if event.text:
            voice.put_nowait(event.text)


async def converse(engine: Engine) -> tuple[str, str]:
    """Two turns, the first of which is interrupted; returns the part of each that the user
    heard.
    """
    with engine.session() as session:
        before = len(session)
        voice: asyncio.Queue[str] = asyncio.Queue()
        reply = asyncio.create_task(speak(session, "# A long story\n", voice))
        heard = await voice.get()  # the first words, and then the user begins to speak
        reply.cancel()
        await asyncio.gather(reply, return_exceptions=True)
        while engine.busy:  # the step that ends the cancelled turn
            engine.step(timeout=0)
        session.rewind(len(session) - before)  # the question goes, too
        second: asyncio.Queue[str] = asyncio.Queue()
        await speak(session, "def stop(", second)
        said = "".join(second.get_nowait() for _ in range(second.qsize()))
    return heard, said


def main() -> tuple[str, str]:
    with Engine.from_pretrained("demo", max_batch=2, max_seq_len=256) as engine:
        heard, said = asyncio.run(converse(engine))
    print(f"interrupted after {heard!r}; then: {said!r}")
    return heard, said


if __name__ == "__main__":
    main()
