// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Page transfers on the CPU.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvext/checked_transfer.h"
#include "kvext/rotation.h"

namespace kvext {

// The CPUs and the priority of the threads that copy.
struct Placement {
  // CPUs, ascending, without repetition. If there are none, the threads may run on the CPUs of the
  // thread that starts them.
  std::vector<int> cpus;
  // The value of nice(2): 0 is the default, 19 gives way to everything.
  int niceness = 0;

  bool operator==(const Placement& other) const {
    return cpus == other.cpus && niceness == other.niceness;
  }
};

// The message names the CPUs that the kernel does not give to this process.
class PlacementError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Starts a thread on the CPUs of a placement. Throws PlacementError if the kernel does not give all
// of them.
void require_cpus(const Placement& placement);

// Whether large copies write past the caches (kAuto: if the transfer is large).
enum class Streaming { kAuto = -1, kOff = 0, kOn = 1 };

struct CopyOptions {
  int num_threads = 1;  // at least 1
  Streaming streaming = Streaming::kAuto;
  Placement placement;
};

// Moves every byte of a transfer. Throws PlacementError before any byte moves.
void page_transfer(const CheckedTransfer& checked, const CopyOptions& options);

// Moves every byte of a transfer, and rotates the keys while they move.
void rotated_page_transfer(const CheckedRotation& rotation, const CopyOptions& options);

// Does one plain copy with the same threads, front to back. Benchmarks compare a transfer with it.
void copy(void* destination, const void* source, int64_t num_bytes, const CopyOptions& options);

}  // namespace kvext
