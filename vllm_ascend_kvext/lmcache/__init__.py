# SPDX-License-Identifier: Apache-2.0
"""What LMCache's connector has to be given so that no engine reads wrong KV.

These modules read objects of vLLM and LMCache by their attributes, and import neither.
"""
