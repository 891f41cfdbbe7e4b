# SPDX-License-Identifier: Apache-2.0
"""How an operator gets from a Python function to ``torch_npu`` or ``torch.ops._C_ascend``.

The function, its *body*, is plain torch and knows no device: it is tested on CPU tensors. There are
two ways to give it to the device:

- As an **operator** it is called with the tensors of the device, and made of operators of torch,
  each of which is put in the stream's queue by itself. It must not read values (``item()``, masks
  as indices): that would have the host wait, which the device's operator does not do.
- As a **kernel** it runs as one when the stream comes to it, with CPU tensors of the same memory.
  So it may read values. Its results need sizes before: a second function gives ``(shape, dtype)``
  of each, or an empty list if all it does is to write to its arguments.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.library import infer_schema

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


def nothing(*args: Any, **kwargs: Any) -> list[tuple[Sequence[int], torch.dtype]]:
    return []


def kernel(
    name: str,
    body: Body,
    outputs: Outputs = nothing,
    returned: Returned | None = None,
    on_host: Sequence[str] = (),
) -> Body:
    """A body that runs as one when its stream comes to it, in whatever thread waits.

    So it depends on nothing but its arguments: values, lists and tensors of the host are those of
    the call.

    Args:
        name: As it is counted, and named in errors.
        body: Takes CPU tensors that have the memory of the call's tensors.
        outputs: Shape and type of what the body returns, if anything.
        returned: What the caller gets, if that is something else than the outputs.
        on_host: Parameters that may be tensors of the host. Others are refused, as the device does,
            unless they are numbers.
    """
    host_places = _places_of(body, on_host)

    def call(*args: Any, **kwargs: Any) -> Any:
        _emulator.count_operator(name)
        made = [
            _emulator.new_tensor(tuple(shape), dtype) for shape, dtype in outputs(*args, **kwargs)
        ]
        # The device keeps memory, not tensors: the work must not either.
        targets = [_emulator.alias(tensor) for tensor in made]
        inputs = [_input(name, arg, place in host_places) for place, arg in enumerate(args)]
        named = {key: _input(name, value, key in on_host) for key, value in kwargs.items()}

        def run() -> None:
            # Modes of the thread that happens to wait, such as a default device, do not count.
            with torch._C.DisableTorchFunction():
                results = body(*inputs, **named)
                if targets:
                    _deliver(name, targets, results)

        _emulator.enqueue_kernel(name, run)
        if returned is not None:
            return returned(made, *args, **kwargs)
        return made[0] if len(made) == 1 else tuple(made) or None

    return _named(call, body, name)


def _places_of(body: Body, names: Sequence[str]) -> frozenset[int]:
    if not names:
        return frozenset()
    parameters = list(inspect.signature(body).parameters)
    return frozenset(parameters.index(name) for name in names)


def _input(name: str, value: Any, is_on_host: bool) -> Any:
    """What the body gets for an argument."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "npu":
            return _emulator.alias(value)
        if is_on_host or value.dim() == 0:
            return value.clone()
        raise RuntimeError(f"{name}: expected tensors on npu, found one on {value.device}")
    if type(value) in (list, tuple):
        return type(value)(_input(name, item, is_on_host) for item in value)
    return value


def _deliver(name: str, targets: Sequence[torch.Tensor], results: Any) -> None:
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    found = [(tuple(one.shape), one.dtype) for one in results]
    said = [(tuple(one.shape), one.dtype) for one in targets]
    if found != said:
        raise RuntimeError(f"{name}: its body returned {found}, and its outputs are {said}")
    for target, result in zip(targets, results, strict=True):
        target.copy_(result)


def register_operators() -> dict[str, Body]:
    """Define the operators of vLLM-Ascend's library; return those of ``torch_npu``, by name.

    Modules of ``operators`` have tables ``OPERATORS`` (name: body) and ``KERNELS`` (name: what
    ``kernel`` takes besides); those of ``custom_operators`` the same, with a schema for a name
    where the body's signature does not say it.
    """
    found: dict[str, Body] = {}
    for module in _modules("operators"):
        for name, body in getattr(module, "OPERATORS", {}).items():
            found[name] = operator(name, body)
        for name, (body, *more) in getattr(module, "KERNELS", {}).items():
            found[name] = kernel(name, body, *more)
    for module in _modules("custom_operators"):
        for schema, body in getattr(module, "OPERATORS", {}).items():
            _define(schema, body, operator)
        for schema, (body, *more) in getattr(module, "KERNELS", {}).items():
            _define(schema, body, lambda *which, more=more: kernel(*which, *more))
        for schema, body in getattr(module, "HOST_FUNCTIONS", {}).items():
            _define(schema, body, operator, "CPU")
    return found


_library = torch.library.Library("_C_ascend", "FRAGMENT")


def _define(
    schema: str, body: Body, make: Callable[[str, Body], Body], key: str = "PrivateUse1"
) -> None:
    name, has_schema, _ = schema.partition("(")
    # Who calls it does not look at what it writes to.
    _library.define(schema if has_schema else name + infer_schema(body, mutates_args=()))
    _library.impl(name, make(name, body), key)


def _modules(package: str) -> Iterable[ModuleType]:
    folder = importlib.import_module(f"torch_npu.{package}")
    for module in pkgutil.iter_modules(folder.__path__):
        yield importlib.import_module(f"torch_npu.{package}.{module.name}")


def _named(call: Body, body: Body, name: str) -> Body:
    call.__name__ = call.__qualname__ = name
    call.__doc__ = body.__doc__
    return call
