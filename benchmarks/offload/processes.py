# SPDX-License-Identifier: Apache-2.0
"""Engines as processes of their own, asked one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.contenders import Contender
from offload.workload import Prompt, Visit

ENGINE_ENVIRON = {
    "TORCHDYNAMO_DISABLE": "1",  # Nothing worth compiling, and no C++ compiler needed.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The loop is the benchmark's.
    "PYTHONDONTWRITEBYTECODE": "",  # Engines start many times, and all from the same packages.
    "LMCACHE_TRACK_USAGE": "false",
    "HF_HUB_OFFLINE": "1",
}
_STOP_LIMIT_S = 30


class EngineProcess:
    """Runs from its construction to `stop`; `contender` says what it uses."""

    def __init__(
        self,
        contender: Contender,
        model: Path,
        num_blocks: int,
        cpu: int,
        log: Path,
    ) -> None:
        """Start it, with the model on one CPU, and wait until it is ready.

        Raises:
            SystemExit: It ended.
        """
        self.contender = contender
        self._log = log
        binding = {"VLLM_CPU_OMP_THREADS_BIND": str(cpu), "OMP_NUM_THREADS": "1"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("engine.py"))],
                # Away from the checkout: vLLM inspects models in a process that imports from here.
                cwd=model,
                env={**os.environ, **ENGINE_ENVIRON, **binding, **contender.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.block_tokens: int = self._ask(
            {
                "tap": contender.tap,
                "model": str(model),
                "num_blocks": num_blocks,
                "kv_transfer_config": contender.kv_transfer_config,
            }
        )["block_tokens"]

    def prompt(self, seed: int) -> Prompt:
        """Cold, and then warm."""
        return Prompt.from_dict(self._ask({"prompt": seed}))

    def visits(self, seeds: Sequence[int]) -> list[Visit]:
        """One after the other, beside requests that decode."""
        found = self._ask({"visits": list(seeds)})["visits"]
        return [Visit.from_dict(visit) for visit in found]

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            self.stop()
            tail = self._log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"{tail}\nThe engine of '{self.contender.name}' ended; see above.")
        return json.loads(line)

    def stop(self) -> None:
        """End it. LMCache leaves its pages in /dev/shm if the engine did not end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{self._process.pid}_*"):
            segment.unlink(missing_ok=True)
