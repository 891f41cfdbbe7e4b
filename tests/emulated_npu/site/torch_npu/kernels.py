# SPDX-License-Identifier: Apache-2.0
"""How an operator gets from a Python function to ``torch_npu`` or ``torch.ops._C_ascend``.

The function, its *body*, is plain torch and knows no device: it is tested on CPU tensors. There are
two ways to give it to the device, each a decorator that leaves the body as it is:

- As an **operator** it is called with the tensors of the device, and made of operators of torch,
  each of which is put in the stream's queue by itself. It must not read values (``item()``, masks
  as indices): that would have the host wait, which the device's operator does not do.
- As a **kernel** it runs as one when the stream comes to it, with CPU tensors of the same memory.
  So it may read values. Its results need sizes before: a second function gives ``(shape, dtype)``
  of each, or an empty list if all it does is to write to its arguments.

Names are those of ``torch_npu``. Behind ``_C_ascend.`` stands one of vLLM-Ascend's own library, or
its schema where the body's signature does not say it.
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
"""Gets the arguments of the call, by name."""
Returned = Callable[[list[torch.Tensor], SimpleNamespace], Any]
"""Gets the list of outputs, and the arguments of the call; gives what the caller is to have."""

_library = torch.library.Library("_C_ascend", "FRAGMENT")
_of_torch_npu: dict[str, Body] = {}


def operator(name: str, key: str = "PrivateUse1") -> Callable[[Body], Body]:
    """Register a body that is made of operators of torch.

    Args:
        key: For which tensors, of torch's dispatch keys.
    """

    def register(body: Body) -> Body:
        _register(name, body, body, key)
        return body

    return register


def kernel_operator(name: str, *how: Any) -> Callable[[Body], Body]:
    """Register a body as a kernel; ``how`` is what `kernel` takes besides."""

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
        setattr(torch.ops._C_ascend, name, call)  # no schema says it
        return
    # Who calls it does not look at what it writes to.
    _library.define(schema if has_schema else name + infer_schema(body, mutates_args=()))
    _library.impl(name, call, key)


def register_operators() -> dict[str, Body]:
    """Define the operators of vLLM-Ascend's library; return those of ``torch_npu``, by name."""
    for module in pkgutil.iter_modules(importlib.import_module("torch_npu.operators").__path__):
        importlib.import_module(f"torch_npu.operators.{module.name}")
    return _of_torch_npu


def require(operator: str, is_met: bool, requirement: str) -> None:
    """Refuse what the operator's documentation forbids, or the emulation does not have.

    An argument that an operator does not know at all is refused by Python.
    """
    if not is_met:
        raise RuntimeError(f"{operator}: {requirement}")


def nothing(call: SimpleNamespace) -> list[tuple[Sequence[int], torch.dtype]]:
    return []


def like(name: str) -> Outputs:
    """One output, of the shape and type of an argument."""
    return lambda call: [(getattr(call, name).shape, getattr(call, name).dtype)]


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
        name: As errors name it.
        body: Takes CPU tensors that have the memory of the call's tensors.
        outputs: Shape and type of what the body returns, if anything.
        returned: What the caller gets, if that is something else than the outputs.
        on_host: Parameters that may be tensors of the host. Others are refused, as the device does,
            unless they are numbers.
    """
    signature = inspect.signature(body)

    def launch(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        call = SimpleNamespace(**given.arguments)
        made = [_emulator.new_tensor(tuple(shape), dtype) for shape, dtype in outputs(call)]
        # The device keeps memory, not tensors: the work must not either.
        targets = [_emulator.alias(tensor) for tensor in made]
        for key, value in given.arguments.items():
            given.arguments[key] = _input(name, value, key in on_host)

        def run() -> None:
            # Modes of the thread that happens to wait, such as a default device, do not count.
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
    """What the body gets for an argument."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "npu":
            return _emulator.alias(value)
        if is_on_host or value.dim() == 0:
            return value.clone()
        raise RuntimeError(f"{name}: expected tensors on npu, found one on {value.device}")
    if type(value) in (list, tuple):
        return type(value)(_input(name, item, is_on_host) for item in value)
    if type(value) is dict:  # of ``**``
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
