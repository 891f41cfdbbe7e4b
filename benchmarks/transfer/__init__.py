# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks/page_transfer.py` is made of."""
