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
  uint64_t recorded_in = 0;  // the recorder's number; 0 for a marker of a queue
  c10::Stream stream{c10::Stream::DEFAULT, c10::Device(kNpu, 0)};
};
using MarkerPtr = std::shared_ptr<Marker>;

struct Task {
  std::string name;
  std::function<void()> run;  // may be empty
  MarkerPtr waits_for;        // not run before
  MarkerPtr reaches;          // reached when run
};

class Block;
struct GraphMemory;

// Takes the work of some streams in the place of their queues: a capture, or an update (graphs.h).
class Recorder {
 public:
  Recorder();
  virtual ~Recorder() = default;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  virtual bool takes(c10::Stream stream) const = 0;
  virtual void add(c10::Stream stream, Task task) = 0;
  // Takes a stream's wait for an event, or not.
  virtual bool add_wait(c10::Stream stream, const MarkerPtr& marker) = 0;
  // What the memory belongs to that is allocated on a stream whose work is taken; null: to nobody.
  virtual std::shared_ptr<GraphMemory> memory() const { return nullptr; }
  virtual void note_allocated(const std::shared_ptr<Block>&) {}
  virtual void note_freed(const std::shared_ptr<Block>&) {}
  // Raises: this must not be done meanwhile.
  [[noreturn]] virtual void refuse(const std::string& what) = 0;

  const uint64_t number;
};
using RecorderPtr = std::shared_ptr<Recorder>;

class Scheduler {
 public:
  static Scheduler& get();

  // Chooses the schedule; nothing for a synchronous device. Runs what is pending first.
  void seed(std::optional<uint64_t> seed);
  bool is_late() const { return is_late_; }

  c10::Stream new_stream(c10::Device device);
  c10::Stream current_stream(c10::DeviceIndex device) const;
  c10::Stream exchange_current_stream(c10::Stream stream);

  // One at a time. Without one, work goes to the queues.
  void begin_recording(RecorderPtr recorder);
  void end_recording();
  // The recorder that takes the work of a stream, if one does.
  RecorderPtr recorder_of(c10::Stream stream) const;

  // Appends to a stream, and runs some work if the seed says so. Without a seed the work runs, unless
  // it waits for an event that is to come: then the stream goes on when that has come.
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
  RecorderPtr recorder() const;
  void refuse_while_recorded(c10::Stream stream, const char* what) const;
  void refuse_if_recorded(const MarkerPtr& marker, const char* what) const;
  void run_at_once(c10::Stream stream, Task task);
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
  std::atomic<size_t> num_queued_{0};  // tasks that are in queues, or run from there
  mutable std::mutex recorders_;
  RecorderPtr recorder_;
  std::atomic<bool> is_recording_{false};
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
