// SPDX-License-Identifier: Apache-2.0
// Boundaries whose checkpoints were evicted: requests that would have resumed there are told so.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <string>
#include <unordered_map>

#include "use_rates.h"

namespace kvext::retention {

/// Finds the longest of some remembered prefixes that a prompt begins with. A prefix is known by
/// its chained hash and its length.
class EvictedPrefixes {
 public:
  /// What had kept a checkpoint, and when it was last of use.
  struct Entry {
    std::string key;
    std::int64_t boundary_tokens;
    Reason reason;
    double clock_pools;
    int seen_ages;  // see `UseRates::note_age`
  };

  /// The oldest entry gives way beyond `capacity`.
  explicit EvictedPrefixes(std::size_t capacity) : capacity_(capacity) {}

  void clear();

  /// Remembers a prefix, and notes how old a few others have grown.
  void put(Entry entry, double now_pools, UseRates& rates);

  /// A prompt begins with a prefix: forget it, and say what was known of it.
  /// @return whether it was known
  bool pop(const std::string& key, Entry* entry);

  /// The length in tokens of the longest prefix of a prompt, 0 if there is none. Tries the lengths
  /// that are known, the longest first and at most `kMostProbes` of them.
  /// @param prefix_key  the prompt's key per length in tokens
  std::int64_t longest(const std::function<std::string(std::int64_t)>& prefix_key,
                       std::int64_t after_tokens, std::int64_t upto_tokens) const;

  static constexpr int kMostProbes = 256;

 private:
  using Order = std::list<Entry>;

  void remove(Order::iterator entry);

  std::size_t capacity_;
  Order order_;  // the oldest eviction first
  Order::iterator next_to_note_ = order_.end();
  std::unordered_map<std::string, Order::iterator> by_key_;
  std::map<std::int64_t, std::int64_t> num_by_length_;
};

}  // namespace kvext::retention
