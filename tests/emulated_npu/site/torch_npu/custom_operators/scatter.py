"""Rows written to places in a paged tensor."""


def scatter_nd_update(var, indices, update):
    """Writes row i of ``update`` to ``var[indices[i]]``; what lies outside ``var`` is left out, as slots of -1 do.

    On the device ``var`` and ``update`` have one type. Here the cache may be narrower: float32 models keep their cache
    in bfloat16.
    """
    if update.dtype != var.dtype and not (update.is_floating_point() and var.is_floating_point()):
        raise RuntimeError(f"npu_scatter_nd_update_v2: var is {var.dtype}, update {update.dtype}")
    places, depth = indices.long(), indices.shape[-1]
    inside = (places >= 0).all(-1)
    rows = update.reshape(len(places), *var.shape[depth:])
    var[tuple(places[inside].T)] = rows[inside].to(var.dtype)
    return []
