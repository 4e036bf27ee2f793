"""A conversation that goes back, branches, and goes on in another process.

    python examples/sessions.py

Each turn prefills only new tokens: `cached_tokens` counts those whose KV existed already.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from graphengine import Engine, Result, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24)


def main() -> list[Result]:
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine.from_pretrained("demo", max_batch=2, max_seq_len=256) as engine,
    ):
        saved = Path(folder) / "turn.safetensors"
        with engine.session() as session:
            session.append("def fib(n):")
            results.append(session.generate(PARAMS))
            mark = len(session)

            session.append("\n\ndef fact(n):")
            results.append(session.generate(PARAMS))
            session.rewind(len(session) - mark)  # as if the second turn had not been

            branch = session.fork()  # shares the blocks of the first turn
            branch.append("\n\ndef power(x, n):")
            results.append(branch.generate(PARAMS))
            branch.close()
            session.snapshot(saved)
        with engine.restore_session(saved) as session:  # here, or in another process
            session.append("\n\ndef fact(n):")
            results.append(session.generate(PARAMS))
    for result in results:
        print(f"{result.cached_tokens:>4} tokens were there, {len(result.token_ids)} are new")
    return results


if __name__ == "__main__":
    main()
