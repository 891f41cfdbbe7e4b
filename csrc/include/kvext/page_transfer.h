// SPDX-License-Identifier: Apache-2.0
// The CPU backend.
#pragma once

#include <cstdint>

#include "kvext/checked_transfer.h"
#include "kvext/placement.h"
#include "kvext/rotation.h"

namespace kvext {

// Whether large copies write past the caches.
enum class Streaming { kAuto = -1, kOff = 0, kOn = 1 };

struct CopyOptions {
  int num_threads = 1;  // at least 1
  Streaming streaming = Streaming::kAuto;
  Placement placement;
};

// Moves every byte of a transfer. Throws PlacementError before the first one moves.
void page_transfer(const CheckedTransfer& checked, const CopyOptions& options);

// The same, and rotates keys on their way.
void rotated_page_transfer(const CheckedRotation& rotation, const CopyOptions& options);

// One plain copy with the same threads, front to back: what a transfer is measured against.
void copy(void* destination, const void* source, int64_t num_bytes, const CopyOptions& options);

}  // namespace kvext
