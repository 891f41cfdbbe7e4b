# SPDX-License-Identifier: Apache-2.0
"""How an operator gets from a Python function to ``torch_npu`` or ``torch.ops._C_ascend``.

The function, its *body*, is plain torch and knows no device: it is tested on CPU tensors. There are
two ways to give it to the device:

- As an **operator** it is called with the tensors of the device, and made of operators of torch, each
  of which is put in the stream's queue by itself. It must not read values (``item()``, masks as
  indices): that would have the host wait, which the device's operator does not do.
- As a **kernel** it runs as one when the stream comes to it, with CPU tensors of the same memory. So it
  may read values. Its results need sizes before: a second function gives ``(shape, dtype)`` of each,
  or an empty list if all it does is to write to its arguments.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_npu import _emulator

Body = Callable[..., Any]
Outputs = Callable[..., Sequence[tuple[Sequence[int], torch.dtype]]]
"""Gets the arguments of the call."""
Returned = Callable[..., Any]
"""Gets the list of outputs, and the arguments of the call; gives what the caller is to have."""


def operator(name: str, body: Body) -> Body:
    """A body that is made of operators of torch, counted under its name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _emulator.count_operator(name)
        return body(*args, **kwargs)

    return _named(call, body, name)


def kernel(name: str, body: Body, outputs: Outputs, returned: Returned | None = None) -> Body:
    """A body that runs as one when its stream comes to it.

    What it is called with besides tensors must not change afterwards: lists are copied.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        _emulator.count_operator(name)
        made = [
            torch.empty(tuple(shape), dtype=dtype, device="npu")
            for shape, dtype in outputs(*args, **kwargs)
        ]
        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves = [list(leaf) if isinstance(leaf, list) else leaf for leaf in leaves]
        places = [place for place, leaf in enumerate(leaves) if _is_on_device(leaf)]

        def run(aliases: list[torch.Tensor]) -> None:
            on_cpu = list(leaves_without_tensors)
            for place, alias in zip(places, aliases, strict=False):
                on_cpu[place] = alias
            cpu_args, cpu_kwargs = pytree.tree_unflatten(on_cpu, structure)
            results = body(*cpu_args, **cpu_kwargs)
            if made_count:
                for result, target in zip(_listed(results), aliases[-made_count:], strict=True):
                    target.copy_(result)

        # The device keeps memory, not tensors: the work must not either.
        tensors = [leaves[place] for place in places]
        leaves_without_tensors = [None if _is_on_device(leaf) else leaf for leaf in leaves]
        made_count = len(made)
        del leaves
        _emulator.enqueue_kernel(name, run, tensors + made)
        if returned is not None:
            return returned(made, *args, **kwargs)
        return made[0] if len(made) == 1 else tuple(made) or None

    return _named(call, body, name)


def register_operators() -> dict[str, Body]:
    """Define the operators of vLLM-Ascend's library; return those of ``torch_npu``, by name.

    Modules of ``operators`` have tables ``OPERATORS`` (name: body) and ``KERNELS`` (name: body,
    outputs, and if it is something else than the outputs, what is returned); those of
    ``custom_operators`` the same with schemas for names.
    """
    found: dict[str, Body] = {}
    for module in _modules("operators"):
        for name, body in getattr(module, "OPERATORS", {}).items():
            found[name] = operator(name, body)
        for name, (body, *rest) in getattr(module, "KERNELS", {}).items():
            found[name] = kernel(name, body, *rest)
    for module in _modules("custom_operators"):
        for schema, body in getattr(module, "OPERATORS", {}).items():
            _define(schema, operator(_name_of(schema), body))
        for schema, (body, *rest) in getattr(module, "KERNELS", {}).items():
            _define(schema, kernel(_name_of(schema), body, *rest))
        for schema, body in getattr(module, "HOST_FUNCTIONS", {}).items():
            _define(schema, operator(_name_of(schema), body), "CPU")
    return found


_library = torch.library.Library("_C_ascend", "FRAGMENT")


def _define(schema: str, function: Body, key: str = "PrivateUse1") -> None:
    _library.define(schema)
    _library.impl(_name_of(schema), function, key)


def _name_of(schema: str) -> str:
    return schema.partition("(")[0]


def _modules(package: str) -> Iterable[ModuleType]:
    folder = importlib.import_module(f"torch_npu.{package}")
    for module in pkgutil.iter_modules(folder.__path__):
        yield importlib.import_module(f"torch_npu.{package}.{module.name}")


def _is_on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "npu"


def _listed(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _named(call: Body, body: Body, name: str) -> Body:
    call.__name__ = call.__qualname__ = name
    call.__doc__ = body.__doc__
    return call
