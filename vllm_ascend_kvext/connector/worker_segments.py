# SPDX-License-Identifier: Apache-2.0
"""Makes of a worker's configuration and pages what moves tokens of segments, or says why it cannot.

vLLM is not imported: its configuration is read by attributes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.blending.attention_keys import LayerKeys, read_layer_keys, shares_pages
from vllm_ascend_kvext.blending.cpu_token_pages import CpuLayer, CpuTokenPages
from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.segment_mover import SegmentMover
from vllm_ascend_kvext.blending.segment_rows import SegmentLayout
from vllm_ascend_kvext.blending.token_pages import TokenPages
from vllm_ascend_kvext.connector.cpu_backend import PagedBackend
from vllm_ascend_kvext.connector.loaded_models import model_with
from vllm_ascend_kvext.connector.question_probe import QuestionProbe, check_layer_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup
from vllm_ascend_kvext.transfer.placement import CopyPlacement

if TYPE_CHECKING:
    import torch

_TOKEN_KINDS = (GroupKind.FULL, GroupKind.WINDOW)


class WorkerSegments:
    """Segments in the pages of one worker.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker has it.
        layout: Of the pages.
        kv_caches: By layer name, as registered.
        device_type: That has the pages.
        backend: How kernels write the pages, where they are on a CPU.

    Raises:
        BlendingError: Segments cannot be stored or placed in these pages.
        RotationError: The model's keys cannot be moved by a rotation.
    """

    def __init__(
        self,
        vllm_config: Any,
        layout: KVLayout,
        kv_caches: Mapping[str, Any],
        device_type: str,
        backend: PagedBackend | None,
    ) -> None:
        self._backend = _require_cpu(device_type, backend)
        self._compilation = vllm_config.compilation_config
        self._group_of_layer = _groups_by_layer(layout)
        self._num_pages = layout.num_pages
        self._keys = _read_keys(vllm_config, kv_caches, self._group_of_layer)
        self.pages = self.pages_of(kv_caches)

    def pages_of(self, kv_caches: Mapping[str, Any]) -> TokenPages:
        """The rows of tokens in registered pages; the same layers at each call.

        Raises:
            BlendingError: The pages are not what is expected of these layers.
        """
        return CpuTokenPages(
            [self._cpu_layer(name, keys, kv_caches[name]) for name, keys in self._keys.items()],
            self._backend.write_rows,
        )

    def mover(
        self, worker_fingerprint: str, host: torch.Tensor, placement: CopyPlacement | None
    ) -> SegmentMover:
        """What moves tokens between the pages and a host buffer.

        Args:
            worker_fingerprint: See `worker_identity`.
            host: dtype: uint8, shape: [num_bytes].
            placement: Where rotations run.
        """
        windows = [group.window_tokens for group in self._group_of_layer.values()]
        windows += [keys.window_tokens for keys in self._keys.values()]
        layout = SegmentLayout(
            tuple(plane.row_bytes for plane in self.pages.planes),
            segment_fingerprint(worker_fingerprint, self.pages),
            max(windows),
        )
        return SegmentMover(self.pages, host, layout, placement)

    def probe(self, check_layer: int | None) -> QuestionProbe:
        """What compares questions with segments.

        Args:
            check_layer: At which layer; see `question_probe.check_layer_of`.

        Raises:
            BlendingError: They cannot be compared.
        """
        layer = check_layer_of(self._compilation, self._keys, check_layer)
        slots_of_step = partial(self._backend.slots_of_step, layer.name)
        return QuestionProbe(layer, self.pages, slots_of_step)

    def _cpu_layer(self, name: str, keys: LayerKeys, registered: Any) -> CpuLayer:
        group = self._group_of_layer[name]
        key_cache, value_cache = self._backend.caches_of(name, registered)
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
                + ". Serve this model without blending."
            )
        return CpuLayer(name, group.scheduler_group, key_cache, value_cache, keys.signature)


def segment_fingerprint(worker_fingerprint: str, pages: TokenPages) -> str:
    """Equal for workers one of which can use what the other has stored; 64 hexadecimal digits."""
    planes = [
        (
            plane.layer_name,
            plane.num_heads,
            plane.head_elements,
            plane.dtype.name,
            None if plane.keys is None else plane.keys.fingerprint,
        )
        for plane in pages.planes
    ]
    return hashlib.sha256(json.dumps([worker_fingerprint, planes]).encode()).hexdigest()


def _require_cpu(device_type: str, backend: PagedBackend | None) -> PagedBackend:
    if device_type != "cpu" or backend is None:
        raise BlendingError(
            f"pages: expected some on a CPU, whose rows of tokens can be addressed, found some on "
            f"{device_type}. Serve without blending there."
        )
    return backend


def _groups_by_layer(layout: KVLayout) -> dict[str, LayoutGroup]:
    """The group of each layer that has pages.

    Raises:
        BlendingError: Some have no row per token.
    """
    found: dict[str, LayoutGroup] = {}
    for group in layout.groups:
        is_of_tokens = group.kind in _TOKEN_KINDS and not group.holds_states
        if not is_of_tokens or group.compress_ratio != 1:
            raise BlendingError(
                f"KV cache group {group.scheduler_group}: expected full or sliding-window "
                f"attention with a row per token, found kind {group.kind.value}"
                + (" of states" if group.holds_states else "")
                + (f", {group.compress_ratio} tokens a row" if group.compress_ratio != 1 else "")
                + ": what a segment leaves there depends on what stands before it. Serve this "
                "model without blending."
            )
        found.update((plane.layer_name, group) for plane in group.planes)
    return found


def _read_keys(
    vllm_config: Any, kv_caches: Mapping[str, Any], groups: Mapping[str, LayoutGroup]
) -> dict[str, LayerKeys]:
    import torch

    modules = vllm_config.compilation_config.static_forward_context
    for name in groups:
        registered = kv_caches[name]
        if name not in modules or shares_pages(modules[name]):
            raise BlendingError(
                f"layer {name}: expected an attention module that has the pages of its own, found "
                f"{'none' if name not in modules else 'one that shares those of another layer'}. "
                "Serve this model without blending."
            )
        if not isinstance(registered, torch.Tensor):
            raise BlendingError(
                f"layer {name}: expected pages in one tensor, found "
                f"{type(registered).__qualname__}. Serve this model without blending."
            )
    attention = {name: modules[name] for name in groups}
    first = next(iter(attention.values()))
    model = model_with(first)
    if model is None:
        raise BlendingError(
            f"layer {next(iter(attention))}: expected a model that vLLM's own loader has loaded, "
            "found none: its rotary modules are not known. Load it in another format (not GGUF or "
            "tensorizer), or serve it without blending."
        )
    return read_layer_keys(model, attention, {name: kv_caches[name].dtype for name in groups})
