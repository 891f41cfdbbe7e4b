"""The indexer: scores all compressed keys for a token with 8-bit integers, and chooses those that attention reads."""

import torch


def quant_lightning_indexer_outputs(query, key, *args, sparse_count=2048, **kwargs):
    return [((query.shape[0], key.shape[2], sparse_count), torch.int32), ((0,), torch.float32)]


def quant_lightning_indexer(
    query, key, weights, query_dequant_scale, key_dequant_scale, query_quant_mode=0, key_quant_mode=0,
    actual_seq_lengths_query=None, actual_seq_lengths_key=None, block_table=None, metadata=None, layout_query="BSND",
    layout_key="BSND", sparse_count=2048, sparse_mode=3, pre_tokens=0, next_tokens=0, cmp_ratio=1, return_value=False,
):  # fmt: skip
    """Returns for each token the ``sparse_count`` best of the keys whose windows have ended, and -1 for what is missing.

    ``actual_seq_lengths_query`` counts tokens from the first request on, ``actual_seq_lengths_key`` the tokens of each
    request before compression. A score is the weighted sum over heads of what is positive in query times key.
    """
    if (layout_query, layout_key, sparse_mode, return_value) != ("TND", "PA_BSND", 3, False):
        raise RuntimeError("npu_vllm_quant_lightning_indexer: only TND, PA_BSND and sparse_mode 3 are emulated")
    if query.dtype != torch.int8 or key.dtype != torch.int8 or weights.dtype != torch.float16:
        raise RuntimeError("npu_vllm_quant_lightning_indexer: query and key have to be int8, weights float16")
    if query.shape[1:] != (64, 128):
        raise RuntimeError(f"npu_vllm_quant_lightning_indexer: 64 heads of 128, but query is {tuple(query.shape)}")
    chosen = torch.full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32)
    block_size = key.shape[1]
    begin = 0
    for request, end in enumerate(actual_seq_lengths_query.tolist()):
        length = int(actual_seq_lengths_key[request])
        ended = (torch.arange(length - (end - begin), length) + 1) // cmp_ratio  # keys that each token may see
        keys = int(ended[-1]) if end > begin else 0
        if keys:
            pages = block_table[request, : -(-keys // block_size)].long()
            key_rows = key[pages].flatten(0, 1)[:keys, 0].float()
            key_scale = key_dequant_scale[pages].flatten(0, 1)[:keys].flatten().float()
            factors = (weights[begin:end] * query_dequant_scale[begin:end].view(end - begin, -1)).float()
            scores = torch.stack([  # by token: all at once would take tokens x heads x keys
                factor @ (one @ key_rows.T).relu_() for one, factor in zip(query[begin:end].float(), factors, strict=True)
            ])  # fmt: skip
            scores = (scores * key_scale).masked_fill(torch.arange(keys) >= ended[:, None], float("-inf"))
            best = scores.topk(min(sparse_count, keys), -1)
            chosen[begin:end, 0, : best.indices.shape[1]] = torch.where(best.values == float("-inf"), -1, best.indices)
        begin = end
    return [chosen, torch.empty(0)]
