# SPDX-License-Identifier: Apache-2.0
"""KvextConnector behind ``vllm serve``: every response is that of an engine without it."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from operator import sub
from pathlib import Path

import connector_models
import pytest
from connector_models import WINDOW_TOKENS
from http_served import Client, serving
from support.scenarios import connector, processes, scenario_of
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.connector import PROMPT_LENGTHS
from support.scenarios.engine import POOL_BLOCKS, REPLY_TOKENS
from support.scenarios.processes import CPU, NO_PREFIX_CACHING, PLUGIN_OFF, Plan

SCENARIOS = ("turns", "large_storm")
BLOCK_TOKENS = CPU.block_tokens
CONNECTOR = processes.connector(host_memory_gib=0.25, blending=True, segment_sink=[2])[
    "kv_transfer_config"
]
"""With blending: nothing changes for requests that name no segments."""
COMMON_ARGUMENTS = (
    *("--skip-tokenizer-init", "--enforce-eager"),
    *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048"),
    # Prompts are computed in chunks. The storm outgrows the pool; what the turns store does not,
    # however slow the copies are.
    *(
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "128",
        "--num-gpu-blocks-override",
        str(POOL_BLOCKS),
    ),
    *("--no-disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details"),
    *("--kv-transfer-config", json.dumps(CONNECTOR)),
)
SERVERS = {
    "prefix caching": (["--enable-prefix-caching"], {"VLLM_CPU_OMP_THREADS_BIND": "0"}),
    "two ranks, no prefix caching": (
        ["--no-enable-prefix-caching", "--tensor-parallel-size", "2"],
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
}
needs_two_cpus = pytest.mark.skipif(
    not {0, 1} <= os.sched_getaffinity(0), reason="the ranks run on CPUs 0 and 1"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    connector_models.write_one_window(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """An engine without plugin, connector and prefix caching."""
    plans = {"reference": Plan(model, SCENARIOS, engine=NO_PREFIX_CACHING)}
    return processes.serve(tmp_path_factory, plans, PLUGIN_OFF)["reference"]


@pytest.fixture(
    scope="module",
    params=["prefix caching", pytest.param("two ranks, no prefix caching", marks=needs_two_cpus)],
)
def client(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client that has asked all scenarios of a server, which still runs."""
    arguments, environ = SERVERS[request.param]
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(model, [*COMMON_ARGUMENTS, *arguments], environ, log) as client:
        for scenario in SCENARIOS:
            scenario_of(connector, scenario)(client)
        yield client


def floor(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_every_response_is_that_of_an_engine_without_a_connector(
    client: Client, reference: Served
) -> None:
    report = client.report()
    assert len(report.labels) == 7
    report.check_equal(reference, report.labels)


def test_hits_end_at_the_last_row_unit(client: Client) -> None:
    report = client.report()
    assert report.hit_tokens("cold") == [0] * len(PROMPT_LENGTHS)
    assert report.hit_tokens("warm") == [floor(length - 1) for length in PROMPT_LENGTHS]
    assert report.hit_tokens("second turn") == [
        floor(length + REPLY_TOKENS - 1) for length in PROMPT_LENGTHS
    ]
    assert report.hit_tokens("forgotten") == [0]


def test_metrics_tell_what_came_from_host_memory(client: Client) -> None:
    name = "external_prefix_cache_hits_total"
    expected = sum(floor(length - 1) for length in PROMPT_LENGTHS)
    assert client.metrics["warm"][name] - client.metrics["cold"][name] == expected
    deadline_s = time.monotonic() + 20
    while True:  # What has ended is reported with the step after it.
        metrics = client.read_metrics()
        if metrics["kvext_host_hit_tokens_total"] >= metrics[name]:
            break
        assert time.monotonic() < deadline_s, metrics
        time.sleep(0.1)
    assert metrics["kvext_transfer_bytes_total.store"] > 0
    assert metrics["kvext_transfer_bytes_total.load"] > 0
    assert metrics["kvext_host_capacity_bytes"] > 0


def test_requests_were_preempted(client: Client) -> None:
    metrics = client.read_metrics()
    assert metrics["num_preemptions_total"] > 0
    assert metrics["kvext_host_swapped_requests_total"] > 0


def test_segments_are_stored_and_reused_by_name(client: Client) -> None:
    """In its old place a segment is exact; elsewhere it is not, and the response says so."""
    rng = random.Random("segments")
    question = [rng.randrange(100, 400) for _ in range(21)]
    document = [rng.randrange(100, 400) for _ in range(203)]  # Some are equal: keys are compared.
    stored = client.complete(document, 1, kvext_store_segment=True)
    assert stored["kv_transfer_params"] == {"kvext_stored_tokens": len(document)}
    deadline_s = time.monotonic() + 60
    while not client.read_metrics()["kvext_blend_stored_segments_total"]:
        assert time.monotonic() < deadline_s
        client.complete(question, 1)  # Reports come with steps.
    client.reset(is_host_too=False)  # The device has the document, too, behind the sink.
    in_place, elsewhere = [2, *document, *question], [*question, *document, *question]
    answers = {}
    for name, prompt in (("in place", in_place), ("elsewhere", elsewhere)):
        first = prompt.index(document[0])
        segments = json.dumps([[first, first + len(document)]])
        blended = client.complete(prompt, REPLY_TOKENS, kvext_segments=segments)
        plain = client.complete(prompt, REPLY_TOKENS)
        assert plain["kv_transfer_params"] is None
        said = blended["kv_transfer_params"]
        assert said is not None, name
        assert sum(said.values()) == len(prompt), (name, said)
        assert said["kvext_reused_tokens"] == len(document) - (WINDOW_TOKENS - 1)
        answers[name] = [
            each["choices"][0]["logprobs"]["token_logprobs"] for each in (blended, plain)
        ]
    error = {name: max(map(abs, map(sub, *both))) for name, both in answers.items()}
    assert error["in place"] <= LOGPROB_TOLERANCE < 1e-2 < error["elsewhere"]


def test_wrong_segments_are_computed_and_counted(client: Client) -> None:
    prompt = list(range(100, 180))
    response = client.complete(prompt, 1, kvext_segments="[[0, 200]]")
    assert response["kv_transfer_params"] is None
    deadline_s = time.monotonic() + 60
    while not client.read_metrics()["kvext_blend_refusals_total.wrong_segments"]:
        assert time.monotonic() < deadline_s
        client.complete(prompt, 1)
