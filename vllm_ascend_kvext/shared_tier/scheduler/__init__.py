# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the shared tier: decides what is asked, got and put."""
