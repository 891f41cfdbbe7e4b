# SPDX-License-Identifier: Apache-2.0
"""The worker side of segments: moves their rows, and compares questions with their keys."""
