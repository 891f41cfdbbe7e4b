# SPDX-License-Identifier: Apache-2.0
"""Gives LMCache's connector names and block sizes, so that engines do not read wrong KV.

Nothing is changed in an engine that is started without LMCacheMPConnector.
"""
