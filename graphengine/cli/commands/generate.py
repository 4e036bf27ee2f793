"""`graphengine generate`: the text of one prompt."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from graphengine.cli.given import first_adapter, open_engine, read_sampling
from graphengine.cli.output import print_logprobs, print_summary, summarise
from graphengine.core.intake import QueueOptions
from graphengine.engine import Engine
from graphengine.sampling_params import SamplingParams


def generate(options: argparse.Namespace) -> None:
    """Complete one prompt: the text goes to standard output, figures of it to standard error."""
    read_sampling(options)  # Errors come before the engine is opened.
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with open_engine(options) as engine:
        params = read_sampling(options, engine.default_params)
        if options.samples != 1:
            _samples(options, engine, prompt, params)
            return
        before, request = Counter(engine.counters), None
        queued: QueueOptions = {"deadline_s": options.deadline, "adapter": first_adapter(engine)}
        try:
            for event in engine.stream(prompt, params, **queued):
                request = event.request
                if not options.json:
                    print(event.text, end="", flush=True)
        except KeyboardInterrupt:
            if not options.json:
                # The shell's prompt shall not stick to the text.
                print(flush=True)
            raise
        assert request is not None, "a stream ends with an event"
        result = request.result()
        summary = summarise(engine, result, engine.counters - before)
    if options.json:
        print(json.dumps(summary | result.to_dict()))
        return
    print(flush=True)
    print_logprobs(result)
    # The figures come after the text where both go to a terminal.
    sys.stdout.flush()
    print_summary(summary, result)


def _samples(
    options: argparse.Namespace, engine: Engine, prompt: str, params: SamplingParams
) -> None:
    """Print several texts of a prompt."""
    queued: QueueOptions = {"deadline_s": options.deadline, "adapter": first_adapter(engine)}
    results = engine.generate_many(prompt, params, n=options.samples, **queued)
    for result in results:
        if options.json:
            print(json.dumps(result.to_dict()))
        else:
            print(f"--- seed {result.seed}\n{result.text}")
