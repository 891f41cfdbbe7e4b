# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Torch code that replaces Triton kernels, which need a compiler for the device.

Each module of this folder has a table ``STAND_INS``. A key is module and name of a kernel, and the
value replaces the kernel. The replacement happens as soon as the kernel's module has been imported,
before other modules take the name from it. A kernel that is in different modules in different
versions of vLLM-Ascend has one key for each. A table ``WHOLE_MODULES`` has replacements, by name,
of whole modules that cannot be imported here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Launched:
    """A function that is launched like a Triton kernel: ``kernel[grid](...)``.

    A launch returns what Triton has compiled, which can be launched again. Here it is the same.
    """

    pre_run_hooks: Sequence[Callable[..., None]] = ()

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., Launched]:
        def launch(*args: Any, **named: Any) -> Launched:
            self._function(*args, **named)
            return self

        return launch


class _Loader(importlib.abc.Loader):
    """A loader that also calls a function with the module.

    Its loader may belong to another finder that wraps loaders, so it is left as it is.
    """

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, stand_ins: dict[tuple[str, str], Any]) -> None:
        self._stand_ins = stand_ins

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        mine = {kernel: by for (module, kernel), by in self._stand_ins.items() if module == name}
        if not mine:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        everyone = [kernel for _, kernel in self._stand_ins]

        def replace(module: ModuleType) -> None:
            for kernel, stand_in in mine.items():
                if hasattr(module, kernel):
                    setattr(module, kernel, stand_in)
                elif everyone.count(kernel) == 1:
                    raise ImportError(f"{name}.{kernel} does not exist: its stand-in is of no use")

        spec.loader = _Loader(spec.loader, replace)
        return spec


def install() -> None:
    """Find the stand-ins, and have each replace its kernel."""
    found: dict[tuple[str, str], Any] = {}
    for info in pkgutil.iter_modules(__path__):
        part = importlib.import_module(f"{__name__}.{info.name}")
        found.update(getattr(part, "STAND_INS", {}))
        for name, attributes in getattr(part, "WHOLE_MODULES", {}).items():
            module = ModuleType(name)
            module.__spec__ = None
            vars(module).update(attributes)
            sys.modules[name] = module
    sys.meta_path.insert(0, _Finder(found))
