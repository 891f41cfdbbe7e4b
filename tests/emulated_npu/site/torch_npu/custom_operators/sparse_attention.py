"""Attention to a window of tokens and to compressed keys, one head of keys that are the values as well."""

import torch

ROWS = 128  # query rows at a time: the scores of all heads of a step would take gigabytes


def sparse_attention_outputs(q, **kwargs):
    return [(tuple(q.shape), q.dtype), ((0,), torch.float32)]


def _paged(cache, block_table, first, last):
    """Returns the rows [first, last) of a request in a paged cache [pages, rows, 1, head size]."""
    rows = torch.arange(first, last)
    return cache[block_table[rows // cache.shape[1]].long(), rows % cache.shape[1], 0].float()


def sparse_attention(
    q, *, ori_kv=None, cmp_kv=None, ori_sparse_indices=None, cmp_sparse_indices=None, ori_block_table=None,
    cmp_block_table=None, cu_seqlens_q=None, cu_seqlens_ori_kv=None, cu_seqlens_cmp_kv=None, seqused_q=None,
    seqused_kv=None, sinks=None, metadata=None, softmax_scale=0.0, cmp_ratio=0, ori_mask_mode=4, cmp_mask_mode=3,
    ori_win_left=128, ori_win_right=0, layout_q="BSND", layout_kv="PA_ND", return_softmax_lse=False,
):  # fmt: skip
    """Each token of ``q`` [tokens, heads, head size] sees itself, ``ori_win_left`` tokens before it, and compressed keys:
    those of ``cmp_sparse_indices``, or, without them, all whose windows have ended.

    A sink takes part in the softmax of its head and adds nothing. ``metadata`` is a plan for the device's cores.
    """
    if (layout_q, layout_kv, ori_mask_mode, cmp_mask_mode, ori_win_right) != ("TND", "PA_ND", 4, 3, 0):
        raise RuntimeError("npu_sparse_attn_sharedkv: only TND, PA_ND, mask modes 4 and 3, ori_win_right 0 are emulated")
    if ori_sparse_indices is not None or return_softmax_lse or ori_kv is None or sinks is None or metadata is None:
        raise RuntimeError("npu_sparse_attn_sharedkv: needs ori_kv, sinks and metadata, no ori_sparse_indices, no lse")
    if q.shape[-1] != ori_kv.shape[-1]:
        raise RuntimeError(f"npu_sparse_attn_sharedkv: q {tuple(q.shape)} does not fit ori_kv {tuple(ori_kv.shape)}")
    result = torch.empty_like(q)
    bounds = cu_seqlens_q.tolist()
    for request, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        before = int(seqused_kv[request]) - (end - begin)  # tokens before the request's first row
        compressed = None
        if cmp_kv is not None:
            compressed = _paged(cmp_kv, cmp_block_table[request], 0, (before + end - begin) // cmp_ratio)
        for first in range(begin, end, ROWS):
            last = min(first + ROWS, end)
            position = torch.arange(first, last) - begin + before
            lowest = max(0, int(position[0]) - ori_win_left)
            keys = _paged(ori_kv, ori_block_table[request], lowest, int(position[-1]) + 1)
            distance = position[:, None] - torch.arange(lowest, lowest + len(keys))
            seen = (distance >= 0) & (distance <= ori_win_left)
            if compressed is not None:
                ended = torch.arange(len(compressed)) < ((position + 1) // cmp_ratio)[:, None]
                if cmp_sparse_indices is not None:
                    places = cmp_sparse_indices[first:last, 0].long()
                    chosen = torch.zeros(last - first, len(compressed) + 1, dtype=torch.bool)
                    chosen.scatter_(1, torch.where(places < 0, len(compressed), places), True)  # the last: nothing
                    ended &= chosen[:, :-1]
                keys, seen = torch.cat((keys, compressed)), torch.cat((seen, ended), 1)
            scores = torch.einsum("thd,kd->thk", q[first:last].float(), keys) * softmax_scale
            scores.masked_fill_(~seen[:, None], float("-inf"))
            sink = sinks.float()[None, :, None].expand(last - first, -1, 1)
            share = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
            result[first:last] = torch.einsum("thk,kd->thd", share, keys).to(q.dtype)
    return [result, torch.empty(0)]
