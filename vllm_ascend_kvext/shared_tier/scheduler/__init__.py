# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the shared tier: what is asked of it, brought from it and put there."""
