// SPDX-License-Identifier: Apache-2.0
// How useful checkpoints turn out, by why they are kept and by how long ago they were of use.
//
// Nothing is known in advance of what a workload resumes from, and when: chats resume at the end of an
// answer after a while, edited messages before the end of a prompt, questions about a document at
// its end. So nothing is assumed. Every reason starts out equal and is judged by what became of its
// checkpoints, evicted ones that are asked for again included.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <unordered_map>

namespace kvext::retention {

/// The origin of a boundary: `vllm_ascend_kvext.retention.reasons.Origin`, which explains each.
enum class Origin : std::int32_t {
  kGrid, kPrompt, kLatest, kLadder, kChunk, kJunction, kWanted, kHint, kOverlap, kUse
};

/// Why a checkpoint is kept: `vllm_ascend_kvext.retention.reasons.Reason`.
struct Reason {
  Origin origin = Origin::kLatest;
  std::int32_t step = 0;    // rung of the ladder; 1 for a last boundary that is the prompt's, too
  std::int32_t uses = 0;    // how often it has been resumed from, counted up to `kMaxUses`

  /// The reason to keep a checkpoint after one more use: its origin matters no more.
  Reason used_again() const;

  std::uint64_t code() const {
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(origin)) << 40) |
           (static_cast<std::uint64_t>(static_cast<std::uint32_t>(step)) << 8) |
           static_cast<std::uint64_t>(uses & 0xff);
  }
};

/// The reason of every boundary of the grid.
inline constexpr Reason kGridReason{Origin::kGrid, 0, 0};

class UseRates {
 public:
  /// Whether to leave one more checkpoint that no request asked for. Even a checkpoint that is the
  /// first to give way takes blocks for a while. One in `kTryEvery` is left all the same, for
  /// workloads change.
  bool is_worth_trying(const Reason& reason);

  /// Odds that a checkpoint is used before it is evicted; 1 while nothing is known.
  double expected_uses(const Reason& reason) const;

  /// Uses per pool that is cached in the meantime, from a checkpoint last used `age_pools` ago, if
  /// it is kept for the time for which that is most.
  ///
  /// For every class of age it is counted how many checkpoints were used in it, among those that
  /// grew so old, whether they were still there or not (the estimator of Kaplan and Meier). The
  /// most uses per time is the index of Gittins. Where all prompts return after the same time, old
  /// checkpoints are worth more than new ones; where none returns late, less.
  double uses_per_pool(const Reason& reason, double age_pools);

  /// A checkpoint, there or evicted, has grown so old without a use.
  /// @param seen_ages  classes of age of which this was counted before; brought up to date
  void note_age(const Reason& reason, double age_pools, int& seen_ages);

  /// A request resumed from a checkpoint.
  void count_use(const Reason& reason, double age_pools, int seen_ages);

  void count_eviction(const Reason& reason);

  /// An evicted checkpoint is asked for: it should have stayed.
  void count_missed_use(const Reason& reason, double age_pools, int seen_ages);

  static constexpr int kNumAges = 28;

 private:
  struct Counts {
    double used = 0, evicted = 0;
    std::int64_t num_refused = 0;
    std::int64_t num_uses = 0, num_noted = 0;
    // By class of age: checkpoints that were used in it or lived through it; those that were used.
    std::array<double, kNumAges> exposed{}, uses{};
    std::array<double, kNumAges> best{};  // uses_per_pool
    bool is_stale = true;
  };

  static void count(Counts& counts, bool is_use);
  static void note_age(Counts& counts, int age, int& seen_ages);
  void estimate(Counts& counts, const Reason& reason) const;

  std::unordered_map<std::uint64_t, Counts> counts_;
};

/// Finds the longest of some remembered prefixes that a prompt begins with. A prefix is known by
/// its chained hash and its length.
class EvictedPrefixes {
 public:
  /// A checkpoint that was evicted: why it was kept, and when it was last of use.
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
  /// that are known, the longest first and at most `kMaxProbes` of them.
  /// @param prefix_key  the prompt's key per length in tokens
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
