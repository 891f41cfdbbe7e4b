# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``worker/utils.py`` of vLLM and of vLLM-Ascend: a partial hit copies all that lies in its block.

With ``prefix_match_unit``, a hit may end inside a block. The block is then copied for the request,
which computes the rest. Layers of several groups lie at the same address, each with its own view of
a block, and upstream copies only the first view at an address. Of Qwen3-Next, that is the view of a
state. It is shorter than the keys and values of a block, so the rest of them is not copied.

Upstream's own functions copy the views here, in several calls. No call has two views that begin at
one address.

Modules of vLLM import the function by name, some of them before this package is loaded. So it is
wrapped in each of these modules, and not where it is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import wrapt

from vllm_ascend_kvext.patching.declaration import SINCE_0_30, Kind, Patch

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy


def copy_every_view(
    wrapped: Callable[..., None],
    _instance: None,
    kv_caches: Iterable[torch.Tensor],
    num_blocks: int,
    kv_cache_block_copies: Sequence[KVCacheBlockCopy],
) -> None:
    """Copy all views at an address, and not only the first one."""
    if not kv_cache_block_copies:
        return
    views: dict[Hashable, dict[Hashable, torch.Tensor]] = {}
    for cache in kv_caches:
        storage = cache.untyped_storage()
        address: Hashable = (cache.device, cache.data_ptr())
        extent = _extent_of(cache)
        block_bytes = cache.stride(0) * cache.element_size() * cache.shape[0] // num_blocks
        if storage.nbytes() == num_blocks * block_bytes:
            # A block of this view is a block of the whole storage. Upstream then copies all of it.
            address, extent = (cache.device, storage.data_ptr()), ()
        views.setdefault(address, {}).setdefault(extent, cache)
    for number in range(max((len(extents) for extents in views.values()), default=0)):
        part = [
            list(extents.values())[number] for extents in views.values() if number < len(extents)
        ]
        wrapped(part, num_blocks, kv_cache_block_copies)


def copy_every_layer(
    wrapped: Callable[..., None],
    _instance: None,
    kv_caches: Iterable[Any],
    num_blocks: int,
    kv_cache_block_copies: Sequence[KVCacheBlockCopy],
) -> None:
    """Copy the views of each layer by a call of its own. Layers with the same views have one call.

    A layer has one view, or several, or none. Its own views, of keys and values or of two states,
    begin at different addresses.
    """
    if not kv_cache_block_copies:
        return
    layers: dict[Hashable, Any] = {}
    for cache in kv_caches:
        if cache is None:
            continue
        tensors = [cache] if hasattr(cache, "data_ptr") else list(cache)
        layers.setdefault(tuple(_place_of(each) for each in tensors), cache)
    for cache in layers.values():
        wrapped([cache], num_blocks, kv_cache_block_copies)


def _place_of(cache: Any) -> Hashable:
    return None if cache is None else (cache.device, cache.data_ptr(), _extent_of(cache))


def _extent_of(cache: torch.Tensor) -> Hashable:
    """What two views that begin at the same address must share to be the same view."""
    return (cache.dtype, tuple(cache.shape), cache.stride())


def wrap_where_it_is_imported() -> Callable[[], None]:
    """Wrap vLLM's function in the modules that import it, as soon as they are imported.

    Returns:
        A function that takes all wrappers back.
    """
    wrappings = _Wrappings()
    for name in _IMPORTERS:
        wrapt.register_post_import_hook(wrappings.wrap, name)
    return wrappings.take_back


class _Wrappings:
    """The modules in which vLLM's function is wrapped, and the function that each had."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Callable[..., None]]] = []
        self._is_on = True

    def wrap(self, module: Any) -> None:
        found = module.copy_kv_cache_blocks_inplace
        # vLLM-Ascend may have put its own function here, which another patch repairs.
        if self._is_on and found.__module__ == _DEFINED_IN:
            module.copy_kv_cache_blocks_inplace = partial(copy_every_view, found, None)
            self._found.append((module, found))

    def take_back(self) -> None:
        self._is_on = False
        for module, found in self._found:
            current = module.copy_kv_cache_blocks_inplace
            if isinstance(current, partial) and current.func is copy_every_view:
                module.copy_kv_cache_blocks_inplace = found
        self._found.clear()


_DEFINED_IN = "vllm.v1.worker.utils"
_IMPORTERS = (
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker",
    "vllm_ascend._310p.worker.v2.model_runner",
)
"""The modules that import vLLM's function by name."""

_WHY = (
    "Layers of different groups lie at the same address. Only the first view at an address is "
    "copied. If the view of a state comes first, and is shorter than the keys and values of a "
    "block, a hit that ends inside this block (prefix_match_unit) reads keys and values of others."
)

_COPY = f"{_DEFINED_IN}:copy_kv_cache_blocks_inplace"

PATCHES = (
    Patch(
        id="KVX-321",
        target=_COPY,
        kind=Kind.HOOK,
        feature="block-copies",
        vllm=SINCE_0_30,
        install=wrap_where_it_is_imported,
        why=_WHY,
        retire_when="vLLM copies all views of a block, or its whole page",
        relies_on=(
            _COPY,
            f"{_DEFINED_IN}:allocate_kv_cache",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        ),
        when_imported=True,
    ),
    Patch(
        id="KVX-322",
        target="vllm_ascend.worker.utils:copy_kv_cache_blocks_inplace",
        feature="block-copies",
        vllm=SINCE_0_30,
        wrapper=copy_every_layer,
        why=_WHY,
        retire_when="vLLM-Ascend copies all views of a block",
        relies_on=(
            "vllm_ascend.worker.model_runner_v1:NPUModelRunner._update_states",
            "vllm_ascend.worker.model_runner_v1:NPUModelRunner._reshape_kv_cache_tensors",
        ),
        when_imported=True,
    ),
)
