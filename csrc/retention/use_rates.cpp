// SPDX-License-Identifier: Apache-2.0
#include "use_rates.h"

#include <algorithm>
#include <cmath>

namespace kvext::retention {

namespace {

constexpr int kNumAges = UseRates::kNumAges;
constexpr double kYoungestPools = 0.01;
constexpr double kAgeRatio = 1.25;

constexpr std::int32_t kMostUses = 3;
constexpr double kMemory = 256;
constexpr double kAgeMemory = 512;
constexpr std::int64_t kEstimateEvery = 16;
constexpr double kMostExpectedUses = 8.0;
constexpr double kFewestExpectedUses = 0.02;
constexpr std::int64_t kRetryAfter = 16;
constexpr double kMostLikely = 0.99;

// What is believed of a reason before anything is known, as if so many checkpoints had been seen:
// half of them are used, half of these within this many pools.
constexpr double kPriorCheckpoints = 2;
constexpr double kPriorHalfLifePools = 0.3;

/// Ages in pools; the last one is where the last class ends.
struct Ages {
  std::array<double, kNumAges + 1> edges;
  std::array<double, kNumAges> prior_alive, prior_uses;

  Ages() {
    edges[0] = 0;
    double edge = kYoungestPools;
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

Reason Reason::used_again() const { return {Origin::kUse, 0, std::min(uses + 1, kMostUses)}; }

bool UseRates::is_worth_trying(const Reason& reason) {
  if (expected_uses(reason) >= kFewestExpectedUses) return true;
  return ++counts_[reason.code()].num_refused % kRetryAfter == 0;
}

double UseRates::expected_uses(const Reason& reason) const {
  const auto found = counts_.find(reason.code());
  if (found == counts_.end()) return 1;
  const Counts& counts = found->second;
  return std::min((counts.used + 1) / (counts.evicted + 1), kMostExpectedUses);
}

double UseRates::uses_per_pool(const Reason& reason, double age_pools) {
  Counts& counts = counts_[reason.code()];
  if (counts.is_stale) estimate(counts);
  return counts.best[age_class(age_pools)];
}

void UseRates::note_age(const Reason& reason, double age_pools, int& seen_ages) {
  const int age = static_cast<int>(age_class(age_pools));
  if (age > seen_ages) note_age(counts_[reason.code()], age, seen_ages);
}

void UseRates::count_use(const Reason& reason, double age_pools, int seen_ages) {
  Counts& counts = counts_[reason.code()];
  count(counts, true);
  count_use_at(counts, age_pools, seen_ages);
}

void UseRates::count_eviction(const Reason& reason) { count(counts_[reason.code()], false); }

void UseRates::count_missed_use(const Reason& reason, double age_pools, int seen_ages) {
  Counts& counts = counts_[reason.code()];
  counts.evicted = std::max(0.0, counts.evicted - 1);
  count(counts, true);
  count_use_at(counts, age_pools, seen_ages);
}

void UseRates::count_use_at(Counts& counts, double age_pools, int seen_ages) {
  const auto age = age_class(age_pools);
  note_age(counts, static_cast<int>(age), seen_ages);
  counts.exposed[age] += 1;
  counts.uses[age] += 1;
  if (++counts.num_uses < kEstimateEvery || counts.num_uses % kEstimateEvery == 0) {
    counts.is_stale = true;
  }
}

void UseRates::note_age(Counts& counts, int age, int& seen_ages) {
  for (; seen_ages < age; ++seen_ages) {
    counts.exposed[static_cast<std::size_t>(seen_ages)] += 1;
    if (++counts.num_noted % kEstimateEvery == 0) counts.is_stale = true;
  }
  if (counts.exposed[0] > kAgeMemory) {
    for (double& number : counts.exposed) number /= 2;
    for (double& number : counts.uses) number /= 2;
  }
}

void UseRates::count(Counts& counts, bool is_use) {
  (is_use ? counts.used : counts.evicted) += 1;
  if (counts.used + counts.evicted > kMemory) {
    counts.used /= 2;
    counts.evicted /= 2;
  }
}

void UseRates::estimate(Counts& counts) {
  std::array<double, kNumAges> likely;  // to be used in this class of age, for those that get there
  for (std::size_t age = 0; age < kNumAges; ++age) {
    likely[age] = std::min(kMostLikely, (counts.uses[age] + ages().prior_uses[age]) /
                                            (counts.exposed[age] + ages().prior_alive[age]));
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

}  // namespace kvext::retention
