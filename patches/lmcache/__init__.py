# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector gets names and block sizes that keep engines from reading wrong KV.

Nothing is changed in an engine that is started without LMCacheMPConnector.
"""
