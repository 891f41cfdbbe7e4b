# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines that share a folder, on vLLM's real scheduler, with real pages, but no model.

Every byte that attention would read is compared, so a wrong object shows where it is used.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.connector.engines import engine_of, plan_of
from support.connector.gates import until
from support.connector.offload_run import check_nothing_is_left, run_offloading, serve
from support.connector.offload_workloads import EngineKind, offloading, random_offload, tokens
from support.connector.page_contents import WrongBytesError
from support.connector.paged_layouts import FULL, GEMMA, LAYOUTS, STATE_LAYOUTS, PagedLayout
from support.connector.shared_objects import forge, objects
from support.connector.simulated_engine import SimulatedEngine
from support.sample import IS_LONG, sampled
from support.scheduler.options import _model_config
from support.scheduler.workload import RequestPlan

from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.connector.scheduler.secondary_tier import SecondaryTierScheduler
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.shared_tier import backend, engine_identity, files
from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES, Answer, SharedObject
from vllm_ascend_kvext.shared_tier.engine_identity import identity_of
from vllm_ascend_kvext.shared_tier.files import FilesTier
from vllm_ascend_kvext.shared_tier.names import differences
from vllm_ascend_kvext.shared_tier.scheduler import limits
from vllm_ascend_kvext.store.entries import Kind

pytestmark = [
    pytest.mark.usefixtures("offloading_in_effect", "weights"),
    pytest.mark.main_version,
]

SOME_LAYOUTS = LAYOUTS + STATE_LAYOUTS if IS_LONG else (FULL, LAYOUTS[1], STATE_LAYOUTS[0])
every_layout = pytest.mark.parametrize(
    "layout", LAYOUTS + STATE_LAYOUTS, ids=lambda layout: layout.name
)


@pytest.fixture(autouse=True)
def _equal_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a tier may seem to hang."""
    if "hangs" not in request.node.name:
        monkeypatch.setattr(limits, "MAX_LOOKUP_S", 20.0)
        monkeypatch.setattr(limits, "MAX_STALL_S", 20.0)


@pytest.fixture
def weights() -> Iterator[Path]:
    names = ("EagleLlamaForCausalLM", "LlamaForCausalLM")
    paths = [
        Path(_model_config(name, max_tokens).model) / "model.safetensors"
        for name in names
        for max_tokens in (2048, 1024)
    ]
    for path in paths:
        write_weights(path, b"\1" * 64)
    yield paths[-1]
    for path in paths:
        path.unlink()


def write_weights(path: Path, content: bytes) -> None:
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)


def sharing(layout: PagedLayout, folder: Path, **values: Any) -> dict[str, Any]:
    return offloading(layout, shared_tier=f"file://{folder}", **values)


def prompt_of(layout: PagedLayout, seed: object, num_units: int = 6) -> list[int]:
    rng = random.Random(str(seed))
    return tokens(rng, num_units * layout.unit_tokens + 3)


def hit_tokens(engine: SimulatedEngine, *plans: RequestPlan) -> int:
    before = engine.side.counters.hit_tokens
    serve(engine, *plans)
    check_nothing_is_left(engine)
    return engine.side.counters.hit_tokens - before


def floor(engine: SimulatedEngine, num_tokens: int) -> int:
    return engine.tier.geometry.floor(num_tokens)


def store_in(folder: Path, layout: PagedLayout, *prompts: Sequence[int], **options: Any) -> None:
    """Let an engine compute prompts, put their KV, and end."""
    with engine_of(layout, offloading=sharing(layout, folder), **options) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"stored-{number}", prompt))
        assert not any(engine.side.counters.shared_failures.values())


# KV that one engine stores, and another engine hits.


@pytest.mark.parametrize("num_workers", [1, 2])
@every_layout
def test_another_engine_hits_what_one_has_stored(
    layout: PagedLayout, num_workers: int, tmp_path: Path
) -> None:
    prompt = prompt_of(layout, 1)
    store_in(tmp_path, layout, prompt, num_workers=num_workers)
    with engine_of(layout, offloading=sharing(layout, tmp_path), num_workers=num_workers) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1)
        counters = engine.side.counters
        assert counters.shared_requests["found"] == 1
        assert counters.transfer_bytes["get"] > 0 and not any(counters.shared_failures.values())
        # Host memory has the KV now, so the tier is not asked.
        assert hit_tokens(engine, plan_of("b", prompt)) == floor(engine, len(prompt) - 1)
        assert sum(counters.shared_requests.values()) == 1


@every_layout
def test_a_prompt_that_parts_within_a_chunk_hits_to_the_last_unit(
    layout: PagedLayout, tmp_path: Path
) -> None:
    """Layouts with windows or states hit up to tails.

    An earlier prompt ended there and left some.
    """
    unit = layout.unit_tokens
    prompt = prompt_of(layout, 1, 8)
    shared = prompt[: 5 * unit]  # A chunk has two units.
    store_in(tmp_path, layout, [*shared, 1], prompt)
    other = shared + prompt_of(layout, 2, 4)
    with engine_of(layout, offloading=sharing(layout, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", other)) == len(shared)
        assert hit_tokens(engine, plan_of("b", prompt)) >= len(shared)


def test_tails_are_stored_as_a_whole(tmp_path: Path) -> None:
    """Tails do not continue those that other prompts have left, because an object is read alone."""
    beginning = prompt_of(GEMMA, "beginning", num_units=20)
    with engine_of(GEMMA, offloading=sharing(GEMMA, tmp_path)) as engine:
        for number in range(6):
            question = prompt_of(GEMMA, number, num_units=1)
            serve(engine, plan_of(f"question-{number}", [*beginning, *question]))
        tails = [entry for entry in engine.entries if entry.piece.kind is Kind.TAILS]
        assert len(tails) > 4 and not any(entry.base for entry in tails)


def test_of_a_chunk_of_another_prompt_only_the_shared_rows_are_loaded(tmp_path: Path) -> None:
    unit = FULL.unit_tokens
    prompt = prompt_of(FULL, 1, 8)
    store_in(tmp_path, FULL, prompt)
    other = [*prompt[: 5 * unit], *prompt_of(FULL, 2, 4)]
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", other)) == 5 * unit
        # Now the rest of that chunk is stored, too. Both parts are read.
        assert hit_tokens(engine, plan_of("b", other)) == floor(engine, len(other) - 1)
        assert hit_tokens(engine, plan_of("c", prompt)) == floor(engine, len(prompt) - 1)


def test_several_requests_at_once_share_what_is_got(tmp_path: Path) -> None:
    prompt = prompt_of(FULL, 1, 12)
    store_in(tmp_path, FULL, prompt)
    num_bytes = sum(path.stat().st_size for path in objects(tmp_path))
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        plans = [plan_of(str(number), prompt) for number in range(4)]
        assert hit_tokens(engine, *plans) == 4 * floor(engine, len(prompt) - 1)
        assert engine.side.counters.transfer_bytes["get"] < num_bytes


def test_engines_share_at_the_same_time(tmp_path: Path) -> None:
    options = sharing(FULL, tmp_path)
    with engine_of(FULL, offloading=options) as one, engine_of(FULL, offloading=options) as other:
        for seed in range(4):
            prompt = prompt_of(FULL, seed)
            engines = (one, other) if seed % 2 else (other, one)
            assert hit_tokens(engines[0], plan_of(f"a{seed}", prompt)) == 0
            found = hit_tokens(engines[1], plan_of(f"b{seed}", prompt))
            assert found == floor(one, len(prompt) - 1)


def test_requests_of_a_burst_wait_until_they_are_asked_for(tmp_path: Path) -> None:
    prompts = [prompt_of(FULL, seed, 2) for seed in range(3 * limits.MAX_ASKED)]
    store_in(tmp_path, FULL, *prompts)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        plans = [plan_of(str(seed), prompt) for seed, prompt in enumerate(prompts)]
        assert hit_tokens(engine, *plans) == len(prompts) * floor(engine, len(prompts[0]) - 1)


def test_only_what_is_used_a_second_time_is_put(tmp_path: Path) -> None:
    prompt = prompt_of(FULL, 1)
    options = sharing(FULL, tmp_path, store_policy="second_touch")
    with engine_of(FULL, offloading=options) as engine:
        serve(engine, plan_of("first", prompt), plan_of("other", prompt_of(FULL, 2)))
        assert objects(tmp_path) == []
        serve(engine, plan_of("second", prompt))
        assert objects(tmp_path)
    with engine_of(FULL, offloading=options) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1)
        assert hit_tokens(engine, plan_of("b", prompt_of(FULL, 2))) == 0


def test_what_stands_behind_a_lost_object_is_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    prompt = prompt_of(FULL, 1, 12)
    chunk = 2 * FULL.unit_tokens
    store_in(tmp_path, FULL, prompt)
    (lost,) = tmp_path.glob(f"kvext4/*/*/objects/*/R{2 * chunk}-{3 * chunk}-*")
    lost.unlink()
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1) - chunk


# Engines that do not share KV.


def test_a_salt_does_not_meet(tmp_path: Path) -> None:
    prompt = tuple(prompt_of(FULL, 1))
    store_in(tmp_path, FULL, prompt)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        salted = RequestPlan(
            request_id="a", arrival_step=0, prompt=prompt, max_tokens=3, cache_salt="x"
        )
        assert hit_tokens(engine, salted) == 0
        assert hit_tokens(engine, plan_of("plain", prompt)) > 0


def test_requests_with_an_adapter_are_neither_put_nor_asked_for(tmp_path: Path) -> None:
    """vLLM identifies an adapter only by its name."""
    prompt = tuple(prompt_of(FULL, 1))
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        for name in ("a", "b"):
            plan = RequestPlan(
                request_id=name, arrival_step=0, prompt=prompt, max_tokens=3, adapter="adapter-1"
            )
            assert hit_tokens(engine, plan) == (
                floor(engine, len(prompt) - 1) if name == "b" else 0
            )
        assert sum(engine.side.counters.shared_requests.values()) == 0
        assert objects(tmp_path) == []


def test_other_weights_under_the_same_path_do_not_meet(
    tmp_path: Path, weights: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    see_log(caplog, monkeypatch)
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    before = weights.stat()
    write_weights(weights, b"\1" * 40 + b"\2" + b"\1" * 23)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
    assert "differs in: weights." in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_workers": 2}, "tensor parallel size (2 here, 1 there)"),
        ({"max_model_len": 2048}, "max_model_len (2048 here, 1024 there)"),
        ({"chunk_tokens": 4}, "chunk tokens ("),
    ],
)
def test_other_engines_do_not_meet(
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see_log(caplog, monkeypatch)
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    values = sharing(FULL, tmp_path)
    if "chunk_tokens" in options:
        values["chunk_tokens"] = options.pop("chunk_tokens") * FULL.unit_tokens
    with engine_of(FULL, offloading=values, **options) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
    assert said in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch: patch.setenv("PYTHONHASHSEED", "1"), "block hashes"),
        (
            lambda patch: patch.setattr(engine_identity, "installed_version", lambda *_: "another"),
            "versions",
        ),
    ],
    ids=["seeds", "releases"],
)
def test_other_seeds_and_releases_do_not_meet(
    change: Callable[[pytest.MonkeyPatch], None],
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see_log(caplog, monkeypatch)
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    change(monkeypatch)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
    assert f"differs in: {said}" in caplog.text


def test_what_was_put_or_got_is_not_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of a longer object has its rows in other places than an object of that piece."""
    puts, put = Counter[str](), FilesTier.put

    def counted(tier: FilesTier, each: SharedObject) -> Answer:
        puts[each.name] += 1
        return put(tier, each)

    monkeypatch.setattr(FilesTier, "put", counted)
    prompt = prompt_of(FULL, 1, 8)
    other = [*prompt[: 5 * FULL.unit_tokens], *prompt_of(FULL, 2, 4)]
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        serve(engine, *(plan_of(str(number), prompt) for number in range(3)))
        serve(engine, *(plan_of(f"again {number}", prompt) for number in range(3)))
    assert set(puts.values()) == {1}
    puts.clear()
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        for number in range(3):
            serve(engine, plan_of(str(number), other))
        row_map = engine.side.secondary._uses._layout.row_map
        (cut,) = (each for each in engine.entries if each.row_map != row_map(each.piece))
        assert set(puts.values()) == {1}
        assert not any(cut.key.hex()[:32] in name for name in puts)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", other)) == floor(engine, len(other) - 1)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("load_config.load_format", "pt", "loading"),
        ("load_config.model_loader_extra_config", {"pattern": "x"}, "loading"),
        ("model_config.quantization", "x", "how a model computes"),
        ("model_config.model_impl", "transformers", "how a model computes"),
        ("model_config.code_revision", "x", "how a model computes"),
        ("model_config.max_model_len", 512, "max_model_len"),
        ("load_config.use_tqdm_on_load", False, ""),
        ("load_config.download_dir", "elsewhere", ""),
        ("model_config.revision", "another name of these files", ""),
    ],
)
def test_an_engine_is_known_by_what_decides_its_kv(
    name: str, value: object, said: str, tmp_path: Path
) -> None:
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        config = copy.deepcopy(engine.scheduler.vllm_config)
        layout = engine.side.secondary._uses._layout
        workers = [worker.handshake().worker.secondary for worker in engine.workers]
        before = identity_of(config, layout, workers)
        part, _, attribute = name.partition(".")
        setattr(getattr(config, part), attribute, value)
        found = differences(before, identity_of(config, layout, workers))
    assert [each.partition(" (")[0] for each in found] == [said] * bool(said)


def test_weights_that_a_worker_cannot_know_are_refused(tmp_path: Path) -> None:
    with engine_of(FULL, offloading=sharing(FULL, tmp_path), num_workers=2) as engine:
        first, second = (worker.handshake().worker.secondary for worker in engine.workers)
        workers = [first, replace(second, refusal="Why.")]
        layout = engine.side.secondary._uses._layout
        with pytest.raises(SettingsError, match=r"Why\. \(rank 1 of 2, load_format=auto\)"):
            identity_of(engine.scheduler.vllm_config, layout, workers)


# Used KV stays.


NUM_OTHERS = 20  # The folder holds about half of these.


def let_pass(engine: SimulatedEngine, seconds: float) -> None:
    """Let time pass, but only for the clock of the scheduler side."""
    before = engine.clock
    engine.clock = lambda: before() + seconds


def forget_host(engine: SimulatedEngine) -> None:
    engine.tier.evict(lambda entry: True)


def watch_touches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Sequence[str]]]:
    """Record from now on which thread touches which objects."""
    seen: list[tuple[str, Sequence[str]]] = []
    touch = FilesTier.touch

    def watched(tier: FilesTier, each: Sequence[str]) -> list[bool] | None:
        seen.append((threading.current_thread().name, each))
        return touch(tier, each)

    monkeypatch.setattr(FilesTier, "touch", watched)
    return seen


@pytest.mark.parametrize("hits", ["device", "device alone", "host"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=lambda layout: layout.name)
def test_what_is_used_all_the_time_stays_in_the_folder(
    layout: PagedLayout, num_workers: int, hits: str, tmp_path: Path
) -> None:
    """The prompt is still on the device or in host memory, so the tier is not asked for it."""
    hot = prompt_of(layout, "hot")
    options = sharing(layout, tmp_path, shared_tier_bytes=num_workers << 17)
    with engine_of(
        layout, offloading=options, num_workers=num_workers, caching=hits != "host"
    ) as engine:
        serve(engine, plan_of("hot", hot))
        if hits == "device alone":
            serve(engine, plan_of("hot, again", hot))
            forget_host(engine)
        first = {path.name for path in objects(tmp_path)}
        for seed in range(NUM_OTHERS):
            serve(engine, plan_of(f"other {seed}", prompt_of(layout, seed)))
            let_pass(engine, limits.TOUCH_EVERY_S)
            serve(engine, plan_of(f"hot {seed}", hot))
        assert not any(engine.side.counters.shared_failures.values())
        check_nothing_is_left(engine)
    assert len({path.name for path in objects(tmp_path)}) < NUM_OTHERS * len(first), (
        "no object was evicted, so the test shows nothing"
    )
    with engine_of(layout, offloading=options, num_workers=num_workers) as engine:
        assert hit_tokens(engine, plan_of("cold", prompt_of(layout, 0))) == 0
        assert hit_tokens(engine, plan_of("hot", hot)) == floor(engine, len(hot) - 1)


def test_an_object_is_touched_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the workers touch objects, at once for all requests of a step."""
    prompt = prompt_of(FULL, 1)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        engine.clock = lambda: 0.0
        serve(engine, plan_of("first", prompt))
        seen = watch_touches(monkeypatch)
        plans = [plan_of(str(number), prompt) for number in range(8)]
        serve(engine, *plans)
        serve(engine, *(plan_of(f"again {number}", prompt) for number in range(8)))
        assert len(seen) == 1, "expected one call for a step, and no call too early"
        ((thread, names),) = seen
        assert thread == "kvext-shared-puts" and len({*names}) == len(names) == 3  # Chunks.
        let_pass(engine, limits.TOUCH_EVERY_S)
        serve(engine, plan_of("later", prompt))
        assert len(seen) == 2 and seen[1] == seen[0]
        check_nothing_is_left(engine)


def test_few_objects_are_touched_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some objects are touched in a step.

    The others wait, also the beginnings of long prompts.
    """
    monkeypatch.setattr(limits, "MAX_TOUCHED", 4)
    prompt = prompt_of(FULL, 1, 20)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        engine.clock = lambda: 0.0
        serve(engine, plan_of("first", prompt))
        seen = watch_touches(monkeypatch)
        for number in range(4):
            serve(engine, plan_of(str(number), prompt))
        assert [len(each) for _, each in seen] == [4, 4, 2]
        assert len({name for _, each in seen for name in each}) == 10


def test_all_of_a_prompt_is_touched_that_has_more_objects_than_are_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are touched even if the first objects are due again each time that the prompt is used."""
    monkeypatch.setattr(limits, "MAX_TOUCHED", 4)
    prompt = prompt_of(FULL, 1, 20)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        engine.clock = lambda: 0.0
        serve(engine, plan_of("first", prompt))
        seen = watch_touches(monkeypatch)
        for number in range(3):
            let_pass(engine, 2 * limits.TOUCH_EVERY_S)
            serve(engine, plan_of(str(number), prompt))
        assert max(len(each) for _, each in seen) <= 4
        touched = Counter(name for _, each in seen for name in each)
        assert len(touched) == 10 and min(touched.values()) >= 2
        check_nothing_is_left(engine)


def test_what_waits_to_be_touched_is_forgotten_where_the_folder_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No steps are made for objects that wait to be touched."""
    monkeypatch.setattr(limits, "MAX_TOUCHED", 4)
    prompt = prompt_of(FULL, 1, 20)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        engine.clock = lambda: 0.0
        serve(engine, plan_of("first", prompt))
        let_pass(engine, 2 * limits.TOUCH_EVERY_S)
        monkeypatch.setattr(FilesTier, "touch", lambda *_: None)
        serve(engine, plan_of("again", prompt))
        assert engine.side.counters.shared_failures["touch_unreachable"] == 1
        assert not engine.side.secondary.has_transfers
        check_nothing_is_left(engine)


def test_a_tier_is_not_closed_beneath_a_lookup_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing would end Mooncake's client with the process. A later lookup must not hide a hang."""
    prompts = [prompt_of(FULL, seed) for seed in range(2)]
    store_in(tmp_path, FULL, *prompts)
    hanging = Hanging(monkeypatch, "exist")
    hanging.is_hanging = lambda name: not hanging.begun
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        side = engine.side.secondary
        timed_steps(engine, plan_of("hangs", prompts[0]))
        time.sleep(0.1)
        let_pass(engine, limits.PAUSE_S + 0.1)
        timed_steps(engine, plan_of("later", prompts[1]))
        assert side._questions._last_asked.is_answered.is_set(), "another thread must have answered"
        closed: list[bool] = []
        monkeypatch.setattr(side._backend, "close", lambda: closed.append(True))
        side.shutdown()
        assert not closed
        hanging.gate.set()
        until(lambda: not side._questions._thread.has_left_behind)
        side.shutdown()
        assert closed


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=lambda layout: layout.name)
def test_what_is_used_and_was_removed_is_put_again(
    layout: PagedLayout, num_workers: int, tmp_path: Path
) -> None:
    """Either one worker has lost the KV, or all have."""
    prompt = prompt_of(layout, 1)
    options = sharing(layout, tmp_path)
    with engine_of(layout, offloading=options, num_workers=num_workers) as engine:
        serve(engine, plan_of("first", prompt))
        serve(engine, plan_of("second", prompt))
        let_pass(engine, limits.TOUCH_EVERY_S)
        for path in objects(tmp_path):
            if path.parts[-4] == f"r{num_workers - 1}":
                path.unlink()
        serve(engine, plan_of("third", prompt))
        check_nothing_is_left(engine)
    with engine_of(layout, offloading=options, num_workers=num_workers) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1)


def test_a_piece_of_a_longer_object_is_not_put_again(tmp_path: Path) -> None:
    """Its bytes are not laid out as its name says."""
    prompt = prompt_of(FULL, 1, 8)
    other = [*prompt[: 5 * FULL.unit_tokens], *prompt_of(FULL, 2, 4)]
    store_in(tmp_path, FULL, prompt)
    options = sharing(FULL, tmp_path, store_policy="second_touch")
    with engine_of(FULL, offloading=options) as engine:
        assert hit_tokens(engine, plan_of("a", other)) == 5 * FULL.unit_tokens
        row_map = engine.side.secondary._uses._layout.row_map
        (cut,) = (each for each in engine.entries if each.row_map != row_map(each.piece))
        for path in objects(tmp_path):
            path.unlink()
        let_pass(engine, limits.TOUCH_EVERY_S)
        again = [*other[: 5 * FULL.unit_tokens], 1, 2, 3]
        assert hit_tokens(engine, plan_of("b", again)) == 5 * FULL.unit_tokens
        there = {path.name for path in objects(tmp_path)}
    assert len(there) == 2 and not any(cut.key.hex()[:32] in name for name in there)


def test_touches_are_left_while_the_folder_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(FULL, 1)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        serve(engine, plan_of("first", prompt))
        calls: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(FilesTier, "touch", lambda *_: calls.append(1))
            for number in range(5):
                let_pass(engine, limits.TOUCH_EVERY_S / 2)
                serve(engine, plan_of(f"failing {number}", prompt))
        assert len(calls) == 1
        assert engine.side.counters.shared_failures["touch_unreachable"] == 1
        let_pass(engine, limits.PAUSE_S)
        seen = watch_touches(monkeypatch)
        serve(engine, plan_of("later", prompt))
        assert len(seen) == 1
        check_nothing_is_left(engine)


@pytest.mark.vllm("<0.30")
def test_random_seeds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    with (
        pytest.raises(SettingsError, match="Set PYTHONHASHSEED to 0"),
        engine_of(FULL, offloading=sharing(FULL, tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    ("load_format", "has_own_scales", "said"),
    [
        ("dummy", False, "load_format=dummy, calculate_kv_scales=False"),
        ("auto", True, "load_format=auto, calculate_kv_scales=True"),
        ("npcache", False, "load_format=npcache, which reads copies"),
    ],
    ids=str,
)
def test_what_no_file_of_weights_tells_is_refused(
    load_format: str, has_own_scales: bool, said: str
) -> None:
    config = SimpleNamespace(
        model_config=None,
        cache_config=SimpleNamespace(calculate_kv_scales=has_own_scales),
        load_config=SimpleNamespace(load_format=load_format),
    )
    with pytest.raises(SettingsError, match=said):
        identity_of(config, None, ())


def test_a_model_without_weights_is_refused(tmp_path: Path, weights: Path) -> None:
    content = weights.read_bytes()
    weights.unlink()
    try:
        with (
            pytest.raises(SettingsError, match="expected files of weights"),
            engine_of(FULL, offloading=sharing(FULL, tmp_path)),
        ):
            pass
    finally:
        weights.write_bytes(content)


def see_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.ascend_kvext")


# Faults: KV that does not come is computed.


def payload(path: Path) -> bytes:
    return path.read_bytes()[:-SEAL_BYTES]


@pytest.mark.parametrize("kind", ["zeroed", "swapped"])
@every_layout
def test_wrong_bytes_with_a_right_checksum_are_seen(
    layout: PagedLayout, kind: str, tmp_path: Path
) -> None:
    """The control: the tests here would notice if objects were mixed up."""
    prompt = prompt_of(layout, 1)
    store_in(tmp_path, layout, prompt, prompt_of(layout, 2))
    first: dict[str, list[Path]] = {"R0": [], "T": []}
    for path in objects(tmp_path):
        for prefix in first:
            if path.name.startswith(prefix):
                first[prefix].append(path)
    mine = first["R0"] or first["T"]
    contents = [payload(path) for path in mine]
    for number, path in enumerate(mine):
        content = bytes(len(contents[number]))
        if kind == "swapped":
            fitting = [c for i, c in enumerate(contents) if i != number and len(c) == len(content)]
            if not fitting:
                continue
            content = fitting[0]
        forge(tmp_path, path, content)
    with (
        pytest.raises((WrongBytesError, AssertionError)),
        engine_of(layout, offloading=sharing(layout, tmp_path)) as engine,
    ):
        serve(engine, plan_of("a", prompt))


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "zeroed"])
@pytest.mark.parametrize("share", [0.3, 1.0])
@every_layout
def test_damaged_objects_are_computed(
    layout: PagedLayout, damage: str, share: float, tmp_path: Path
) -> None:
    prompt = prompt_of(layout, 1)
    store_in(tmp_path, layout, prompt, num_workers=2)
    rng = random.Random(f"{layout.name}/{damage}")
    chosen = [path for path in objects(tmp_path) if rng.random() < share]
    for path in chosen:
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        elif damage == "cut":
            os.truncate(path, len(data) // 2)
        else:
            data[rng.randrange(len(data))] ^= 1
            path.write_bytes(data if damage == "flipped" else bytes(len(data)))
    with engine_of(layout, offloading=sharing(layout, tmp_path), num_workers=2) as engine:
        found = hit_tokens(engine, plan_of("a", prompt))
        assert share < 1 or found == 0
        assert hit_tokens(engine, plan_of("b", prompt)) == floor(engine, len(prompt) - 1)
    with engine_of(layout, offloading=sharing(layout, tmp_path), num_workers=2) as engine:
        # The engine that computed the tokens of the broken objects puts them again.
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1)


def test_a_folder_that_vanishes_stops_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    prompt = prompt_of(FULL, 1)
    store_in(folder, FULL, prompt)
    with engine_of(FULL, offloading=sharing(FULL, folder)) as engine:
        shutil.rmtree(folder)
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
        assert hit_tokens(engine, plan_of("b", prompt)) == floor(engine, len(prompt) - 1)


class Slow:
    """Calls of a tier wait until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.gate = threading.Event()
        self.num_calls = 0
        call = getattr(FilesTier, name)

        def slow(*arguments: Any) -> Any:
            self.num_calls += 1
            self.gate.wait(30)
            return call(*arguments)

        monkeypatch.setattr(FilesTier, name, slow)


def timed_steps(engine: SimulatedEngine, plan: RequestPlan) -> tuple[float, float]:
    """Serve a request. Return its whole time, and the time of the longest call of ``schedule``."""
    longest_s, schedule = 0.0, engine.scheduler.schedule

    def timed(*arguments: Any) -> Any:
        nonlocal longest_s
        began_s = time.perf_counter()
        output = schedule(*arguments)
        longest_s = max(longest_s, time.perf_counter() - began_s)
        return output

    engine.scheduler.schedule = timed
    began_s = time.perf_counter()
    engine.add_request(plan)
    while plan.request_id in engine.scheduler.requests:
        engine.step()
    return time.perf_counter() - began_s, longest_s


@pytest.mark.parametrize("call", ["exist", "get_into"])
def test_a_tier_that_hangs_is_not_waited_for(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is not asked until it continues. Late answers serve later requests."""
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    slow = Slow(monkeypatch, call)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        counters = engine.side.counters
        timed_steps(engine, plan_of("a", prompt))
        assert engine.side.counters.hit_tokens == 0
        event = "late" if call == "exist" else "given_up"
        assert counters.shared_requests[event] == 1
        timed_steps(engine, plan_of("b", prompt_of(FULL, 2)))
        assert counters.shared_requests["paused"] == 1
        assert slow.num_calls <= FilesTier(f"file://{tmp_path}", None, 0).num_get_threads
        slow.gate.set()
        while engine.has_work():
            engine.step()
        check_nothing_is_left(engine)


class Hanging:
    """Calls with some names hang until they are released. Other calls do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "get_into") -> None:
        self.gate, self.begun = threading.Event(), list[str]()
        self.is_hanging: Callable[[str], bool] = lambda name: True
        call = getattr(FilesTier, name)

        def hang(tier: FilesTier, what: Any, *more: Any) -> Any:
            named = what.name if isinstance(what, SharedObject) else str(what)
            if self.is_hanging(named):
                self.begun.append(named)
                self.gate.wait(60)
            return call(tier, what, *more)

        monkeypatch.setattr(FilesTier, name, hang)
        monkeypatch.setattr(backend, "MAX_HANG_S", 0.05)  # This limit is for threads.


@pytest.mark.parametrize("num_threads", [1, 2])
def test_one_get_that_hangs_ends_nothing(
    num_threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No other job uses the place of the get until it ends. Its tokens are computed and stored."""
    see_log(caplog, monkeypatch)
    monkeypatch.setattr(files, "_MAX_GET_THREADS", num_threads)
    prompts = [prompt_of(FULL, seed) for seed in range(12)]
    store_in(tmp_path, FULL, *prompts)
    hanging = Hanging(monkeypatch)
    hanging.is_hanging = lambda name: not hanging.begun
    options = sharing(FULL, tmp_path, host_memory_gib=FULL.host_bytes[1] / (1 << 30))
    with engine_of(FULL, offloading=options) as engine:
        counters = engine.side.counters
        timed_steps(engine, plan_of("hangs", prompts[0]))
        assert counters.shared_requests["given_up"] == 1 and len(hanging.begun) == 1
        timed_steps(engine, plan_of("paused", prompts[1]))
        assert counters.shared_requests["paused"] == 1
        time.sleep(0.1)
        let_pass(engine, limits.PAUSE_S + 0.1)
        monkeypatch.setattr(limits, "MAX_STALL_S", 20.0)
        caplog.clear()
        for number, prompt in enumerate(prompts[2:]):
            before = counters.hit_tokens
            timed_steps(engine, plan_of(f"later {number}", prompt))
            assert counters.hit_tokens - before == floor(engine, len(prompt) - 1)
        assert counters.shared_failures["get_hung"] == 1
        (line,) = {each for each in caplog.messages if "have not come for more than" in each}
        assert hanging.begun[0] in line
        for number in range(2):  # The prompt is computed, and stored in another place.
            before = counters.hit_tokens
            timed_steps(engine, plan_of(f"once more {number}", prompts[0]))
        assert counters.hit_tokens - before == floor(engine, len(prompts[0]) - 1)
        assert counters.shared_requests["paused"] == 1
        (lost,) = engine.side.secondary._gets._abandoned
        others = [each for each in engine.entries if each is not lost]
        assert all(
            each.offset_bytes + each.num_bytes <= lost.offset_bytes
            or each.offset_bytes >= lost.offset_bytes + lost.num_bytes
            for each in others
        )
        hanging.gate.set()  # Now the bytes of the get come.
        until(lambda: not engine.workers[0].shared.wait_for_end(0.01), "the get that hung")
        serve(engine, *(plan_of(f"end {seed}", prompt) for seed, prompt in enumerate(prompts)))
        assert lost not in engine.entries and not engine.side.secondary._gets._abandoned
        check_nothing_is_left(engine)


def test_a_get_that_hangs_while_others_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile, bytes of other requests come all the time."""
    monkeypatch.setattr(files, "_MAX_GET_THREADS", 2)
    prompts = [prompt_of(FULL, seed) for seed in range(40)]
    store_in(tmp_path, FULL, *prompts)
    hanging = Hanging(monkeypatch)
    hanging.is_hanging = lambda name: not hanging.begun
    monkeypatch.setattr(limits, "MAX_STALL_S", 1e6)  # Other gets bring something in time.
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        engine.add_request(plan_of("hangs", prompts[0]))
        for number, prompt in enumerate(prompts[1:]):
            timed_steps(engine, plan_of(f"other {number}", prompt))
            let_pass(engine, 0.4)
            if "hangs" not in engine.scheduler.requests:
                break
        assert 10 < number < 20
        assert engine.side.counters.shared_requests["given_up"] == 1
        hanging.gate.set()
        until(lambda: not engine.workers[0].shared.wait_for_end(0.01), "the get that hung")
        serve(engine)
        check_nothing_is_left(engine)


def test_touches_go_on_beside_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TOUCHED", 3)
    hot = prompt_of(FULL, "hot")
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        serve(engine, plan_of("first", hot))
        hanging = Hanging(monkeypatch, "touch")
        hanging.is_hanging = lambda name: not hanging.begun
        timed_steps(engine, plan_of("hangs", hot))
        until(lambda: hanging.begun, "the touch that hangs")
        time.sleep(0.1)
        let_pass(engine, backend.MAX_HANG_S + 5.1)
        monkeypatch.setattr(limits, "MAX_HANG_S", 5.0)
        timed_steps(engine, plan_of("frees", hot))
        for path in objects(tmp_path):
            path.unlink()
        timed_steps(engine, plan_of("later", hot))
        let_pass(engine, limits.TOUCH_EVERY_S)
        timed_steps(engine, plan_of("again", hot))
        hanging.gate.set()
        until(lambda: not engine.workers[0].shared.wait_for_end(0.01), "the touch that hung")
        serve(engine)
        assert len(objects(tmp_path)) == 3 and engine.side.secondary._uses._num_hung == 0
        check_nothing_is_left(engine)


def test_lookups_go_on_beside_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(FULL, seed) for seed in range(4)]
    store_in(tmp_path, FULL, *prompts)
    hanging = Hanging(monkeypatch, "exist")
    hanging.is_hanging = lambda name: not hanging.begun
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        counters = engine.side.counters
        timed_steps(engine, plan_of("hangs", prompts[0]))
        assert counters.shared_requests["late"] == 1
        time.sleep(0.1)
        monkeypatch.setattr(limits, "MAX_LOOKUP_S", 20.0)
        monkeypatch.setattr(limits, "MAX_STALL_S", 20.0)
        for number, prompt in enumerate(prompts[1:]):
            let_pass(engine, limits.PAUSE_S + 0.1)
            before = counters.hit_tokens
            timed_steps(engine, plan_of(f"later {number}", prompt))
            assert counters.hit_tokens - before == floor(engine, len(prompt) - 1)
        hanging.gate.set()
        serve(engine)
        check_nothing_is_left(engine)


def test_a_tier_of_which_much_hangs_is_left_alone_aloud_until_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    see_log(caplog, monkeypatch)
    prompts = [prompt_of(FULL, seed, 24) for seed in range(12)]
    store_in(tmp_path, FULL, *prompts)
    hanging = Hanging(monkeypatch)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        gets, counters = engine.side.secondary._gets, engine.side.counters
        for number, prompt in enumerate(prompts):
            timed_steps(engine, plan_of(str(number), prompt))
            time.sleep(0.06)
            let_pass(engine, limits.PAUSE_S + 0.1)
        num_hanging = len(gets._abandoned) + len(gets._under_way)
        assert limits.MAX_ABANDONED <= num_hanging <= limits.MAX_ABANDONED + 12
        assert counters.shared_requests["paused"] > 0 and counters.hit_tokens == 0
        assert any("objects that it has do not come" in each for each in caplog.messages)
        hanging.gate.set()
        monkeypatch.setattr(limits, "MAX_STALL_S", 20.0)
        serve(engine)
        until(lambda: not engine.workers[0].shared.wait_for_end(0.01), "the gets that hung")
        forget_host(engine)
        serve(engine, plan_of("now they are reported", prompt_of(FULL, "another")))
        let_pass(engine, limits.PAUSE_S + 0.1)
        prompt = prompts[-1]
        assert hit_tokens(engine, plan_of("end", prompt)) == floor(engine, len(prompt) - 1)


def test_long_steps_are_not_taken_for_a_tier_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results of one step are reported with a later step."""
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    get_into = FilesTier.get_into

    def get_later(*arguments: Any) -> Answer:
        time.sleep(0.01)
        return get_into(*arguments)

    monkeypatch.setattr(FilesTier, "get_into", get_later)
    monkeypatch.setattr(limits, "MAX_LOOKUP_S", 20.0)
    monkeypatch.setattr(limits, "MAX_STALL_S", 0.02)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        engine.add_request(plan_of("another", prompt_of(FULL, 2), max_tokens=30))
        engine.step()
        execute = engine.runner.execute

        def execute_long(output: Any) -> Any:
            result = execute(output)  # Workers have reported the ended jobs.
            time.sleep(0.05)
            return result

        engine.runner.execute = execute_long
        engine.add_request(plan_of("a", prompt))
        while "a" in engine.scheduler.requests:
            engine.step()
        assert engine.side.counters.shared_requests["given_up"] == 0
        assert engine.side.counters.hit_tokens == floor(engine, len(prompt) - 1)
        serve(engine)


def test_a_get_that_hangs_does_not_take_host_memory_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of hanging gets are lost until the gets end. Meanwhile there are fewer places."""
    prompts = [prompt_of(FULL, seed) for seed in range(1, 12)]
    store_in(tmp_path, FULL, *prompts)
    slow = Slow(monkeypatch, "get_into")
    monkeypatch.setattr(limits, "PAUSE_S", 0.0)
    # These places are not given up forever yet.
    monkeypatch.setattr(limits, "MAX_HANG_S", 1e6)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        own = prompt_of(FULL, 0)
        serve(engine, plan_of("own", own))
        counters = engine.side.counters
        for number, prompt in enumerate(prompts):
            timed_steps(engine, plan_of(f"other-{number}", prompt))
        assert counters.shared_requests["given_up"] == 1
        assert counters.shared_requests["paused"] == len(prompts) - 1
        before = counters.hit_tokens
        timed_steps(engine, plan_of("again", own))
        assert counters.hit_tokens - before == floor(engine, len(own) - 1)
        slow.gate.set()
        while engine.has_work():
            engine.step()
        check_nothing_is_left(engine)


def test_what_is_being_got_has_half_of_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(FULL, 1, 24)
    store_in(tmp_path, FULL, prompt)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        all_bytes = sum(payload(path).__len__() for path in objects(tmp_path))
        share = 0.4 * all_bytes / engine.tier.capacity_bytes
        monkeypatch.setattr(limits, "MAX_GET_SHARE", share)
        found = hit_tokens(engine, plan_of("a", prompt))
        assert 0 < found <= 0.4 * len(prompt)
        assert engine.side.counters.transfer_bytes["get"] <= 0.4 * all_bytes


def test_notes_of_another_tenant_are_not_believed(tmp_path: Path) -> None:
    """Two links for the same place are exchanged."""
    links: dict[str, dict[str, Path]] = {}
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        for salt in ("a", "b"):
            serve(engine, salted_plan("stored", salt))
            notes = {*tmp_path.glob("kvext4/*/r0/notes/*/*")}
            notes -= {path for each in links.values() for path in each.values()}
            target = {path: os.path.basename(os.readlink(path)) for path in notes}
            place = {path: name.rsplit("-", 1)[0] for path, name in target.items()}
            # If a chunk has links of several units, any of them will do.
            links[salt] = {name: path for path, name in sorted(place.items(), reverse=True)}
    assert links["a"].keys() == links["b"].keys() and links["a"]
    for place, link in links["b"].items():
        target = os.readlink(links["a"][place])
        link.unlink()
        link.symlink_to(target)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        serve(engine, salted_plan("asked", "b"))  # This compares every byte.
        serve(engine, salted_plan("asked again", "b"))
        assert engine.side.counters.hit_tokens > 0
        assert not any(engine.side.counters.shared_failures.values())


def salted_plan(request_id: str, salt: str) -> RequestPlan:
    return RequestPlan(
        request_id=f"{request_id} {salt}",
        arrival_step=0,
        prompt=tuple(prompt_of(FULL, salt)),
        max_tokens=3,
        cache_salt=salt,
    )


@pytest.mark.parametrize("kind", ["objects", "notes"])
@pytest.mark.parametrize("thing", ["folder", "pipe"])
def test_something_else_in_a_place_does_not_stop_other_requests(
    kind: str, thing: str, tmp_path: Path
) -> None:
    prompts = [prompt_of(FULL, seed) for seed in range(3)]
    store_in(tmp_path, FULL, prompts[0])
    places = [*tmp_path.glob(f"kvext4/*/r0/{kind}/*/*")]
    store_in(tmp_path, FULL, *prompts[1:])
    for path in places:
        path.unlink()
        path.mkdir() if thing == "folder" else os.mkfifo(path)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        for number, prompt in enumerate(prompts):
            found = hit_tokens(engine, plan_of(str(number), prompt))
            assert found == (floor(engine, len(prompt) - 1) if number else 0)
        assert engine.side.counters.shared_requests["paused"] == 0
        assert not any(engine.side.counters.shared_failures.values())
    # The engine that put the object is used here.
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        prompt = prompts[0]
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1)


def test_names_that_somebody_has_made_up_are_not_got(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_log(caplog, monkeypatch)
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    for link in tmp_path.glob("kvext4/*/r0/notes/*/*"):
        known = os.readlink(link).rpartition(".")[0]
        crooked = f"R3-7-{known.rpartition('-')[2]}"
        tier, note = FilesTier(f"file://{tmp_path}", None, 0), f"{link.parts[-5]}/{link.name}"
        Path(tier._path(f"{link.parts[-5]}/{crooked}")).write_bytes(b"")
        link.unlink()
        link.symlink_to(f"{crooked}.{tier._note_seal(note, crooked)}")
        assert tier.exist([note]) == [crooked]
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
    assert "A call of the shared tier failed" not in caplog.text


def test_a_queue_before_a_tier_that_hangs_a_little_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is answered in time, but the queue of questions is too long."""
    exist = FilesTier.exist
    asked: list[int] = []

    def slow(tier: FilesTier, names: Sequence[str]) -> list[str]:
        asked.append(len(names))
        time.sleep(0.01)
        return exist(tier, names)

    monkeypatch.setattr(FilesTier, "exist", slow)
    monkeypatch.setattr(limits, "MAX_LOOKUP_S", 20.0)
    monkeypatch.setattr(limits, "MAX_QUEUED_S", 0.05)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        serve(engine, plan_of("alone", prompt_of(FULL, "alone")))
        calls_per_question = len(asked)
        serve(engine, *(plan_of(str(seed), prompt_of(FULL, seed)) for seed in range(40)))
        results = engine.side.counters.shared_requests
        assert results["late"] > 0 and results["late"] + results["absent"] == 41
        until(
            engine.side.secondary._questions._last_asked.is_answered.is_set,
            "the thread's last question",
        )
        are_dropped = len(asked) < 41 * calls_per_question
        assert are_dropped, "questions must be dropped when no request waits for them"
        check_nothing_is_left(engine)


@pytest.mark.parametrize("answers", ["at once", "late", "never and hangs"])
def test_of_thousands_that_wait_a_step_asks_for_few(
    answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM looks at all requests that may wait, so its step is as long as the work for them."""
    gate, asked_in_step = threading.Event(), []
    if answers != "at once":
        wait_s = 0.02 if answers == "late" else 30.0
        exist = FilesTier.exist
        monkeypatch.setattr(FilesTier, "exist", lambda *each: (gate.wait(wait_s), exist(*each))[1])
    number = 2000 if IS_LONG else 100
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        questions = engine.side.secondary._questions
        ask = questions._ask
        monkeypatch.setattr(questions, "_ask", lambda *each: (asked_in_step.append(1), ask(*each)))
        for seed in range(number):
            engine.add_request(plan_of(str(seed), prompt_of(FULL, seed, 2), max_tokens=1))
        while engine.scheduler.requests:
            before = len(asked_in_step)
            engine.step()
            assert len(asked_in_step) - before <= limits.MAX_ASKED + engine.options.max_num_seqs
        results = engine.side.counters.shared_requests
        assert sum(results.values()) <= number and (answers == "at once") == (not results["late"])
        gate.set()
        serve(engine)
        check_nothing_is_left(engine)


def test_no_steps_are_made_for_a_put_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, "put")
    monkeypatch.setattr(limits, "MAX_QUIET_S", 0.05)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        timed_steps(engine, plan_of("a", prompt_of(FULL, 1)))
        serve(engine)
        assert slow.num_calls == 1 and not engine.side.has_work
        slow.gate.set()
        serve(engine, plan_of("b", prompt_of(FULL, 2)))
        while engine.side.secondary._jobs.num_under_way:
            engine.step()
        check_nothing_is_left(engine)


def test_a_put_that_hangs_holds_little_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch, "put")
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        size = 0
        for seed in range(100):
            timed_steps(engine, plan_of(str(seed), prompt_of(FULL, seed, 60)))
            size = engine.side.secondary._puts._num_bytes
        counters = engine.side.counters
        assert counters.shared_failures["put_busy"] > 0
        assert 0 < size <= engine.tier.capacity_bytes / 8
        slow.gate.set()
        while engine.has_work():
            engine.step()
        check_nothing_is_left(engine)


def test_what_is_being_put_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise other requests would get the place, and overwrite it before it is read."""
    prompt = prompt_of(FULL, 1)
    slow = Slow(monkeypatch, "put")
    options = sharing(FULL, tmp_path, host_memory_gib=FULL.host_bytes[1] / (1 << 30))
    monkeypatch.setattr(limits, "MAX_PUT_SHARE", 0.5)
    with engine_of(FULL, offloading=options) as engine:
        for seed in range(1, 10):
            timed_steps(engine, plan_of(str(seed), prompt_of(FULL, seed)))
            while engine.side.secondary._jobs.num_under_way and slow.num_calls == 0:
                engine.step()
            engine.tier.evict(lambda entry: True)
        slow.gate.set()
        serve(engine)
        check_nothing_is_left(engine)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == floor(engine, len(prompt) - 1)


def test_a_put_that_fails_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(FULL, 1)
    options = sharing(FULL, tmp_path, store_policy="second_touch")
    with engine_of(FULL, offloading=options) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(FilesTier, "put", lambda *_: Answer.UNREACHABLE)
            serve(engine, plan_of("a", prompt))
            serve(engine, plan_of("b", prompt))
        failures = engine.side.counters.shared_failures
        assert failures["put_unreachable"] > 0
        serve(engine, plan_of("c", prompt))
        assert objects(tmp_path) == []  # No object is there yet.
        let_pass(engine, limits.PAUSE_S)
        serve(engine, plan_of("d", prompt))
        assert objects(tmp_path)
        check_nothing_is_left(engine)


def test_after_a_reset_of_the_connector_nothing_is_shared(tmp_path: Path) -> None:
    """This happens when weights are replaced in memory."""
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert engine.reset(reset_connector=True)
        num_files = len(objects(tmp_path))
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
        serve(engine, plan_of("b", prompt_of(FULL, 2)))
        assert len(objects(tmp_path)) == num_files


def test_what_is_evicted_between_lookup_and_get_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    exist = FilesTier.exist

    def exist_and_vanish(self: FilesTier, names: Sequence[str]) -> list[str]:
        found = exist(self, names)
        for path in objects(tmp_path):
            path.unlink()
        return found

    monkeypatch.setattr(FilesTier, "exist", exist_and_vanish)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        assert hit_tokens(engine, plan_of("a", prompt)) == 0
        assert engine.side.counters.shared_failures["get_absent"] > 0


# A soak: two engines, one after the other, on one folder. Faults occur all the time.

CAPACITY_BYTES = 1 << 19


class Faults:
    """Occasional faults of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random("faults")
        self.counts: Counter[str] = Counter()
        self._is_on = threading.Lock()
        get, put = FilesTier._get, FilesTier._put

        def faulty_get(tier: FilesTier, each: SharedObject, on_bytes: Any) -> Answer:
            self.damage(Path(tier._path(each.name)))
            answer = Answer.UNREACHABLE if self.happens("get fails") else get(tier, each, on_bytes)
            self.counts[answer.value] += 1
            return answer

        def faulty_put(tier: FilesTier, each: SharedObject) -> None:
            if self.happens("put fails"):
                raise OSError("a put that fails")
            self.counts["puts"] += 1
            put(tier, each)

        answer_put = FilesTier.put

        def seen_put(tier: FilesTier, each: SharedObject) -> Answer:
            answer = answer_put(tier, each)
            self.counts[f"put {answer.value}"] += 1
            return answer

        monkeypatch.setattr(FilesTier, "_get", faulty_get)
        monkeypatch.setattr(FilesTier, "_put", faulty_put)
        monkeypatch.setattr(FilesTier, "put", seen_put)

    def happens(self, name: str, share: float = 0.05) -> bool:
        with self._is_on:
            does_happen = self.rng.random() < share
            self.counts[name] += does_happen
        return does_happen

    def damage(self, path: Path) -> None:
        if not path.exists():
            return
        if self.happens("flipped"):
            data = bytearray(path.read_bytes())
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)
        elif self.happens("cut"):
            os.truncate(path, self.rng.randrange(path.stat().st_size))
        elif self.happens("vanished"):
            path.unlink()


@pytest.fixture(scope="module")
def soaked() -> Counter[str]:
    """The events of all runs of the soak."""
    return Counter()


@pytest.mark.parametrize("kind", EngineKind, ids=lambda kind: kind.value)
@every_layout
def test_random_requests(
    layout: PagedLayout,
    kind: EngineKind,
    soaked: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes and outputs are right, and nothing is left, whatever happens to the files."""
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    monkeypatch.setattr(limits, "PAUSE_S", 0.005)
    faults = Faults(monkeypatch)
    for seed in range(sampled(3)):
        folder = tmp_path / str(seed)
        workload = random_offload(layout, f"shared/{seed}", 15, kind)
        reset_share = workload.reset_share if seed else 0
        shared = {"shared_tier": f"file://{folder}", "shared_tier_bytes": CAPACITY_BYTES}
        options = replace(
            workload.options, offloading={**(workload.options.offloading or {}), **shared}
        )
        for number in range(2):
            workload = workload._replace(name=f"{number}", options=options, reset_share=reset_share)
            counts = run_offloading(workload).counts
            soaked["requests"] += counts["requests"]
            soaked["hit requests"] += counts["hit requests"]
        taken = sum(taken for _, taken, _ in files.files_below(str(folder / "kvext4")))
        assert taken <= CAPACITY_BYTES
    soaked.update(faults.counts)


def test_the_soak_has_met_everything(soaked: Counter[str]) -> None:
    if soaked["requests"] < 30 * len(LAYOUTS + STATE_LAYOUTS) * len(EngineKind):
        pytest.skip("only a part of the soak has run")
    named = ("whole", "absent", "broken", "unreachable", "puts", "put unreachable", "get fails")
    assert {name for name in (*named, "flipped", "cut", "vanished") if not soaked[name]} == set()


# An engine without the option.


def test_without_the_option_nothing_of_it_is_imported(tmp_path: Path) -> None:
    code = """
import sys, threading
from vllm_ascend_kvext.connector import kvext_connector
assert not [name for name in sys.modules if "kvext" in name and "shared_tier" in name], sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_without_the_option_there_is_no_thread() -> None:
    before = {*threading.enumerate()}  # Threads of other tests may still be ending.
    with engine_of(FULL) as engine:
        serve(engine, plan_of("a", prompt_of(FULL, 1)))
        started = {*threading.enumerate()} - before
        assert not [each for each in started if "shared" in each.name]
        assert type(engine.side.secondary) is SecondaryTierScheduler


def test_entries_that_come_from_elsewhere_are_like_others(tmp_path: Path) -> None:
    prompt = prompt_of(FULL, 1)
    store_in(tmp_path, FULL, prompt)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        serve(engine, plan_of("a", prompt))
        kinds = {entry.piece.kind for entry in engine.entries}
        assert kinds == {Kind.ROWS}
