// SPDX-License-Identifier: Apache-2.0
#include "evicted_prefixes.h"

namespace kvext::retention {

namespace {

constexpr int kNotedPerEviction = 8;

}  // namespace

void EvictedPrefixes::clear() {
  order_.clear();
  by_key_.clear();
  num_by_length_.clear();
  next_to_note_ = order_.end();
}

void EvictedPrefixes::put(Entry entry, double now_pools, UseRates& rates) {
  if (const auto known = by_key_.find(entry.key); known != by_key_.end()) remove(known->second);
  const auto place = order_.insert(order_.end(), std::move(entry));
  by_key_.emplace(place->key, place);
  ++num_by_length_[place->boundary_tokens];
  if (by_key_.size() > capacity_) remove(order_.begin());
  for (int noted = 0; noted < kNotedPerEviction; ++noted) {
    if (next_to_note_ == order_.end()) next_to_note_ = order_.begin();
    Entry& next = *next_to_note_++;
    rates.note_age(next.reason, now_pools - next.clock_pools, next.seen_ages);
  }
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
  if (next_to_note_ == entry) ++next_to_note_;
  const auto length = num_by_length_.find(entry->boundary_tokens);
  if (--length->second == 0) num_by_length_.erase(length);
  by_key_.erase(entry->key);
  order_.erase(entry);
}

}  // namespace kvext::retention
