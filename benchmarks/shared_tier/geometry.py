# SPDX-License-Identifier: Apache-2.0
"""What one prompt's KV is in files: ours by chunks and tails, vLLM's and LMCache's by theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """The files of one prompt of one model, on one rank.

    Attributes:
        object_bytes: Of our objects: chunks of rows, then tails of windows.
        vllm_file_bytes: vLLM's file: a block of 16 tokens of the layers of one group.
        lmcache_file_bytes: LMCache's: a chunk of 256 tokens of all layers.
        num_prompts: So that a round moves about 130 MiB.
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
        """How many files of one size hold a prompt."""
        return max(1, round(self.prompt_bytes / num_bytes))


GEOMETRIES = (
    # 16 layers of 2 KiB for each token, 2,048 tokens.
    Geometry("Llama-3.2-1B", (32 * _MIB,) * 2, 512 * _KIB, 8 * _MIB, 2),
    # 4 of 26 layers with full attention, of 1 KiB for each token; a tail is 512 tokens of the 22
    # others. 8,192 tokens. LMCache keeps a window's chunks by themselves.
    Geometry("Gemma-3-1B", (*((4 * _MIB,) * 8), 11 * _MIB), 64 * _KIB, 1 * _MIB, 3),
    # Compressed rows, 7 MiB for 1,024 tokens: 4,096 tokens. vLLM's block there is of 128 tokens.
    Geometry("DeepSeek-V4", (7 * _MIB,) * 4, 896 * _KIB, 1792 * _KIB, 5),
    # chunk_tokens=128 of 2 KiB for each token: the smallest that anybody uses.
    Geometry("small chunks", (256 * _KIB,) * 64, 32 * _KIB, 512 * _KIB, 8),
)
