# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Starts of engines. Every documented variable and option is set in a start, and unset in one.

`documented` reads the pages, and `started` reads the table of starts.
`tests/unit/test_settings_starts.py` compares them. `test_settings_start.py` runs the starts on
every supported pair.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_kvext.connector.common.options import OPTIONS
from vllm_ascend_kvext.declared import Declared
from vllm_ascend_kvext.features import DEFAULTS, FEATURES
from vllm_ascend_kvext.segments.options import OPTION, SEGMENT_OPTIONS
from vllm_ascend_kvext.settings import (
    ASCEND_KERNEL_VARIABLE,
    BUNDLE_VARIABLE,
    DISABLE_VARIABLE,
    FAST_PREFIX_CACHE_VARIABLE,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    VARIABLE_NAMES,
)

CHECKOUT = Path(__file__).parents[2]
KEYS = [option.key for option in OPTIONS]
SEGMENT_KEYS = [option.key for option in SEGMENT_OPTIONS]
UNSET = "unset"
NUMBER = "N"
"""The word of the pages for any integer above 0."""

OTHER = "not the default"
"""Means some other value of a name, if the pages do not list its values."""

KEYS_OF_OTHERS = {"connectors", "decode", "dp_size", "prefill", "tp_size"}
"""Keys of MultiConnector, and of connectors that send KV to other nodes."""

MAX_TOKEN_ID = 499
"""The largest token id of the prompts. Separators have larger ids."""

INTERVAL_TOKENS = 256
FULL_LAYER = 5
"""The full-attention layer of the models, Gemma 3 with six layers."""

LEFT_OUT = {
    ("host_memory_gib", UNSET): "the default of 8 GiB is more than a machine of tests may have",
}
"""The reason why no start has a value, by name and value."""

NOT_SHOWN = {
    ASCEND_KERNEL_VARIABLE: "1: there is no AscendC to build the kernel with; copies are made by "
    "DMA. test_ascend_kernel.py and test_kernel_or_dma.py run the kernel's code",
    "allow_cuda": "on CPUs and NPUs it changes nothing; test_batched_dma.py runs the code for GPUs "
    "on a stand-in",
    "shared_tier": "file:///...; mooncake://... needs a master: "
    "test_shared_tier_mooncake_engine.py",
    "separator": "token ids; a text needs a tokenizer: test_segment_tokens.py",
    "sink": "token ids; a text needs a tokenizer: test_segment_tokens.py",
}
"""Values that these starts do not cover, because the pair lacks a requirement, by name."""


class Start(NamedTuple):
    """A process, and the engines that it starts one after the other.

    Attributes:
        environ: The variables that are set.
        engines: By name: the options of KvextConnector. None if there is no connector.
    """

    environ: Mapping[str, str]
    engines: Mapping[str, Mapping[str, Any] | None]


STOCK = "off"
"""The start that has the answers of vLLM alone."""


def starts(folder: Path) -> dict[str, Start]:
    """All starts, by name.

    Args:
        folder: A folder in which a shared tier may keep files.
    """
    host_memory = {"host_memory_gib": 0.125}
    (retention,) = [feature for feature in FEATURES if feature.name == "retention"]
    # These features are needed by retention, and by a connector with a hybrid model on vLLM 0.23.
    needed = {*retention.requires, "connector", "failed-loads"}
    return {
        "nothing set": Start(
            {},
            {
                "null": {**dict.fromkeys([*KEYS, OPTION]), **host_memory},
                "null in segments": {**host_memory, OPTION: dict.fromkeys(SEGMENT_KEYS)},
                "nothing but exact": {
                    **host_memory,
                    "chunk_tokens": INTERVAL_TOKENS,
                    "store_policy": "all",
                    "state_policy": "skip",
                    "hole_reuse": False,
                    "load_if_slower": True,
                    "allow_cuda": True,
                    "copy_cpus": [min(os.sched_getaffinity(0))],
                },
                "question": {
                    **host_memory,
                    "store_policy": "never",
                    "state_policy": "exact",
                    "hole_reuse": True,
                    "segments": {
                        "selector": "question",
                        "head_tokens": 8,
                        "ratio": 0.5,
                        "check_layer": FULL_LAYER,
                        "separator": [MAX_TOKEN_ID + 1],
                        "sink": [MAX_TOKEN_ID + 2],
                        "context": True,
                        "learn": False,
                    },
                },
            },
        ),
        STOCK: Start(
            {
                MODE_VARIABLE: "off",
                RETENTION_VARIABLE: "adaptive",
                RETENTION_INTERVAL_VARIABLE: str(INTERVAL_TOKENS),
            },
            {"stock": None},
        ),
        "adaptive": Start(
            {
                MODE_VARIABLE: "strict",
                DISABLE_VARIABLE: ",".join(
                    each.name for each in DEFAULTS if each.name not in needed
                ),
                RETENTION_VARIABLE: "adaptive",
                RETENTION_INTERVAL_VARIABLE: str(INTERVAL_TOKENS),
                FAST_PREFIX_CACHE_VARIABLE: "1",
                BUNDLE_VARIABLE: "0",
                ASCEND_KERNEL_VARIABLE: "1",
                "PYTHONHASHSEED": "0",  # A shared tier requires a seed.
            },
            {
                "heads": {
                    **host_memory,
                    "segments": {
                        "selector": "heads",
                        "sink": [],
                        "context": False,
                        "learn": True,
                    },
                    "shared_tier": f"file://{folder}",
                    "shared_tier_bytes": 1 << 26,
                },
            },
        ),
        "interval": Start(
            {
                MODE_VARIABLE: "safe",
                RETENTION_VARIABLE: "interval",
                RETENTION_INTERVAL_VARIABLE: "0",
                FAST_PREFIX_CACHE_VARIABLE: "0",
                BUNDLE_VARIABLE: "1",
                ASCEND_KERNEL_VARIABLE: "0",
            },
            {
                "words of defaults": {
                    **host_memory,
                    "store_policy": "second_touch",
                    "load_if_slower": False,
                    "allow_cuda": False,
                    "segments": {},
                }
            },
        ),
        "disabled": Start(
            {
                DISABLE_VARIABLE: ",".join(each.name for each in DEFAULTS),
                FAST_PREFIX_CACHE_VARIABLE: "auto",
            },
            {"no connector": None},
        ),
    }


def documented(page: str) -> dict[str, set[str]]:
    """The names on the page of settings, each with the values that the page describes.

    `UNSET` is a value of every name. If the page has no other word for a name, `OTHER` is a value.
    """
    found = {}
    for name, default, text in re.findall(
        r"^### `(.+)`\n\nDefault: (.+)\.\n\n(.+)$", page, re.MULTILINE
    ):
        of_lists = re.findall(r"`([a-z-]+)`", text) if name == DISABLE_VARIABLE else []
        words = {*re.findall(r"(?:^|\. )`([^`]+)`:", text), *of_lists}
        found[name] = {UNSET, *words} | (set() if words - {default} else {OTHER})
    return found


def mentioned(pages: Iterable[str]) -> set[str]:
    """Our variables and the keys of the connector's configuration that pages mention."""
    found: set[str] = set()
    for text in pages:
        found |= {*re.findall(r"\bVLLM_ASCEND_KVEXT_[A-Z_]*[A-Z]\b", text)}
        found |= {*re.findall(r"\bVLLM_[A-Z_]*RETENTION[A-Z_]*[A-Z]\b", text)}
        for options in re.findall(r'"kv_connector_extra_config": *\{([^}]*)\}', text):
            found |= {*re.findall(r'"(\w+)" *:', options)} - KEYS_OF_OTHERS
    return found


def started(table: Iterable[Start]) -> dict[str, set[str]]:
    """The names that starts set, each with its values, and `UNSET` if a start leaves it out."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for start in table:
        if start.environ.get(MODE_VARIABLE) == "off":
            found[MODE_VARIABLE].add("off")  # In this mode, no other variable is read.
            continue
        for name in VARIABLE_NAMES:
            found[name] |= {*start.environ.get(name, UNSET).split(",")}
        for options in start.engines.values():
            if options is None:
                continue
            segments = options.get(OPTION)
            found[OPTION].add(UNSET if segments is None else OTHER)
            _note_values(found, OPTIONS, options)
            if segments is not None:
                _note_values(found, SEGMENT_OPTIONS, segments)
    for values in found.values():
        if any(value.isdecimal() and int(value) > 1 for value in values):
            values.add(NUMBER)
    return found


def _note_values(
    found: Mapping[str, set[str]], declared: Iterable[Declared], options: Mapping[str, Any]
) -> None:
    """Add the value that the options have for each declared key, or `UNSET`."""
    for option in declared:
        value = options.get(option.key)
        if isinstance(value, bool):
            found[option.key].add(str(value).lower())
        else:
            found[option.key].add(UNSET if value is None else str(value))
        if value not in (None, option.default):
            found[option.key].add(OTHER)


def lacking(
    asked: Mapping[str, Iterable[str]], found: Callable[[str], Iterable[str]]
) -> list[tuple[str, str]]:
    """The documented names and values that no start has, unless they are left out for a reason."""
    return [
        (name, value)
        for name, values in asked.items()
        for value in sorted({*values} - {*found(name)})
        if (name, value) not in LEFT_OUT
    ]
