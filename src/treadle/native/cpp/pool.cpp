#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <thread>

namespace treadle {
namespace {

constexpr int SPINS = 64; // pauses between two looks at the clock
constexpr int64_t IDLE_NS = 40'000; // a helper looks for work so long before it sleeps: a few small operations of MLX
constexpr int64_t PATIENCE_NS = 60'000; // the caller looks so long for the end of a chunk before it sleeps
constexpr int64_t MOST_CREDIT_NS = 20'000'000; // of waiting at once that is put up with: some slices of the system's time
constexpr int PATIENT_PART = 3; // and a third of all time: at a half, one thread alone would be as quick as two
constexpr int MOST_CHUNKS = 0xffff;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class T>
void sleep_while(std::atomic<T>& place, T value, int64_t ns) {
  static_assert(sizeof(T) == 4);
  timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, &place, FUTEX_WAIT_PRIVATE, value, ns ? &limit : nullptr, nullptr, 0);
}

template <class T>
void wake(std::atomic<T>& place) {
  syscall(SYS_futex, &place, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

int total(uint64_t ticket) {
  return ticket >> 16 & 0xffff;
}

int taken(uint64_t ticket) {
  return ticket & 0xffff;
}

// Look at `ready` for at most `ns`; whether it became true.
template <class F>
bool spin(int64_t ns, F ready) {
  int64_t end = now() + ns;
  do {
    for (int i = 0; i < SPINS; ++i) {
      if (ready()) {
        return true;
      }
      pause();
    }
    sched_yield(); // whoever waits for this core, the thread that builds the next step above all, shall have it
  } while (now() < end);
  return false;
}

} // namespace

Pool& Pool::shared() {
  static Pool* pool = new Pool;
  return *pool;
}

void Pool::set_num_threads(int n) {
  while (busy_.exchange(true, std::memory_order_acquire)) {
    std::this_thread::yield();
  }
  num_threads_ = std::clamp(n, 1, 256);
  allowed_.store(num_threads_);
  for (; started_ < num_threads_; ++started_) {
    std::thread(&Pool::serve, this, started_).detach();
  }
  alone_until_ = 0;
  credit_ = MOST_CREDIT_NS;
  busy_.store(false, std::memory_order_release);
}

bool Pool::run(int count, Call call, void* work) {
  if (num_threads_ == 1 || count > MOST_CHUNKS || busy_.exchange(true, std::memory_order_acquire)) {
    return false;
  }
  if (alone_until_ != 0) {
    if (now() < alone_until_) {
      busy_.store(false, std::memory_order_release);
      return false;
    }
    alone_until_ = 0;
  }
  call_ = call;
  work_ = work;
  done_.store(0, std::memory_order_relaxed);
  uint64_t round = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
  ticket_.store(round << 32 | uint64_t(count) << 16, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst) > 0) {
    bell_.fetch_add(1, std::memory_order_seq_cst);
    wake(bell_);
  }
  uint64_t seen = ticket_.load(std::memory_order_relaxed);
  int chunk;
  while (take(seen, chunk)) {
    call(work, chunk);
    done_.fetch_add(1, std::memory_order_acq_rel);
  }
  if (done_.load(std::memory_order_acquire) < count) {
    wait_for_helpers(count);
  }
  busy_.store(false, std::memory_order_release);
  return true;
}

bool Pool::take(uint64_t& seen, int& chunk) {
  while (taken(seen) < total(seen)) {
    if (ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      chunk = taken(seen);
      return true;
    }
  }
  return false;
}

void Pool::wait_for_helpers(int count) {
  auto complete = [&] { return done_.load(std::memory_order_acquire) >= count; };
  if (spin(PATIENCE_NS, complete)) {
    return;
  }
  int64_t began = now();
  waiting_.store(1, std::memory_order_seq_cst);
  for (int have = done_.load(std::memory_order_seq_cst); have < count; have = done_.load(std::memory_order_seq_cst)) {
    sleep_while(done_, have, 0);
  }
  waiting_.store(0, std::memory_order_relaxed);
  int64_t end = now(), waited = end - began;
  credit_ = std::min(credit_ + (began - credited_) / PATIENT_PART, MOST_CREDIT_NS) - waited;
  credited_ = end;
  if (credit_ < 0) { // until half of it is there again
    alone_until_ = end + (MOST_CREDIT_NS / 2 - credit_) * PATIENT_PART;
  }
}

void Pool::finish_one() {
  done_.fetch_add(1, std::memory_order_seq_cst);
  if (waiting_.load(std::memory_order_seq_cst)) {
    wake(done_);
  }
}

void Pool::serve(int number) {
  auto open = [&] {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    return taken(seen) < total(seen) && number < allowed_.load(std::memory_order_relaxed);
  };
  for (;;) {
    if (!spin(IDLE_NS, open)) {
      uint32_t before = bell_.load(std::memory_order_seq_cst);
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      if (!open()) {
        sleep_while(bell_, before, 0);
      }
      asleep_.fetch_sub(1, std::memory_order_seq_cst);
      continue;
    }
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    int chunk;
    while (take(seen, chunk)) {
      call_(work_, chunk);
      finish_one();
      seen = ticket_.load(std::memory_order_acquire);
    }
  }
}

} // namespace treadle
