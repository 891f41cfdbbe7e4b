// SPDX-License-Identifier: Apache-2.0
// Streams and events of the emulated device.
//
// Without a seed everything runs when it is called. With a seed it is late: work is put in the queue
// of a stream, and runs when the host waits for it, or by chance before. A stream keeps its order;
// between streams any order can occur that the events allow. All draws come from the seed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace emulated_npu {

constexpr int64_t kDefaultStream = 0;

struct Event {
  uint64_t num_recorded = 0;  // How often it was recorded: the ticket of the last time.
  uint64_t num_done = 0;      // The last ticket that its stream has come to.
  int64_t stream = kDefaultStream;  // Where it was recorded last.
  double time_s = 0;
};
using EventRef = std::shared_ptr<Event>;
using Work = std::function<void()>;

// Start again with another seed, or none. Raises: work is in flight.
void set_seed(std::optional<uint64_t> seed);
std::optional<uint64_t> seed();
bool is_late();
// Whether the calling thread is running work of a stream: what it calls runs at once.
bool is_running_work();

int64_t new_stream();
int64_t current_stream();
void set_current_stream(int64_t stream);

void enqueue(int64_t stream, std::string name, Work work);
void record(const EventRef& event, int64_t stream);
void wait(const EventRef& event, int64_t stream);

// The host waits. Each raises what work has raised since the last wait.
void synchronize_event(const EventRef& event);
void synchronize_stream(int64_t stream);
void synchronize_all();

bool query_event(const EventRef& event);
bool query_stream(int64_t stream);
int64_t num_in_flight();

}  // namespace emulated_npu
