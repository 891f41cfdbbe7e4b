# SPDX-License-Identifier: Apache-2.0
"""The device's runtime, of which nothing is emulated but its name."""

from __future__ import annotations

from typing import NoReturn


def memcpy(*args: object) -> NoReturn:
    raise NotImplementedError("acl.rt.memcpy is not emulated")
