# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler, driven without a model, for tests and benchmarks.

``engine`` runs it, ``workload`` and ``random_workloads`` give it something to do, ``transcript``
records what it decided, ``model_runner`` and ``kv_memory`` check that what it decided leads to the
right KV.
"""
