# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector gets what it needs to know of hybrid models, and fails early.

Nothing is changed in an engine that is started without LMCacheMPConnector.
"""
