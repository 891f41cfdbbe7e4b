// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "use_rates.h"

#include <algorithm>
#include <cmath>

namespace kvext::retention {

namespace {

constexpr int kNumAges = UseRates::kNumAges;

// UseRates learns what a workload resumes from. The constants below determine how fast it learns,
// and how finely it distinguishes.

/// End of the first age class, in pools cached since the last use. Checkpoints as young as this are
/// hardly ever evicted, so that finer classes are not needed.
constexpr double kFirstAgePools = 0.01;

/// Ratio of the lengths of consecutive age classes. With this ratio, 28 classes reach from a
/// hundredth of a pool to about four pools, and the ends of neighbouring classes differ by a
/// quarter.
constexpr double kAgeRatio = 1.25;

/// Maximum number of uses of one checkpoint that is counted. Each further count would be a reason
/// of its own, with fewer checkpoints to learn from.
constexpr std::int32_t kMaxUses = 3;

/// Number of checkpoints of one reason, used or evicted, that the odds of a use remember. If there
/// are more, all counts are halved, so that a change of the workload shows after some hundred
/// checkpoints.
constexpr double kRememberedCheckpoints = 256;

/// Number of checkpoints of one reason that the rates by age remember before their counts are
/// halved. The number is twice that of the odds, because checkpoints are spread over the age
/// classes.
constexpr double kRememberedAges = 512;

/// Number of events between two estimates of a reason's rates. An estimate takes some microseconds
/// (its time grows with the square of the number of age classes), and 16 events among
/// `kRememberedAges` hardly change it.
constexpr std::int64_t kEventsPerEstimate = 16;

/// Minimum odds of a use for a checkpoint that no request asked for. With lower odds no checkpoint
/// is left: the blocks of fifty tails would be spent on one hit.
constexpr double kMinExpectedUses = 0.02;

/// One in this many checkpoints is left although it is not worth leaving. If fewer were left, a
/// change of the workload would not be noticed within `kRememberedCheckpoints`.
constexpr std::int64_t kTryEvery = 16;

/// Maximum odds of a use within one age class. If a use were certain, no checkpoint would grow
/// older, and older classes would have no rate.
constexpr double kMaxLikely = 0.99;

/// Number of evicted prefixes whose age is updated per eviction. All 8,192 remembered prefixes are
/// updated within 1,024 evictions.
constexpr int kNotedPerEviction = 8;

/// Number of assumed checkpoints with which the rates of a reason begin, so that the first real
/// checkpoints do not make anything certain. Half of them count as used, and half of these within
/// `kPriorHalfLifePools`.
constexpr double kPriorCheckpoints = 2;

/// Assumed half-life for a reason without data: pools cached until half of the checkpoints that
/// will be used have been used.
constexpr double kPriorHalfLifePools = 0.3;

/// Weight, in checkpoints, of the common data of two similar reasons in the rates of each of them.
constexpr double kAlikeCheckpoints = 64;

/// Age classes, in pools. edges[n] is the start of class n; the last edge is the end of the last
/// class.
struct Ages {
  std::array<double, kNumAges + 1> edges;
  std::array<double, kNumAges> prior_alive, prior_uses;

  Ages() {
    edges[0] = 0;
    double edge = kFirstAgePools;
    for (int age = 1; age <= kNumAges; ++age, edge *= kAgeRatio) edges[age] = edge;
    std::array<double, kNumAges + 1> alive;
    for (int age = 0; age <= kNumAges; ++age) {
      alive[age] = 0.5 + 0.5 * std::exp2(-edges[age] / kPriorHalfLifePools);
    }
    for (int age = 0; age < kNumAges; ++age) {
      prior_alive[age] = kPriorCheckpoints * alive[age];
      prior_uses[age] = kPriorCheckpoints * (alive[age] - alive[age + 1]);
    }
  }
};

const Ages& ages() {
  static const Ages ages;
  return ages;
}

std::size_t age_class(double age_pools) {
  const auto& edges = ages().edges;
  const auto above = std::upper_bound(edges.begin() + 1, edges.end() - 1, age_pools);
  return static_cast<std::size_t>(above - edges.begin() - 1);
}

}  // namespace

Reason Reason::used_again() const { return {Origin::kUse, 0, std::min(uses + 1, kMaxUses), 0}; }

bool UseRates::is_worth_trying(const Reason& reason) {
  if (expected_uses(reason) >= kMinExpectedUses) return true;
  return ++counts_[reason.code()].num_refused % kTryEvery == 0;
}

double UseRates::expected_uses(const Reason& reason) const {
  const auto found = counts_.find(reason.code());
  if (found == counts_.end()) return 1;
  const Counts& counts = found->second;
  return (counts.used + 1) / (counts.evicted + 1);
}

double UseRates::uses_per_pool(const Reason& reason, double age_pools) {
  Counts& counts = counts_[reason.code_by_age()];
  if (counts.is_stale) estimate(counts, reason);
  return counts.best[age_class(age_pools)];
}

void UseRates::note_age(const Reason& reason, double age_pools, int& seen_ages) {
  const int age = static_cast<int>(age_class(age_pools));
  if (age > seen_ages) note_age(counts_[reason.code_by_age()], age, seen_ages);
}

void UseRates::count_use(const Reason& reason, double age_pools, int seen_ages) {
  count(counts_[reason.code()], true);
  Counts& counts = counts_[reason.code_by_age()];
  const auto age = age_class(age_pools);
  note_age(counts, static_cast<int>(age), seen_ages);
  counts.exposed[age] += 1;
  counts.uses[age] += 1;
  counts.is_stale |= ++counts.num_uses < kEventsPerEstimate || counts.num_uses % kEventsPerEstimate == 0;
}

void UseRates::count_eviction(const Reason& reason) { count(counts_[reason.code()], false); }

void UseRates::count_missed_use(const Reason& reason, double age_pools, int seen_ages) {
  Counts& counts = counts_[reason.code()];
  counts.evicted = std::max(0.0, counts.evicted - 1);
  count_use(reason, age_pools, seen_ages);
}

void UseRates::note_age(Counts& counts, int age, int& seen_ages) {
  for (; seen_ages < age; ++seen_ages) {
    counts.exposed[static_cast<std::size_t>(seen_ages)] += 1;
    if (++counts.num_noted % kEventsPerEstimate == 0) counts.is_stale = true;
  }
  if (counts.exposed[0] > kRememberedAges) {
    for (double& number : counts.exposed) number /= 2;
    for (double& number : counts.uses) number /= 2;
  }
}

void UseRates::count(Counts& counts, bool is_use) {
  (is_use ? counts.used : counts.evicted) += 1;
  if (counts.used + counts.evicted > kRememberedCheckpoints) {
    counts.used /= 2;
    counts.evicted /= 2;
  }
}

void UseRates::estimate(Counts& counts, const Reason& reason) const {
  const Reason other{reason.origin, 1 - reason.step, reason.uses, reason.num_paths};
  const auto alike = reason.origin == Origin::kLatest ? counts_.find(other.code_by_age()) : counts_.end();
  // likely[n]: the odds of a use in age class n, for a checkpoint that reaches this age.
  std::array<double, kNumAges> likely;
  for (std::size_t age = 0; age < kNumAges; ++age) {
    double uses = counts.uses[age] + ages().prior_uses[age];
    double exposed = counts.exposed[age] + ages().prior_alive[age];
    if (alike != counts_.end()) {
      const Counts& known = alike->second;
      uses += kAlikeCheckpoints * (uses + known.uses[age]) / (exposed + known.exposed[age]);
      exposed += kAlikeCheckpoints;
    }
    likely[age] = std::min(kMaxLikely, uses / exposed);
  }
  for (std::size_t from = 0; from < kNumAges; ++from) {
    double alive = 1, uses = 0, pools = 0, best = 0;
    for (std::size_t age = from; age < kNumAges; ++age) {
      uses += alive * likely[age];
      pools += alive * (1 - likely[age] / 2) * (ages().edges[age + 1] - ages().edges[age]);
      alive *= 1 - likely[age];
      best = std::max(best, uses / pools);
    }
    counts.best[from] = best;
  }
  counts.is_stale = false;
}

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
  while (length != num_by_length_.begin() && num_probes++ < kMaxProbes) {
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
