# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Makes the parts of a worker that move and compare tokens of segments, or says why it cannot.

This module imports only the forward context of vLLM, within a forward. It reads vLLM's
configuration by its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.connector.worker.host_buffer import HostBuffer
from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup
from vllm_ascend_kvext.layout.sharing import HostSharing, PlaneShare
from vllm_ascend_kvext.layout.views import tensors_of
from vllm_ascend_kvext.loaded_models import model_with
from vllm_ascend_kvext.segments.keys.attention_keys import LayerKeys, read_layer_keys, shares_pages
from vllm_ascend_kvext.segments.token_rows import SegmentLayout, TokenPages, TokenPlane
from vllm_ascend_kvext.segments.worker.cpu_backend import CpuBackend
from vllm_ascend_kvext.segments.worker.cpu_token_pages import CpuLayer, CpuTokenPages
from vllm_ascend_kvext.segments.worker.device_token_pages import DeviceTokenPages, PlacedPlane
from vllm_ascend_kvext.segments.worker.question_probe import QuestionProbe, check_layer_of
from vllm_ascend_kvext.segments.worker.segment_mover import SegmentMover
from vllm_ascend_kvext.transfer.devices import transfers_on
from vllm_ascend_kvext.transfer.page_transfer import page_transfer
from vllm_ascend_kvext.transfer.placement import Placer
from vllm_ascend_kvext.transfer.pools import Pools
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

_PLANES_OF_LAYER = 2
_TOKEN_KINDS = (GroupKind.FULL, GroupKind.WINDOW)


class WorkerSegments:
    """Segments in the pages of one worker.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker has it.
        layout: The layout of the pages.
        kv_caches: The registered tensors, by layer name.
        pools: The storages of the layout, renewed by the caller.
        placer: Says where copies and rotations run.
        backend: Writes the pages of a CPU, whose rows cannot be addressed by token.
        move: Moves rows of pages that are addressed by token, as `page_transfer` does.

    Raises:
        BlendingError: Segments cannot be stored or placed in these pages, or keys cannot be
            rotated.
    """

    def __init__(
        self,
        vllm_config: Any,
        layout: KVLayout,
        kv_caches: Mapping[str, Any],
        pools: Pools,
        placer: Placer,
        backend: CpuBackend | None,
        move: Callable[..., None] = page_transfer,
    ) -> None:
        self._pools = pools
        self._placer = placer
        self._backend = backend
        self._move = move
        self._compilation = vllm_config.compilation_config
        self._has_microbatches = getattr(vllm_config.parallel_config, "use_ubatching", False)
        self._groups = layout.groups
        self._group_of_layer = _groups_by_layer(layout)
        self._num_pages = layout.num_pages
        self._keys = _read_keys(vllm_config, kv_caches, self._group_of_layer)
        self.pages = self.pages_of(kv_caches)

    def pages_of(self, kv_caches: Mapping[str, Any]) -> TokenPages:
        """The rows of tokens in registered pages. Each call has the same layers.

        Raises:
            BlendingError: The pages do not have the shape or the order that is expected.
        """
        if all(group.tokens_per_row == 1 for group in self._group_of_layer.values()):
            return self._device_pages()
        backend = _require_cpu(self._pools.device_types, self._backend)
        layers = [
            self._cpu_layer(backend, name, keys, kv_caches[name])
            for name, keys in self._keys.items()
        ]
        return CpuTokenPages(layers, backend.write_rows)

    def mover(self, host: torch.Tensor, sharing: HostSharing | None = None) -> SegmentMover:
        """Make the mover of tokens between the pages and a host buffer.

        Args:
            host: The host buffer. dtype: uint8, shape: [num_bytes].
            sharing: How the worker shares the host buffer; None if it does not.
        """
        windows = [group.window_tokens for group in self._group_of_layer.values()]
        windows += [keys.window_tokens for keys in self._keys.values()]
        row_bytes = tuple(plane.row_bytes for plane in self.pages.planes)
        layout = SegmentLayout(row_bytes, max(windows))
        return SegmentMover(
            self.pages,
            host,
            layout,
            self._staging,
            self._placer,
            sharing,
            self._shares_of(sharing),
        )

    def _shares_of(self, sharing: HostSharing | None) -> list[PlaneShare]:
        """How the worker shares the planes of segments."""
        return [
            share
            for group, shares in zip(self._groups, sharing.planes if sharing else (), strict=False)
            for plane, share in zip(group.planes, shares, strict=True)
            if plane.layer_name in self._keys
        ]

    def probe(self, check_layer: int | None, is_asked_for: bool) -> QuestionProbe:
        """Make the probe of questions; see `question_probe.check_layer_of`.

        Raises:
            BlendingError: Questions cannot be compared here. Or ``is_asked_for`` is false, on a
                device where questions are compared only if the option asks for it.
        """
        if not is_asked_for and self._pools.device_types != ("cpu",):
            raise BlendingError(
                "segments: selector: expected question, to compare questions with segments on "
                f"{', '.join(self._pools.device_types)}, found none. Set it to question, and "
                "measure: neither an NPU nor a GPU has run that yet."
            )
        if self._has_microbatches:
            raise BlendingError(
                "segments: selector: question: expected steps that are computed as a whole, found "
                "microbatches (enable_dbo or ubatch_size). Leave them out, or set selector to "
                "heads."
            )
        layer = check_layer_of(self._compilation, self._keys, check_layer)
        return QuestionProbe(layer, self.pages, partial(_slots_of_step, layer.name))

    def _staging(self, num_bytes: int) -> HostBuffer:
        """Make staging memory that the pages' device can reach, of a power of two of bytes.

        So it seldom has to grow, and torch loses nothing if it has to pin it.
        """
        num_bytes = max(HOST_ALIGNMENT_BYTES, 1 << (num_bytes - 1).bit_length())
        return HostBuffer.allocate(num_bytes, self._pools.tensors[0].device)

    def _device_pages(self) -> DeviceTokenPages:
        device = self._pools.tensors[0].device
        return DeviceTokenPages(
            [
                placed
                for name, keys in self._keys.items()
                for placed in placed_planes(name, keys, self._group_of_layer[name])
            ],
            {
                group.kv_cache_group_id: group.tokens_per_page
                for group in self._group_of_layer.values()
            },
            self._num_pages,
            self._pools,
            self._placer,
            transfers_on(device.type).make_fence(device).wait,
            self._move,
        )

    def _cpu_layer(
        self, backend: CpuBackend, name: str, keys: LayerKeys, registered: Any
    ) -> CpuLayer:
        group = self._group_of_layer[name]
        key_cache, value_cache = backend.caches_of(name, registered)
        expected = [
            self._num_pages,
            keys.num_heads,
            group.tokens_per_page,
            keys.signature.head_elements,
        ]
        if not keys.has_values or list(key_cache.shape) != expected:
            raise BlendingError(
                f"layer {name}: expected pages of shape [pages, heads, tokens, elements] = "
                f"{expected} beside such of values, found {list(key_cache.shape)}"
                + ("" if keys.has_values else " and no values")
                + ". Serve this model without segments."
            )
        return CpuLayer(name, group.kv_cache_group_id, key_cache, value_cache, keys.signature)


def placed_planes(name: str, keys: LayerKeys, group: LayoutGroup) -> list[PlacedPlane]:
    """The planes of a layer that registers keys and values, or latents and their rotated parts."""
    found = [plane for plane in group.planes if plane.layer_name == name]
    signature = keys.signature
    element_bytes = signature.dtype.element_bytes
    head_elements = signature.head_elements
    if not keys.has_values:
        # Here the latent and its rotated part are separate tensors, in this order.
        found.reverse()
        head_elements = signature.head_elements - signature.offset_elements
        signature = replace(signature, head_elements=head_elements, offset_elements=0)
    expected = keys.num_heads * head_elements * element_bytes
    head_bytes = keys.num_heads * element_bytes
    dtype = signature.dtype.name.lower()
    if (
        len(found) != _PLANES_OF_LAYER
        or found[0].row_bytes != expected
        or found[1].row_bytes % head_bytes
        or any(plane.dtype != dtype or plane.is_packed for plane in found)
    ):
        described = ", ".join(f"{plane.row_bytes} bytes of {plane.dtype}" for plane in found)
        raise BlendingError(
            f"layer {name}: expected rows of {expected} bytes of {dtype} that are rotated, beside "
            f"such of values, found {described}. Serve this model without segments."
        )
    return [
        PlacedPlane(
            TokenPlane(
                name,
                group.kv_cache_group_id,
                keys.num_heads,
                plane.row_bytes // head_bytes,
                signature.dtype,
                signature if plane is found[0] else None,
            ),
            plane,
        )
        for plane in found
    ]


def _slots_of_step(layer_name: str) -> torch.Tensor:
    """The slots of the tokens that a layer is computing, in their order. Called within a forward.

    dtype: an integer type, shape: [num_tokens], on the device of the pages.
    """
    from vllm.forward_context import get_forward_context

    slots: torch.Tensor = get_forward_context().attn_metadata[layer_name].slot_mapping
    return slots


def _require_cpu(device_types: tuple[str, ...], backend: CpuBackend | None) -> CpuBackend:
    if device_types != ("cpu",) or backend is None:
        raise BlendingError(
            "pages: expected some whose rows of tokens can be addressed, or that vLLM's CPU "
            f"attention writes, found others on {', '.join(device_types)}. Serve without segments "
            "there."
        )
    return backend


def _groups_by_layer(layout: KVLayout) -> dict[str, LayoutGroup]:
    """The group of each layer that has pages; refuses groups without a row per token."""
    found: dict[str, LayoutGroup] = {}
    for group in layout.groups:
        is_of_tokens = group.kind in _TOKEN_KINDS and not group.holds_states
        if not is_of_tokens or group.compress_ratio != 1:
            raise BlendingError(
                f"KV cache group {group.kv_cache_group_id}: expected full or sliding-window "
                f"attention with a row per token, found kind {group.kind.value}"
                + (" of states" if group.holds_states else "")
                + (f", {group.compress_ratio} tokens a row" if group.compress_ratio != 1 else "")
                + ": what a segment leaves there depends on what stands before it. Serve this "
                "model without segments."
            )
        found.update((plane.layer_name, group) for plane in group.planes)
    return found


def _read_keys(
    vllm_config: Any, kv_caches: Mapping[str, Any], groups: Mapping[str, LayoutGroup]
) -> dict[str, LayerKeys]:
    modules = vllm_config.compilation_config.static_forward_context
    for name in groups:
        if name not in modules or shares_pages(modules[name]):
            raise BlendingError(
                f"layer {name}: expected an attention module that has the pages of its own, found "
                f"{'none' if name not in modules else 'one that shares those of another layer'}. "
                "Serve this model without segments."
            )
    attention = {name: modules[name] for name in groups}
    first = next(iter(attention.values()))
    model = model_with(first)
    if model is None:
        raise BlendingError(
            f"layer {next(iter(attention))}: expected a model that vLLM's own loader has loaded, "
            "found none: its rotary modules are not known. Load it in another format (not GGUF or "
            "tensorizer), or serve it without segments."
        )
    # The first tensor has the keys, or is the only tensor.
    dtypes = {name: next(tensors_of(kv_caches[name])).dtype for name in groups}
    return read_layer_keys(model, attention, dtypes)
