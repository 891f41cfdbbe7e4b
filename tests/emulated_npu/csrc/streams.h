// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
// Streams of the emulated NPU: queues of work that nobody runs until somebody waits.
//
// There is no device thread. A thread of the host that waits (for a stream, an event, the device, a
// value) runs work itself, one task at a time, from the heads of all streams, in an order that a
// seed draws among those that the events allow. Without a seed work runs at the call: synchronous.
//
// Locks: `queues` is short and is never held while a task runs or the GIL is taken; `running` is
// held while a task runs, and is only waited for by threads that have let go of the GIL.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace emulated_npu {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// A point in a stream: what an event has recorded.
struct Marker {
  std::atomic<bool> is_reached{false};
  std::atomic<double> time_s{0};
  c10::Stream stream{c10::Stream::DEFAULT, c10::Device(kNpu, 0)};
};
using MarkerPtr = std::shared_ptr<Marker>;

struct Task {
  std::string name;
  std::function<void()> run;  // may be empty
  MarkerPtr waits_for;        // not run before
  MarkerPtr reaches;          // reached when run
};

class Scheduler {
 public:
  static Scheduler& get();

  // Chooses the schedule; nothing for a synchronous device. Runs what is pending first.
  void seed(std::optional<uint64_t> seed);
  bool is_late() const { return is_late_; }

  c10::Stream new_stream(c10::Device device);
  c10::Stream current_stream(c10::DeviceIndex device) const;
  c10::Stream exchange_current_stream(c10::Stream stream);

  // Appends to a stream, and runs some work if the seed says so.
  void enqueue(c10::Stream stream, Task task);
  // Appends only: for destructors.
  void append(c10::Stream stream, Task task);
  // Runs by itself at some time after all of the markers.
  void append_after(std::vector<MarkerPtr> markers, Task task);

  MarkerPtr record(c10::Stream stream);
  void wait(c10::Stream stream, const MarkerPtr& marker);

  void synchronize(c10::Stream stream);
  void synchronize(const MarkerPtr& marker);
  void synchronize_device();
  // Whether all is done; if not, some work may run, so that who asks in a loop ends some time.
  bool query(c10::Stream stream);
  bool query(const MarkerPtr& marker);

  size_t num_pending();

 private:
  struct Queue {
    int64_t id;
    bool is_transient;
    std::deque<Task> tasks;
    uint64_t num_appended = 0;
    uint64_t num_finished = 0;
    uint64_t num_queries = 0;
    uint64_t num_before_seed = 0;  // appended; draws count from here
    bool is_running = false;

    uint64_t head() const { return num_finished - num_before_seed; }
  };
  enum class Draw : uint64_t;

  Queue& queue_of(c10::Stream stream);
  MarkerPtr tail(Queue& queue, c10::Stream stream);
  uint64_t draw(const Queue& queue, uint64_t sequence, Draw purpose) const;
  double draw_share(const Queue& queue, uint64_t sequence, Draw purpose) const;
  static bool is_runnable(const Queue& queue);
  Queue* next_towards(Queue* queue);
  Queue* next_of_all();
  Queue* next(Queue* wanted);
  bool run_one(Queue* wanted);
  void run_some(uint64_t count);
  void run_until(Queue* wanted, const std::function<bool()>& is_done);
  void execute(Task& task, int64_t stream);
  void raise_failure();

  std::mutex queues_;
  std::recursive_mutex running_;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>> by_stream_;
  std::vector<std::unique_ptr<Queue>> transient_;
  int64_t num_streams_ = 0;
  int64_t num_transient_ = 0;
  std::atomic<bool> is_late_{false};
  std::atomic<bool> has_failed_{false};
  uint64_t seed_ = 0;
  std::string failure_;
};

// Whether this thread is running a task: then it must not wait for another one.
bool is_in_task();

// Lets go of the GIL, if this thread has it, for as long as it lives.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace emulated_npu
