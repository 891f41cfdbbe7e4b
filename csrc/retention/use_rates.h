// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// How useful checkpoints turn out, by the reason to keep them and by the time since their last use.
//
// It is not known in advance from where the requests of a workload resume, and when. Chats resume
// at the end of an answer after a while; edited messages resume before the end of a prompt;
// questions about a document resume at its end. Therefore all reasons start equal. Each reason is
// judged by the later use of its checkpoints, including evicted checkpoints that are asked for
// again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <unordered_map>

namespace kvext::retention {

/// The origin of a boundary. `vllm_ascend_kvext.retention.reasons.Origin` explains each value.
enum class Origin : std::int32_t {
  kGrid, kPrompt, kLatest, kLadder, kChunk, kJunction, kWanted, kHint, kOverlap, kUse
};

/// Why a checkpoint is kept: `vllm_ascend_kvext.retention.reasons.Reason`.
struct Reason {
  Origin origin = Origin::kLatest;
  // Number of the rung. For `kLatest`: 1 if the boundary is also the prompt's last boundary, else
  // 0.
  std::int32_t step = 0;
  std::int32_t uses = 0;    // number of times a request resumed from it, at most `kMaxUses`
  /// Number of paths that go on from the checkpoint, at most `kMaxPaths`. Only rates by age depend
  /// on it: see `UseRates::uses_per_pool`.
  std::int32_t num_paths = 0;

  /// The reason to keep the checkpoint after one more use; the origin no longer matters then.
  Reason used_again() const;

  std::uint64_t code() const {
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(origin)) << 40) |
           (static_cast<std::uint64_t>(static_cast<std::uint32_t>(step)) << 8) |
           static_cast<std::uint64_t>(uses & 0xff);
  }
  std::uint64_t code_by_age() const {
    return code() | static_cast<std::uint64_t>(num_paths & 0xff) << 56;
  }

  static constexpr std::int32_t kMaxPaths = 2;
};

/// The reason of every boundary of the grid.
inline constexpr Reason kGridReason{Origin::kGrid, 0, 0};

class UseRates {
 public:
  /// Whether to leave one more checkpoint that no request asked for. Even a checkpoint that is
  /// evicted first takes blocks for a while. One checkpoint in `kTryEvery` is left even if its
  /// reason is not worth it, because workloads change.
  bool is_worth_trying(const Reason& reason);

  /// Odds that a checkpoint is used before it is evicted; 1 while nothing is known.
  double expected_uses(const Reason& reason) const;

  /// The best expected uses per unit of time, over all times for which the checkpoint may be kept.
  /// The unit of time is one pool's worth of caching; the checkpoint was last used `age_pools` ago.
  ///
  /// For each age class, the share of checkpoints that were used is counted. It is a share of all
  /// checkpoints that reached this age, including evicted checkpoints (the Kaplan-Meier estimator).
  /// The maximum of uses per time is the Gittins index. If all prompts return after the same time,
  /// old checkpoints are worth more than new checkpoints. If no prompt returns late, old
  /// checkpoints are worth less.
  ///
  /// If boundaries may lie inside blocks, the rates are learned apart for ends of paths, for
  /// checkpoints that one path goes on from, and for those where paths part. A chat resumes at the
  /// end of its path. It resumes earlier only if the end was evicted, and the earlier checkpoint is
  /// the end then. If such uses counted for all checkpoints, those before an end would stay, and
  /// ends would be evicted for them. Other layouts have fewer such pairs, and too few checkpoints of
  /// each kind to learn from.
  double uses_per_pool(const Reason& reason, double age_pools);

  /// A checkpoint, present or evicted, has reached this age without a use.
  /// @param seen_ages  number of age classes for which this was counted before; updated here
  void note_age(const Reason& reason, double age_pools, int& seen_ages);

  /// A request resumed from a checkpoint.
  void count_use(const Reason& reason, double age_pools, int seen_ages);

  void count_eviction(const Reason& reason);

  /// A request asks for an evicted checkpoint, which should have been kept.
  void count_missed_use(const Reason& reason, double age_pools, int seen_ages);

  static constexpr int kNumAges = 28;

 private:
  struct Counts {
    double used = 0, evicted = 0;
    std::int64_t num_refused = 0;
    std::int64_t num_uses = 0, num_noted = 0;
    // By age class. exposed[n]: checkpoints that reached class n and were used in it or survived
    // it. uses[n]: checkpoints that were used in it.
    std::array<double, kNumAges> exposed{}, uses{};
    std::array<double, kNumAges> best{};  // best[n]: `uses_per_pool` of a checkpoint in class n
    bool is_stale = true;
  };

  static void count(Counts& counts, bool is_use);
  static void note_age(Counts& counts, int age, int& seen_ages);
  void estimate(Counts& counts, const Reason& reason) const;

  std::unordered_map<std::uint64_t, Counts> counts_;
};

/// Finds the longest remembered prefix with which a prompt begins. A prefix is identified by its
/// chained hash and its length.
class EvictedPrefixes {
 public:
  /// An evicted checkpoint: why it was kept, and the clock at its last use.
  struct Entry {
    std::string key;
    std::int64_t boundary_tokens;
    Reason reason;
    double clock_pools;
    int seen_ages;  // see `UseRates::note_age`
  };

  /// When there are more than `capacity` entries, the oldest entry is dropped.
  explicit EvictedPrefixes(std::size_t capacity) : capacity_(capacity) {}

  void clear();

  /// Remembers a prefix, and updates the ages of a few other entries.
  void put(Entry entry, double now_pools, UseRates& rates);

  /// A prompt begins with this prefix: removes its entry and returns it in `entry`.
  /// @return whether there was an entry
  bool pop(const std::string& key, Entry* entry);

  /// The length in tokens of the longest remembered prefix of a prompt; 0 if there is none. Tries
  /// the remembered lengths, the longest first, at most `kMaxProbes` lengths.
  /// @param prefix_key  returns the prompt's key for a length in tokens
  std::int64_t longest(const std::function<std::string(std::int64_t)>& prefix_key,
                       std::int64_t after_tokens, std::int64_t upto_tokens) const;

  static constexpr int kMaxProbes = 256;

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
