# SPDX-License-Identifier: Apache-2.0
"""What vLLM hands to LMCache's connector, and what is asked of LMCache's server before.

Knows neither vLLM nor LMCache: both are read by their attributes. Knows no blocks, moves nothing.
"""
