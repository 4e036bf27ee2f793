"""Weights that are updated in place: against an engine that was opened on the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from events import GENEROUS_S
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from checkpoints.eagle3_heads import Shape, head_config, head_tensors, write_head
from checkpoints.few_layers import few_layers
from checkpoints.mtp_chains import HAS_CHAINS, SIZES, VOCAB, Chains
from engines.failing_ranks import limit_waits, stop
from engines.forked_ranks import ranks_are_forked
from graphengine import Engine, EngineConfig, SamplingParams
from graphengine.core.commands import UpdateWeights
from graphengine.core.weight_updates import update_weights
from graphengine.demo import checkpoint_path
from graphengine.models.checkpoints import given_tensors
from graphengine.models.checkpoints.checkpoint import Checkpoint
from graphengine.models.checkpoints.given_tensors import GivenTensors, as_checkpoint
from graphengine.models.launches import Share
from graphengine.models.quantised.writer import write_quantised
from graphengine.opening.loading import load_checkpoint, plan_checkpoint, read_checkpoint
from graphengine.options.drafts.draft_vocabulary import DraftVocabulary
from graphengine.parallel.driver_runtime import DriverRuntime
from graphengine.parallel.ranks import RankFailed, Ranks
from graphengine.speculative import MTP, DraftModel, Eagle3

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 3, 80], [*range(1, 72, 3)]]


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    with ranks_are_forked():
        yield


def open_engine(path: Path, **options: Any) -> Engine:
    sizes = {"max_batch": 2, "max_seq_len": 96, "block_size": 8, "prefill_buckets": (8, 32)}
    fixed = {"device": "cpu", "dtype": "float32", "wait_limit_s": GENEROUS_S}
    return Engine.from_pretrained(path, **sizes | fixed | options)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors by the names in its files."""
    checkpoint = Checkpoint.open(path)
    mapped = checkpoint.uncut().mapped()
    return {checkpoint.stored_names.get(name, name): mapped[name].clone() for name in mapped}


def other_weights(path: Path, folder: Path, seed: int = 1) -> Path:
    """A checkpoint of the same model with other random weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors_of(path)
    tied = json.loads((path / "config.json").read_text()).get("tie_word_embeddings", False)
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    if tied:
        tensors.pop("lm_head.weight", None)
    folder.mkdir()
    for file in path.glob("*.json"):
        if file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def said(engine: Engine) -> list[tuple[Any, ...]]:
    results = engine.generate(PROMPTS, GREEDY)
    return [(each.token_ids, each.logprobs) for each in results]


def held(engine: Engine) -> list[Tensor]:
    """Every weight, of the drafter, too, and the norms that the model has of its own."""
    drafter = engine.core.drafter
    model = engine.model
    tensors = model.weights.tensors()
    tensors += [] if drafter.weights is None else drafter.weights.tensors()
    return [*tensors, model.first_norm]


def assert_updates(
    path: Path, other: Path, stale_drafts: Literal["off", "keep"] = "off", **options: Any
) -> None:
    with open_engine(other, **options) as engine:
        expected, accepted = said(engine), engine.acceptance.accepted
    with open_engine(path, **options) as engine:
        before = said(engine)
        assert before != expected
        addresses = [tensor.data_ptr() for tensor in held(engine)]
        engine.update_weights(tensors_of(other).items(), stale_drafts=stale_drafts)
        found, drafted = engine.acceptance.accepted, said(engine)
        assert drafted == expected
        assert engine.acceptance.accepted - found == accepted
        assert [tensor.data_ptr() for tensor in held(engine)] == addresses
        engine.update_weights(str(path))
        assert said(engine) == before
        assert engine.counters["weights/updates"] == 2


FAMILIES = ["llama-biases", "llama-tied-yarn", "qwen3-biases"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_decoders(
    checkpoints: dict[str, Any], tmp_path: Path, name: str, quantize: str | None
) -> None:
    path = checkpoints[name].path
    head = quantize is not None
    options = {"quantize": quantize, "quantize_lm_head": head}
    assert_updates(path, other_weights(path, tmp_path / "other"), **options)


def test_windows_in_rings(tmp_path: Path) -> None:
    """Gemma's norms lack 1, and a session has a ring."""
    sizes = SIZES | {"sliding_window": 9, "head_dim": 64, "tie_word_embeddings": True}
    kinds = ["sliding_attention", "full_attention"] * (SIZES["num_hidden_layers"] // 2 + 1)
    kinds = kinds[: SIZES["num_hidden_layers"]]
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds))
    path = tmp_path / "gemma"
    model.save_pretrained(path)
    other = other_weights(path, tmp_path / "other")
    assert_updates(path, other)
    with open_engine(path) as engine, engine.session() as session:
        assert engine.memory.rings
        session.append(PROMPTS[1])
        session.generate(GREEDY)
        assert session.cached_tokens > 0
        engine.update_weights(other)
        assert session.evicted and session.cached_tokens == 0
        found = session.generate(GREEDY)
    with open_engine(other) as engine:
        assert engine.generate(found.prompt_token_ids, GREEDY).token_ids == found.token_ids


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_experts(expert_checkpoints: dict[str, Any], tmp_path: Path, quantize: str | None) -> None:
    path = expert_checkpoints["moe-some-layers"].path
    assert_updates(path, other_weights(path, tmp_path / "other"), quantize=quantize)


def test_latents(latent_checkpoints: dict[str, Any], tmp_path: Path) -> None:
    path = latent_checkpoints["latent-groups"].path
    assert_updates(path, other_weights(path, tmp_path / "other"))


@pytest.mark.parametrize(
    "name", ["granite-rope-limits", "nemotron-biases", "qwen-next-experts", "lfm2-biases"]
)
def test_hybrids(hybrids: dict[str, Any], tmp_path: Path, name: str) -> None:
    path = hybrids[name].path
    assert_updates(path, other_weights(path, tmp_path / "other"))


@pytest.mark.skipif(not HAS_CHAINS, reason="needs transformers with chains of modules")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_draft_modules_of_the_checkpoint(tmp_path: Path, quantize: str | None) -> None:
    """With norms that lack 1, and rows of lm_head: their copies are made anew."""
    path = Chains(tmp_path / "chains", "qwen3.5", 1).path
    kept = torch.arange(0, VOCAB, 2)
    offsets = {"d2t": kept - torch.arange(len(kept))}
    save_file(tensors_of(path) | offsets, path / "model.safetensors")
    other = other_weights(path, tmp_path / "other")
    mode = MTP(k=2, draft_vocab=DraftVocabulary(tensor="d2t"))
    head = quantize is not None
    assert_updates(path, other, speculative=mode, quantize=quantize, quantize_lm_head=head)


def test_a_head_with_a_checkpoint_of_its_own_stays(tmp_path: Path) -> None:
    target = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 8}))
    path, shape = tmp_path / "target", Shape()
    target.save_pretrained(path)
    embedding = target.get_input_embeddings().weight.detach()
    tensors = head_tensors(shape, embedding, target.lm_head.weight.detach())
    head = write_head(tmp_path / "head", head_config(shape, embedding), tensors)
    other = other_weights(path, tmp_path / "other")
    assert_updates(path, other, "keep", speculative=Eagle3(head, 2))
    with open_engine(path, speculative=Eagle3(head, 2)) as engine:
        weights = engine.core.drafter.weights
        assert weights is not None
        before = [tensor.clone() for tensor in weights.tensors()]
        engine.update_weights(other)
        assert all(map(torch.equal, weights.tensors(), before))


def assert_updates_drafts(
    paths: tuple[Path, Path], drafts: tuple[Path, Path], mode: Any, **options: Any
) -> None:
    """Target and drafter get the second weights; drafts are accepted as often as when opened."""
    with open_engine(paths[1], speculative=mode(drafts[1]), **options) as engine:
        expected, accepted = said(engine), engine.acceptance.accepted
        proposed, weights = engine.acceptance.proposed, [each.clone() for each in held(engine)]
    with open_engine(paths[0], speculative=mode(drafts[0]), **options) as engine:
        said(engine)
        engine.update_weights(paths[1])
        assert engine.core.weights.drafts_off
        engine.update_weights({}, draft_weights=tensors_of(drafts[1]))
        assert engine.weight_version == 1 and not engine.core.weights.drafts_off
        # Drafts of random weights may all be refused: their weights are compared as well.
        assert all(map(torch.equal, held(engine), weights))
        before = engine.acceptance.accepted, engine.acceptance.proposed
        assert said(engine) == expected
        found = engine.acceptance.accepted - before[0], engine.acceptance.proposed - before[1]
        assert found == (accepted, proposed)
        # Pieces of one version, then a folder.
        names = iter(tensors_of(drafts[0]).items())
        engine.update_weights(paths[0], version=5, draft_weights=[next(names)])
        assert engine.core.weights.drafts_off
        engine.update_weights({}, version=5, draft_weights=names)
        assert not engine.core.weights.drafts_off
        engine.update_weights(paths[1], draft_weights=drafts[1])
        assert said(engine) == expected and not engine.core.weights.drafts_off


def target_and_head(folder: Path, seed: int) -> tuple[Path, Path]:
    """A target and a head of Eagle3 with a draft vocabulary, of random weights."""
    torch.manual_seed(seed)
    target = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 8}))
    target.save_pretrained(folder / f"target{seed}")
    shape = Shape()
    embedding = target.get_input_embeddings().weight.detach()
    tensors = head_tensors(shape, embedding, target.lm_head.weight.detach())
    head = write_head(folder / f"head{seed}", head_config(shape, embedding), tensors)
    return folder / f"target{seed}", head


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_head_is_updated_with_its_target(tmp_path: Path, ranks: int) -> None:
    (path, head), (other, newer) = (target_and_head(tmp_path, seed) for seed in (1, 2))
    if ranks > 1:
        with (
            open_engine(other, speculative=Eagle3(newer, 2), tensor_parallel=2) as opened,
            open_engine(path, speculative=Eagle3(head, 2), tensor_parallel=2) as engine,
        ):
            expected = said(opened)
            engine.update_weights(other, draft_weights=tensors_of(newer))
            assert_equal_tokens(said(engine), expected)
            assert engine.acceptance.accepted == opened.acceptance.accepted
            assert_equal_ranks(engine)
        return
    assert_updates_drafts((path, other), (head, newer), lambda found: Eagle3(found, 2))


def test_a_draft_model_is_updated_with_its_target(
    checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    path = checkpoints["llama-biases"].path
    other = other_weights(path, tmp_path / "other")
    drafts = (
        other_weights(path, tmp_path / "drafts", seed=3),
        other_weights(path, tmp_path / "newer", seed=4),
    )
    assert_updates_drafts((path, other), drafts, lambda found: DraftModel(found, 2))


def test_wrong_draft_weights_change_nothing(checkpoints: dict[str, Any], tmp_path: Path) -> None:
    path, head = target_and_head(tmp_path, 1)
    with (
        open_engine(path) as engine,
        pytest.raises(ValueError, match="a drafter with a checkpoint"),
    ):
        engine.update_weights({}, draft_weights={})
    with open_engine(path, speculative=Eagle3(head, 2)) as engine:
        before = [tensor.clone() for tensor in held(engine)]
        given = tensors_of(head)
        name = next(name for name, each in given.items() if each.dim() == 2)
        rows, columns = given[name].shape
        cases: list[tuple[Any, str]] = [
            (
                {"x": given[name]},
                "1 of 1 draft tensors are not in .*, which the drafter was op.*: x$",
            ),
            ({name: given[name][1:]}, rf"{name} has shape \[{rows - 1}, {columns}\], not"),
            (
                {name: spoiled(given[name], torch.nan, 2)},
                rf"1 of 1 tensors have a NaN .*{name} \(2",
            ),
            (3, "takes tensors by their names"),
            (path, "lacks .* tensors of the drafter that are in use"),
            ({"d2t": given["d2t"] + 1}, "d2t differs from .*: an update cannot change"),
        ]
        for wrong, message in cases:
            with pytest.raises(ValueError, match=message):
                engine.update_weights(path, draft_weights=wrong)
            assert all(map(torch.equal, held(engine), before)) and engine.weight_version == 0


def test_stale_drafts_are_off_until_they_are_updated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = other_weights(few_layers(), tmp_path / "other")
    tensors = tensors_of(other)
    mtp = {name: value for name, value in tensors.items() if "mtp" in name}
    trunk = {name: value for name, value in tensors.items() if "mtp" not in name}
    with open_engine(other) as plain:
        expected = [tokens for tokens, _ in said(plain)]
    with open_engine(few_layers(), speculative=MTP(k=2), row_family="dot") as engine:

        def verified() -> int:
            before = engine.acceptance.proposed
            assert [tokens for tokens, _ in said(engine)] == expected
            return engine.acceptance.proposed - before

        engine.update_weights(trunk)
        assert "tensors of the drafter were not in the update" in caplog.text
        assert "drafts are off until it is updated as well" in caplog.text
        assert verified() == 0
        engine.update_weights(trunk, stale_drafts="keep")
        assert "drafts go on" in caplog.text and verified() > 0
        # Pieces of one version.
        caplog.clear()
        engine.update_weights(trunk, version=7)
        engine.update_weights(mtp, version=7)
        assert verified() > 0 and engine.core.weights.stale_drafts is None
        engine.update_weights(trunk, version=8)
        assert verified() == 0
        with pytest.raises(ValueError, match="stale_drafts='on' must be 'off' or 'keep'"):
            engine.update_weights(trunk, stale_drafts="on")  # type: ignore[arg-type]


def test_every_token_has_the_version_of_its_weights(checkpoints: dict[str, Any]) -> None:
    path = checkpoints["llama-biases"].path
    with open_engine(path, lookahead=1) as engine:
        first = engine.submit(PROMPTS[0], GREEDY)
        assert {event.weight_version for event in engine.drain()} == {0}
        engine.update_weights(path)
        second = engine.submit(PROMPTS[0], GREEDY)
        assert {event.weight_version for event in engine.drain()} == {1} == {engine.weight_version}
        engine.update_weights(path, version=40)
        third = engine.generate(PROMPTS[0], GREEDY)
        engine.update_weights({})  # Nothing is outdated.
        assert engine.weight_version == 40
        versions = [each.result().weight_version for each in (first, second)]
        assert [*versions, third.weight_version] == [0, 1, 40]
        assert third.to_dict()["weight_version"] == 40
        engine.update_weights(path)
        assert engine.weight_version == 41
        for wrong in (-1, 1.5, True):
            with pytest.raises(ValueError, match="must be an integer from 0 up"):
                engine.update_weights(path, version=wrong)  # type: ignore[arg-type]
        assert engine.weight_version == 41


def assert_equal_ranks(engine: Engine) -> None:
    runtime = engine.runtime
    assert isinstance(runtime, DriverRuntime) and len(set(runtime.digests())) == 1


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_two_ranks_take_their_parts(
    checkpoints: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantize: str | None,
) -> None:
    """Parts of tensors that are handed over, and of a checkpoint; snapshots go to one rank and
    back.
    """
    path, temporary = checkpoints["llama-biases"].path, tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    other = other_weights(path, tmp_path / "other")
    options: dict[str, Any] = {"quantize": quantize, "lookahead": 0}
    with (
        open_engine(path, tensor_parallel=2, **options) as engine,
        open_engine(path, **options) as alone,
    ):
        assert_equal_tokens(said(engine), said(alone))
        for source in (tensors_of(other), path):
            with engine.session() as session:
                session.append(PROMPTS[1])
                session.generate(GREEDY)
                older = session.snapshot()
            for each in (engine, alone):
                each.update_weights(source)
                with pytest.raises(ValueError, match="the session is of model="):
                    each.restore_session(older)
            assert_equal_tokens(said(engine), said(alone))
            assert_equal_ranks(engine)
            with alone.session() as session:
                session.append(PROMPTS[1])
                expected = session.generate(GREEDY)
                kept = session.snapshot()
            with engine.restore_session(kept) as session:
                assert session.cached_tokens > 0
                assert session.token_ids[-12:] == expected.token_ids
        assert not list(temporary.iterdir())
        runtime = engine.runtime
        assert isinstance(runtime, DriverRuntime)
        os.kill(runtime.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank 1 .*ended"):
            engine.update_weights(path)
        with pytest.raises(RuntimeError, match=r"is broken.* while weights were updated"):
            engine.generate([5], GREEDY)


def test_values_without_room_say_how_many_bytes_they_have(
    checkpoints: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(given_tensors, "save_whole", save)
    values = {"model.norm.weight": torch.ones(72)}
    given = GivenTensors.in_place_of(Checkpoint.open(checkpoints["llama-biases"].path), values)
    message = (
        r"^288 bytes of new weights, which the other ranks read, do not go to .*graphengine-"
        r"weights-.* \(TMPDIR names another place\): I/O error: No space left on device "
        r"\(os error 28\)$"
    )
    with pytest.raises(OSError, match=message), as_checkpoint(given):
        raise AssertionError("nothing was written")


def send_elsewhere(ranks: Ranks) -> None:
    ranks.send(UpdateWeights("/nowhere", temporary=False, drafts=False))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            stop,
            r"^waited 0\.7 s for command (\d+), an update of {nbytes} bytes of weights "
            r"\(wait_limit_s=0\.2 and 0\.5 s for the bytes\): rank 1 \(process \d+, cpu\) has done "
            r"\d+ of \1 commands$",
        ),
        (send_elsewhere, r"^rank 1 \(process \d+, cpu\) failed: FileNotFoundError: .*/nowhere"),
    ],
)
def test_a_rank_that_does_not_update(
    checkpoints: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Ranks], None],
    message: str,
) -> None:
    """It is waited for no longer than the engine's limit and the bytes allow, and says why."""
    path = checkpoints["llama-biases"].path
    nbytes = sum(info.nbytes for info in Checkpoint.open(path).tensors.values())
    monkeypatch.setattr("graphengine.parallel.ranks._UPDATE_BYTES_PER_S", 2 * nbytes)
    with open_engine(path, wait_limit_s=GENEROUS_S, tensor_parallel=2) as engine:
        runtime = engine.runtime
        assert isinstance(runtime, DriverRuntime)
        if fault is stop:
            limit_waits(engine, 0.2)
        fault(runtime.ranks)
        with pytest.raises(RankFailed, match=message.format(nbytes=nbytes)):
            engine.update_weights(path)
        with pytest.raises(RuntimeError, match=r"(?s)is broken.* while weights were updated"):
            engine.generate([5], GREEDY)


@pytest.mark.parametrize("kind", ["tied and rounded", "modules"])
def test_two_stages_take_their_layers(
    checkpoints: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """Layers come from tensors that are handed over, where the driver also checks those of other
    stages, and from a checkpoint; tokens and log-probabilities are those of one process, to the
    bit.
    """
    path, options = checkpoints["llama-tied-yarn"].path, dict[str, Any]()
    if kind == "modules":
        if not HAS_CHAINS:
            pytest.skip("needs transformers with chains of modules")
        path, options["speculative"] = Chains(tmp_path / "chains", "qwen3", 1).path, MTP(k=2)
    else:
        options |= {"quantize": "int8", "quantize_lm_head": True}
    other = other_weights(path, tmp_path / "other")
    with open_engine(other, **options) as alone:
        expected = said(alone)
    with open_engine(path, pipeline_parallel=2, **options) as engine:
        before = said(engine)
        assert before != expected
        values = tensors_of(other)
        if kind != "modules":
            first = "model.layers.0.mlp.gate_proj.weight"
            with pytest.raises(ValueError, match=r"together, and 1 of 2 are missing: .*0\.mlp\.up"):
                engine.update_weights({first: values[first]})
        engine.update_weights({})
        assert said(engine) == before
        engine.update_weights(values)
        assert said(engine) == expected
        assert_equal_ranks(engine)
        engine.update_weights(path)
        assert said(engine) == before


def test_ranks_with_whole_experts(expert_checkpoints: dict[str, Any], tmp_path: Path) -> None:
    """The driver hands over what others have, and checks it."""
    path = expert_checkpoints["moe-even"].path
    other = other_weights(path, tmp_path / "other")
    options: dict[str, Any] = {"quantize": "int8", "lookahead": 0}
    with open_engine(other, **options) as engine:
        expected = said(engine)
    ranks: dict[str, Any] = {"tensor_parallel": 2, "expert_parallel": True}
    with open_engine(path, **ranks, **options) as engine:
        values = tensors_of(other)
        alone = "model.layers.1.mlp.experts.15.gate_proj.weight"
        with pytest.raises(ValueError, match=r"together, and 1 of 2 are missing: .*15\.up_p"):
            engine.update_weights({alone: values[alone]})
        engine.update_weights(values)
        assert_equal_tokens(said(engine), expected)
        assert_equal_ranks(engine)


def assert_equal_tokens(found: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    """Sums of ranks differ in last bits."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_kv_of_older_weights_is_dropped(checkpoints: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoints["llama-tied-yarn"].path
    other = other_weights(path, tmp_path / "other")
    prompt = [*range(40)]
    with open_engine(path, prefix_caching=True) as engine, engine.session() as session:
        first = engine.generate(prompt, GREEDY)
        assert engine.generate(prompt, GREEDY).cached_tokens == 32
        session.append(prompt[:20])
        turn = session.generate(GREEDY)
        assert session.cached_tokens > 0
        older = session.snapshot()
        kept = session.token_ids

        engine.update_weights(tensors_of(other))
        again = engine.generate(prompt, GREEDY)
        assert again.cached_tokens == 0 and again.token_ids != first.token_ids
        assert engine.generate(prompt, GREEDY).cached_tokens == 32
        with pytest.raises(ValueError, match=r"the session is of model='\w{16}', the engine of"):
            engine.restore_session(older)
        assert session.token_ids == kept == (*prompt[:20], *turn.token_ids)
        assert session.evicted and session.cached_tokens == 0
        session.append([7])
        found = session.generate(GREEDY)
        newer = session.snapshot()
        # All of the same values make the same model; after one of them it is another.
        engine.update_weights(other)
        engine.restore_session(newer).close()
        engine.update_weights({"model.norm.weight": tensors_of(other)["model.norm.weight"]})
        with pytest.raises(ValueError, match="the session is of model="):
            engine.restore_session(newer)
    with open_engine(other) as engine:
        assert engine.generate([*kept, 7], GREEDY).token_ids == found.token_ids


def test_states_of_older_weights_are_dropped(hybrids: dict[str, Any], tmp_path: Path) -> None:
    path = hybrids["qwen"].path
    other = other_weights(path, tmp_path / "other")
    options: dict[str, Any] = {"prefix_caching": True, "session_states": 4}
    with open_engine(path, **options) as engine, engine.session() as session:
        session.append(PROMPTS[1])
        session.generate(GREEDY)
        assert session.cached_tokens > 0
        engine.update_weights(tensors_of(other))
        assert session.evicted and session.cached_tokens == 0
        kv = engine.stats()["kv"]
        assert kv["idle"] == 0 and kv["vacant"] == kv["blocks"]
        found = session.generate(GREEDY)
        assert found.cached_tokens == 0
        prompt = found.prompt_token_ids
    with open_engine(other) as engine:
        assert engine.generate(prompt, GREEDY).token_ids == found.token_ids


def test_some_of_the_tensors(checkpoints: dict[str, Any], tmp_path: Path) -> None:
    """One after the other, in other dtypes and layouts, they are all of them."""
    path = checkpoints["llama-biases"].path
    other = other_weights(path, tmp_path / "other")
    with open_engine(other) as engine:
        expected = said(engine)
    with open_engine(path) as engine:
        for name, tensor in tensors_of(other).items():
            value = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
            engine.update_weights(iter([(name, torch.nn.Parameter(value))]))
        assert said(engine) == expected
        with engine.session() as session:
            session.append(PROMPTS[1])
            session.generate(GREEDY)
            engine.update_weights([])
            assert session.cached_tokens > 0
        assert said(engine) == expected


def test_a_tied_head_has_two_names(checkpoints: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoints["llama-tied-yarn"].path
    other = tensors_of(other_weights(path, tmp_path / "other"))
    embedding = other.pop("model.embed_tokens.weight")
    for quantize in (None, "int8"):
        with open_engine(path, quantize=quantize, quantize_lm_head=quantize is not None) as engine:
            found = []
            for names in (["lm_head"], ["model.embed_tokens"], ["lm_head", "model.embed_tokens"]):
                engine.update_weights(str(path))
                given = {f"{name}.weight": embedding.clone() for name in names}
                engine.update_weights(other | given)
                found.append(said(engine))
            assert found[0] == found[1] == found[2]
            two = {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding + 1}
            with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens"):
                engine.update_weights(two)
            assert said(engine) == found[0]


Q, K, UP = (f"model.layers.0.{name}.weight" for name in
            ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"))  # fmt: skip
INF = float("inf")


def spoiled(tensor: Tensor, value: float, count: int) -> Tensor:
    """The tensor with a value at its last `count` places."""
    result = tensor.clone()
    result.view(-1)[-count:] = value
    return result


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "name": (
        lambda given: given | {"model.layers.9.mlp.up_proj.weight": given[Q]},
        r"1 of \d+ tensors are not in .*, which the engine was opened from: model.layers.9.mlp",
    ),
    "shape": (
        lambda given: given | {Q: given[Q][:-1]},
        rf"{Q} has shape \[479, 72\], not \[480, 72\]",
    ),
    "dtype": (
        lambda given: given | {UP: given[UP].to(torch.int8)},
        rf"{UP} has dtype torch.int8: weights are in one of torch.float32, torch.float16, torch.bf",
    ),
    "layout": (
        lambda given: given | {UP: given[UP].to_sparse()},
        rf"{UP} is a Tensor with layout torch.sparse_coo on cpu: weights are whole, dense tensors",
    ),
    "meta": (lambda given: given | {UP: given[UP].to("meta")}, rf"{UP} is a Tensor .* on meta"),
    "twice": (lambda given: [*given.items(), (Q, given[Q])], f"{Q} is there twice"),
    "no tensor": (
        lambda given: given | {Q: 3},
        rf"takes pairs of a name and a tensor, not '{Q}' and a int",
    ),
    "nothing": (lambda given: None, "takes tensors by their names, or the path .*, not None"),
    "NaN": (
        lambda given: given | {Q: spoiled(given[Q], torch.nan, 3), K: spoiled(given[K], -INF, 1)},
        rf"2 of \d+ tensors have a NaN or an infinite number, and nothing was changed: "
        rf"{K} \(1 of 11520 numbers\), {Q} \(3 of 34560 numbers\)$",
    ),
    "infinite": (
        lambda given: given | {UP: spoiled(given[UP].half(), INF, 2)},
        rf"1 of \d+ tensors have a NaN or an infinite number.*: {UP} \(2 of \d+ numbers\)$",
    ),
    "no pair": (lambda given: [given[Q]], "takes pairs of a name and a tensor, not tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_changes_nothing(checkpoints: dict[str, Any], case: str) -> None:
    path = checkpoints["llama-biases"].path
    change, message = WRONG[case]
    given = change({name: tensor + 1 for name, tensor in tensors_of(path).items()})
    with open_engine(path, prefix_caching=True) as engine:
        before = [tensor.clone() for tensor in held(engine)]
        engine.generate(PROMPTS[1], GREEDY)
        with pytest.raises(ValueError, match=message):
            engine.update_weights(given)
        assert all(map(torch.equal, held(engine), before))
        assert engine.generate(PROMPTS[1], GREEDY).cached_tokens > 0


def test_numbers_that_the_engines_dtype_cannot_hold_are_refused(
    checkpoints: dict[str, Any],
) -> None:
    path = checkpoints["llama-biases"].path
    large = spoiled(tensors_of(path)[UP], 1e6, 2)
    with open_engine(path, dtype="float16") as engine:
        before = [tensor.clone() for tensor in held(engine)]
        with pytest.raises(ValueError, match=rf"{UP} \(2 of \d+ numbers as torch.float16\)$"):
            engine.update_weights({UP: large})
        assert all(map(torch.equal, held(engine), before))
    with open_engine(path) as engine:
        engine.update_weights({UP: large})


@pytest.mark.parametrize("ranks", ["pipeline_parallel", "tensor_parallel"])
def test_numbers_of_another_ranks_tensors_are_checked_too(
    checkpoints: dict[str, Any], ranks: str
) -> None:
    """Those of the first layer, which the last stage, the driver's, does not have."""
    path = checkpoints["llama-biases"].path
    options: dict[str, Any] = {ranks: 2, "max_seq_len": 64}
    config = EngineConfig(device="cpu", dtype="float16", **options)
    found = read_checkpoint(path, config, Share(0, 2))
    loaded = load_checkpoint(found, plan_checkpoint(found, config), config).loaded
    tensors = tensors_of(path)
    first = min(name for name in tensors if name.endswith(".mlp.up_proj.weight"))
    assert (first in loaded.wanted) == (ranks == "tensor_parallel")
    with pytest.raises(ValueError, match=rf"{first} \(2 of \d+ numbers as torch.float16\)$"):
        loaded.checked({first: spoiled(tensors[first], 1e6, 2)})
    assert loaded.checked({first: tensors[first]}).values.keys() == {first}


def test_what_is_rounded_together_comes_together(checkpoints: dict[str, Any]) -> None:
    path = checkpoints["llama-biases"].path
    with open_engine(path, quantize="int8") as engine:
        before, given = said(engine), tensors_of(path)
        with pytest.raises(ValueError, match=r"rounded together, and 2 of 3 are missing: .*k_pr"):
            engine.update_weights({Q: given[Q] + 1})
        given[K][3, 2] = torch.nan
        with pytest.raises(ValueError, match=rf"1 of \d+ tensors have a NaN .*: {K} \(1 of"):
            engine.update_weights(given)
        assert said(engine) == before


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_tensors_that_are_rounded_count_as_all_do(
    checkpoints: dict[str, Any], tmp_path: Path, quantize: str | None
) -> None:
    """A checkpoint without them is refused, and after others the model is another, which depends on
    what the remaining ones were.
    """
    path = checkpoints["llama-biases"].path
    partial = other_weights(path, tmp_path / "partial")
    other = tensors_of(partial)
    kept = {name: value for name, value in other.items() if name != UP}
    save_file(kept, partial / "model.safetensors")
    pair = {name: other[name] for name in (UP, UP.replace("up_proj", "gate_proj"))}

    with open_engine(path, quantize=quantize) as engine:
        before = said(engine)
        with pytest.raises(ValueError, match=rf"lacks 1 .*tensors.*: {UP}$"):
            engine.update_weights(partial)
        assert said(engine) == before
        for each in (path, pair):
            engine.update_weights(each)
        with engine.session() as session:
            session.append(PROMPTS[1])
            session.generate(GREEDY)
            kept = session.snapshot()
        for whole, some in ((path, pair | {UP: pair[UP] + 0.25}), (other, pair)):
            engine.update_weights(whole)
            engine.update_weights(some)
            with pytest.raises(ValueError, match="the session is of model="):
                engine.restore_session(kept)
        for each in (path, pair):
            engine.update_weights(each)
        engine.restore_session(kept).close()


def test_modules_of_a_checkpoint_are_not_left_as_they_were(tmp_path: Path) -> None:
    tensors = tensors_of(few_layers())
    name = next(name for name in tensors if "mtp" in name)
    partial = other_weights(few_layers(), tmp_path / "partial")
    kept = {other: value for other, value in tensors.items() if other != name}
    save_file(kept, partial / "model.safetensors")
    with (
        open_engine(few_layers(), speculative=MTP(k=2)) as engine,
        pytest.raises(ValueError, match=f"partial lacks 1 tensors that are in use: {name}"),
    ):
        engine.update_weights(partial)


def test_another_model_is_refused(
    checkpoints: dict[str, Any],
    expert_checkpoints: dict[str, Any],
    hybrids: dict[str, Any],
    edited: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = checkpoints["llama-biases"].path
    with open_engine(path) as engine:
        before = said(engine)
        turned = edited(path, config={"rms_norm_eps": 0.25})
        with pytest.raises(ValueError, match=r"is another model than the engine's: its .*0\.25"):
            engine.update_weights(turned)
        with pytest.raises(ValueError, match=r"is a Qwen3Moe\w+, the engine's model a Llama"):
            engine.update_weights(expert_checkpoints["moe-every-layer"].path)
        with pytest.raises(ValueError, match=r"is a Qwen3_5\w+, the engine's model a Llama"):
            engine.update_weights(hybrids["qwen"].path)
        with pytest.raises(FileNotFoundError, match="there is no such directory"):
            engine.update_weights(tmp_path / "nowhere")
        assert said(engine) == before
    # What differs within a layer is named alone.
    path = expert_checkpoints["moe-every-layer"].path
    with open_engine(path) as engine:
        turned = edited(path, config={"num_experts_per_tok": 1})
        message = r"its config\.layers\[0\]\[1\]\[2\]\.router.* is 1, the engine's"
        with pytest.raises(ValueError, match=message):
            engine.update_weights(turned)


def test_packed_checkpoints_are_refused(checkpoints: dict[str, Any], tmp_path: Path) -> None:
    path = checkpoints["llama-biases"].path
    write_quantised(Checkpoint.open(path), tmp_path / "packed", "int8")
    message = r"packed are quantised \(compressed-tensors\): only those of 16 and 32 bits can be up"
    with open_engine(path, quantize="int8") as engine:
        before = said(engine)
        with pytest.raises(ValueError, match=message):
            engine.update_weights(tmp_path / "packed")
        assert said(engine) == before
    with open_engine(tmp_path / "packed") as engine:
        for source in (tmp_path / "packed", path, {}):
            with pytest.raises(ValueError, match=message):
                engine.update_weights(source)
        assert said(engine) == before
        with pytest.raises(ValueError, match="is for engines that from_pretrained has opened"):
            update_weights(engine.core, None, {}, None, "off")


def test_requests_are_to_end_first(checkpoints: dict[str, Any]) -> None:
    path = checkpoints["llama-biases"].path
    with open_engine(path) as engine:
        expected = engine.generate(PROMPTS[0], GREEDY)
        request = engine.submit(PROMPTS[0], GREEDY)
        for _ in range(4):
            engine.step()
        waiting = r"update_weights\(\) with unfinished requests \(1\): drain\(\)"
        with pytest.raises(ValueError, match=waiting):
            engine.update_weights(tensors_of(path))
        engine.drain()
        assert tuple(request.token_ids) == expected.token_ids
        # What was launched ahead is read.
        stopped = replace(GREEDY, stop_token_ids=expected.token_ids[5:6])
        request = engine.submit(PROMPTS[0], stopped)
        while not request.finished:
            engine.step()
        assert engine.core.in_flight
        engine.update_weights(path)
        assert not engine.core.in_flight

        def update(event: object) -> None:
            engine.update_weights(path)

        engine.submit(PROMPTS[0], replace(GREEDY, max_tokens=1), on_event=update)
        with pytest.raises(ValueError, match=r"update_weights\(\) called from inside step\(\)"):
            engine.drain()
        engine.drain()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.update_weights(path)


def test_an_error_amid_the_values_breaks_the_engine(
    checkpoints: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints["llama-biases"].path

    def fail(*arguments: object) -> None:
        raise MemoryError("planted")

    with open_engine(path) as engine:
        monkeypatch.setattr(engine.model, "refresh", fail)
        with pytest.raises(MemoryError, match="planted"):
            engine.update_weights(path)
        with pytest.raises(RuntimeError, match=r"broken.*planted, while weights were updated"):
            engine.generate([5], GREEDY)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_graphs_replay_with_other_weights(tmp_path: Path, quantize: str | None) -> None:
    """Tensors of the device, as a trainer in the same process has them."""
    path, other = checkpoint_path(), other_weights(checkpoint_path(), tmp_path / "other")
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "quantize": quantize}
    with open_engine(other, **options) as engine:
        expected = said(engine)
    with open_engine(path, **options) as engine:
        assert said(engine) != expected
        addresses = [tensor.data_ptr() for tensor in held(engine)]
        engine.update_weights((name, each.cuda()) for name, each in tensors_of(other).items())
        assert said(engine) == expected
        assert [tensor.data_ptr() for tensor in held(engine)] == addresses
