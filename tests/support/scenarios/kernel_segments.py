# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Blended prompts. The AscendC kernel or DMA moves their pages; see `kernel_or_dma`."""

from __future__ import annotations

from support.scenarios import blending, kernel_or_dma

orders = blending.orders
controls = blending.controls


class Engine(kernel_or_dma.Moving, blending.Engine):
    """An engine that reuses segments."""
