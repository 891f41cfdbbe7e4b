# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Loads the compiled module.

The compiled module is part of the installed package. A process that is started in a checkout
imports this package from the checkout (see the package's ``__init__``), but takes the compiled
module from the installed package.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from types import ModuleType

import vllm_ascend_kvext
from vllm_ascend_kvext.errors import CompiledModuleError

_NAME = "vllm_ascend_kvext._native"
_STUB = "_native.pyi"


@functools.cache
def native() -> ModuleType:
    """The compiled module. ``_native.pyi`` declares its functions and classes.

    Raises:
        CompiledModuleError: The module is missing for this interpreter, does not load, belongs to
            another version, or lacks a function or class of ``_native.pyi``.
    """
    try:
        try:
            module = importlib.import_module(_NAME)
        except ModuleNotFoundError:
            module = _load_installed()
    except ImportError as error:
        raise CompiledModuleError(
            f"{_NAME} does not load: {error}. Install the package again."
        ) from error
    found = module.describe()["version"]
    if found != vllm_ascend_kvext.__version__:
        raise CompiledModuleError(
            f"{module.__file__}: expected version {vllm_ascend_kvext.__version__}, as the package "
            f"in {_package_folder()}, found {found}. Install that package."
        )
    missing = [name for name in _promised_names() if not hasattr(module, name)]
    if missing:
        raise CompiledModuleError(
            f"{module.__file__}: expected the functions and classes of "
            f"{_package_folder() / _STUB}, found none named {', '.join(missing)}: "
            "it was built from older sources of the same version. Install that package again."
        )
    return module


def _package_folder() -> Path:
    return Path(vllm_ascend_kvext.__file__).parent


def _promised_names() -> list[str]:
    """The functions and classes that the compiled module must have.

    A development version keeps its number when functions are added or removed, so the number alone
    does not tell whether the module is current.
    """
    stub = _package_folder() / _STUB
    source = stub.read_text(encoding="utf-8") if stub.is_file() else ""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.ClassDef) and not node.bases)  # else it is a type of the stub's
    ]


def _load_installed() -> ModuleType:
    """The compiled module of the installed package, which lies further back on the path."""
    folders = [str(Path(entry) / "vllm_ascend_kvext") for entry in sys.path]
    spec = PathFinder.find_spec(_NAME, folders)
    if spec is None or spec.loader is None:
        raise CompiledModuleError(
            f"{_NAME}: expected _native{EXTENSION_SUFFIXES[0]} in vllm_ascend_kvext, found none on "
            f"sys.path. Install the package for this interpreter ({sys.executable}): pip install ."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
