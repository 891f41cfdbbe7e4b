// SPDX-License-Identifier: Apache-2.0
// The CPU backend.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvext/plan.h"

namespace kvext {

// Whether large copies write past the caches.
enum class Streaming { kAuto = -1, kOff = 0, kOn = 1 };

// Moves every byte of a plan. num_threads >= 1, the caller's among them.
void page_transfer(const Plan& plan, int num_threads, Streaming streaming);

// One plain copy with the same threads and kernels: the limit that a transfer is measured against.
void copy(void* destination, const void* source, int64_t num_bytes, int num_threads,
          Streaming streaming);

struct Description {
  std::vector<std::string> instruction_sets;  // that this build has kernels for and this CPU runs
  std::string kernel;                         // the one that is used
};

Description describe();

}  // namespace kvext
