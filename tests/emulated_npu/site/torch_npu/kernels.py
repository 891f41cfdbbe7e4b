# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Registers Python functions as operators of ``torch_npu`` and ``torch.ops._C_ascend``.

The function is called the *body* of the operator. It is plain torch code without a device, and
tests call it with CPU tensors. Two decorators give it to the device and leave the body unchanged:

- As an **operator** the body is called with the tensors of the device. It consists of operators of
  torch, and each of them is put in the stream's queue separately. The body must not read values
  (``item()``, masks as indices), because the host would wait then. The device's operator does not
  wait.
- As a **kernel** the body runs as a whole when the stream reaches it. It gets CPU tensors of the
  same memory, so it may read values. The sizes of its results must be known before. A second
  function returns ``(shape, dtype)`` of each result, or an empty list if the body only writes to
  its arguments.

A name is one of ``torch_npu``. With the prefix ``_C_ascend.`` it is one of vLLM-Ascend's own
library, or the operator's schema if the body's signature does not determine it. A name that ends in
`OUT` is a variant of an operator of ``torch_npu``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.library import infer_schema

from torch_npu import _emulator

Body = Callable[..., Any]
Outputs = Callable[[SimpleNamespace], Sequence[tuple[Sequence[int], torch.dtype]]]
"""Returns shapes and types of the results. Its parameter has the arguments of the call, by name."""
Returned = Callable[[list[torch.Tensor], SimpleNamespace], Any]
"""Returns the caller's value. Its parameters are the outputs and the arguments of the call."""

OUT = ".out"
"""The end of the name of an operator that writes to given tensors.

It is an attribute of the operator that has the rest of the name.
"""

_library = torch.library.Library("_C_ascend", "FRAGMENT")
_of_torch_npu: dict[str, Body] = {}


def operator(name: str, key: str = "PrivateUse1") -> Callable[[Body], Body]:
    """Register a body that consists of operators of torch.

    Args:
        key: The dispatch key of torch; it says for which tensors the body is called.
    """

    def register(body: Body) -> Body:
        _register(name, body, body, key)
        return body

    return register


def kernel_operator(name: str, *how: Any) -> Callable[[Body], Body]:
    """Register a body as a kernel. ``how`` has further arguments of `kernel`."""

    def register(body: Body) -> Body:
        _register(name, body, kernel(name.partition("(")[0], body, *how))
        return body

    return register


def _register(name: str, body: Body, call: Body, key: str = "PrivateUse1") -> None:
    library, _, schema = name.partition(".")
    if library != "_C_ascend":
        _of_torch_npu[name] = call
        return
    name, has_schema, _ = schema.partition("(")
    if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(body).parameters.values()):
        setattr(torch.ops._C_ascend, name, call)  # a schema cannot express ``**``
        return
    # Callers do not look at the schema's list of arguments that the operator writes to.
    _library.define(schema if has_schema else name + infer_schema(body, mutates_args=()))
    _library.impl(name, call, key)


def register_operators() -> dict[str, Body]:
    """Define vLLM-Ascend's operators, and return the operators of ``torch_npu`` by name."""
    for module in pkgutil.iter_modules(importlib.import_module("torch_npu.operators").__path__):
        importlib.import_module(f"torch_npu.operators.{module.name}")
    for name in [name for name in _of_torch_npu if name.endswith(OUT)]:
        vars(_of_torch_npu[name.removesuffix(OUT)])["out"] = _of_torch_npu.pop(name)
    return _of_torch_npu


def require(operator: str, is_met: bool, requirement: str) -> None:
    """Raise if a call is one that the operator's documentation forbids or that is not emulated.

    Python itself refuses an argument that the operator does not have.
    """
    if not is_met:
        raise RuntimeError(f"{operator}: {requirement}")


def nothing(call: SimpleNamespace) -> list[tuple[Sequence[int], torch.dtype]]:
    return []


def like(name: str) -> Outputs:
    """The outputs of a kernel with one result, which has shape and type of an argument."""
    return lambda call: [(getattr(call, name).shape, getattr(call, name).dtype)]


def kernel(
    name: str,
    body: Body,
    outputs: Outputs = nothing,
    returned: Returned | None = None,
    on_host: Sequence[str] = (),
) -> Body:
    """Make a function that enqueues the body as a whole.

    The body runs when its stream reaches it, in the thread that waits at that time. So it depends
    only on its arguments. Values, lists and tensors of the host are those of the time of the call.

    Args:
        name: The operator's name in errors.
        body: Takes CPU tensors that have the memory of the call's tensors.
        outputs: Shapes and types of the results of the body, if it has any.
        returned: Makes the caller's value, if that differs from the outputs.
        on_host: Parameters that may be tensors of the host. Tensors of the host in other
            parameters are refused unless they are numbers, as the device does.
    """
    signature = inspect.signature(body)

    def launch(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = SimpleNamespace(**given.arguments)
        made = [_emulator.new_tensor(tuple(shape), dtype) for shape, dtype in outputs(call)]
        # Enqueued work must keep the memory and not the tensors, as on the device.
        targets = [_emulator.alias(tensor) for tensor in made]
        for key, value in given.arguments.items():
            given.arguments[key] = _input(name, value, key in on_host)

        def run() -> None:
            # Modes of the waiting thread, such as a default device, must have no effect.
            with torch._C.DisableTorchFunction():
                results = body(*given.args, **given.kwargs)
                if targets:
                    _deliver(name, targets, results)

        _emulator.enqueue_kernel(name, run)
        if returned is not None:
            return returned(made, call)
        return made[0] if len(made) == 1 else tuple(made) or None

    return launch


def _input(name: str, value: Any, is_on_host: bool) -> Any:
    """The value that the body gets for an argument."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "npu":
            return _emulator.alias(value)
        if is_on_host or value.dim() == 0:
            return value.clone()
        raise RuntimeError(f"{name}: expected tensors on npu, found one on {value.device}")
    if type(value) in (list, tuple):
        return type(value)(_input(name, item, is_on_host) for item in value)
    if type(value) is dict:  # the arguments of ``**``
        return {key: _input(name, item, is_on_host) for key, item in value.items()}
    return value


def _deliver(name: str, targets: Sequence[torch.Tensor], results: Any) -> None:
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    found = [(tuple(one.shape), one.dtype) for one in results]
    said = [(tuple(one.shape), one.dtype) for one in targets]
    if found != said:
        raise RuntimeError(f"{name}: its body returned {found}, and its outputs are {said}")
    for target, result in zip(targets, results, strict=True):
        target.copy_(result)
