// SPDX-License-Identifier: Apache-2.0
// Feeds valid and damaged descriptors to the compiled core; meant for AddressSanitizer and
// UndefinedBehaviorSanitizer, which watch every access. What is accepted must move exactly the bytes
// that the definition names. Usage: fuzz <seconds> [seed]. Prints "<accepted> <refused>".
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../cpu/copy_kernels.h"
#include "kvext/copies.h"
#include "kvext/page_transfer.h"

namespace {

using kvext::Direction;
using kvext::Plane;
using kvext::Pool;
using kvext::Run;

std::mt19937_64 engine;

int64_t between(int64_t least, int64_t most) {
  return least + static_cast<int64_t>(engine() % static_cast<uint64_t>(most - least + 1));
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
  Direction direction;

  kvext::Transfer transfer() const {
    return {{pool_rows.data(), static_cast<int64_t>(pool_rows.size())},
            {planes.data(), static_cast<int64_t>(planes.size())},
            {runs.data(), static_cast<int64_t>(runs.size())},
            reinterpret_cast<int64_t>(host->bytes.get()),
            host->num_bytes,
            direction};
  }
};

// Valid: every page is named once, by one group.
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
  for (int64_t times = between(1, 3); times > 0; --times) {
    const bool is_run = !made.runs.empty() && one_in(2);
    int64_t* const cells = is_run ? &made.runs[0].group : &made.planes[0].group;
    const auto rows = static_cast<int64_t>(is_run ? made.runs.size() : made.planes.size());
    const int64_t columns = is_run ? Run::kColumns : Plane::kColumns;
    int64_t& cell = cells[between(0, rows * columns - 1)];
    if (one_in(4)) {
      cell = cells[between(0, rows * columns - 1)];
    } else {
      damage(cell);
    }
  }
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// The definition, row by row, into copies of the memory.
std::vector<std::vector<uint8_t>> expected(const Case& made) {
  std::vector<std::vector<uint8_t>> result;
  for (const Memory& pool : made.pools) {
    result.emplace_back(pool.bytes.get(), pool.bytes.get() + pool.num_bytes);
  }
  result.emplace_back(made.host->bytes.get(), made.host->bytes.get() + made.host->num_bytes);
  for (const Run& run : made.runs) {
    for (const Plane& plane : made.planes) {
      if (plane.group != run.group) continue;
      for (int64_t row = 0; row < run.num_rows; ++row) {
        uint8_t* const in_page = &result[plane.pool].at(
            plane.base_bytes + run.page * plane.page_stride_bytes + plane.region_offset_bytes +
            (run.first_row + row) * plane.row_bytes);
        uint8_t* const in_host =
            &result.back().at(plane.host_offset_bytes + (run.host_row + row) * plane.row_bytes);
        const bool is_store = made.direction == Direction::kPagesToHost;
        std::memcpy(is_store ? in_host : in_page, is_store ? in_page : in_host, plane.row_bytes);
      }
    }
  }
  return result;
}

void run_in_parts(const kvext::CheckedTransfer& checked) {
  for (int64_t begin = 0, end; begin < checked.num_bytes(); begin = end) {
    end = begin + between(1, checked.num_bytes() - begin);
    kvext::for_each_copy(checked, begin, end, [](const kvext::Copy& copy) {
      std::memcpy(reinterpret_cast<void*>(copy.destination),
                  reinterpret_cast<const void*>(copy.source), copy.num_bytes);
    });
  }
}

bool check_case(const Case& made) {
  try {
    const kvext::CheckedTransfer checked(made.transfer());
    const auto wanted = expected(made);
    if (one_in(3)) {
      run_in_parts(checked);
    } else {
      kvext::page_transfer(checked, {static_cast<int>(between(1, 3)),
                                     static_cast<kvext::Streaming>(between(-1, 1)), {}});
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

void check_together(const kvext::CopyKernel& kernel) {
  const auto most = static_cast<int64_t>(kvext::kMostTogether);
  const int64_t num_copies = between(1, most), room_bytes = 5000;
  const Memory source(most * room_bytes), destination(most * room_bytes);
  std::vector<uint8_t> wanted(destination.bytes.get(), destination.bytes.get() + most * room_bytes);
  std::vector<kvext::Copy> copies, later;
  for (int64_t i = 0; i < most; ++i) {
    const int64_t num_bytes = one_in(2) ? between(1, 300) : between(1, 4900);
    const int64_t from = i * room_bytes + between(0, 70), to = i * room_bytes + between(0, 70);
    const kvext::Copy copy{reinterpret_cast<int64_t>(&source.bytes[from]),
                           reinterpret_cast<int64_t>(&destination.bytes[to]), num_bytes};
    if (i < num_copies) {
      copies.push_back(copy);
      std::memcpy(&wanted[to], &source.bytes[from], num_bytes);
    }
    if (one_in(2)) later.push_back(copy);
  }
  kernel.stream_together(copies.data(), copies.size(), later.data(), later.size());
  kernel.fence();
  if (std::memcmp(destination.bytes.get(), wanted.data(), wanted.size()) != 0) {
    fail("copies that were made together have other bytes than expected");
  }
}

// Every kernel that this CPU runs, not only the one that is used.
void check_kernels() {
  for (const kvext::CopyKernel& kernel : kvext::copy_kernels()) {
    const int64_t num_bytes = one_in(2) ? between(1, 300) : between(1, 5000);
    const int64_t from = between(0, 70), to = between(0, 70);
    const Memory source(from + num_bytes), destination(to + num_bytes + 1);
    const uint8_t behind = destination.bytes[to + num_bytes];
    kernel.stream(&destination.bytes[to], &source.bytes[from], num_bytes);
    kernel.fence();
    if (std::memcmp(&destination.bytes[to], &source.bytes[from], num_bytes) != 0 ||
        destination.bytes[to + num_bytes] != behind) {
      fail("a kernel has copied other bytes than it was given");
    }
    if (kernel.stream_together) check_together(kernel);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) fail("usage: fuzz <seconds> [seed]");
  engine.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::milliseconds(static_cast<int64_t>(1000 * std::atof(argv[1])));
  int64_t num_accepted = 0, num_refused = 0;
  while (std::chrono::steady_clock::now() < end) {
    Case made = valid_case();
    if (!check_case(made)) fail("a valid transfer has been refused");
    for (int times = 0; times < 8; ++times) {
      const auto planes = made.planes;
      const auto runs = made.runs;
      damage(made);
      ++(check_case(made) ? num_accepted : num_refused);
      made.planes = planes;
      made.runs = runs;
    }
    check_kernels();
  }
  std::printf("%lld %lld\n", static_cast<long long>(num_accepted),
              static_cast<long long>(num_refused));
  return 0;
}
