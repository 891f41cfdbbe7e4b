# SPDX-License-Identifier: Apache-2.0
"""Real layouts, layouts made by hand, and their expected facts."""
