// SPDX-License-Identifier: Apache-2.0
// Which checkpoint gives way when blocks are needed.
//
// A checkpoint is worth the tokens that a use saves, per block that it takes, times the uses to
// expect of it per time (`UseRates::uses_per_pool`). The least worthy gives way.
//
// Worth changes with age, not alike for all, so that no order of all checkpoints lasts. Therefore
// every eviction looks at the next few of them, in turns, and puts the least worthy into a list of
// candidates. The list thus has the least worthy of the last round, and costs the same per eviction
// however many checkpoints there are:
//
//   checkpoints  A  B  C  D  E  F  G  H  I  ...        candidates, least worthy first
//                      └─ looked at ─┘                 F 0.2   B 0.4   H 0.7  ...
//
// A candidate is looked at again before it is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "use_rates.h"

namespace kvext::retention {

struct Checkpoint;
class CheckpointTree;

class EvictionOrder {
 public:
  /// Where a checkpoint is in the order.
  struct Place {
    std::ptrdiff_t index = -1;  // among all; -1 without a tail
    bool is_candidate = false;
    double worth = 0;  // as of when it became a candidate
  };

  explicit EvictionOrder(CheckpointTree& tree) : tree_(tree) {}

  /// Pools that have been cached for checkpoints since the start. Allocated blocks would be no clock:
  /// where states take a block every few tokens and drop it at once, many pools are allocated while
  /// little is cached.
  double clock_pools() const { return clock_pools_; }
  void advance(double num_pools) { clock_pools_ += num_pools; }

  /// A checkpoint has got a tail.
  void add(Checkpoint& node);

  /// A checkpoint loses its tail.
  void remove(Checkpoint& node);

  /// A checkpoint has been of use.
  void renew(Checkpoint& node);

  /// A checkpoint may be worth less than before.
  void offer(Checkpoint& node);

  /// The least worthy checkpoint, as far as is known; none if there is none. One that is in use is
  /// taken only when all that were looked at are. Looks at a bounded number of checkpoints.
  Checkpoint* choose();

  void clear();

  double worth(Checkpoint& node);

 private:
  struct LessWorthy {
    bool operator()(const Checkpoint* one, const Checkpoint* other) const;
  };

  void look_at(std::size_t num_checkpoints);
  void insert_candidate(Checkpoint& node, double worth);
  void drop_candidate(Checkpoint& node);
  bool is_in_use(const Checkpoint& node) const;
  double saved_per_block(Checkpoint& node) const;

  CheckpointTree& tree_;
  double clock_pools_ = 0;
  std::vector<Checkpoint*> all_;
  std::size_t next_ = 0;  // to be looked at, in `all_`
  std::set<Checkpoint*, LessWorthy> candidates_;
};

}  // namespace kvext::retention
