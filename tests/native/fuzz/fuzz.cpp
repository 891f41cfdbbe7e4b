// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Feeds valid and damaged descriptors to the compiled core; meant for AddressSanitizer and
// UndefinedBehaviorSanitizer, which watch every access. An accepted case must move exactly the bytes
// that the definition names, and rotate the bytes of keys. Usage: fuzz <seconds> [seed]. Prints "<accepted> <refused>".
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/copier.h"
#include "cpu/rotator.h"
#include "kvext/copies.h"
#include "kvext/page_transfer.h"
#include "kvext/rotation.h"

namespace {

using kvext::Direction;
using kvext::Plane;
using kvext::Pool;
using kvext::Rotation;
using kvext::Run;
using kvext::Shift;

std::mt19937_64 engine;

int64_t between(int64_t min, int64_t max) {
  return min + static_cast<int64_t>(engine() % static_cast<uint64_t>(max - min + 1));
}

bool one_in(int64_t count) { return between(1, count) == 1; }

// Memory of exactly this size: the sanitizer sees the first byte beyond it.
struct Memory {
  explicit Memory(int64_t size) : bytes(new uint8_t[size]), num_bytes(size) {
    for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(engine());
  }
  std::unique_ptr<uint8_t[]> bytes;
  int64_t num_bytes;
};

struct Case {
  std::vector<Memory> pools;
  std::unique_ptr<Memory> host;
  std::vector<Pool> pool_rows;
  std::vector<Plane> planes;
  std::vector<Run> runs;
  std::vector<Rotation> rotations;
  std::vector<Shift> shifts;
  std::vector<double> frequencies;
  Direction direction;

  kvext::Transfer transfer() const {
    return {{pool_rows.data(), static_cast<int64_t>(pool_rows.size())},
            {planes.data(), static_cast<int64_t>(planes.size())},
            {runs.data(), static_cast<int64_t>(runs.size())},
            reinterpret_cast<int64_t>(host->bytes.get()),
            host->num_bytes,
            direction};
  }

  kvext::KeyRotation rotation() const {
    return {{rotations.data(), static_cast<int64_t>(rotations.size())},
            {shifts.data(), static_cast<int64_t>(shifts.size())},
            frequencies.data(),
            static_cast<int64_t>(frequencies.size())};
  }
};

// Rotates some of the planes whose rows are whole elements.
void add_rotations(Case& made) {
  for (int64_t i = between(0, 90); i > 0; --i) {
    made.frequencies.push_back(static_cast<double>(between(0, 1000)) / 1000);
  }
  const auto num_frequencies = static_cast<int64_t>(made.frequencies.size());
  for (size_t i = 0; i < made.planes.size(); ++i) {
    const int64_t dtype = between(0, 2), unit = dtype == 0 ? 4 : 2;
    const int64_t row_elements = made.planes[i].row_bytes / unit;
    int64_t num_heads = between(1, 4);
    if (row_elements % num_heads != 0) num_heads = 1;
    const int64_t head_elements = row_elements / num_heads;
    const int64_t max_pairs = std::min(head_elements / 2, num_frequencies);
    if (made.planes[i].row_bytes % unit != 0 || max_pairs == 0 || one_in(3)) continue;
    const int64_t num_pairs = one_in(2) ? max_pairs : between(1, max_pairs);
    made.rotations.push_back({static_cast<int64_t>(i), static_cast<kvext::RowDtype>(dtype),
                              static_cast<kvext::PairStyle>(between(0, 1)), num_heads,
                              head_elements * unit,
                              between(0, head_elements - 2 * num_pairs) * unit, num_pairs,
                              between(0, num_frequencies - num_pairs)});
  }
  int64_t last_group = -1;
  for (const Plane& plane : made.planes) {
    if (plane.group == last_group) continue;
    last_group = plane.group;
    made.shifts.push_back({plane.group, one_in(4) ? 0 : between(-1000000, 1000000)});
  }
}

// A valid case names every page once, by one group.
Case valid_case() {
  Case made;
  made.direction = one_in(2) ? Direction::kPagesToHost : Direction::kHostToPages;
  const int64_t num_pages = between(2, 9), num_groups = between(1, 3);
  int64_t host_end = 0;
  int64_t page = 1;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t rows_per_page = between(1, 12);
    int64_t host_row = between(0, 2);
    for (int64_t left = between(0, num_pages / num_groups); left > 0 && page < num_pages; --left) {
      const int64_t first_row = between(0, rows_per_page - 1);
      const int64_t num_rows = between(1, rows_per_page - first_row);
      made.runs.push_back({group, page++, first_row, num_rows, host_row});
      host_row += num_rows + between(0, 1);
    }
    for (int64_t left = between(1, 3); left > 0; --left) {
      const int64_t row_bytes = one_in(4) ? between(1, 9000) : between(1, 80);
      const int64_t region_offset = between(0, 70), base = between(0, 70);
      const int64_t stride = region_offset + rows_per_page * row_bytes + between(0, 70);
      const int64_t host_offset = (host_end + 63) / 64 * 64;
      made.planes.push_back({group, static_cast<int64_t>(made.pools.size()), base, stride,
                             region_offset, row_bytes, rows_per_page, num_pages, host_offset});
      made.pools.emplace_back(base + num_pages * stride);
      host_end = host_offset + host_row * row_bytes;
    }
  }
  made.host = std::make_unique<Memory>(host_end + 1);
  for (const Memory& pool : made.pools) {
    made.pool_rows.push_back({reinterpret_cast<int64_t>(pool.bytes.get()), pool.num_bytes});
  }
  add_rotations(made);
  return made;
}

void damage(int64_t& value) {
  switch (between(0, 7)) {
    case 0: value = static_cast<int64_t>(engine()); break;
    case 1: value = between(-2, 2); break;
    case 2: value = INT64_MAX - between(0, 2); break;
    case 3: value = INT64_MIN + between(0, 2); break;
    case 4: value = static_cast<int64_t>(static_cast<uint64_t>(value) << between(1, 62)); break;
    case 5: value = int64_t{1} << between(0, 62); break;
    case 6: value = between(0, 20) * 64; break;
    default:
      value = static_cast<int64_t>(static_cast<uint64_t>(value) +
                                   static_cast<uint64_t>(between(-3, 3)));
  }
}

// Addresses and sizes of pools stay true: no check can tell whether memory is there.
void damage(Case& made) {
  const auto cells_of = [](auto& rows) {
    constexpr int64_t num_columns = std::decay_t<decltype(rows.front())>::kColumns;
    return std::make_pair(reinterpret_cast<int64_t*>(rows.data()),
                          static_cast<int64_t>(rows.size()) * num_columns);
  };
  const std::pair<int64_t*, int64_t> tables[] = {cells_of(made.planes), cells_of(made.runs),
                                                 cells_of(made.rotations), cells_of(made.shifts)};
  for (int64_t times = between(1, 3); times > 0; --times) {
    const auto [first, num_cells] = tables[between(0, 3)];
    if (num_cells == 0) continue;
    int64_t& cell = first[between(0, num_cells - 1)];
    if (one_in(4)) {
      cell = first[between(0, num_cells - 1)];
    } else {
      damage(cell);
    }
  }
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Applies the definition, row by row, to copies of the memory. Without a rotation all rows stay as they are.
std::vector<std::vector<uint8_t>> expected(const Case& made,
                                           const kvext::CheckedRotation* rotation) {
  std::vector<std::vector<uint8_t>> result;
  for (const Memory& pool : made.pools) {
    result.emplace_back(pool.bytes.get(), pool.bytes.get() + pool.num_bytes);
  }
  result.emplace_back(made.host->bytes.get(), made.host->bytes.get() + made.host->num_bytes);
  for (const Run& run : made.runs) {
    for (size_t index = 0; index < made.planes.size(); ++index) {
      const Plane& plane = made.planes[index];
      if (plane.group != run.group) continue;
      const kvext::HeadRotation* head = nullptr;
      if (rotation != nullptr) {
        const auto& order = rotation->transfer().plane_order();
        const auto place = std::find(order.begin(), order.end(), static_cast<int64_t>(index));
        head = rotation->head_rotation(place - order.begin());
      }
      for (int64_t row = 0; row < run.num_rows; ++row) {
        uint8_t* const in_page = &result[plane.pool].at(
            plane.base_bytes + run.page * plane.page_stride_bytes + plane.region_offset_bytes +
            (run.first_row + row) * plane.row_bytes);
        uint8_t* const in_host =
            &result.back().at(plane.host_offset_bytes + (run.host_row + row) * plane.row_bytes);
        const bool is_store = made.direction == Direction::kPagesToHost;
        uint8_t* const to = is_store ? in_host : in_page;
        const uint8_t* const from = is_store ? in_page : in_host;
        if (head == nullptr) {
          std::memcpy(to, from, plane.row_bytes);
        } else {
          kvext::rotation_kernels().front().rotate(to, from, plane.row_bytes / head->head_bytes,
                                                   *head);
        }
      }
    }
  }
  return result;
}

bool check_case(const Case& made, bool is_rotating) {
  try {
    const kvext::CheckedTransfer checked(made.transfer());
    const kvext::CopyOptions options{static_cast<int>(between(1, 3)),
                                     static_cast<kvext::Streaming>(between(-1, 1)),
                                     {}};
    std::vector<std::vector<uint8_t>> wanted;
    if (is_rotating) {
      const kvext::CheckedRotation rotation(checked, made.rotation());
      wanted = expected(made, &rotation);
      kvext::rotated_page_transfer(rotation, options);
    } else {
      wanted = expected(made, nullptr);
      kvext::page_transfer(checked, options);
    }
    for (size_t i = 0; i < made.pools.size(); ++i) {
      if (std::memcmp(made.pools[i].bytes.get(), wanted[i].data(), wanted[i].size()) != 0) {
        fail("a pool has other bytes than expected");
      }
    }
    if (std::memcmp(made.host->bytes.get(), wanted.back().data(), wanted.back().size()) != 0) {
      fail("the host buffer has other bytes than expected");
    }
    return true;
  } catch (const kvext::DescriptorError&) {
    return false;
  }
}

// Every kernel copies what is asked, and nothing beside it.
void check_copies() {
  std::vector<Memory> sources;
  std::vector<kvext::Copy> copies;
  const int64_t max_bytes = one_in(4) ? 40000 : 3000, multiple = one_in(2) ? 64 : 1;
  int64_t num_bytes = between(0, 70 / multiple) * multiple;
  for (int64_t count = between(1, 60); count > 0; --count) {
    const int64_t copied = between(1, max_bytes / multiple) * multiple;
    sources.emplace_back(copied);
    copies.push_back({reinterpret_cast<int64_t>(sources.back().bytes.get()), num_bytes, copied});
    num_bytes += copied + (one_in(3) ? between(0, 3) * multiple : 0);
  }
  std::shuffle(copies.begin(), copies.end(), engine);
  const Memory before(num_bytes + 64);
  const int64_t to_line = -reinterpret_cast<intptr_t>(before.bytes.get()) & 63;
  for (const kvext::CopyKernel& kernel : kvext::copy_kernels()) {
    std::vector<uint8_t> wanted(&before.bytes[0], &before.bytes[num_bytes + 64]);
    {
      kvext::Copier copier(true, kernel);
      for (const kvext::Copy& copy : copies) {
        const auto* const source = reinterpret_cast<const uint8_t*>(copy.source);
        uint8_t* const destination = &before.bytes[to_line + copy.destination];
        std::copy(source, source + copy.num_bytes, &wanted[to_line + copy.destination]);
        copier({copy.source, reinterpret_cast<int64_t>(destination), copy.num_bytes});
      }
    }
    if (!std::equal(wanted.begin(), wanted.end(), &before.bytes[0])) fail("a kernel copies other bytes");
    std::fill_n(&before.bytes[0], num_bytes + 64, static_cast<uint8_t>(engine()));
  }
}

int num_streamed = 0;

void count_stream(uint8_t* destination, const uint8_t* source, size_t num_bytes) {
  ++num_streamed;
  std::memcpy(destination, source, num_bytes);
}

// A kernel that cannot write past the caches is not given bytes to stream: staged bytes would be
// copied once more for nothing.
void check_staging() {
  constexpr int64_t kNumPairs = 32, kNumHeads = 40;
  const std::vector<float> cosines(kNumPairs, 1.0f), sines(kNumPairs, 0.0f);
  const kvext::HeadRotation head{kvext::RowDtype::kFloat32, kvext::PairStyle::kHalves,
                                 8 * kNumPairs, 0, kNumPairs, cosines.data(), sines.data()};
  const std::vector<float> source(2 * kNumPairs * kNumHeads, 3.0f);
  const auto num_bytes = static_cast<int64_t>(source.size() * sizeof(float));
  for (const bool writes_past_caches : {false, true}) {
    const kvext::CopyKernel kernel{"counted", writes_past_caches, count_stream, nullptr, 0, 0, [] {}};
    for (const bool is_rotating : {false, true}) {
      std::vector<float> found(source.size());
      const kvext::Copy copy{reinterpret_cast<int64_t>(source.data()),
                             reinterpret_cast<int64_t>(found.data()), num_bytes};
      num_streamed = 0;
      if (is_rotating) {
        kvext::Rotator rotate(true, kernel);
        rotate(copy, head);
      } else {
        kvext::Copier copier(true, kernel);
        copier(copy);
      }
      if (found != source) fail("a kernel copies other bytes");
      if ((num_streamed > 0) != writes_past_caches) fail("bytes are staged for nothing");
    }
  }
}

bool is_finite(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

bool is_nan(uint16_t half) { return !is_finite(half) && (half & 0x3FF) != 0; }

// A turn by nothing keeps every float16, whichever instructions convert it: also those below 2^-14,
// and the largest. What is paired with an infinity or a NaN becomes a NaN.
void check_halves() {
  for (const int64_t num_pairs : {3, 37, 64}) {
    const std::vector<float> cosines(num_pairs, 1.0f), sines(num_pairs, 0.0f);
    for (int64_t style = 0; style < 2; ++style) {
      const kvext::HeadRotation head{kvext::RowDtype::kFloat16,
                                     static_cast<kvext::PairStyle>(style), 4 * num_pairs, 0,
                                     num_pairs, cosines.data(), sines.data()};
      const int64_t num_heads = (65536 + 2 * num_pairs - 1) / (2 * num_pairs);
      std::vector<uint16_t> wanted(num_heads * 2 * num_pairs), found(wanted.size());
      for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<uint16_t>(i);
      std::shuffle(wanted.begin(), wanted.end(), engine);
      for (const kvext::RotationKernel& kernel : kvext::rotation_kernels()) {
        kernel.rotate(reinterpret_cast<uint8_t*>(found.data()),
                      reinterpret_cast<const uint8_t*>(wanted.data()), num_heads, head);
        for (int64_t i = 0; i < static_cast<int64_t>(wanted.size()); ++i) {
          const int64_t in_head = i % (2 * num_pairs);
          const int64_t other =
              style == 1 ? i ^ 1 : in_head < num_pairs ? i + num_pairs : i - num_pairs;
          if (is_nan(wanted[i]) || !is_finite(wanted[other])) {
            if (!is_nan(found[i])) fail("a float16 that is no number becomes one");
          } else if (found[i] != wanted[i] && (wanted[i] & 0x7FFF) != 0) {
            fail("a turn by nothing changes a float16");
          }
        }
      }
    }
  }
}

// Compares every kernel with the last one, on numbers: they may differ in the last bit only.
void check_rotations() {
  const int64_t num_pairs = between(1, 80), num_heads = between(1, 5);
  const int64_t front = between(0, 9), back = one_in(2) ? 0 : between(0, 9);
  std::vector<float> cosines, sines;
  for (int64_t i = 0; i < num_pairs; ++i) {
    const double angle = static_cast<double>(between(0, 1000000)) / 1e4;
    cosines.push_back(static_cast<float>(std::cos(angle)));
    sines.push_back(static_cast<float>(std::sin(angle)));
  }
  for (int64_t style = 0; style < 2; ++style) {
    const int64_t head_bytes = (front + 2 * num_pairs + back) * 4;
    const kvext::HeadRotation head{kvext::RowDtype::kFloat32, static_cast<kvext::PairStyle>(style),
                                   head_bytes, front * 4, num_pairs, cosines.data(), sines.data()};
    const int64_t num_numbers = num_heads * head_bytes / 4;
    const int64_t from = between(0, 5), to = between(0, 5);
    const Memory source(from + num_numbers * 4);
    for (int64_t i = 0; i < num_numbers; ++i) {
      const auto number = static_cast<float>(between(-1000, 1000)) / 100;
      std::memcpy(&source.bytes[from + 4 * i], &number, 4);
    }
    std::vector<float> wanted(num_numbers), found(num_numbers);
    kvext::rotation_kernels().back().rotate(reinterpret_cast<uint8_t*>(wanted.data()),
                                            &source.bytes[from], num_heads, head);
    for (const kvext::RotationKernel& kernel : kvext::rotation_kernels()) {
      const Memory destination(to + num_numbers * 4);
      kernel.rotate(&destination.bytes[to], &source.bytes[from], num_heads, head);
      std::memcpy(found.data(), &destination.bytes[to], num_numbers * 4);
      for (int64_t i = 0; i < num_numbers; ++i) {
        if (!(std::fabs(found[i] - wanted[i]) <= 1e-5f)) fail("kernels rotate to other keys");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) fail("usage: fuzz <seconds> [seed]");
  engine.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::milliseconds(static_cast<int64_t>(1000 * std::atof(argv[1])));
  int64_t num_accepted = 0, num_refused = 0;
  check_staging();
  check_halves();
  while (std::chrono::steady_clock::now() < end) {
    Case made = valid_case();
    for (const bool is_rotating : {false, true}) {
      if (!check_case(made, is_rotating)) fail("a valid transfer has been refused");
    }
    for (int times = 0; times < 8; ++times) {
      const auto tables = std::make_tuple(made.planes, made.runs, made.rotations, made.shifts);
      damage(made);
      ++(check_case(made, one_in(2)) ? num_accepted : num_refused);
      std::tie(made.planes, made.runs, made.rotations, made.shifts) = tables;
    }
    check_copies();
    check_rotations();
  }
  std::printf("%lld %lld\n", static_cast<long long>(num_accepted),
              static_cast<long long>(num_refused));
  return 0;
}
