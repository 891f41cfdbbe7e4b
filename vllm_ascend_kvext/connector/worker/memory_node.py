# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Has the kernel take host memory from one memory node of a machine that has several.

A copy between two nodes takes longer, and slows down what else these nodes do. The node is
preferred, not required: from a node without free memory the kernel would kill some process.

The calls are those of set_mempolicy(2), get_mempolicy(2) and mbind(2). They are made by number,
because the C library has no functions for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

logger = logging.getLogger("vllm.ascend_kvext.connector")

# linux/mempolicy.h: use the given node while it has free memory.
_MPOL_PREFERRED = 1
# The nodes that a set of nodes can hold. No kernel is built for more.
_NUM_NODES = 1024
_WORD_BITS = 64

_Nodes = ctypes.c_uint64 * (_NUM_NODES // _WORD_BITS)


class _Calls(NamedTuple):
    """The numbers of system calls."""

    mbind: int
    set_mempolicy: int
    get_mempolicy: int


_CALLS = {"x86_64": _Calls(237, 238, 239), "aarch64": _Calls(235, 237, 236)}
"""By the machine's name: arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h of
Linux."""


_LOGGED_NODES: set[int] = set()
"""The nodes for which a failure has been logged."""


@contextlib.contextmanager
def memory_of(node: int | None) -> Iterator[None]:
    """Within it, memory that this thread takes is of the node.

    Drivers that pin memory take it in the thread that asks for it. Afterwards it cannot be moved.
    A failure is logged, and changes nothing.

    Args:
        node: The number of the node; None leaves the choice to the kernel.
    """
    if node is None:
        yield
        return
    mode = ctypes.c_int()
    nodes = _Nodes()
    try:
        _call("get_mempolicy", ctypes.byref(mode), nodes, _NUM_NODES + 1, None, 0)
        _call("set_mempolicy", _MPOL_PREFERRED, _only(node), _NUM_NODES + 1)
    except OSError as error:
        _log_failure(node, error)
        yield
        return
    try:
        yield
    finally:
        try:
            _call("set_mempolicy", mode.value, nodes, _NUM_NODES + 1)
        except OSError as error:
            logger.warning(
                "The memory policy of this thread is not restored: %s. The thread goes on to take "
                "memory from memory node %d first.",
                error,
                node,
            )


def prefer_node(address: int, num_bytes: int, node: int | None) -> None:
    """Have the pages of a mapping taken from a node, whichever thread writes to them first.

    A failure is logged, and changes nothing.

    Args:
        address: The start of the mapping. No page of it has been written to.
        node: The number of the node; None leaves the choice to the kernel.
    """
    if node is None:
        return
    try:
        size = ctypes.c_size_t(num_bytes)
        start = ctypes.c_void_p(address)
        _call("mbind", start, size, _MPOL_PREFERRED, _only(node), _NUM_NODES + 1, 0)
    except OSError as error:
        _log_failure(node, error)


def _only(node: int) -> ctypes.Array[ctypes.c_uint64]:
    nodes = _Nodes()
    nodes[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return nodes


def _call(name: str, *arguments: object) -> None:
    """Make a system call.

    Raises:
        OSError: The kernel refuses it, or its number is not known here.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise OSError(f"{name}: not known for {platform.machine()}")
    as_longs = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    if _system_call()(ctypes.c_long(getattr(calls, name)), *as_longs) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@cache
def _system_call() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _log_failure(node: int, error: OSError) -> None:
    """Log the first failure for a node."""
    if node in _LOGGED_NODES:
        return
    _LOGGED_NODES.add(node)
    logger.warning(
        "Host memory is not taken from memory node %d, the node of this worker: %s. It lies where "
        "the kernel puts it.",
        node,
        error,
    )
