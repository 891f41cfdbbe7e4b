# SPDX-License-Identifier: Apache-2.0
"""Moving pages to one host buffer and back: descriptors, backends, oracle.

Knows neither vLLM nor how a layout is found; torch is imported by the functions that are handed
tensors.
"""
