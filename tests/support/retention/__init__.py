# SPDX-License-Identifier: Apache-2.0
"""What holds between retention's books and the block pool."""
