// SPDX-License-Identifier: Apache-2.0
#include "evicted_prefixes.h"

namespace kvext::retention {

void EvictedPrefixes::clear() {
  order_.clear();
  by_key_.clear();
  num_by_length_.clear();
  next_to_count_ = order_.end();
}

void EvictedPrefixes::put(const std::string& key, std::int64_t boundary_tokens,
                          const Reason& reason, double clock_pools, double now_pools,
                          UseRates& rates) {
  if (const auto known = by_key_.find(key); known != by_key_.end()) remove(known->second);
  const auto entry =
      order_.insert(order_.end(), Entry{key, boundary_tokens, reason, clock_pools, false});
  by_key_.emplace(key, entry);
  ++num_by_length_[boundary_tokens];
  if (next_to_count_ == order_.end()) next_to_count_ = entry;
  const auto is_due = [&](const Entry& oldest) {
    return now_pools - oldest.clock_pools >= UseRates::oldest_age_pools();
  };
  while (next_to_count_ != order_.end() &&
         (is_due(*next_to_count_) ||
          (by_key_.size() > capacity_ && next_to_count_ == order_.begin()))) {
    rates.count_unused(next_to_count_->reason, now_pools - next_to_count_->clock_pools);
    next_to_count_->is_counted = true;
    ++next_to_count_;
  }
  if (by_key_.size() > capacity_) remove(order_.begin());
}

bool EvictedPrefixes::pop(const std::string& key, Entry* entry) {
  const auto known = by_key_.find(key);
  if (known == by_key_.end()) return false;
  *entry = *known->second;
  remove(known->second);
  return true;
}

std::int64_t EvictedPrefixes::longest(
    const std::function<std::string(std::int64_t)>& prefix_key, std::int64_t after_tokens,
    std::int64_t upto_tokens) const {
  int num_probes = 0;
  auto length = num_by_length_.upper_bound(upto_tokens);
  while (length != num_by_length_.begin() && num_probes++ < kMostProbes) {
    --length;
    if (length->first <= after_tokens) return 0;
    if (by_key_.count(prefix_key(length->first))) return length->first;
  }
  return 0;
}

void EvictedPrefixes::remove(Order::iterator entry) {
  if (next_to_count_ == entry) ++next_to_count_;
  const auto length = num_by_length_.find(entry->boundary_tokens);
  if (--length->second == 0) num_by_length_.erase(length);
  by_key_.erase(entry->key);
  order_.erase(entry);
}

}  // namespace kvext::retention
