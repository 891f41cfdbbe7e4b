# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector is given what keeps engines from reading wrong KV.

Nothing is changed in an engine that is started without LMCacheMPConnector.
"""
