# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of segments: decides which segments are reused, stored and learned."""
