# SPDX-License-Identifier: Apache-2.0
"""How many tokens one page holds: the one place that decides it.

``block_size`` of a compressed group means two things. Upstream vLLM counts tokens: a page has
``block_size / compress_ratio`` rows (``storage_block_size`` in ``vllm/v1/kv_cache_interface.py``).
vLLM-Ascend counts rows: a page holds ``block_size * compress_ratio`` tokens
(``CompressAttentionManager`` in ``vllm_ascend/core/single_type_kv_cache_manager.py``). Nothing in
the config says which, but the size of a page does, and so does the shape of the registered tensor.
"""

from __future__ import annotations

from vllm_ascend_kvext.groups.errors import GroupError


def tokens_per_page(
    block_size: int,
    compress_ratio: int,
    *,
    config_rows: int | None,
    tensor_rows: int | None,
    where: str,
) -> int:
    """Tokens that one block id of a layer stands for.

    Args:
        block_size: Of the spec.
        compress_ratio: Tokens per row; 1 where nothing is compressed.
        config_rows: Rows of a page according to its size in bytes in the config, if that says.
        tensor_rows: Rows of a page according to the registered tensor; None where there is none
            (the scheduler's side), or where its shape does not say.
        where: The layer or group, for the message.

    Raises:
        GroupError: If the two contradict each other, or neither fits ``block_size``.
    """
    if block_size < 1 or compress_ratio < 1:
        raise GroupError(
            f"{where}: block_size {block_size} and compress ratio {compress_ratio} must be "
            "positive; report the model and the vLLM version"
        )
    meanings = {block_size: block_size * compress_ratio}
    if block_size % compress_ratio == 0:
        meanings[block_size // compress_ratio] = block_size
    both_known = config_rows is not None and tensor_rows is not None
    if both_known and config_rows != tensor_rows:
        raise GroupError(
            f"{where}: the size of a page in the KV cache config makes {config_rows} rows, the "
            f"registered tensor has {tensor_rows}; this vLLM and vLLM-Ascend lay out pages in a "
            "way that is not supported"
        )
    rows = config_rows if tensor_rows is None else tensor_rows
    if rows is None:
        if len(set(meanings.values())) > 1:
            raise GroupError(
                f"{where}: block_size {block_size} with compress ratio {compress_ratio} may mean "
                f"{block_size} or {block_size * compress_ratio} tokens per page, and neither the "
                "config nor a tensor says which; this layout is not supported"
            )
        return block_size
    if rows not in meanings:
        raise GroupError(
            f"{where}: a page has {rows} rows, expected {' or '.join(map(str, meanings))} from "
            f"block_size {block_size} and compress ratio {compress_ratio}; check that the config "
            "and the tensors come from the same worker"
        )
    return meanings[rows]
