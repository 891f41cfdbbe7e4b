// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// One source for all instruction sets: loops that compilers vectorise are compiled once per
// instruction set. Conversions use integer arithmetic, because on x86-64 a compiler knows half
// precision for some CPUs only. Every aarch64 CPU converts half precision itself.
#include "kvext/rotation.h"

#include <cstring>
#include <type_traits>

#include "cpu_features.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvext {
namespace {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Neighbours are read as one number, of which the first is the lower half."
#endif

// A number that may begin at any address, as rows do. It is a struct, because template deduction
// drops the attributes of a plain number type.
template <typename Number>
struct __attribute__((packed, may_alias)) Any {
  Number number;
};

#define KVEXT_INLINE [[gnu::always_inline]] inline

KVEXT_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

KVEXT_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct Float32 {
  using Stored = float;
  KVEXT_INLINE static float widen(float value) { return value; }
  KVEXT_INLINE static float narrow(float value) { return value; }
};

// A bfloat16 is the upper half of a float32, rounded to nearest, ties to even. A NaN stays a NaN.
// Rounding cannot overflow it, because its low 16 bits are always zero here.
struct Bfloat16 {
  using Stored = uint16_t;
  KVEXT_INLINE static float widen(uint32_t half) { return float_of(half << 16); }
  KVEXT_INLINE static uint32_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  }
};

// IEEE 754 binary16: 5 bits of exponent, 10 bits of fraction.
#if defined(__aarch64__)

// The conversions are single instructions. They round to nearest, ties to even, and a NaN stays a
// NaN.
struct Float16 {
  using Stored = uint16_t;
  KVEXT_INLINE static float widen(uint32_t half) {
    const auto bits = static_cast<uint16_t>(half);
    __fp16 value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  KVEXT_INLINE static uint32_t narrow(float value) {
    const auto half = static_cast<__fp16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof(bits));
    return bits;
  }
};

#else

struct Float16 {
  using Stored = uint16_t;
  KVEXT_INLINE static float widen(uint32_t half) {
    const uint32_t shifted = (half & 0x7FFF) << 13;
    const uint32_t exponent = shifted & 0x0F800000;
    const uint32_t normal = shifted + (112u << 23);
    // Subnormals (below 2^-14) have no implicit 1. Add a 1 through the exponent, then subtract it.
    const uint32_t small = bits_of(float_of(shifted + (113u << 23)) - float_of(113u << 23));
    const uint32_t infinite = normal + (112u << 23);
    const uint32_t bits = exponent == 0 ? small : exponent == 0x0F800000 ? infinite : normal;
    return float_of(bits | (half & 0x8000) << 16);
  }
  KVEXT_INLINE static uint32_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    // The addition rounds to a multiple of 2^-24, the smallest float16.
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t none = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    const uint32_t half = magnitude >= (143u << 23) ? none : magnitude < (113u << 23) ? small : normal;
    return half | (bits >> 16 & 0x8000);
  }
};

#endif

#if defined(__aarch64__)

// Four pairs of float16 at a time, by fcvtl and fcvtn. They are written out, because g++ does not
// use these instructions for a loop over __fp16.

// Rotates the pairs (a[i], b[i]).
KVEXT_INLINE void rotate_four(uint16x4_t* a, uint16x4_t* b, const float* cosines,
                              const float* sines) {
  const float32x4_t first = vcvt_f32_f16(vreinterpret_f16_u16(*a));
  const float32x4_t second = vcvt_f32_f16(vreinterpret_f16_u16(*b));
  const float32x4_t cosine = vld1q_f32(cosines), sine = vld1q_f32(sines);
  *a = vreinterpret_u16_f16(vcvt_f16_f32(first * cosine - second * sine));
  *b = vreinterpret_u16_f16(vcvt_f16_f32(second * cosine + first * sine));
}

template <int64_t kCount>
KVEXT_INLINE void rotate_halves_by_four(uint8_t* __restrict destination,
                                        const uint8_t* __restrict source, int64_t first,
                                        int64_t num_pairs, const float* __restrict cosines,
                                        const float* __restrict sines) {
  for (int64_t i = first; i < first + kCount; i += 4) {
    uint16x4_t a, b;
    std::memcpy(&a, source + 2 * i, sizeof(a));
    std::memcpy(&b, source + 2 * (num_pairs + i), sizeof(b));
    rotate_four(&a, &b, cosines + i, sines + i);
    std::memcpy(destination + 2 * i, &a, sizeof(a));
    std::memcpy(destination + 2 * (num_pairs + i), &b, sizeof(b));
  }
}

template <int64_t kCount>
KVEXT_INLINE void rotate_neighbours_by_four(uint8_t* __restrict destination,
                                            const uint8_t* __restrict source, int64_t first,
                                            const float* __restrict cosines,
                                            const float* __restrict sines) {
  for (int64_t i = first; i < first + kCount; i += 4) {
    uint16x8_t pairs;
    std::memcpy(&pairs, source + 4 * i, sizeof(pairs));
    uint16x4_t a = vget_low_u16(vuzp1q_u16(pairs, pairs));
    uint16x4_t b = vget_low_u16(vuzp2q_u16(pairs, pairs));
    rotate_four(&a, &b, cosines + i, sines + i);
    pairs = vcombine_u16(vzip1_u16(a, b), vzip2_u16(a, b));
    std::memcpy(destination + 4 * i, &pairs, sizeof(pairs));
  }
}

#endif

// Each of these structs rotates kCount pairs, starting with pair `first`. The count is a constant,
// so that compilers use vectors without a loop, a remainder or a branch.

template <typename Element>
struct Halves {
  template <int64_t kCount>
  KVEXT_INLINE static void rotate(uint8_t* __restrict destination, const uint8_t* __restrict source,
                                  int64_t first, int64_t num_pairs, const float* __restrict cosines,
                                  const float* __restrict sines) {
#if defined(__aarch64__)
    if constexpr (std::is_same_v<Element, Float16> && kCount % 4 == 0) {
      rotate_halves_by_four<kCount>(destination, source, first, num_pairs, cosines, sines);
      return;
    }
#endif
    using Stored = Any<typename Element::Stored>;
    const auto* const from = reinterpret_cast<const Stored*>(source) + first;
    auto* const __restrict to = reinterpret_cast<Stored*>(destination) + first;
    auto* const __restrict to_second = to + num_pairs;
    for (int64_t i = 0; i < kCount; ++i) {
      const float a = Element::widen(from[i].number);
      const float b = Element::widen(from[num_pairs + i].number);
      to[i].number = Element::narrow(a * cosines[first + i] - b * sines[first + i]);
      to_second[i].number = Element::narrow(b * cosines[first + i] + a * sines[first + i]);
    }
  }
};

// The two elements of a pair are neighbours: 16-bit elements are read as one 32-bit number per
// pair.
template <typename Element>
struct Neighbours {
  template <int64_t kCount>
  KVEXT_INLINE static void rotate(uint8_t* __restrict destination, const uint8_t* __restrict source,
                                  int64_t first, int64_t, const float* __restrict cosines,
                                  const float* __restrict sines) {
#if defined(__aarch64__)
    if constexpr (std::is_same_v<Element, Float16> && kCount % 4 == 0) {
      rotate_neighbours_by_four<kCount>(destination, source, first, cosines, sines);
      return;
    }
#endif
    const auto* const from = reinterpret_cast<const Any<uint32_t>*>(source) + first;
    auto* const to = reinterpret_cast<Any<uint32_t>*>(destination) + first;
    for (int64_t i = 0; i < kCount; ++i) {
      const uint32_t pair = from[i].number;
      const float a = Element::widen(pair & 0xFFFF), b = Element::widen(pair >> 16);
      to[i].number = Element::narrow(a * cosines[first + i] - b * sines[first + i]) |
                     Element::narrow(b * cosines[first + i] + a * sines[first + i]) << 16;
    }
  }
};

template <>
struct Neighbours<Float32> {
  template <int64_t kCount>
  KVEXT_INLINE static void rotate(uint8_t* __restrict destination, const uint8_t* __restrict source,
                                  int64_t first, int64_t, const float* __restrict cosines,
                                  const float* __restrict sines) {
    const auto* const from = reinterpret_cast<const Any<float>*>(source) + 2 * first;
    auto* const to = reinterpret_cast<Any<float>*>(destination) + 2 * first;
    for (int64_t i = 0; i < kCount; ++i) {
      const float a = from[2 * i].number, b = from[2 * i + 1].number;
      to[2 * i].number = a * cosines[first + i] - b * sines[first + i];
      to[2 * i + 1].number = b * cosines[first + i] + a * sines[first + i];
    }
  }
};

// Rotates all pairs. Vectors are used as long as enough pairs are left to fill one.
template <typename Pairs>
KVEXT_INLINE void rotate_pairs(uint8_t* __restrict destination, const uint8_t* __restrict source,
                               const HeadRotation& head) {
  const int64_t num_pairs = head.num_pairs;
  int64_t first = 0;
  for (; first + 32 <= num_pairs; first += 32) {
    Pairs::template rotate<32>(destination, source, first, num_pairs, head.cosines, head.sines);
  }
  for (; first + 16 <= num_pairs; first += 16) {
    Pairs::template rotate<16>(destination, source, first, num_pairs, head.cosines, head.sines);
  }
  for (; first + 4 <= num_pairs; first += 4) {
    Pairs::template rotate<4>(destination, source, first, num_pairs, head.cosines, head.sines);
  }
  for (; first < num_pairs; ++first) {
    Pairs::template rotate<1>(destination, source, first, num_pairs, head.cosines, head.sines);
  }
}

template <typename Pairs>
KVEXT_INLINE void rotate_heads(uint8_t* __restrict destination, const uint8_t* __restrict source,
                               int64_t num_heads, int64_t element_bytes,
                               const HeadRotation& head) {
  const int64_t offset = head.offset_bytes;
  const int64_t end = offset + 2 * head.num_pairs * element_bytes;
  const auto front = static_cast<size_t>(offset), back = static_cast<size_t>(head.head_bytes - end);
  const float* const __restrict cosines = head.cosines;
  const float* const __restrict sines = head.sines;
  // The heads have 32 or 64 pairs, and all elements are rotated. Without an inner loop, the angles
  // stay in registers.
  if (front + back == 0 && head.num_pairs == 32) {
    for (int64_t i = 0; i < num_heads; ++i) {
      Pairs::template rotate<32>(destination + i * end, source + i * end, 0, 32, cosines, sines);
    }
    return;
  }
  if (front + back == 0 && head.num_pairs == 64) {
    for (int64_t i = 0; i < num_heads; ++i) {
      Pairs::template rotate<64>(destination + i * end, source + i * end, 0, 64, cosines, sines);
    }
    return;
  }
  for (int64_t i = 0; i < num_heads; ++i) {
    if (front > 0) std::memcpy(destination, source, front);
    rotate_pairs<Pairs>(destination + offset, source + offset, head);
    if (back > 0) std::memcpy(destination + end, source + end, back);
    destination += head.head_bytes;
    source += head.head_bytes;
  }
}

template <template <typename> typename Pairs>
KVEXT_INLINE void rotate_style(uint8_t* destination, const uint8_t* source, int64_t num_heads,
                               const HeadRotation& head) {
  switch (head.dtype) {
    case RowDtype::kFloat32:
      return rotate_heads<Pairs<Float32>>(destination, source, num_heads, 4, head);
    case RowDtype::kBfloat16:
      return rotate_heads<Pairs<Bfloat16>>(destination, source, num_heads, 2, head);
    case RowDtype::kFloat16:
      return rotate_heads<Pairs<Float16>>(destination, source, num_heads, 2, head);
  }
}

KVEXT_INLINE void rotate_any(uint8_t* destination, const uint8_t* source, int64_t num_heads,
                             const HeadRotation& head) {
  if (head.pair_style == PairStyle::kHalves) {
    rotate_style<Halves>(destination, source, num_heads, head);
  } else {
    rotate_style<Neighbours>(destination, source, num_heads, head);
  }
}

void rotate_plain(uint8_t* destination, const uint8_t* source, int64_t num_heads,
                  const HeadRotation& head) {
  rotate_any(destination, source, num_heads, head);
}

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) void rotate_avx2(uint8_t* destination, const uint8_t* source,
                                                     int64_t num_heads, const HeadRotation& head) {
  rotate_any(destination, source, num_heads, head);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) void rotate_avx512(
    uint8_t* destination, const uint8_t* source, int64_t num_heads, const HeadRotation& head) {
  rotate_any(destination, source, num_heads, head);
}

#endif

std::vector<RotationKernel> available_kernels() {
  std::vector<RotationKernel> kernels;
#if defined(__x86_64__)
  const CpuFeatures features = read_cpu_features();
  const bool has_avx2 = features.has_avx2 && features.has_fma;
  if (has_avx2 && features.has_avx512f && features.has_avx512bw && features.has_avx512vl &&
      features.has_avx512dq) {
    kernels.push_back({"avx512", rotate_avx512});
  }
  if (has_avx2) kernels.push_back({"avx2", rotate_avx2});
#endif
  kernels.push_back({"plain", rotate_plain});
  return kernels;
}

// The kernels are chosen when the library is loaded, like the copy kernels.
const std::vector<RotationKernel> kKernels = available_kernels();

}  // namespace

const std::vector<RotationKernel>& rotation_kernels() { return kKernels; }

}  // namespace kvext
