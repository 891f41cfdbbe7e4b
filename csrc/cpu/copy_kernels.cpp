// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
#include "copy_kernels.h"

#include "cpu_features.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <utility>
#endif

namespace kvext {
namespace {

void copy_plainly(uint8_t* destination, const uint8_t* source, size_t num_bytes) {
  std::memcpy(destination, source, num_bytes);
}

void fence_nothing() {}

#if defined(__x86_64__)

constexpr size_t kLine = 64;

// Copies up to the first whole line of the destination; returns the number of bytes copied.
size_t copy_head(uint8_t* destination, const uint8_t* source, size_t num_bytes) {
  const size_t to_line = (kLine - reinterpret_cast<uintptr_t>(destination) % kLine) % kLine;
  const size_t head = to_line < num_bytes ? to_line : num_bytes;
  if (head > 0) std::memcpy(destination, source, head);
  return head;
}

// Vectors wider than AVX2 do not make transfers faster.
__attribute__((target("avx2"))) void stream_avx2(uint8_t* destination, const uint8_t* source,
                                                 size_t num_bytes) {
  size_t i = copy_head(destination, source, num_bytes);
  for (; i + kLine <= num_bytes; i += kLine) {
    const auto* from = reinterpret_cast<const __m256i*>(source + i);
    auto* to = reinterpret_cast<__m256i*>(destination + i);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    _mm256_stream_si256(to, a);
    _mm256_stream_si256(to + 1, b);
  }
  if (i < num_bytes) std::memcpy(destination + i, source + i, num_bytes - i);
}

constexpr int64_t kStep = 2 * kLine;

// A prefetch past the end of a source is harmless, because a prefetch never fails.
inline void fetch_step(const uint8_t* source) {
  __builtin_prefetch(source, 0, 2);
  __builtin_prefetch(source + kLine, 0, 2);
}

__attribute__((target("avx2"))) inline void stream_step(uint8_t* destination,
                                                        const uint8_t* source) {
  const auto* const from = reinterpret_cast<const __m256i*>(source);
  auto* const to = reinterpret_cast<__m256i*>(destination);
  const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
  const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
  _mm256_stream_si256(to, a);
  _mm256_stream_si256(to + 1, b);
  _mm256_stream_si256(to + 2, c);
  _mm256_stream_si256(to + 3, d);
}

// Copies several sources in turns of kTurn bytes. If copies are done one after the other, most of a
// core's outstanding reads stay unused, because a short copy ends before the CPU's own prefetching
// has found its lines. Reads of several sources overlap. Only a few lines at a time are prefetched,
// because streaming stores need the same buffers.
template <size_t kTogether, int64_t kTurn>
__attribute__((target("avx2"))) void stream_together_avx2(const Copy* copies, size_t num_copies,
                                                          const Copy* later, size_t num_later) {
  static_assert(kTogether <= kMaxTogether && kTurn % kStep == 0);
  const auto to = [](const Copy& copy) { return reinterpret_cast<uint8_t*>(copy.destination); };
  const auto from = [](const Copy& copy) { return reinterpret_cast<const uint8_t*>(copy.source); };
  int64_t done = 0, shortest = INT64_MAX, longest = 0, unaligned = 0;
  for (size_t j = 0; j < num_copies; ++j) {
    shortest = std::min(shortest, copies[j].num_bytes);
    longest = std::max(longest, copies[j].num_bytes);
    unaligned |= copies[j].destination % static_cast<int64_t>(kLine);
  }
  if (num_copies == kTogether && num_later == kTogether && unaligned == 0) {
    for (size_t j = 0; j < kTogether; ++j) shortest = std::min(shortest, later[j].num_bytes);
    // Pages nearly always have the same size, so the bytes that all copies have are copied without
    // a check per step.
    for (; done + kTurn <= shortest; done += kTurn) {
      for (size_t j = 0; j < kTogether; ++j) {
        for (int64_t at = done; at < done + kTurn; at += kStep) {
          fetch_step(from(later[j]) + at);
          stream_step(to(copies[j]) + at, from(copies[j]) + at);
        }
      }
    }
    if (done == longest) return;
  }
  int64_t heads[kMaxTogether];
  for (size_t j = 0; j < num_copies; ++j) {
    heads[j] = copy_head(to(copies[j]) + done, from(copies[j]) + done, copies[j].num_bytes - done);
  }
  for (; done < longest; done += kTurn) {
    for (size_t j = 0; j < num_copies; ++j) {
      for (int64_t i = 0; i < kTurn; i += kStep) {
        if (j < num_later && done + i < later[j].num_bytes) fetch_step(from(later[j]) + done + i);
        const int64_t at = done + i + heads[j];
        const int64_t num_bytes = copies[j].num_bytes - at;
        if (num_bytes >= kStep) {
          stream_step(to(copies[j]) + at, from(copies[j]) + at);
        } else if (num_bytes > 0) {
          stream_avx2(to(copies[j]) + at, from(copies[j]) + at, static_cast<size_t>(num_bytes));
        }
      }
    }
  }
}

void fence_stores() { _mm_sfence(); }

#endif

std::vector<CopyKernel> available_kernels() {
  std::vector<CopyKernel> kernels;
#if defined(__x86_64__)
  const CpuFeatures features = read_cpu_features();
  if (features.has_avx2) {
    kernels.push_back(
        {"avx2", true, stream_avx2, stream_together_avx2<16, kStep>, 16, INT64_MAX, fence_stores});
    kernels.push_back({"avx2, longer turns", true, stream_avx2, stream_together_avx2<8, 512>, 8,
                       16384, fence_stores});
    // On Zen 3, pages of 4 KB and more take four times as long if destinations take turns of two
    // lines, and long pages are fastest alone. A CPU with AVX-512 was fastest with turns of two
    // lines, for pages of any length.
    if (features.is_amd) std::swap(kernels[0], kernels[1]);
  }
#endif
  kernels.push_back({"memcpy", false, copy_plainly, nullptr, 0, 0, fence_nothing});
  return kernels;
}

// The kernels are chosen when the library is loaded. If they were chosen on first use, a forked
// child might wait for the guard of the static variable.
const std::vector<CopyKernel> kKernels = available_kernels();

}  // namespace

const std::vector<CopyKernel>& copy_kernels() { return kKernels; }

}  // namespace kvext
