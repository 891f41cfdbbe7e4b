// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "eviction_order.h"

#include <algorithm>

#include "checkpoint_tree.h"

namespace kvext::retention {

namespace {

constexpr std::size_t kLookAtPerChoice = 16;
constexpr std::size_t kMaxCandidates = 128;
constexpr int kMaxTries = 64;
constexpr int kMaxPutBack = 8;

}  // namespace

bool EvictionOrder::LessWorthy::operator()(const Checkpoint* one, const Checkpoint* other) const {
  if (one->place.worth != other->place.worth) return one->place.worth < other->place.worth;
  return one->place.index < other->place.index;
}

void EvictionOrder::add(Checkpoint& node) {
  node.clock_pools = clock_pools_;
  node.seen_ages = 0;
  node.place.index = static_cast<std::ptrdiff_t>(all_.size());
  all_.push_back(&node);
  offer(node);
}

void EvictionOrder::remove(Checkpoint& node) {
  drop_candidate(node);
  Checkpoint* last = all_.back();
  if (last != &node) {
    // The order of the candidates also depends on the index.
    const bool is_candidate = last->place.is_candidate;
    drop_candidate(*last);
    all_[static_cast<std::size_t>(node.place.index)] = last;
    last->place.index = node.place.index;
    if (is_candidate) insert_candidate(*last, last->place.worth);
  }
  all_.pop_back();
  node.place.index = -1;
}

void EvictionOrder::renew(Checkpoint& node) {
  node.clock_pools = clock_pools_;
  node.seen_ages = 0;
  offer(node);
}

void EvictionOrder::offer(Checkpoint& node) {
  drop_candidate(node);
  const double worth = this->worth(node);
  if (candidates_.size() >= kMaxCandidates) {
    Checkpoint* worthiest = *candidates_.rbegin();
    if (worthiest->place.worth <= worth) return;
    drop_candidate(*worthiest);
  }
  insert_candidate(node, worth);
}

Checkpoint* EvictionOrder::choose() {
  look_at(kLookAtPerChoice);
  Checkpoint* in_use = nullptr;
  int num_put_back = 0;
  for (int num_tries = 0; num_tries < kMaxTries; ++num_tries) {
    if (candidates_.empty()) look_at(kMaxCandidates);
    if (candidates_.empty()) break;
    Checkpoint* node = *candidates_.begin();
    drop_candidate(*node);
    if (is_in_use(*node)) {
      if (!in_use) in_use = node;
      continue;
    }
    const double worth = this->worth(*node);
    if (!candidates_.empty() && worth > (*candidates_.begin())->place.worth &&
        num_put_back < kMaxPutBack) {
      ++num_put_back;
      insert_candidate(*node, worth);
      continue;
    }
    return node;
  }
  return in_use;
}

void EvictionOrder::clear() {
  for (Checkpoint* node : all_) node->place = Place{};
  all_.clear();
  candidates_.clear();
  next_ = 0;
}

void EvictionOrder::look_at(std::size_t num_checkpoints) {
  const std::size_t count = std::min(num_checkpoints, all_.size());
  for (std::size_t seen = 0; seen < count; ++seen) {
    if (next_ >= all_.size()) next_ = 0;
    Checkpoint& node = *all_[next_++];
    tree_.rates_.note_age(tree_.judged(node), clock_pools_ - node.clock_pools, node.seen_ages);
    offer(node);
  }
}

void EvictionOrder::insert_candidate(Checkpoint& node, double worth) {
  node.place.worth = worth;
  node.place.is_candidate = true;
  candidates_.insert(&node);
}

void EvictionOrder::drop_candidate(Checkpoint& node) {
  if (!node.place.is_candidate) return;
  candidates_.erase(&node);
  node.place.is_candidate = false;
}

double EvictionOrder::worth(Checkpoint& node) {
  return tree_.rates_.uses_per_pool(tree_.judged(node), clock_pools_ - node.clock_pools) *
         saved_per_block(node);
}

double EvictionOrder::saved_per_block(Checkpoint& node) const {
  double num_blocks = tree_.needs_.share(node.tail);
  if (node.children.empty() && !node.num_requests) {
    std::size_t num_run_blocks = 0;  // these blocks are freed together with the tail
    for (const BlockIds& run : node.runs) num_run_blocks += run.size();
    num_blocks += static_cast<double>(num_run_blocks);
  }
  // Without full attention, a boundary may outlive the boundaries before it.
  while (!node.parent->is_in_tree) node.parent = node.parent->parent;
  const auto ancestor = nearest_with_tail(node.parent);
  const auto saved_tokens = node.boundary_tokens - ancestor->boundary_tokens;
  return static_cast<double>(saved_tokens) / std::max(1.0, num_blocks);
}

bool EvictionOrder::is_in_use(const Checkpoint& node) const {
  // The request itself does not read a state inside a block any more, so that it is free, and worth
  // no more than other states. A state at the end of a block is held until the request passes the
  // next one: its eviction would free no block.
  if (node.num_requests && !tree_.hits_inside_blocks()) return true;
  bool is_any_own = node.num_requests > 0;
  // A request that reads a tail frees the first blocks of the tail first.
  for (const BlockId id : node.tail) {
    if (tree_.needs_[id] != 1) continue;
    is_any_own = true;
    if (tree_.blocks_.is_free(id)) return false;
  }
  if (node.children.empty()) {
    for (const BlockIds& run : node.runs) {
      if (run.empty()) continue;
      is_any_own = true;
      if (tree_.blocks_.is_free(run.back())) return false;
    }
  }
  return is_any_own;
}

}  // namespace kvext::retention
