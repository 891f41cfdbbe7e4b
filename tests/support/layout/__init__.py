# SPDX-License-Identifier: Apache-2.0
"""Layouts, real and made by hand, and their expected facts."""
