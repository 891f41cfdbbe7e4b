# SPDX-License-Identifier: Apache-2.0
"""What holds between retention's state and the block pool."""
