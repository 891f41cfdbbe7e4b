# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Calls LMCache's own functions for CPUs on the same memory, if LMCache 0.5.6 is importable."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch

from transfer.geometry import Job, Layout
from transfer.methods import Copy, Method
from vllm_ascend_kvext.transfer.schema import Direction

VERSION = "0.5.6"


def lmcache_methods(folder: Path | None) -> tuple[tuple[Method, ...], str]:
    """The methods that can be measured, and a text about what was found.

    Args:
        folder: The folder of the unpacked package; None if it is installed or missing.
    """
    if folder is not None:
        sys.path.append(str(folder))
    try:
        version = importlib.import_module("lmcache._version").__version__
        kernels = importlib.import_module("lmcache.v1.platform.torch_ops.mp_mem_kernels")
        formats = importlib.import_module("lmcache.lmcache_native")
    except (ImportError, AttributeError) as error:
        return (), f"LMCache: not measured ({error})"
    if version != VERSION:
        return (), f"LMCache: not measured (expected {VERSION}, found {version})"
    return (Blocks(kernels, formats), Planes(kernels, formats)), f"LMCache {version}"


class _LMCache:
    """A call of ``multi_layer_block_kv_transfer`` over tensors."""

    name = ""

    def __init__(self, kernels: ModuleType, formats: ModuleType) -> None:
        self._kernels = kernels
        self._formats = formats

    def _copy(
        self, job: Job, kv_format: str, paged: list[object], chunk: torch.Tensor, heads: int
    ) -> Copy:
        layout = job.memory.layout
        plane = layout.planes_of_layer[0]
        described = self._formats.PageBufferShapeDesc()
        described.kv_size = 2
        described.nl = layout.num_layers
        described.nb = layout.num_pages
        described.bs = plane.rows_per_page
        described.nh = heads
        described.hs = plane.row_bytes // 2 // heads
        described.element_size = 2
        directions = self._formats.TransferDirection
        is_store = job.direction == Direction.PAGES_TO_HOST
        move = self._kernels.multi_layer_block_kv_transfer
        ids = torch.from_numpy(job.pages)
        return lambda: move(
            paged,
            [chunk],
            ids,
            "cpu",
            directions.D2H if is_store else directions.H2D,
            described,
            layout.pages_per_chunk * plane.rows_per_page,
            getattr(self._formats.EngineKVFormat, kv_format),
            0,
        )


class Blocks(_LMCache):
    """Moves keys and values of every layer, which are two consecutive planes."""

    name = "LMCache block transfer"

    def serves(self, layout: Layout) -> bool:
        return len(layout.planes_of_layer) == 2

    def prepare(self, job: Job) -> Copy:
        memory = job.memory
        layout = job.memory.layout
        plane = layout.planes_of_layer[0]
        shape = (2, layout.num_pages, plane.rows_per_page, 8, plane.row_bytes // 16)
        paged = []
        for layer in range(layout.num_layers):
            start = memory.starts[2 * layer]
            size = 2 * memory.tensors[0].numel()
            paged.append(memory.arena[start : start + size].view(torch.bfloat16).view(shape))
        chunk = job.host.view(torch.bfloat16).view(
            2, layout.num_layers, layout.pages_per_chunk * plane.rows_per_page, -1
        )
        return self._copy(job, "NL_X_TWO_NB_BS_NH_HS", paged, chunk, 8)


class Planes(_LMCache):
    """Moves tuples of planes, whose rows lie token by token in the chunk."""

    name = "LMCache plane transfer"

    def serves(self, layout: Layout) -> bool:
        numbers = {plane.rows_per_page for plane in layout.planes_of_layer}
        return len(layout.planes_of_layer) > 2 and len(numbers) == 1

    def prepare(self, job: Job) -> Copy:
        memory = job.memory
        layout = job.memory.layout
        width = len(layout.planes_of_layer)
        views = [
            tensor.view(torch.bfloat16).view(
                layout.num_pages, plane.rows_per_page, 1, plane.row_bytes // 2
            )
            for tensor, plane in zip(memory.tensors, layout.planes, strict=True)
        ]
        paged = [tuple(views[first : first + width]) for first in range(0, len(views), width)]
        num_tokens = layout.pages_per_chunk * layout.planes_of_layer[0].rows_per_page
        chunk = job.host[: layout.chunk_bytes].view(torch.bfloat16)
        chunk = chunk.view(layout.num_layers, num_tokens, -1)
        return self._copy(job, "NL_X_NP_X_NB_BS_ONE_HS", paged, chunk, 1)
