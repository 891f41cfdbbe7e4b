# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The files of one prompt's KV: our chunks and tails, and the files of vLLM and LMCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """The files of one prompt of one model, on one rank.

    Attributes:
        object_bytes: The sizes of our objects: chunks of rows, then tails of windows.
        vllm_file_bytes: The size of vLLM's file: a block of 16 tokens of the layers of one group.
        lmcache_file_bytes: The size of LMCache's file: a chunk of 256 tokens of all layers.
        num_prompts: The number of prompts, with which a round moves about 130 MiB.
    """

    name: str
    object_bytes: Sequence[int]
    vllm_file_bytes: int
    lmcache_file_bytes: int
    num_prompts: int

    @property
    def prompt_bytes(self) -> int:
        return sum(self.object_bytes)

    def equal_files(self, num_bytes: int) -> int:
        """The number of files of one size that hold a prompt."""
        return max(1, round(self.prompt_bytes / num_bytes))


GEOMETRIES = (
    # 16 layers of 2 KiB for each token, 2,048 tokens.
    Geometry("Llama-3.2-1B", (32 * _MIB,) * 2, 512 * _KIB, 8 * _MIB, 2),
    # 4 of 26 layers have full attention, with 1 KiB for each token. A tail is 512 tokens of the
    # other 22 layers. 8,192 tokens. LMCache stores the chunks of windows separately.
    Geometry("Gemma-3-1B", (*((4 * _MIB,) * 8), 11 * _MIB), 64 * _KIB, 1 * _MIB, 3),
    # Compressed rows of 7 MiB for 1,024 tokens. 4,096 tokens. vLLM's block has 128 tokens there.
    Geometry("DeepSeek-V4", (7 * _MIB,) * 4, 896 * _KIB, 1792 * _KIB, 5),
    # Chunks of 128 tokens with 2 KiB for each token, the smallest that are in use.
    Geometry("small chunks", (256 * _KIB,) * 64, 32 * _KIB, 512 * _KIB, 8),
)
