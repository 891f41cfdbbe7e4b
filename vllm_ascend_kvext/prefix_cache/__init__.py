# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The prefix cache's algorithms: keys, ranges to cache, longest hit. Pure Python, no vLLM."""
