# SPDX-License-Identifier: Apache-2.0
"""The prefix cache's algorithms: keys, ranges to cache, longest hit. Pure Python, no vLLM."""
