# SPDX-License-Identifier: Apache-2.0
"""The data that both sides of the connector exchange, and what the connector reports."""
