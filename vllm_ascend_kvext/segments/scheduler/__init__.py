# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of segments: which are reused, stored and learned."""
