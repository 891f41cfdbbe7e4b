# SPDX-License-Identifier: Apache-2.0
"""Registration of operators for a toolkit that is not here."""

from __future__ import annotations


def _register_atb_extensions() -> None:
    pass
