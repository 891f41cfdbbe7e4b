// SPDX-License-Identifier: Apache-2.0
#include "streams.h"

#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <vector>

namespace emulated_npu {
namespace {

// An item of a queue: work, the recording of an event (`ticket` of it), or the wait for one.
struct Item {
  enum class Kind { kWork, kRecord, kWait } kind;
  std::string name;
  Work work;
  EventRef event;
  uint64_t ticket = 0;
};

// Chances, out of 100, that an enqueued item is followed by a step of some stream. By the seed, so
// that some seeds are as late as possible and others almost in time.
constexpr std::array<uint64_t, 4> kEagernessPercent{0, 5, 30, 80};

// One thread runs work at a time; it may enqueue and wait while it does.
std::recursive_mutex mutex;
std::map<int64_t, std::deque<Item>> queues;
std::optional<uint64_t> the_seed;
std::atomic<bool> has_seed{false};
uint64_t num_draws = 0;
uint64_t eagerness_percent = 0;
std::exception_ptr error;
std::atomic<int64_t> next_stream{kDefaultStream + 1};

thread_local int64_t stream_of_thread = kDefaultStream;
thread_local int num_running = 0;

// The device is never waited for with the interpreter's lock: who runs work may need it.
class Lock {
 public:
  Lock() {
    if (Py_IsInitialized() && PyGILState_Check()) without_gil_.emplace();
    lock_ = std::unique_lock(mutex);
  }
  ~Lock() { lock_.unlock(); }

 private:
  std::optional<pybind11::gil_scoped_release> without_gil_;
  std::unique_lock<std::recursive_mutex> lock_;
};

// SplitMix64 of the seed and the number of the draw.
uint64_t draw(uint64_t below) {
  uint64_t x = *the_seed * 0x9E3779B97F4A7C15u + ++num_draws * 0xD1B54A32D192ED03u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return (x ^ (x >> 31)) % below;
}

double now_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

void finish(Event& event, uint64_t ticket) {
  event.num_done = std::max(event.num_done, ticket);
  event.time_s = now_s();
}

bool is_runnable(const Item& item) {
  return item.kind != Item::Kind::kWait || item.event->num_done >= item.ticket;
}

void run_head(int64_t stream) {
  Item item = std::move(queues[stream].front());
  queues[stream].pop_front();
  if (item.kind == Item::Kind::kRecord) finish(*item.event, item.ticket);
  if (item.kind != Item::Kind::kWork) return;
  const auto before = stream_of_thread;
  stream_of_thread = stream;
  ++num_running;
  try {
    item.work();
  } catch (const std::exception& raised) {
    if (!error)
      error = std::make_exception_ptr(std::runtime_error(
          "emulated NPU: " + item.name + " failed when its stream came to it: " + raised.what()));
  }
  --num_running;
  stream_of_thread = before;
}

// The stream whose head has to run for `stream` to go on; none if events wait for each other.
std::optional<int64_t> needed_for(int64_t stream) {
  for (size_t steps = 0; steps <= queues.size(); ++steps) {
    const auto& queue = queues[stream];
    if (queue.empty()) return std::nullopt;
    if (is_runnable(queue.front())) return stream;
    stream = queue.front().event->stream;
  }
  return std::nullopt;
}

std::vector<int64_t> runnable_streams() {
  std::vector<int64_t> found;
  for (const auto& [stream, queue] : queues)
    if (!queue.empty() && is_runnable(queue.front())) found.push_back(stream);
  return found;
}

bool run_any() {
  const auto streams = runnable_streams();
  if (streams.empty()) return false;
  run_head(streams[draw(streams.size())]);
  return true;
}

template <typename Predicate>
void run_until(int64_t stream, Predicate is_done) {
  if (num_running) return;  // Work sees the device as it is.
  const bool is_straight = draw(2);
  while (!is_done()) {
    if (!is_straight && run_any()) continue;
    const auto needed = needed_for(stream);
    TORCH_CHECK(needed, "emulated NPU: stream ", stream, " waits for an event that is never recorded");
    run_head(*needed);
  }
}

void raise_error() {
  if (num_running || !error) return;
  std::rethrow_exception(std::exchange(error, nullptr));
}

void push(int64_t stream, Item item) {
  queues[stream].push_back(std::move(item));
  if (num_running) return;
  while (draw(100) < eagerness_percent && run_any()) {
  }
}

}  // namespace

void set_seed(std::optional<uint64_t> seed) {
  Lock lock;
  for (const auto& [stream, queue] : queues)
    TORCH_CHECK(queue.empty(), "emulated NPU: work is in flight on stream ", stream,
                "; synchronize before another seed is set");
  the_seed = seed;
  has_seed = seed.has_value();
  num_draws = 0;
  eagerness_percent = seed ? kEagernessPercent[*seed % kEagernessPercent.size()] : 0;
}

std::optional<uint64_t> seed() {
  Lock lock;
  return the_seed;
}

bool is_late() { return has_seed; }
bool is_running_work() { return num_running > 0; }

int64_t new_stream() { return next_stream++; }
int64_t current_stream() { return stream_of_thread; }
void set_current_stream(int64_t stream) { stream_of_thread = stream; }

void enqueue(int64_t stream, std::string name, Work work) {
  if (!is_late() || num_running) return work();
  Lock lock;
  push(stream, {Item::Kind::kWork, std::move(name), std::move(work), nullptr});
}

void record(const EventRef& event, int64_t stream) {
  Lock lock;
  event->stream = stream;
  const auto ticket = ++event->num_recorded;
  if (!is_late())
    finish(*event, ticket);
  else
    push(stream, {Item::Kind::kRecord, "record", nullptr, event, ticket});
}

void wait(const EventRef& event, int64_t stream) {
  if (!is_late()) return;
  Lock lock;
  if (event->num_done < event->num_recorded)
    push(stream, {Item::Kind::kWait, "wait", nullptr, event, event->num_recorded});
}

void synchronize_event(const EventRef& event) {
  if (!is_late()) return;
  Lock lock;
  const auto ticket = event->num_recorded;
  run_until(event->stream, [&] { return event->num_done >= ticket; });
  raise_error();
}

void synchronize_stream(int64_t stream) {
  if (!is_late()) return;
  Lock lock;
  run_until(stream, [&] { return queues[stream].empty(); });
  raise_error();
}

void synchronize_all() {
  if (!is_late()) return;
  Lock lock;
  std::vector<int64_t> streams;
  for (const auto& [stream, queue] : queues) streams.push_back(stream);
  for (const auto stream : streams) run_until(stream, [&] { return queues[stream].empty(); });
  raise_error();
}

bool query_event(const EventRef& event) {
  if (!is_late()) return true;
  Lock lock;
  // Whoever only asks, again and again, is answered in the end.
  if (!num_running && draw(2)) run_any();
  return event->num_done >= event->num_recorded;
}

bool query_stream(int64_t stream) {
  if (!is_late()) return true;
  Lock lock;
  if (!num_running && draw(2)) run_any();
  return queues[stream].empty();
}

int64_t num_in_flight() {
  Lock lock;
  int64_t sum = 0;
  for (const auto& [stream, queue] : queues) sum += static_cast<int64_t>(queue.size());
  return sum;
}

}  // namespace emulated_npu
