# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The names that the pages for readers use, and whether the code still has them.

A name is what a page writes as code: `` `name` ``, or a line of a fenced block. Names of the
package are compared with their declarations. Any other word of code must be a name in the sources,
or one of upstream's names that the pages may use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vllm_ascend_kvext.__main__ import _COMMANDS
from vllm_ascend_kvext.connector.common.counters import METRICS as HOST_METRICS
from vllm_ascend_kvext.connector.common.options import OPTIONS
from vllm_ascend_kvext.counted import PREFIX, Metric
from vllm_ascend_kvext.features import FEATURES
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.ids import RETIRED_IDS
from vllm_ascend_kvext.retention.stats import METRICS as RETENTION_METRICS
from vllm_ascend_kvext.segments.counters import SEGMENT_METRICS
from vllm_ascend_kvext.segments.options import OPTION as SEGMENTS_OPTION
from vllm_ascend_kvext.settings import OWN_PREFIX, VARIABLE_NAMES

CHECKOUT = Path(__file__).parents[2]
PACKAGE = CHECKOUT / "vllm_ascend_kvext"
PATCH_FOLDER = CHECKOUT / "patches"

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_UPSTREAM_PATHS = ("vllm/", "vllm_ascend/", "lmcache/", ".venv/", "out/")
_FILE_ENDINGS = (".py", ".md", ".json", ".cpp", ".h", ".toml", ".sh")


@dataclass(frozen=True)
class Page:
    """A page for readers.

    Attributes:
        spans: The pieces of code inside lines.
        blocks: The fenced blocks.
    """

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[str]:
        return re.findall(r"^```\w*\n(.*?)^```", self.text, re.MULTILINE | re.DOTALL)

    @cached_property
    def spans(self) -> list[str]:
        outside = re.sub(r"^```.*?^```", "", self.text, flags=re.MULTILINE | re.DOTALL)
        return [" ".join(each.split()) for each in re.findall(r"`([^`]+)`", outside)]


NOT_READ = ("CHANGELOG.md", "official_lines.md", "patches.md")
"""The changelog names removed things. The other two are made from data and declarations."""


def pages() -> list[Page]:
    """All pages except for a few that have names of their own kind."""
    found = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/*.md"), *CHECKOUT.glob("examples/*.md")]
    return [Page(path) for path in sorted(found) if path.name not in NOT_READ]


@dataclass(frozen=True)
class Code:
    """The names in the code, by kind."""

    @cached_property
    def metrics(self) -> Mapping[str, Metric]:
        """Metrics by the names that vLLM shows, and by those that Prometheus shows."""
        found = {}
        for metric in (*HOST_METRICS, *SEGMENT_METRICS, *RETENTION_METRICS):
            for suffix in ("",) if metric.is_gauge else ("", "_total"):
                found[f"{PREFIX}{metric.name}{suffix}"] = metric
        return found

    @cached_property
    def options(self) -> frozenset[str]:
        return frozenset(option.key for option in OPTIONS) | {SEGMENTS_OPTION}

    @cached_property
    def commands(self) -> frozenset[str]:
        return frozenset(_COMMANDS)

    @cached_property
    def features(self) -> frozenset[str]:
        return frozenset(feature.name for feature in FEATURES)

    @cached_property
    def patch_ids(self) -> frozenset[str]:
        """The ids of present patches, and of removed ones.

        Pages may name removed patches as such.
        """
        return frozenset(patch.id for patch in PATCHES) | {*RETIRED_IDS}

    @cached_property
    def make_targets(self) -> frozenset[str]:
        text = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
        return frozenset(re.findall(r"^([a-z][a-z0-9-]*):", text, re.MULTILINE))

    @cached_property
    def command_options(self) -> frozenset[str]:
        """The ``--options`` of the package's own commands, scripts and tools."""
        sources = [*PACKAGE.rglob("*.py"), *_scripts()]
        return frozenset(
            name for path in sources for name in re.findall(r'"(--[a-z-]+)"', path.read_text())
        )

    @cached_property
    def variables(self) -> frozenset[str]:
        """Environment variables of the package, and of its tests, tools and sources."""
        sources = [*PACKAGE.rglob("*.py"), *PATCH_FOLDER.rglob("*.py"), *_scripts()]
        sources += [CHECKOUT / "Makefile"]
        return frozenset(
            name
            for path in sources
            for name in re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", path.read_text())
        ) | {*VARIABLE_NAMES}

    @cached_property
    def words(self) -> frozenset[str]:
        """Names in the sources of the package: identifiers, and strings that look like identifiers.

        Comments and docstrings do not count.
        """
        found: set[str] = set()
        for folder in (PACKAGE, PATCH_FOLDER):
            for path in folder.rglob("*.py"):
                found |= {*_names_in(path), path.stem, path.parent.name}
        for path in [*CHECKOUT.glob("csrc/**/*.cpp"), *CHECKOUT.glob("csrc/**/*.h")]:
            text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            found |= set(re.findall(_WORD, re.sub(r"//.*", "", text)))
            found.add(path.stem)
        return frozenset(found)


def _scripts() -> Iterator[Path]:
    for folder in ("benchmarks", "tools", "tests", "examples"):
        for path in (CHECKOUT / folder).rglob("*.py"):
            if path.name != "test_documented_names.py":  # This file invents names.
                yield path


def _names_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.:-]+", text):
                yield text
                yield from re.split(r"[.:]", text)


CODE = Code()


def unknown_names(page: Page, upstream: frozenset[str], code: Code = CODE) -> list[str]:
    """The names of a page that do not exist, one per line, in the order of the page."""
    problems = [f"{each}: no such variable" for each in _unknown_variables(page.text, code)]
    problems += [f"{each}: no such metric" for each in _unknown_metrics(page.text, code)]
    named_ids = dict.fromkeys(re.findall(r"KVX-\d{3}", page.text))
    problems += [
        f"{each}: no patch has this id" for each in named_ids if each not in code.patch_ids
    ]
    for text in (*page.spans, *page.blocks):
        problems += _unknown_commands(text, code)
    for block in page.blocks:
        problems += [f"{each}: no such option" for each in _unknown_options(block, code)]
    for span in dict.fromkeys(page.spans):
        problem = _unknown_span(span, page, upstream, code)
        if problem:
            problems.append(f"{span}: {problem}")
    return problems


def _unknown_variables(text: str, code: Code) -> Iterator[str]:
    for name in dict.fromkeys(re.findall(rf"{OWN_PREFIX}[A-Z_]*[A-Z]", text)):
        if name not in VARIABLE_NAMES:
            yield name


def _unknown_metrics(text: str, code: Code) -> Iterator[str]:
    """Metrics of this package, with the values of their labels. ``*`` means several."""
    pattern = rf"{PREFIX}([a-z_]*)(\*?)(?:\{{(\w+)=\"?([\w|…]+)\"?)?"
    for stem, star, label, value in dict.fromkeys(re.findall(pattern, text)):
        name = f"{PREFIX}{stem}"
        if star or not stem:
            if not any(each.startswith(name) for each in code.metrics):
                yield f"{name}*"
            continue
        metric = code.metrics.get(name)
        if metric is None or (label and label != metric.label):
            yield f"{name}{{{label}}}" if label else name
        elif value and value != "…" and not {*value.split("|")} <= {*metric.label_values}:
            yield f"{name}{{{label}={value}}}"


def _unknown_options(block: str, code: Code) -> Iterator[str]:
    """Keys of KvextConnector's ``kv_connector_extra_config`` in a command line."""
    if '"KvextConnector"' not in block:
        return
    options = r'"KvextConnector"[^{]*?"kv_connector_extra_config":\s*\{([^{}]*)'
    for config in re.findall(options, block):
        for key in re.findall(r'"(\w+)":', config):
            if key not in code.options:
                yield key


def _unknown_commands(text: str, code: Code) -> Iterator[str]:
    """Commands of ``python -m vllm_ascend_kvext`` and of ``make``, in any place."""
    for name in re.findall(r"python -m vllm_ascend_kvext ([a-z][a-z-]*)", text):
        if name not in code.commands:
            yield f"python -m vllm_ascend_kvext {name}: no such command"
    for name in re.findall(r"(?:^|[\s(])make ([a-z][a-z0-9-]+)", text):
        if name not in code.make_targets:
            yield f"make {name}: no such target"


def _unknown_span(span: str, page: Page, upstream: frozenset[str], code: Code) -> str:
    """Why the name in a span of code does not exist. Empty if it exists."""
    first, _, rest = span.partition(" ")
    if first in code.commands:
        named = [word for word in rest.split() if re.fullmatch(r"--[a-z-]+", word)]
        missing = [each for each in named if each not in code.command_options | upstream]
        return f"no command takes {missing[0]}" if missing else ""
    name = span.partition("=")[0]
    if {span.removesuffix("()"), first, name} & upstream:
        return ""
    if span != name and re.fullmatch(r"[a-z]+(_[a-z]+)*", name):
        return "" if name in code.options | code.words else "no such option"
    if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", name):
        return "" if name in code.variables else "no such variable"
    if re.fullmatch(r"--[a-z-]+", first):
        return "" if first in code.command_options else "no such option of a command"
    if _is_path(span):
        return "" if _path_exists(span, page) else "no such file"
    if re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", span):
        is_known = span in code.features | code.commands | code.make_targets
        return "" if is_known else "no such feature, command or target"
    if re.fullmatch(rf"{_WORD}(\.{_WORD})*(\(\w*\))?", span):
        names = re.sub(r"\(\w*\)", "", span).split(".")
        missing = [each for each in names if each not in code.words | code.options | upstream]
        return f"nothing is called {missing[0]}" if missing else ""
    return ""


def _is_path(span: str) -> bool:
    if not re.fullmatch(r"[\w./-]+", span) or span.startswith(_UPSTREAM_PATHS):
        return False
    return "/" in span.strip("/") or span.endswith("/") or span.endswith(_FILE_ENDINGS)


def _path_exists(span: str, page: Page) -> bool:
    """Whether a path exists in the project, beside the page, or in a folder that pages omit."""
    folders = [CHECKOUT, PACKAGE, page.path.parent, CHECKOUT / "tests", CHECKOUT / "csrc"]
    folders += [PACKAGE / "connector", CHECKOUT / "tests" / "engine"]
    if any((folder / f"{span}{ending}").exists() for folder in folders for ending in ("", ".py")):
        return True
    # Pages name tests and sources only by their file names.
    return any(any(CHECKOUT.glob(f"{folder}/**/{span}")) for folder in ("tests", "csrc"))
