# SPDX-License-Identifier: Apache-2.0
"""The worker side of segments: moves their tokens, and compares questions with them."""
