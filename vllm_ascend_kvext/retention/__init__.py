# SPDX-License-Identifier: Apache-2.0
"""Which blocks stay in the local prefix cache. Knows nothing of vLLM or torch."""
