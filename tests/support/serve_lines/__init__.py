# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The ``vllm serve`` lines of the documentation, and how to start them with tiny models.

Lines are found in all code blocks, so a new line is tested without being listed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from support.scenarios import processes

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES += tuple(sorted((ROOT / "examples").glob("*.md")))

TINY = (
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--load-format",
    "dummy",
    "--dtype",
    "float32",
    "--max-model-len",
    "2048",
    "--num-gpu-blocks-override",
    "1024",
)
"""More arguments, for a tiny model on a small machine."""

MOONCAKE = "support.connector.ascend_mooncake"
"""The module with Mooncake's connectors in place of vLLM-Ascend's. Their engine is left out."""

PLATFORM = processes.Platform(16, (), processes.ENGINE_ENVIRON)
"""A platform that finds the packages of ``PYTHONPATH``."""

_COMMAND = re.compile(r"(?:[A-Z_]+=\S* (?:\\\n)?)*vllm serve (?=\S)")
_SETTINGS_OF_MACHINE = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")


@dataclass(frozen=True)
class ServeLine:
    """One command.

    Attributes:
        place: The file and the line, for people.
        environ: The variables that are set before the command, in its line or by ``export``.
        arguments: The arguments of ``vllm serve``, as printed.
    """

    place: str
    environ: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def connector(self) -> str:
        """The name of the line's KV connector. Empty if it has none."""
        options = iter(self.arguments)
        config = next((next(options) for name in options if name == "--kv-transfer-config"), "{}")
        return str(json.loads(config).get("kv_connector", ""))

    def for_model(self, model: Path) -> tuple[str, ...]:
        """The arguments with this model, one rank, and only what every machine has.

        Of the model, only the weights are shared.
        """
        arguments = [str(model), *self.arguments[1:], *TINY]
        if self.connector == "MultiConnector":
            # vLLM's logger cannot read in this process what the connectors below it report.
            arguments.append("--disable-log-stats")
        for number, name in enumerate(arguments):
            if name == "--tensor-parallel-size":
                arguments[number + 1] = "1"
            elif name == "--kv-transfer-config":
                config = json.loads(arguments[number + 1])
                for connector in (config, *_children(config)):
                    extra = connector["kv_connector_extra_config"]
                    small: dict[str, Any] = {"host_memory_gib": 0.25, "copy_cpus": "0"}
                    small |= {key: {"dp_size": 1, "tp_size": 1} for key in ("prefill", "decode")}
                    extra |= {key: value for key, value in small.items() if key in extra}
                    if "shared_tier" in extra:
                        extra["shared_tier"] = f"file://{model.absolute()}/shared"
                        arguments[arguments.index("dummy")] = "auto"
                    if connector["kv_connector"].startswith("Mooncake"):
                        connector["kv_connector_module_path"] = MOONCAKE
                arguments[number + 1] = json.dumps(config)
        return tuple(arguments)


def _children(transfer_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The configurations of the connectors below a MultiConnector."""
    children: list[dict[str, Any]] = transfer_config["kv_connector_extra_config"].get(
        "connectors", []
    )
    return children


def serve_lines() -> list[ServeLine]:
    """All printed lines. If several lines start the same engine, only the first."""
    lines: dict[object, ServeLine] = {}
    for line in (line for page in PAGES for line in _lines_of(page)):
        lines.setdefault((line.for_model(Path()), *sorted(line.environ.items())), line)
    return list(lines.values())


def _lines_of(page: Path) -> Iterator[ServeLine]:
    text = page.read_text()
    for block in re.finditer(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exported = dict(re.findall(r"^export (\w+)=(\S+)", block[1], re.MULTILINE))
        for start in re.finditer(rf"^{_COMMAND.pattern}", block[1], re.MULTILINE):
            words = _words(block[1][start.start() :])
            at = words.index("vllm")
            environ = exported | dict(word.split("=", 1) for word in words[:at])
            number = text[: block.start(1) + start.start()].count("\n") + 1
            place = f"{page.relative_to(ROOT)}:{number}"
            yield ServeLine(
                place,
                {name: environ[name] for name in environ if name not in _SETTINGS_OF_MACHINE},
                tuple(words[at + 2 :]),
            )


def _words(text: str) -> list[str]:
    """The words of the command at the beginning of a text, as a shell reads them."""
    command = ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        command += line
        try:
            return shlex.split(command, comments=True)
        except ValueError:  # The quoted text continues on the next line.
            continue
    raise ValueError(f"a command without an end: {text[:80]}")


class Started(NamedTuple):
    """The result of a start: its log, and its report if it reached the stage."""

    report: dict[str, object]
    log: str


def start(
    line: ServeLine, model: Path, stage: str, environ: Mapping[str, str], folder: Path
) -> Started:
    """Start a line in its own process, up to a stage of ``start.py``.

    Args:
        environ: Variables in addition to the line's own.
        folder: A folder for the files that vLLM keeps.
    """
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    ended = processes.run(
        Path(__file__).with_name("start.py"),
        [stage, str(report), *line.for_model(model)],
        {
            "VLLM_CACHE_ROOT": str(folder),
            "PYTHONPATH": str(ROOT / "tests"),
            **line.environ,
            **environ,
        },
        PLATFORM,
        folder,
    )
    found = json.loads(report.read_text()) if report.exists() else {}
    assert not found or ended.exit_code == 0, ended.log[-4000:]
    return Started(found, ended.log)
