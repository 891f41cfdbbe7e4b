"""Which experts a token goes to, by its id or by its scores."""

import torch


def moe_gating_top_k_hash(
    x, k, bias=None, input_ids=None, tid2eid=None, k_group=1, group_count=1, routed_scaling_factor=1.0, eps=1e-20,
    group_select_mode=0, renorm=0, norm_type=0, out_flag=False,
):  # fmt: skip
    """Scores of ``x`` [tokens, experts]: the root of softplus. The chosen ones' are divided by their sum, and scaled.

    With ``tid2eid`` [vocabulary, k] the experts are those of the token's id, else the best after ``bias`` is added.
    """
    if norm_type != 2 or renorm != 0 or group_count != 1 or k_group != 1 or out_flag:
        raise RuntimeError(f"moe_gating_top_k_hash: {norm_type=} {renorm=} {group_count=} {out_flag=} are not emulated")
    if bias is not None and bias.dtype != x.dtype:
        raise RuntimeError(f"moe_gating_top_k_hash: bias is {bias.dtype}, x {x.dtype}")
    scores = torch.nn.functional.softplus(x.float()).sqrt()
    if tid2eid is not None:
        if input_ids.numel() != x.shape[0]:
            raise RuntimeError(f"moe_gating_top_k_hash: {x.shape[0]} rows, but {input_ids.numel()} token ids")
        experts = tid2eid[input_ids.flatten().long()].long()
    else:
        experts = (scores if bias is None else scores + bias.float()).topk(k, -1).indices
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), experts.to(torch.int32), scores
