# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which blocks stay in the local prefix cache. Knows nothing of vLLM or torch."""
