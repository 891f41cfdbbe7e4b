// SPDX-License-Identifier: Apache-2.0
// Which CPUs copies run on.
#pragma once

#include <stdexcept>
#include <vector>

namespace kvext {

// Where copies run.
struct Placement {
  // Ascending, without repetition. Empty: wherever the thread that starts them may run.
  std::vector<int> cpus;
  // As of nice(2): 0 is the default, 19 gives way to everything.
  int niceness = 0;

  bool operator==(const Placement& other) const {
    return cpus == other.cpus && niceness == other.niceness;
  }
};

// Names the CPUs that the kernel does not give to this process.
class PlacementError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Starts a thread there. Throws PlacementError where the kernel does not give all of the CPUs.
void require_cpus(const Placement& placement);

}  // namespace kvext
