# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The page ``docs/official_lines.md``: what came of each command line of vLLM-Ascend's tutorials.

`render_docs` writes it from the data in ``tests/support/official_lines``: lines of tutorials, which
``official_lines.py`` has read, and outcomes, which ``support.official_lines.record`` has kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.official_lines import RELEASES, OfficialLine, known_outcomes, official_lines
from support.official_lines.answers import known_answers
from support.official_lines.families import FAMILIES

INTRODUCTION = """\
# The command lines of vLLM-Ascend's tutorials, with this package

This page is generated: `make docs` writes it from data in `tests/support/official_lines`.

All `vllm serve` lines and `LLM(...)` calls of the tutorials in vLLM-Ascend's source archives are
read by a tool, which keeps their flags. `make test-ascend` starts each distinct set of flags of a
tutorial on the [emulated NPU](../tests/emulated_npu/README.md), `make test` a sample: with a small
model of the family, and with all flags and sizes of parallelism, **up to the engine's
configuration**: arguments are read, and vLLM, vLLM-Ascend and this package check them. Weights,
graphs and other nodes are behind that stage. Flags that name machines, files or the form
of answers are left out. `--quantization ascend` meets a checkpoint whose weights are floats.

Each line is started four times: without this package, with adaptive retention, with KvextConnector
(`host_memory_gib` and nothing else), and with both. A line that has a KV connector of its own keeps
it: a `MultiConnector` asks it first, and KvextConnector, with the role `kv_both`, behind it.

A line gains where it reuses prefixes on the device: retention then decides what stays, and host
memory keeps more of it. With `--no-enable-prefix-caching`, retention has nothing to do, and a model
with states reuses nothing; a model of keys and values alone still loads prompts from host memory.

**Answers.** Where the emulation runs the model, an engine was started, too, and its answers were
compared with those of the line without this package: a prompt that is new, on the device, and in
host memory alone, where pages held wrong bytes before. The engine has one device, float32, no
graphs and steps of 512 tokens; sizes of parallelism, quantization and the dtype of the KV cache are
left out, all other flags kept. Lines with a connector of their own are not among them. A line that
is not counted was not compared: the emulation does not run its model, it needs more than one
device, it reuses nothing, or nobody has run it yet.

| outcome | meaning |
|---|---|
| started | the configuration is made |
| refused | this package does not start with the line; the sentence says what to change |
| not emulated | the emulation or the tests' environment lacks something; the line was not judged |
| upstream | the line does not start without this package either |
"""

HEADER = (
    "family",
    "caches",
    "lines",
    "started with retention",
    "with KvextConnector",
    "of these with prefix caching",
    "refused",
    "not emulated",
    "upstream",
)


class Row(NamedTuple):
    """A distinct set of flags with its outcomes."""

    line: OfficialLine
    outcomes: Mapping[str, str]

    def kind(self, arm: str) -> str:
        return self.outcomes[arm].partition(":")[0]

    @property
    def num_lines(self) -> int:
        return len(self.line.numbers)

    @property
    def has_prefix_caching(self) -> bool:
        """Whether the line reuses a prefix. Without the flag, models with states do not."""
        flags = self.line.flags
        if "no-enable-prefix-caching" in flags:
            return False
        family = FAMILIES.get(self.line.family)
        return "enable-prefix-caching" in flags or not (family and "states (" in family.kind)


def page() -> str:
    """The page, with a section for each release."""
    parts = [INTRODUCTION]
    for release in RELEASES:
        known = known_outcomes(release)
        rows = [Row(line, known[line.name]) for line in official_lines(release)]
        parts += _release(release, rows)
    return "\n".join(parts)


def _release(release: str, rows: Sequence[Row]) -> Iterable[str]:
    num_lines = sum(row.num_lines for row in rows)
    yield f"## {release}\n"
    yield f"{num_lines} lines, {len(rows)} distinct sets of flags. The numbers count lines.\n"
    yield f"| {' | '.join(HEADER)} |"
    yield "|---" * len(HEADER) + "|"
    of_families: dict[str, list[Row]] = {}
    for row in rows:
        of_families.setdefault(row.line.family or "no small model", []).append(row)
    for name in sorted(of_families):
        yield _counted(name, of_families[name])
    yield _counted("**all**", rows)
    yield ""
    yield "### Refused\n"
    refused = Counter[str]()
    for row in rows:
        for text in {
            row.outcomes[arm]
            for arm in ("retention", "connector", "both")
            if row.kind(arm) == "refused"
        }:
            refused[text.partition(": ")[2]] += row.num_lines
    yield from _list(refused)
    yield "### Not emulated, or not started by upstream\n"
    yield from _list(_reasons(rows, ("not emulated", "upstream")))
    yield "### Answers compared\n"
    yield from _answers(release, of_families)
    yield "### Every set of flags\n"
    yield "| tutorial and line | times | flags | with retention | with KvextConnector |"
    yield "|---|---|---|---|---|"
    for row in rows:
        kinds = [row.kind(arm) for arm in ("retention", "connector")]
        cells = [row.line.name, str(row.num_lines), _flags(row.line), *kinds]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _answers(release: str, of_families: Mapping[str, Sequence[Row]]) -> Iterable[str]:
    """How the lines of each family answer, where that was compared."""
    known = known_answers(release)
    yield "| family | lines compared | largest difference | least, host memory zeroed |"
    yield "|---|---|---|---|"
    for name in sorted(of_families):
        rows = [row for row in of_families[name] if row.line.name in known]
        if rows:
            answers = [known[row.line.name] for row in rows]
            yield (
                f"| {name} | {sum(row.num_lines for row in rows)} "
                f"| {max(each.largest for each in answers):.1e} "
                f"| {min(each.control for each in answers):.1f} |"
            )
    yield ""


def _counted(name: str, rows: Sequence[Row]) -> str:
    def count(chosen: Iterable[Row]) -> int:
        return sum(row.num_lines for row in chosen)

    family = FAMILIES.get(name)
    started = [row for row in rows if row.kind("connector") == "started"]
    numbers = (
        count(rows),
        count(row for row in rows if row.kind("retention") == "started"),
        count(started),
        count(row for row in started if row.has_prefix_caching),
        *(
            count(row for row in rows if row.kind("connector") == kind)
            for kind in ("refused", "not emulated", "upstream")
        ),
    )
    cells = [name, family.kind if family else "", *(str(number) for number in numbers)]
    return f"| {' | '.join(cells)} |"


def _reasons(rows: Sequence[Row], kinds: Sequence[str]) -> Counter[str]:
    found = Counter[str]()
    for row in rows:
        if row.kind("without") in kinds:
            found[row.outcomes["without"]] += row.num_lines
    return found


def _list(texts: Counter[str]) -> Iterable[str]:
    for text, number in texts.most_common():
        yield f"- {number} line{'s' if number > 1 else ''}: {_escaped(text)}"
    if not texts:
        yield "None."
    yield ""


def _flags(line: OfficialLine) -> str:
    """The flags of a line that decide what its engine is, short."""
    sizes = {"tensor": "TP", "data": "DP", "pipeline": "PP"}
    words = [f"{sizes[name.split('-')[0]]} {size}" for name, size in line.sizes.items() if size > 1]
    context = int(line.flags.get("decode-context-parallel-size", 1))
    if context > 1:
        words.append(f"DCP {context}")
    transfer = line.transfer_config
    if transfer:
        words.append(f"{transfer['kv_connector']} {line.role or transfer['kv_role']}")
    speculative = line.flags.get("speculative-config")
    if speculative:
        words.append(f"{speculative['method']} {speculative['num_speculative_tokens']}")
    compilation = line.flags.get("compilation-config") or {}
    if "cudagraph_mode" in compilation:
        words.append(compilation["cudagraph_mode"])
    for name in (
        "enforce-eager",
        "enable-prefix-caching",
        "no-enable-prefix-caching",
        "async-scheduling",
    ):
        if name in line.flags:
            words.append(name)
    for name in ("quantization", "kv-cache-dtype", "block-size", "dtype", "runner"):
        if name in line.flags:
            words.append(f"{name} {line.flags[name]}")
    words += [f"{name}={value}" for name, value in line.environ.items()]
    additional = line.flags.get("additional-config")
    if isinstance(additional, dict):
        words += [f"`{name}`" for name in additional]
    return ", ".join(words)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
