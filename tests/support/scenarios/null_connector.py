# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A foreign KV connector. It never has anything for a request, and stores nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class NullMetadata(KVConnectorMetadata):
    pass


class NullConnector(KVConnectorBase_V1, SupportsHMA):
    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        return 0, False

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return NullMetadata()

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        return False, None

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    update_state_after_alloc = start_load_kv = wait_for_layer_load = _do_nothing
    save_kv_layer = wait_for_save = _do_nothing
