# SPDX-License-Identifier: Apache-2.0
"""Random transfers, their expected results, and backends that run them."""
