# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A package named ``vllm`` with one function to patch, and the process in which it runs."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from pathlib import Path

import pytest
from small_upstream import AddPackage, declare, record

import vllm_ascend_kvext
from vllm_ascend_kvext import activation
from vllm_ascend_kvext.commands import status
from vllm_ascend_kvext.patching.declaration import Feature, Patch
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.install import PatchBook
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import MODE_VARIABLE, RETENTION_INTERVAL_VARIABLE

TARGET = "vllm.engine:Engine.step"
ENGINE = "class Engine:\n    def step(self):\n        return 'stock'\n"
ENVS = f"""\
import os
environment_variables = {{{RETENTION_INTERVAL_VARIABLE!r}: lambda: None}}
VLLM_CACHE_ROOT = ""
"""
OLD_ENVS = "environment_variables = {}\nVLLM_CACHE_ROOT = ''\n"


class World:
    """A vLLM on disk, the variables of a process, and the records of the log."""

    def __init__(self, add_package: AddPackage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.add_package = add_package
        self.monkeypatch = monkeypatch
        self.calls: list[str] = []
        self.records: list[logging.LogRecord] = []
        for name in os.environ:
            if name.startswith("VLLM_"):
                monkeypatch.delenv(name)
        monkeypatch.setitem(sys.modules, "torch_npu", None)
        monkeypatch.setattr(activation, "BOOK", PatchBook())
        self.features(Feature("retention"))
        self.ledger(declare(TARGET, feature="retention", wrapper=record(self.calls)))
        root = self.upstream()
        store = FingerprintStore({"vllm": {"0.23.0": {TARGET: fingerprint_source(root, TARGET)}}})
        monkeypatch.setattr(FingerprintStore, "load", lambda: store)

    def features(self, *features: Feature) -> None:
        for module in (activation, status):
            self.monkeypatch.setattr(module, "FEATURES", features)

    def ledger(self, *patches: Patch) -> None:
        self.monkeypatch.setattr(activation, "PATCHES", patches)

    def upstream(self, version: str = "0.23.0", engine: str = ENGINE, envs: str = ENVS) -> Path:
        modules = {"_version": f"__version__ = {version!r}\n", "engine": engine, "envs": envs}
        return self.add_package("vllm", modules)

    def set(self, **variables: str) -> None:
        names = {"mode": MODE_VARIABLE, "interval": RETENTION_INTERVAL_VARIABLE}
        for name, value in variables.items():
            self.monkeypatch.setenv(names.get(name, name), value)

    def register(self) -> None:
        vllm_ascend_kvext.register()

    def logged(self, level: int) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno == level]

    @property
    def is_patched(self) -> bool:
        engine = importlib.import_module("vllm.engine").Engine
        self.calls.clear()
        assert engine().step() == "stock"
        return bool(self.calls)

    @property
    def is_untouched(self) -> bool:
        """Whether the module that a patch would change was not even imported."""
        return "vllm.engine" not in sys.modules
