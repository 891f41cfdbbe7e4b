# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which page belong to which tokens.

Knows neither vLLM nor, when imported, torch: specs and tensors are read by their attributes.
"""
