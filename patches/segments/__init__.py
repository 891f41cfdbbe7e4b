# SPDX-License-Identifier: Apache-2.0
"""Segments of KvextConnector: what they need of a scheduler beside what all loads and stores need.

Nothing is changed in an engine whose connector reuses no segments.
"""
