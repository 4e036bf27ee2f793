"""`graphengine`: generate text, chat, see what an engine would hold, its graphs, measure, tune."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from graphengine import __version__
from graphengine.cli.chat_command import ChatOutput, Conversation, converse, template_variable
from graphengine.cli.graph_command import (
    DRAWINGS,
    diff_dumps,
    prepare_dump,
    read_dump,
    read_engine,
    write_dump,
)
from graphengine.cli.option_flags import add_flags, given_options
from graphengine.cli.output import print_logprobs, print_summary, summarise
from graphengine.cli.quantize_command import add_arguments as add_quantize_arguments
from graphengine.cli.quantize_command import quantize
from graphengine.cli.typed_lines import typed_lines
from graphengine.config import EngineConfig
from graphengine.core.chunk_times import longest_prompt
from graphengine.engine import Engine
from graphengine.engine_options import EngineOptions
from graphengine.models.checkpoint import Checkpoint, find_local
from graphengine.models.contract import ModelWeights, Share
from graphengine.opening.loading import plan_checkpoint, read_checkpoint
from graphengine.opening.memory import MemoryPlan
from graphengine.parallel.pipelining import plan_stages
from graphengine.prefill_cut import PrefillCut
from graphengine.sampling_params import SamplingParams
from graphengine.speculative import GateOptions, describe
from graphengine.speculative_text import (
    GRAMMAR,
    VOCABULARY_GRAMMAR,
    parse_draft_vocabulary,
    parse_speculative,
    with_draft_vocabulary,
)
from graphengine.structured_outputs import StructuredOutputsParams

COMMANDS_ABOVE = {
    "acceptance": "Measure how many tokens a step drafters are worth on a text.",
    "bench": "Measure a shape or a checkpoint.",
    "profile": "Profile an engine with Nsight Systems or torch's profiler.",
    "report": "Tell from a recording or a trace where the time between tokens goes.",
    "tune": "Find the fastest plans for the decode kernels of a shape or a checkpoint.",
}
"""Commands whose code lies above this folder, and what `--help` says of them.

Command `x` is the module `x` of `FOLDER_ABOVE`, with `add_arguments(parser)` and `x(options)`. This
is the one place here that names anything above, and only as text: the module is imported when its
command is run and at no other time, so that nothing in this folder depends on it.
"""
FOLDER_ABOVE = "graphengine.profiles"

# Prefix of parsed request options: requests and engines both have a `seed`.
_SAMPLING = "sampling_"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 after an error the user can mend."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments[0] if arguments else None).parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character shows a replacement; the text continues.
        sys.stdout.reconfigure(errors="replace")
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        command: Callable[[argparse.Namespace], int | None] = options.command
        status = command(options)
        # The reader of the output may be gone, or the disk full; here it can still be reported.
        sys.stdout.flush()
    except BrokenPipeError:
        # `head` closes the pipe early. The interpreter must have nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"graphengine: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status or 0


def generate(options: argparse.Namespace) -> None:
    """Complete one prompt; the text streams to the terminal."""
    params = _sampling(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with _engine(options) as engine:
        before, request = Counter(engine.counters), None
        for event in engine.stream(prompt, params, deadline_s=options.deadline):
            request = event.request
            if not options.json:
                print(event.text, end="", flush=True)
        assert request is not None, "a stream ends with an event"
        result = request.result()
        summary = summarise(engine, result, engine.counters - before)
    if options.json:
        print(json.dumps(summary | result.to_dict()))
    else:
        print(flush=True)
        print_logprobs(result)
        print_summary(summary)
        if summary["acceptance"] is not None:
            print(f"speculation: {result.acceptance}")


def chat(options: argparse.Namespace) -> int:
    """A conversation through the checkpoint's chat template; one line of input is one turn.

    Ctrl-C ends a reply, /help lists commands. Status 2 after a turn that could not be served.
    """
    params = _sampling(options)
    with _engine(options) as engine, engine.session() as session:
        if engine.tokenizer is None or not engine.tokenizer.has_chat_template:
            raise ValueError(f"{options.checkpoint} has no chat template: use `generate`")
        conversation = Conversation(
            engine,
            session,
            params,
            system=options.system,
            deadline_s=options.deadline,
            template_variables=dict(options.template_variable),
        )
        return converse(conversation, typed_lines(options.json), ChatOutput(options.json))


def info(options: argparse.Namespace) -> None:
    """Show what would be allocated and captured, by each rank, or by one of each stage; allocate
    and capture nothing.
    """
    config = EngineConfig(**_engine_options(options))
    found = read_checkpoint(options.checkpoint, config, Share(0, config.ranks))
    memories, model = [plan_checkpoint(found, config)], found.model
    if config.pipeline_parallel > 1:
        last, *others = plan_stages(found, config)
        memories, model = [*others, last], found.split
    memory = memories[-1]
    facts: dict[str, Any] = {
        "architecture": model.architecture,
        "layers": model.num_layers,
        **_parameters(model.allocate(device="meta", dtype=memory.dtype)),
        "vocabulary": model.vocab_size,
        "device": str(memory.device),
        "tensor_parallel": config.tensor_parallel,
        "data_parallel": config.data_parallel,
        "pipeline_parallel": config.pipeline_parallel,
        "dtype": str(memory.dtype).removeprefix("torch."),
        "kv_dtype": str(memory.kv_dtype).removeprefix("torch."),
        "activations": memory.activations,
        "max_batch": memory.ladder.sizes[-1],
        "max_seq_len": memory.max_seq_len,
        "decode_buckets": memory.ladder.sizes,
        "prefill_buckets": memory.prefill_ladder.sizes,
        "prefill_cut": _prefill_cut(config, memory),
        "row_family": config.family,
        "lookahead": config.launched_ahead,
        "speculative": describe(config.mode),
        "draft_lengths": memory.draft_lengths,
        "graphs": len(memory.graphs),
    }
    kv = {
        "kv_bytes_per_1000_tokens": sum(each.kv_bytes(1000) for each in memories),
        "kv_tokens": memory.kv_blocks * memory.block_size,
        "kv_requests": memory.whole_requests,
        "kv_ring_bytes_per_slot": memory.ring_bytes,
    }
    if options.json:
        budgets = [[asdict(line) for line in each.budget.lines] for each in memories]
        held = {"budget": budgets[0]} if len(budgets) == 1 else {"budgets": budgets}
        print(json.dumps(facts | kv | held))
        return
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        shown = f"{value:,}" if "parameters" in name else shown
        print(f"{name.replace('_', ' '):<17} {shown}")
    for stage, each in enumerate(memories):
        title = f"stage {stage}\n" if len(memories) > 1 else ""
        print(f"\n{title}{each.budget.table()}\n{each.describe_kv()}")


def _parameters(weights: ModelWeights) -> dict[str, int]:
    """All of them, and where there are experts those that a token meets."""
    routed, parameters = weights.routed, weights.parameters
    if routed is None:
        return {"parameters": parameters}
    return {"parameters": parameters, "active_parameters": parameters - routed.idle}


def _prefill_cut(config: EngineConfig, memory: MemoryPlan) -> str:
    """Where prompts will be cut, as far as that is known before anything is measured."""
    if config.max_prefill_ms_per_step is not None:
        return f"measured at opening, within {config.max_prefill_ms_per_step:g} ms"
    cut = PrefillCut(config.prefill_cut or ((0, memory.prefill_ladder.sizes[-1]),))
    return str(cut.within(longest_prompt(memory)))


def graph_dump(options: argparse.Namespace) -> None:
    """Write every graph that an engine captures to a folder."""
    # Errors of the checkpoint are reported first, but nothing is downloaded to find them.
    if find_local(options.checkpoint) is not None:
        Checkpoint.open(options.checkpoint)
    prepare_dump(EngineConfig(**_engine_options(options)), options.out, options.draw)
    with _engine(options) as engine:
        made = read_engine(engine, checkpoint=options.checkpoint)
    write_dump(made, options.out, drawing=options.draw)
    if options.json:
        print(json.dumps({"out": str(options.out), "graphs": list(made.graphs)}))
        return
    for name, graph in made.graphs.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in graph.count().items())
        programmatic, edges = graph.programmatic_edges()
        print(f"{name:<18} {kinds}; {programmatic} of {edges} edges programmatic")
    print(f"{len(made.graphs)} graphs in {options.out}")


def graph_diff(options: argparse.Namespace) -> int:
    """Compare two folders of `graph dump`; exit status 1 where a graph differs."""
    if options.limit < 0:
        raise ValueError(f"--limit {options.limit} must be at least 0")
    old, new = read_dump(options.old), read_dump(options.new)
    found = diff_dumps(
        old, new, exact_names=options.exact_names, launch_sizes=not options.ignore_sizes
    )
    print(found.to_json() if options.json else found.to_text(options.limit))
    return int(found.differs)


def _engine(options: argparse.Namespace) -> Engine:
    progress = None if options.json or not sys.stderr.isatty() else _progress_bar
    return Engine.from_pretrained(options.checkpoint, progress=progress, **_engine_options(options))


def _progress_bar(done: int, total: int) -> None:
    width = 30
    filled = width * done // max(total, 1)
    end = "\r\x1b[K" if done >= total else ""
    print(
        f"\rloading [{'#' * filled}{' ' * (width - filled)}] {done / 2**20:,.0f} of "
        f"{total / 2**20:,.0f} MiB{end}",
        end="",
        file=sys.stderr,
        flush=True,
    )


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    """The engine options that were given; the others keep `EngineConfig`'s defaults."""
    given = given_options(options, EngineConfig)
    if options.speculative is not None:
        given["speculative"] = parse_speculative(options.speculative)
    if options.draft_vocab is not None:
        vocabulary = parse_draft_vocabulary(options.draft_vocab)
        given["speculative"] = with_draft_vocabulary(given.get("speculative"), vocabulary)
    if getattr(options, f"{_SAMPLING}prompt_logprobs", None) is not None:
        given["prompt_logprobs"] = True
    if options.max_live is not None:
        given["gate"] = GateOptions(max_live=options.max_live)
    return cast(EngineOptions, given)


def _sampling(options: argparse.Namespace) -> SamplingParams:
    given = given_options(options, SamplingParams, prefix=_SAMPLING)
    return SamplingParams(**given, structured_outputs=_structured_outputs(options))


def _structured_outputs(options: argparse.Namespace) -> StructuredOutputsParams | None:
    """The output's constraint, from the one option of that group that was given."""
    if options.json_schema is not None:
        try:
            schema = options.json_schema.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--json-schema {options.json_schema}: {error}") from error
        return StructuredOutputsParams(json=schema, disable_any_whitespace=options.no_whitespace)
    if options.no_whitespace:
        raise ValueError("--no-whitespace is for --json-schema")
    if options.regex is not None:
        return StructuredOutputsParams(regex=options.regex)
    if options.choice is not None:
        return StructuredOutputsParams(choice=options.choice.split(","))
    if options.grammar is not None:
        return StructuredOutputsParams(grammar=options.grammar.read_text(encoding="utf-8"))
    return None


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """All commands; of `COMMANDS_ABOVE` only the one `asked` for gets its options."""
    parser = argparse.ArgumentParser(prog="graphengine", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    # An error shows the usage: all options, of which there are some sixty, would hide the error.
    usages = {generate: "--prompt PROMPT [options]", chat: "[options]", info: "[options]"}
    for command, usage in usages.items():
        name = command.__name__
        sub = commands.add_parser(
            name,
            help=command.__doc__,
            description=command.__doc__,
            usage=f"graphengine {name} {usage}; --help lists the options",
        )
        sub.set_defaults(command=command)
        _add_engine_options(sub)
        if command is generate:
            sub.add_argument("--prompt", required=True, help="the prompt, or - for standard input")
            _add_sampling_options(sub)
        if command is chat:
            sub.add_argument("--system", help="system message")
            sub.add_argument(
                "--template-variable",
                type=template_variable,
                action="append",
                default=[],
                metavar="NAME=VALUE",
                help="what the chat template sees as NAME; JSON, or else text; may be repeated",
            )
            # The chat template decides how a prompt begins, and a prompt is all turns so far.
            _add_sampling_options(sub, but=("add_bos", "prompt_logprobs"))
    _add_graph_commands(commands)
    writer = commands.add_parser("quantize", help=quantize.__doc__, description=quantize.__doc__)
    writer.set_defaults(command=quantize, verbose=False)
    add_quantize_arguments(writer)
    for name, description in COMMANDS_ABOVE.items():
        sub = commands.add_parser(name, help=description, description=description)
        if name == asked:
            module: Any = import_module(f"{FOLDER_ABOVE}.{name}")
            sub.set_defaults(command=getattr(module, name), verbose=False)
            module.add_arguments(sub)
    return parser


def _add_graph_commands(commands: Any) -> None:
    description = "Write the captured graphs of an engine to a folder, or compare two folders."
    graph = commands.add_parser("graph", help=description, description=description)
    kinds = graph.add_subparsers(required=True, metavar="dump|diff")
    dump = kinds.add_parser("dump", help=graph_dump.__doc__, description=graph_dump.__doc__)
    dump.set_defaults(command=graph_dump)
    _add_engine_options(dump)
    dump.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    dump.add_argument("--draw", choices=DRAWINGS, help="a drawing of each graph, too")
    diff = kinds.add_parser("diff", help=graph_diff.__doc__, description=graph_diff.__doc__)
    diff.set_defaults(command=graph_diff, verbose=False)
    diff.add_argument("old", type=Path, help="folder of the first dump")
    diff.add_argument("new", type=Path, help="folder of the second one")
    diff.add_argument("--json", action="store_true", help="print JSON only")
    diff.add_argument("--limit", type=int, default=20, help="lines of changes of a graph")
    diff.add_argument(
        "--exact-names", action="store_true", help="compare tile sizes and the like in names, too"
    )
    diff.add_argument(
        "--ignore-sizes", action="store_true", help="leave out grid, block and shared memory"
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        default="demo",
        help="directory or hub id; 'demo' is the packaged model (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--verbose", action="store_true", help="log budget and captures")
    group = parser.add_argument_group("the engine")
    add_flags(group, EngineConfig)
    group.add_argument("--speculative", metavar="MODE", help=f"{GRAMMAR} (default: off)")
    group.add_argument(
        "--max-live",
        type=int,
        metavar="N",
        help="drafts for up to N live requests, and only while enough are accepted",
    )
    group.add_argument("--draft-vocab", metavar="TEXT:SIZE", help=f"mtp: {VOCABULARY_GRAMMAR}")


def _add_sampling_options(parser: argparse.ArgumentParser, but: Sequence[str] = ()) -> None:
    group = parser.add_argument_group("each request")
    add_flags(group, SamplingParams, but=but, prefix=_SAMPLING)
    add = group.add_argument
    add("--deadline", type=float, metavar="S", help="seconds after which the text ends as it is")
    guided = group.add_mutually_exclusive_group()
    guided.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is such JSON")
    guided.add_argument("--regex", help="the text matches it as a whole")
    guided.add_argument("--choice", metavar="A,B,...", help="the text is one of these")
    guided.add_argument("--grammar", type=Path, metavar="FILE", help="a Lark grammar of the text")
    add("--no-whitespace", action="store_true", help="--json-schema: none between its tokens")
