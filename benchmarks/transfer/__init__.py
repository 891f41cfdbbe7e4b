# SPDX-License-Identifier: Apache-2.0
"""The parts of `benchmarks/page_transfer.py`."""
