// SPDX-License-Identifier: Apache-2.0
#include "copy_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
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
  std::memcpy(destination, source, head);
  return head;
}

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
  std::memcpy(destination + i, source + i, num_bytes - i);
}

__attribute__((target("avx512f"))) void stream_avx512(uint8_t* destination, const uint8_t* source,
                                                      size_t num_bytes) {
  size_t i = copy_head(destination, source, num_bytes);
  for (; i + 4 * kLine <= num_bytes; i += 4 * kLine) {
    const uint8_t* from = source + i;
    auto* to = reinterpret_cast<__m512i*>(destination + i);
    const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + kLine);
    const __m512i c = _mm512_loadu_si512(from + 2 * kLine);
    const __m512i d = _mm512_loadu_si512(from + 3 * kLine);
    _mm512_stream_si512(to, a);
    _mm512_stream_si512(to + 1, b);
    _mm512_stream_si512(to + 2, c);
    _mm512_stream_si512(to + 3, d);
  }
  for (; i + kLine <= num_bytes; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + i),
                        _mm512_loadu_si512(source + i));
  }
  std::memcpy(destination + i, source + i, num_bytes - i);
}

void fence_stores() { _mm_sfence(); }

std::vector<CopyKernel> available_kernels() {
  std::vector<CopyKernel> kernels;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512f", stream_avx512, fence_stores});
  if (__builtin_cpu_supports("avx2")) kernels.push_back({"avx2", stream_avx2, fence_stores});
  kernels.push_back({"memcpy", copy_plainly, fence_nothing});
  return kernels;
}

#else

std::vector<CopyKernel> available_kernels() { return {{"memcpy", copy_plainly, fence_nothing}}; }

#endif

// When the library is loaded: a first use would leave a guard behind that a forked child waits for.
const std::vector<CopyKernel> kKernels = available_kernels();

}  // namespace

const std::vector<CopyKernel>& copy_kernels() { return kKernels; }

}  // namespace kvext
