// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Which checkpoint is evicted when blocks are needed.
//
// The worth of a checkpoint is the number of tokens that a use saves, per block of the checkpoint,
// times the expected uses per unit of time (`UseRates::uses_per_pool`). The checkpoint with the
// least worth is evicted.
//
// Worth changes with age, and at different rates, so that no order of all checkpoints stays valid.
// Therefore every eviction looks at the next few checkpoints, in turns, and puts the checkpoint
// with the least worth into a list of candidates. So the list has the least worthy checkpoints of
// the last round. The cost per eviction does not depend on the number of checkpoints:
//
//   checkpoints  A  B  C  D  E  F  G  H  I  ...        candidates, least worthy first
//                      └─ looked at ─┘                 F 0.2   B 0.4   H 0.7  ...
//
// A candidate's worth is computed again before the candidate is evicted.
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
  /// The place of a checkpoint in the order.
  struct Place {
    std::ptrdiff_t index = -1;  // index in `all_`; -1 without a tail
    bool is_candidate = false;
    double worth = 0;  // worth at the time when it became a candidate
  };

  explicit EvictionOrder(CheckpointTree& tree) : tree_(tree) {}

  /// The clock: how much has been cached for checkpoints since the start, in sizes of the pool. The
  /// number of allocated blocks would not work as a clock. If states take a block every few tokens
  /// and drop it at once, many blocks are allocated while little is cached.
  double clock_pools() const { return clock_pools_; }
  void advance(double num_pools) { clock_pools_ += num_pools; }

  /// A checkpoint has got a tail.
  void add(Checkpoint& node);

  /// A checkpoint loses its tail.
  void remove(Checkpoint& node);

  /// A checkpoint has been used.
  void renew(Checkpoint& node);

  /// A checkpoint may be worth less than before.
  void offer(Checkpoint& node);

  /// The least worthy checkpoint, as far as is known; null if there is no checkpoint. A checkpoint
  /// in use is chosen only if all checkpoints looked at are in use. Looks at a bounded number of
  /// checkpoints.
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
  std::size_t next_ = 0;  // index in `all_` of the next checkpoint to look at
  std::set<Checkpoint*, LessWorthy> candidates_;
};

}  // namespace kvext::retention
