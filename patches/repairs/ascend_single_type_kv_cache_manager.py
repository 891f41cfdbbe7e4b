# SPDX-License-Identifier: Apache-2.0
"""``vllm_ascend/core/single_type_kv_cache_manager.py``: compressed blocks by their own tokens.

A block of a compressed group has ``block_size`` rows of ``compress_ratio`` tokens. vllm-ascend
0.20.2rc1 gives it the hash of its first ``block_size`` tokens, and looks it up so: two prompts that
part ways within those rows get each other's KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashList
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request
    from vllm_ascend.core.single_type_kv_cache_manager import CompressAttentionManager


def cache_by_own_tokens(
    wrapped: Callable[..., None],
    manager: CompressAttentionManager,
    request: Request,
    num_tokens: int,
) -> None:
    """Key each compressed block with the hash of all the tokens that it holds."""
    request_id = request.request_id
    tokens_per_block = manager.block_size * manager.compress_ratio
    num_cached_blocks = manager.num_cached_block.get(request_id, 0)
    num_full_blocks = num_tokens // tokens_per_block
    if num_cached_blocks < num_full_blocks:
        manager.block_pool.cache_full_blocks(
            request=request,
            blocks=manager.req_to_blocks[request_id],
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            block_size=tokens_per_block,
            kv_cache_group_id=manager.kv_cache_group_id,
        )
        manager.num_cached_block[request_id] = num_full_blocks


def find_by_own_tokens(
    wrapped: Callable[..., Any],
    manager_class: type[CompressAttentionManager],
    block_hashes: BlockHashList,
    max_length: int,
    kv_cache_group_ids: list[int],
    block_pool: BlockPool,
    kv_cache_spec: KVCacheSpec,
    **arguments: Any,
) -> Any:
    """Look compressed blocks up by the same hashes, and not beyond the tokens asked for."""
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    rows = kv_cache_spec.block_size
    ratio = kv_cache_spec.compress_ratio
    # Upstream counts rows: hand it one hash per block, and a length in rows.
    return wrapped(
        block_hashes=BlockHashListWithBlockSize(block_hashes, rows, rows * ratio),
        max_length=max_length // ratio,
        kv_cache_group_ids=kv_cache_group_ids,
        block_pool=block_pool,
        kv_cache_spec=kv_cache_spec,
        **arguments,
    )


_MANAGER = "vllm_ascend.core.single_type_kv_cache_manager:CompressAttentionManager"
_WHY = (
    "A compressed block is keyed with the hash of a part of its tokens: after a hit, prompts that "
    "share that part read and overwrite each other's KV."
)
_RETIRE_WHEN = "vLLM-Ascend 0.20.2 is no longer supported; 0.23.0 keys them rightly"

PATCHES = (
    Patch(
        id="KVX-151",
        target=f"{_MANAGER}.cache_blocks",
        kind=Kind.REPLACE,
        feature="compressed-block-keys",
        vllm=("==0.20.2.*",),
        wrapper=cache_by_own_tokens,
        why=_WHY,
        retire_when=_RETIRE_WHEN,
    ),
    Patch(
        id="KVX-152",
        target=f"{_MANAGER}.find_longest_cache_hit",
        kind=Kind.WRAP,
        feature="compressed-block-keys",
        vllm=("==0.20.2.*",),
        wrapper=find_by_own_tokens,
        why=_WHY,
        retire_when=_RETIRE_WHEN,
    ),
)
