// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Arithmetic, sorting and messages of the validation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kvext/checked_transfer.h"

namespace kvext {

// Sums and products of non-negative numbers; INT64_MAX if 63 bits cannot hold the result. The
// result is compared with the size of a memory region that does not begin at address 0. Such a size
// is always smaller than INT64_MAX.
inline int64_t saturating_add(int64_t left, int64_t right) {
  int64_t sum;
  return __builtin_add_overflow(left, right, &sum) ? INT64_MAX : sum;
}

inline int64_t saturating_multiply(int64_t left, int64_t right) {
  int64_t product;
  return __builtin_mul_overflow(left, right, &product) ? INT64_MAX : product;
}

inline std::string in_words(int64_t number) {
  return number == INT64_MAX ? "a number that 63 bits do not hold" : std::to_string(number);
}

// Names the wrong cell of a table, as in "runs[3].page".
inline std::string cell(const char* table, int64_t row, const char* column) {
  return std::string(table) + "[" + std::to_string(row) + "]." + column;
}

[[noreturn]] inline void refuse(const std::string& where, const std::string& expected,
                                const std::string& found, const std::string& remedy) {
  throw DescriptorError(where + ": expected " + expected + ", found " + found + ". " + remedy);
}

// The refusal is a function of its own, so that only the comparison is inlined.
[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_less(int64_t min, int64_t found,
                                                               const char* table, int64_t row,
                                                               const char* column,
                                                               const char* remedy) {
  refuse(cell(table, row, column), "at least " + std::to_string(min), std::to_string(found),
         remedy);
}

[[gnu::always_inline]] inline void require_at_least(int64_t min, int64_t found,
                                                    const char* table, int64_t row,
                                                    const char* column, const char* remedy) {
  if (__builtin_expect(found < min, false)) {
    refuse_less(min, found, table, row, column, remedy);
  }
}

// Both functions refuse a transfer that writes a byte twice, and throw DescriptorError then. The
// ranges of the transfer must have been checked before.
void refuse_host_rows_written_twice(const CheckedTransfer& checked);
void refuse_pool_bytes_written_twice(const CheckedTransfer& checked);

// Sorts the items, unless they are sorted already.
template <typename Item, typename IsBefore>
void put_in_order(std::vector<Item>& items, IsBefore&& is_before) {
  if (!std::is_sorted(items.begin(), items.end(), is_before)) {
    std::sort(items.begin(), items.end(), is_before);
  }
}

}  // namespace kvext
