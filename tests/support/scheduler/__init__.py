# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM's real scheduler, driven without a model, for tests and benchmarks.

``engine`` runs it. ``workload`` and ``random_workloads`` give it requests. ``transcript`` records
its decisions. ``model_runner`` and ``kv_memory`` check that these decisions lead to the right KV.
"""
