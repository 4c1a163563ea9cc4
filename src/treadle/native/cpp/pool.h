// Threads that share one piece of work at a time. Whoever calls `share` works too and never waits for a thread to wake:
// chunks are taken by whoever comes, so that one that is late finds nothing left. A thread that lost its core in the
// middle of a chunk is waited for. Where a third of the time goes that way, work is done alone for a while.
// Results never depend on who computed what, because chunks do not depend on the number of threads that came.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace treadle {

class Pool {
 public:
  // Work for `count` chunks, `work(chunk)` each, in any order and on any thread. Returns when all are done.
  template <class F>
  void share(int count, const F& work) {
    if (count <= 1 || !run(count, &call<F>, const_cast<void*>(static_cast<const void*>(&work)))) {
      for (int i = 0; i < count; ++i) {
        work(i);
      }
    }
  }

  int num_threads() const { return num_threads_; }
  void set_num_threads(int n); // including the caller's; before or between work

  static Pool& shared(); // never destroyed: its threads may outlive static objects

 private:
  using Call = void (*)(void*, int);

  template <class F>
  static void call(void* work, int chunk) {
    (*static_cast<const F*>(work))(chunk);
  }

  bool run(int count, Call call, void* work); // false: the caller has to do all of it
  void serve(int number);
  bool take(uint64_t& seen, int& chunk);
  void finish_one();
  void wait_for_helpers(int count);

  // Round in the upper 32 bits, then 16 bits of how many chunks there are and 16 of how many are taken: a thread that
  // is late cannot take a chunk of a round that it has not seen.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  std::atomic<int> waiting_{0}; // set while the caller sleeps until `done_` is complete
  alignas(64) std::atomic<uint32_t> bell_{0}; // what helpers sleep on
  std::atomic<int> asleep_{0};
  alignas(64) std::atomic<bool> busy_{false};
  Call call_ = nullptr;
  void* work_ = nullptr;
  int num_threads_ = 1;
  int started_ = 1;
  std::atomic<int> allowed_{1};
  int64_t alone_until_ = 0; // nanoseconds
  int64_t credit_ = 0; // nanoseconds that may still be waited, as of `credited_`
  int64_t credited_ = 0;
};

} // namespace treadle
