# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The layouts of the real vllm-ascend, read as its own code lays them out."""

from __future__ import annotations

import re
from pathlib import Path

import ascend_layouts
import pytest
import vllm_ascend
from ascend_layouts import FIXTURES, deepseek_v4
from support.layout.upstream_line import HAS_ONE_VIEW

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout


@pytest.mark.parametrize("name", FIXTURES)
def test_groups_are_those_of_the_fixture(name: str) -> None:
    FIXTURES[name]().check_groups()


def geometry(layout: KVLayout) -> set[tuple[object, ...]]:
    """The kind, tokens per page, page stride, offset in the page, row bytes, and rows per page."""
    return {
        (
            group.kind,
            group.tokens_per_page,
            plane.page_stride_bytes,
            plane.region_offset_bytes,
            plane.row_bytes,
            group.rows_per_page,
        )
        for group in layout.groups
        for plane in group.planes
    }


FULL, WINDOW = GroupKind.FULL, GroupKind.WINDOW


def test_deepseek_v4_byte_for_byte() -> None:
    """The bytes are computed by hand, from the sizes of rows and pages in the model's specs."""
    fixture = deepseek_v4(128)
    layout = fixture.layout()
    assert geometry(layout) == {
        (FULL, 512, 131072, 0, 1024, 128),  # attention of ratio 4
        (FULL, 512, 16640, 0, 128, 128),  # keys of the indexer
        (FULL, 512, 16640, 16384, 2, 128),  # and their scales
        (FULL, 16384, 131072, 0, 1024, 128),  # attention of ratio 128
        (WINDOW, 128, 131072, 0, 1024, 128),
        (WINDOW, 8, 131072, 0, 8192, 8),  # compressor of ratio 4, padded
        (WINDOW, 8, 16640, 0, 2048, 8),  # of the indexer, padded
        (WINDOW, 32, 131072, 0, 4096, 32),  # compressor of ratio 128
    }
    assert layout.num_scheduler_groups == 6
    assert layout.num_planes == 21 * 3 + 20 + 43 + 21 * 2 + 20


def test_pages_in_tiles_are_one_row() -> None:
    """The same tensors do not say that kernels write tiles of 16 elements."""
    by_row, tiled = (
        make().layout().groups[0]
        for make in (ascend_layouts.latent_and_rope, ascend_layouts.tiled_latent_and_rope)
    )
    assert (by_row.rows_per_page, tiled.rows_per_page) == (128, 1)
    row_bytes = [sum(plane.row_bytes for plane in group.planes) for group in (by_row, tiled)]
    assert row_bytes[1] == 128 * row_bytes[0]
    assert not any(plane.is_packed for plane in by_row.planes)
    assert all(plane.is_packed for plane in tiled.planes)


NZ_CACHE_MODES = {
    "attention/mla_v1.py": ['cache_mode = "PA_NZ" if self.enable_kv_nz else "PA"'],
    "device/device_op.py": [
        'cache_mode="PA_NZ",',
        'cache_mode="nzcache" if atten_obj.enable_kv_nz else "krope_ctkv",',
    ],
}
"""Settings with which vllm-ascend 0.23 writes tiles; the second is under ``fa_quant_layer``."""

NZ_CACHE_MODES_SINCE_0_30 = {
    "attention/mla_v1.py": [
        'cache_mode = "PA_NZ" if self.enable_kv_nz else "PA"',
        'cache_mode = "PA_NZ" if (self.fa_quant_layer or self.enable_kv_nz) else "PA_BSND"',
    ],
    "attention/attention_c8_mxfp.py": ['cache_mode="PA_NZ",', 'QFA_LAYOUT_PA_NZ = "PA_NZ"'],
}
"""The second case is the cache dtype ``mxfp8``, whose tensors are refused."""


def test_pages_are_tiled_where_the_worker_config_looks() -> None:
    """The sources are read as text, because the modules need a device to import."""
    package = Path(vllm_ascend.__file__).parent
    found = {
        str(path.relative_to(package)): [
            line.strip()
            for line in path.read_text().splitlines()
            if re.search('^[^#=]*= ?"(PA_NZ|nzcache)"', line)
        ]
        for path in sorted(package.rglob("*.py"))
    }
    expected = NZ_CACHE_MODES_SINCE_0_30 if HAS_ONE_VIEW else NZ_CACHE_MODES
    assert {path: lines for path, lines in found.items() if lines} == expected
    assert '"enable_kv_nz"' in (package / "ascend_config.py").read_text()
    (quantization,) = (
        path.read_text() for path in (package / "quantization").rglob("modelslim_config.py")
    )
    assert "self.enable_fa_quant =" in quantization
    assert "def is_fa_quant_layer(self, prefix)" in quantization


def test_blobs_are_shared_by_layers_of_different_groups() -> None:
    layout = deepseek_v4(128).layout()
    # There are 22 layer tuples; the last has no layer of small pages. Since 0.30 one blob has all.
    assert len(layout.storages) == (1 if HAS_ONE_VIEW else 22 + 21)
    groups_of_pages: dict[tuple[int, int], set[int]] = {}
    for group in layout.groups:
        for plane in group.planes:
            place = plane.storage, plane.base_bytes
            groups_of_pages.setdefault(place, set()).add(group.kv_cache_group_id)
    assert max(len(groups) for groups in groups_of_pages.values()) == 6
    assert len(groups_of_pages) == 22 + 21


def test_a_connector_moves_tensors_away_from_the_start_of_their_storage() -> None:
    """vllm-ascend then aligns the tensors to 2 MiB."""
    offsets = {
        has_connector: min(
            plane.base_bytes
            for group in deepseek_v4(has_connector=has_connector).layout().groups
            for plane in group.planes
        )
        for has_connector in (True, False)
    }
    assert offsets[False] == 0
    assert offsets[True] > 0
