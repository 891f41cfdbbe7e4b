# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Pins memory that torch has not allocated: a mapping of this process, or of several.

``aclrtHostRegisterV2`` with ``ACL_HOST_REG_PINNED`` pins a mapping; CANN has it since 8.5. CANN
documents that linux up to 5.10 can register memory of ``aclrtMallocHost`` only. Without it, nothing
is pinned, and the caller goes on with memory of torch.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch

_MAPPED_AND_PINNED = 0x10000002
"""``ACL_HOST_REG_MAPPED | ACL_HOST_REG_PINNED`` of ``acl_rt.h``."""

_OLDEST_KERNEL = (5, 11)

_REGISTERED: dict[int, int] = {}
"""The sizes of the ranges that are pinned, by their first address."""


def pin_host(host: torch.Tensor) -> Callable[[], None]:
    """Pin host memory for the device of the calling thread.

    Args:
        host: The memory, from the first byte of a page on. dtype: uint8, shape: ``[num_bytes]``.

    Returns:
        A function that ends it. Call it once, when every transfer has ended.

    Raises:
        BackendError: The kernel or CANN is too old, or CANN refuses.
    """
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is None or (int(release[1]), int(release[2])) < _OLDEST_KERNEL:
        raise BackendError(
            "pin_host: expected linux 5.11 or later, on which CANN can pin memory that it has not "
            f"allocated, found {platform.release()}."
        )
    runtime = _runtime()
    address, num_bytes = host.data_ptr(), host.numel()
    code = runtime.host_register_v2(address, num_bytes, _MAPPED_AND_PINNED)
    if code != 0:
        raise BackendError(
            f"pin_host: acl.rt.host_register_v2: expected 0, found error code {code} of CANN's "
            f"runtime for {num_bytes} bytes. Its log (ASCEND_PROCESS_LOG_PATH) has the cause."
        )
    _REGISTERED[address] = num_bytes

    def unpin() -> None:
        del _REGISTERED[address]
        runtime.host_unregister(address)

    return unpin


def is_registered(host: torch.Tensor) -> bool:
    """Whether all of some memory is pinned by `pin_host`."""
    if not _REGISTERED:
        return False
    address, num_bytes = host.data_ptr(), host.numel()
    return any(
        first <= address and address + num_bytes <= first + pinned_bytes
        for first, pinned_bytes in tuple(_REGISTERED.items())  # Another thread may pin memory.
    )


def _runtime() -> Any:
    try:
        import acl
    except ImportError as error:
        raise BackendError(
            "pin_host: expected CANN's module acl, found none. Set CANN's environment variables."
        ) from error
    if not hasattr(acl.rt, "host_register_v2"):
        raise BackendError(
            "pin_host: expected acl.rt.host_register_v2, which CANN 8.5 and later have, found none."
        )
    return acl.rt
