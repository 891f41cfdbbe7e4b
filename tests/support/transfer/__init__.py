# SPDX-License-Identifier: Apache-2.0
"""Random transfers, what they must do, and backends to run them on."""
