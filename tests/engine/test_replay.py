# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Logs that are played, against brute force and against vLLM's own hashes of the same tokens."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.sample import IS_LONG
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import EngineOptions, build_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_ascend_kvext.errors import TraceError
from vllm_ascend_kvext.replay import logged_play
from vllm_ascend_kvext.replay.counted_tier import CountedTier
from vllm_ascend_kvext.replay.engine import Engine, HostMemory, ScheduledModel
from vllm_ascend_kvext.replay.geometry.pages import pages_of
from vllm_ascend_kvext.replay.logged_play import LoggedJob, Pace, play
from vllm_ascend_kvext.replay.pieces import RequestPieces
from vllm_ascend_kvext.replay.trace import LoggedRequest, format_request

FULL = Layout("full", (Group(Attention.FULL, 4),))
WINDOWS = Layout("windows", (Group(Attention.FULL, 4), Group(Attention.WINDOW, 4, 10)))
BLOCK_TOKENS = 4
ALONE_MS = 1e6
"""A time between arrivals in which every request has ended."""


def scheduled_model(layout: Layout, num_blocks: int, max_num_seqs: int = 8) -> ScheduledModel:
    options = EngineOptions(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=4096,
        events=False,
    )
    vllm_config = build_vllm_config(layout, options)
    vllm_config.lora_config = None
    config = layout.to_config(num_blocks)
    return ScheduledModel(vllm_config, config, BLOCK_TOKENS, BLOCK_TOKENS)


def host_memory(model: ScheduledModel, num_bytes: int, **named: Any) -> HostMemory:
    options = {"chunk_tokens": 16, "hole_reuse": False}
    return HostMemory(pages_of(model.kv_cache_config), num_bytes, options, **named)


def random_log(
    seed: int, number: int = 60, spacing_ms: float = ALONE_MS, block_tokens: int = BLOCK_TOKENS
) -> list[LoggedRequest]:
    """Chats of which some answers are known. Each turn goes on with an earlier request's text."""
    rng = random.Random(seed)
    texts: list[list[int]] = [[]]
    requests = []
    new_id = 10
    for line in range(1, number + 1):
        kept = rng.choice(texts)
        kept = kept[: rng.randint(0, len(kept))] if rng.random() < 0.3 else kept
        prompt_tokens = len(kept) * block_tokens + rng.randint(1, 40)
        output_tokens = rng.randint(1, 24)
        num_blocks = -(-prompt_tokens // block_tokens)
        num_all = -(-(prompt_tokens + output_tokens) // block_tokens)
        ids = [*kept, *range(new_id, new_id + num_all - len(kept))]
        new_id += num_all
        is_known = rng.random() < 0.6
        output_ids = ids[prompt_tokens // block_tokens :] if is_known else []
        requests.append(
            LoggedRequest(
                line,
                line * spacing_ms,
                prompt_tokens,
                output_tokens,
                ids[:num_blocks],
                output_ids,
                block_tokens,
            )
        )
        known_tokens = prompt_tokens + output_tokens - 1 if is_known else prompt_tokens
        texts.append(ids[: known_tokens // block_tokens])
    return requests


class VllmsHashes(LoggedJob):
    """A job whose blocks vLLM hashes itself, token by token."""

    __slots__ = ()

    def __init__(self, logged: LoggedRequest, *arguments: Any) -> None:
        super().__init__(logged, *arguments)
        self.request = Request(
            request_id=self.request.request_id,
            prompt_token_ids=RequestPieces(logged).tokens()[: logged.prompt_tokens],
            sampling_params=SamplingParams(max_tokens=logged.output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )


def played_hits(
    requests: Iterable[LoggedRequest],
    layout: Layout,
    num_blocks: int,
    host_bytes: int = 0,
    max_num_seqs: int = 8,
) -> tuple[Any, Engine]:
    model = scheduled_model(layout, num_blocks, max_num_seqs)
    host = host_memory(model, host_bytes) if host_bytes else None
    engine = Engine(model, host)
    return play(requests, engine, BLOCK_TOKENS, Pace()), engine


@pytest.mark.parametrize("seed", range(6))
def test_an_endless_pool_hits_what_brute_force_finds(seed: int) -> None:
    """Requests come one by one, and a prefix is what any request before has computed."""
    requests = random_log(seed)
    expected = 0
    before: list[list[int]] = []
    for request in requests:
        tokens = RequestPieces(request).tokens()
        best = 0
        for other in before:
            common = next(
                (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b),
                min(len(tokens), len(other)),
            )
            best = max(best, min(common, request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        expected += best
        before.append(tokens[:-1])  # The last token is sampled, and not computed.
    played, _ = played_hits(requests, FULL, 4000)
    outcome = played.outcome
    assert outcome.hit_tokens == expected == outcome.shared_tokens > 0
    assert outcome.prompt_tokens == sum(request.prompt_tokens for request in requests)
    assert outcome.computed_tokens == outcome.prompt_tokens - expected
    assert outcome.num_requests == len(requests) and outcome.num_preemptions == 0


@pytest.mark.parametrize("layout", [FULL, WINDOWS], ids=lambda layout: layout.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_full_pool_decides_as_with_vllms_own_hashes(
    layout: Layout, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_none_hash(sha256)
    requests = random_log(seed, 80, spacing_ms=40.0)
    ours, _ = played_hits(requests, layout, 150)
    monkeypatch.setattr(logged_play, "LoggedJob", VllmsHashes)
    theirs, _ = played_hits(requests, layout, 150)
    ours.outcome.scheduler_s = theirs.outcome.scheduler_s = 0.0
    assert ours == theirs
    assert 0 < ours.outcome.hit_tokens < ours.outcome.shared_tokens


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    ids = [3, 4, 5]
    requests = [LoggedRequest(line, line * ALONE_MS, 12, 1, ids, (), 4) for line in (1, 2)]
    outcome = played_hits(requests, FULL, 100)[0].outcome
    assert outcome.hit_tokens == outcome.shared_tokens == 8


def test_an_endless_cache_is_counted_where_the_pool_forgets() -> None:
    requests = random_log(1, 80)
    small, _ = played_hits(requests, FULL, 60)
    large, _ = played_hits(requests, FULL, 4000)
    assert small.outcome.shared_tokens == large.outcome.shared_tokens == large.outcome.hit_tokens
    assert small.outcome.hit_tokens < large.outcome.hit_tokens


@pytest.mark.usefixtures("offloading_in_effect")
@pytest.mark.parametrize("layout", [FULL, WINDOWS], ids=lambda layout: layout.name)
def test_host_memory_and_a_shared_tier_bring_back_what_the_pool_forgets(layout: Layout) -> None:
    requests = random_log(2, 120)
    model = scheduled_model(layout, 90)
    hits = {}
    shared = CountedTier()
    for name, num_bytes, tier in (
        ("none", 0, None),
        ("small", 3000, None),
        ("large", 1 << 20, None),
        ("shared", 3000, shared),
        ("shared, all", 3000, CountedTier()),
    ):
        host = host_memory(model, num_bytes, shared=tier) if num_bytes else None
        if name == "shared, all":
            assert host is not None
            host = replace(host, options={**host.options, "store_policy": "all"})
        played = play(requests, Engine(model, host), BLOCK_TOKENS, Pace())
        hits[name] = played.outcome.hit_tokens
        assert played.outcome.hit_tokens <= played.outcome.shared_tokens
    assert hits["none"] < hits["small"] < hits["shared"] <= hits["shared, all"] <= hits["large"]
    assert shared.num_bytes > 3000


@pytest.mark.usefixtures("offloading_in_effect")
def test_the_clock_of_the_connector_is_that_of_the_play() -> None:
    requests = random_log(3, 10)
    model = scheduled_model(FULL, 400)
    engine = Engine(model, host_memory(model, 1 << 16))
    times_s: list[float] = []

    def note(_: int) -> None:
        times_s.append(engine.side._clock())  # type: ignore[union-attr]

    play(requests, engine, BLOCK_TOKENS, Pace(), note)
    assert [round(each / 1000) for each in times_s] == list(range(10))


def test_requests_wait_for_each_other_and_the_pace_decides_how_long() -> None:
    ids = iter(range(10_000))
    requests = [
        LoggedRequest(line, 0.0, 40, 11, [next(ids) for _ in range(10)], (), BLOCK_TOKENS)
        for line in range(1, 9)
    ]
    alone, _ = played_hits(requests, FULL, 400, max_num_seqs=1)
    together, _ = played_hits(requests, FULL, 400, max_num_seqs=8)
    # Each answer takes ten steps behind its first token. Prompts take little.
    assert alone.duration_s == pytest.approx(8 * 10 * 0.03, abs=0.1)
    assert 10 * 0.03 <= together.duration_s < 1.0
    assert sorted(alone.waited_s) == alone.waited_s and alone.waited_s[0] == 0.0
    assert alone.waited_s[-1] > together.waited_s[-1]
    engine = Engine(scheduled_model(FULL, 400), None)
    slow = play(requests, engine, BLOCK_TOKENS, Pace(decode_ms=60.0))
    assert slow.duration_s > 1.5 * together.duration_s
    engine = Engine(scheduled_model(FULL, 400), None)
    slow = play(requests, engine, BLOCK_TOKENS, Pace(prefill_tokens_per_s=100.0))
    assert slow.duration_s >= 8 * 40 / 100


def test_arrivals_are_slowed_down() -> None:
    requests = random_log(4, 10, spacing_ms=5e3)
    engine = Engine(scheduled_model(FULL, 400), None)
    played = play(requests, engine, BLOCK_TOKENS, Pace(slow_down=3.0))
    assert 9 * 15 <= played.duration_s < 9 * 15 + 5


def test_a_request_that_does_not_fit_is_named() -> None:
    prompt = LoggedRequest(7, 0.0, 400, 5, range(100), (), BLOCK_TOKENS)
    answer = LoggedRequest(9, 0.0, 40, 400, range(10), (), BLOCK_TOKENS)
    for request in (prompt, answer):
        engine = Engine(scheduled_model(FULL, 60), None)
        with pytest.raises(TraceError, match=f"line {request.line}: expected a pool that holds"):
            play([request], engine, BLOCK_TOKENS, Pace())


CHECKOUT = Path(__file__).parents[2]
GROUPS = {
    "groups": [
        {"kind": "full", "tokens_per_block": 16, "layers": 2, "bytes_per_token": 64},
        {
            "kind": "window",
            "tokens_per_block": 16,
            "window_tokens": 40,
            "layers": 2,
            "bytes_per_token": 64,
            "number": 2,
        },
    ]
}


def command(*arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-m", "vllm_ascend_kvext", "replay", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
    )


def write_log(path: Path, requests: Sequence[LoggedRequest]) -> Path:
    path.write_text("\n".join(map(format_request, requests)) + "\n")
    return path


def test_the_command_plays_every_variant(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", random_log(5, 60, spacing_ms=500, block_tokens=16))
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps(GROUPS))
    picture, numbers = tmp_path / "hits.svg", tmp_path / "hits.json"
    arguments = {
        "--groups": groups,
        "--blocks": 120,
        "--interval": 50,
        "--jobs": 2,
        "--serve": "--max-num-seqs 4 --max-num-batched-tokens 64",
        "--picture": picture,
        "--json": numbers,
    }
    options = [part for pair in arguments.items() for part in pair]
    for size in (0.0001, 0.01):
        options += ["--host-memory-gib", size]
    found = command(log, *options)
    assert found.returncode == 0, found.stderr
    results = {each["name"]: each for each in json.loads(numbers.read_text())["results"]}
    assert list(results) == [
        "dense caching",
        "vLLM, interval 64",
        "adaptive retention",
        "adaptive + host 0.0001 GiB",
        "adaptive + host 0.01 GiB",
        "adaptive + host 0.01 GiB + shared",
        "adaptive + host 0.01 GiB + shared, all",
    ]
    assert {each["refusal"] for each in results.values()} == {""}
    rates = {name: each["hit_rate"] for name, each in results.items()}
    assert 0 < rates["dense caching"] < rates["adaptive + host 0.01 GiB"]
    assert rates["adaptive retention"] <= rates["adaptive + host 0.0001 GiB"]
    assert rates["adaptive + host 0.01 GiB"] <= results["dense caching"]["endless_rate"] + 0.01
    assert rates["vLLM, interval 64"] != rates["dense caching"]
    shared = "adaptive + host 0.01 GiB + shared"
    assert 0 < results[shared]["shared_bytes"] < results[f"{shared}, all"]["shared_bytes"]
    assert "at most 4 requests at once, 64 tokens in a step" in found.stdout
    assert "endless cache" in found.stdout and "100% 420/420 requests" in found.stderr
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.skipif(not IS_LONG, reason="the error is tested without a command, too")
def test_a_pool_that_is_too_small_is_said_of_each_variant(tmp_path: Path) -> None:
    request = LoggedRequest(1, 0.0, 4000, 5, range(1000, 1250), (), 16)
    log = write_log(tmp_path / "log.jsonl", [request])
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps(GROUPS))
    found = command(log, "--groups", groups, "--blocks", 100, "--host-memory-gib", 0.01)
    assert found.returncode == 1
    assert found.stdout.count("refused: line 1: expected a pool that holds the request") >= 5


@pytest.mark.main_version
def test_the_line_of_the_page_plays_a_trace_of_production(tmp_path: Path) -> None:
    page = (CHECKOUT / "docs" / "replay.md").read_text()
    (line,) = re.findall(
        r"^python -m vllm_ascend_kvext replay (benchmarks/.+)$", page, re.MULTILINE
    )
    asked, _ = line.split(" --requests ")
    numbers = tmp_path / "hits.json"
    found = command(*asked.split(), "--requests", 10, "--json", numbers, folder=CHECKOUT)
    assert found.returncode == 0, found.stderr
    results = json.loads(numbers.read_text())["results"]
    assert len(results) == 9 and {each["refusal"] for each in results} == {""}
