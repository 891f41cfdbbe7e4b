# SPDX-License-Identifier: Apache-2.0
"""Measures the hit rates of the host tier. The command is `run`."""
