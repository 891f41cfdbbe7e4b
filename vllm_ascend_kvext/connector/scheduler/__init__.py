# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: what is loaded, what is stored, and when."""
