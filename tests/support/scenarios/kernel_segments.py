# SPDX-License-Identifier: Apache-2.0
"""Blended prompts whose pages move by the AscendC kernel and by DMA; see `kernel_or_dma`."""

from __future__ import annotations

from support.scenarios import blending, kernel_or_dma

orders = blending.orders
controls = blending.controls


class Engine(kernel_or_dma.Moving, blending.Engine):
    """An engine that blends."""
