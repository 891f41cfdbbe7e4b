# SPDX-License-Identifier: Apache-2.0
"""Reuse of KV behind a missing stretch of a prompt: only the stretch is computed."""
