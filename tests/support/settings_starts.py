# SPDX-License-Identifier: Apache-2.0
"""Starts of engines in which every documented variable and option is set, and is left unset.

`documented` reads the pages, `started` the table of starts; `tests/unit/test_settings_starts.py`
compares them, and `test_settings_start.py` carries the starts out on every supported pair.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ascend_kvext.connector.common.options import OPTIONS
from vllm_ascend_kvext.features import DEFAULTS, FEATURES
from vllm_ascend_kvext.settings import (
    ASCEND_KERNEL_VARIABLE,
    BUNDLE_VARIABLE,
    DISABLE_VARIABLE,
    FAST_PREFIX_CACHE_VARIABLE,
    LMCACHE_KEYS_VARIABLE,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    VARIABLE_NAMES,
)

CHECKOUT = Path(__file__).parents[2]
UNSET = "unset"
NUMBER = "N"
"""The word of the pages for any integer above 0."""

OTHER = "not the default"
"""Stands for some other value of a name whose values are not listed on the pages."""

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
    LMCACHE_KEYS_VARIABLE: "the engine starts; what it does needs LMCache: test_lmcache_engine.py",
    "shared_tier": "file:///...; mooncake://... needs a master: "
    "test_shared_tier_mooncake_engine.py",
    "segment_separator": "token ids; a text needs a tokenizer: test_segment_tokens.py",
    "segment_sink": "token ids; a text needs a tokenizer: test_segment_tokens.py",
}
"""Values that these starts do not cover, as the pair lacks a requirement, by name."""


class Start(NamedTuple):
    """A process, and the engines that it starts one after the other.

    Attributes:
        environ: The variables that are set.
        engines: By name, the options of KvextConnector; None where there is no connector.
    """

    environ: Mapping[str, str]
    engines: Mapping[str, Mapping[str, Any] | None]


STOCK = "off"
"""The start whose answers are those of vLLM alone."""


def starts(folder: Path) -> dict[str, Start]:
    """All starts, by name.

    Args:
        folder: Where a shared tier may keep files.
    """
    host_memory = {"host_memory_gib": 0.125}
    (retention,) = [feature for feature in FEATURES if feature.name == "retention"]
    # The features that retention needs, and those that a connector needs with a hybrid model on
    # vLLM 0.23.
    needed = {*retention.requires, "connector", "failed-loads"}
    return {
        "nothing set": Start(
            {},
            {
                "null": {**dict.fromkeys(option.key for option in OPTIONS), **host_memory},
                "nothing but exact": {
                    **host_memory,
                    "chunk_tokens": INTERVAL_TOKENS,
                    "store_policy": "all",
                    "state_policy": "skip",
                    "hole_reuse": False,
                    "load_if_slower": True,
                    "copy_cpus": [min(os.sched_getaffinity(0))],
                },
                "question": {
                    **host_memory,
                    "store_policy": "never",
                    "state_policy": "exact",
                    "hole_reuse": True,
                    "blending": True,
                    "blend_selector": "question",
                    "blend_head_tokens": 8,
                    "blend_ratio": 0.5,
                    "blend_check_layer": FULL_LAYER,
                    "segment_separator": [MAX_TOKEN_ID + 1],
                    "segment_sink": [MAX_TOKEN_ID + 2],
                    "segment_context": True,
                    "learn_segments": False,
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
                LMCACHE_KEYS_VARIABLE: "1",
                "PYTHONHASHSEED": "0",  # A shared tier needs a fixed seed.
            },
            {
                "heads": {
                    **host_memory,
                    "blending": True,
                    "blend_selector": "heads",
                    "segment_context": False,
                    "learn_segments": True,
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
                LMCACHE_KEYS_VARIABLE: "0",
            },
            {
                "words of defaults": {
                    **host_memory,
                    "store_policy": "second_touch",
                    "blending": False,
                    "load_if_slower": False,
                }
            },
        ),
        "disabled": Start(
            {
                DISABLE_VARIABLE: ",".join(each.name for each in DEFAULTS),
                FAST_PREFIX_CACHE_VARIABLE: "auto",
                LMCACHE_KEYS_VARIABLE: "auto",
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
    """Our variables, and keys of the connector's configuration, that pages mention."""
    found: set[str] = set()
    for text in pages:
        found |= {*re.findall(r"\bVLLM_ASCEND_KVEXT_[A-Z_]*[A-Z]\b", text)}
        found |= {*re.findall(r"\bVLLM_[A-Z_]*RETENTION[A-Z_]*[A-Z]\b", text)}
        for options in re.findall(r'"kv_connector_extra_config": *\{([^}]*)\}', text):
            found |= {*re.findall(r'"(\w+)" *:', options)}
    return found


def started(table: Iterable[Start]) -> dict[str, set[str]]:
    """The names that starts set, each with its values, and with `UNSET` where one leaves it out."""
    defaults = {option.key: option.default for option in OPTIONS}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for start in table:
        if start.environ.get(MODE_VARIABLE) == "off":
            found[MODE_VARIABLE].add("off")  # In this mode no other variable is read.
            continue
        for name in VARIABLE_NAMES:
            found[name] |= {*start.environ.get(name, UNSET).split(",")}
        for options in start.engines.values():
            for key in defaults if options is not None else ():
                value = (options or {}).get(key)
                if isinstance(value, bool):
                    found[key].add(str(value).lower())
                else:
                    found[key].add(UNSET if value is None else str(value))
                if value not in (None, defaults[key]):
                    found[key].add(OTHER)
    for values in found.values():
        if any(value.isdecimal() and int(value) > 1 for value in values):
            values.add(NUMBER)
    return found


def lacking(
    asked: Mapping[str, Iterable[str]], found: Callable[[str], Iterable[str]]
) -> list[tuple[str, str]]:
    """The documented names and values that no start has and that are not left out for a reason."""
    return [
        (name, value)
        for name, values in asked.items()
        for value in sorted({*values} - {*found(name)})
        if (name, value) not in LEFT_OUT
    ]
