// SPDX-License-Identifier: Apache-2.0
// Ways to rotate keys, chosen for the CPU at hand when the library is loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvext/rotation.h"

namespace kvext {

struct RotationKernel {
  std::string name;
  // Moves num_heads heads that follow each other, and rotates them on the way; in float32 whatever
  // their dtype. Neither side need be aligned; they have no byte in common.
  void (*rotate)(uint8_t* destination, const uint8_t* source, int64_t num_heads,
                 const HeadRotation& head);
};

// Best first; the last one is always "plain".
const std::vector<RotationKernel>& rotation_kernels();

}  // namespace kvext
