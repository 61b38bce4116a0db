// The threads of a process that work on decoding steps: one pool, whatever number of engines.
//
// All threads of a job run the same function, which goes through the same phases in the same order. A
// phase is a number of tasks. Each thread takes the tasks of its own share first, whose weights lie in
// its cache since the last step, and then those of the others. So a thread that other work has
// displaced, or that is not awake yet, keeps nobody waiting unless it holds a task.
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

constexpr int MOST_THREADS = 64;
// Turns of a waiting thread before it lets others run: some microseconds.
constexpr int TURNS = 200;
// Turns of an idle thread before it sleeps. A service needs the cores between two steps.
constexpr int IDLE_TURNS = 1000;

class Pool;

// A thread's place in a job.
class Worker {
public:
    const int index, threads;
    template <class Task>
    void phase(int tasks, const Task& task);

private:
    friend class Pool;
    Worker(Pool* pool, int index, int threads, uint64_t phase, uint64_t target)
        : index(index), threads(threads), pool_(pool), phase_(phase), target_(target) {}
    Pool* pool_;
    uint64_t phase_, target_;  // number of the last phase; tasks that are done when it ends
};

class Pool {
public:
    // Runs job(worker) in so many threads, this one included; alone if another engine has the pool.
    template <class Job>
    void run(int threads, const Job& job) {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) {
            Pool own;
            return job_in_this_thread(own, job);
        }
        if (threads > MOST_THREADS) threads = MOST_THREADS;
        while ((int)started_.size() + 1 < threads) start();
        call_ = [](const void* f, Worker& worker) { (*(const Job*)f)(worker); };
        job_ = &job;
        threads_ = threads;
        first_phase_ = last_phase_;
        first_target_ = done_.load();
        open_.store(true);
        number_.fetch_add(1);
        if (threads > 1) syscall(SYS_futex, &number_, FUTEX_WAKE_PRIVATE, threads - 1, 0, 0, 0);
        Worker worker(this, 0, threads, first_phase_, first_target_);
        job(worker);
        last_phase_ = worker.phase_;
        // Who has not begun yet finds it closed; who has begun may still use what is the job's.
        open_.store(false);
        for (int turn = 0; inside_.load(); turn++) rest(turn);
    }

private:
    friend class Worker;
    struct alignas(64) Share {
        std::atomic<uint64_t> taken{0};  // the phase, and how many tasks of the share are taken
    };
    static constexpr int TASK_BITS = 24;

    template <class Job>
    static void job_in_this_thread(Pool& pool, const Job& job) {
        Worker worker(&pool, 0, 1, 0, 0);
        job(worker);
    }

    static void rest(int turn) {
        if (turn < TURNS)
            _mm_pause();
        else
            sched_yield();
    }

    void start() {
        int index = (int)started_.size() + 1;
        started_.emplace_back([this, index, seen = number_.load()] { serve(index, seen); });
        started_.back().detach();
    }

    void serve(int index, uint32_t seen) {
        for (;;) {
            for (int turn = 0; number_.load() == seen; turn++) {
                if (turn < IDLE_TURNS)
                    _mm_pause();
                else
                    syscall(SYS_futex, &number_, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
            }
            seen = number_.load();
            inside_.fetch_add(1);
            if (open_.load() && index < threads_) {
                Worker worker(this, index, threads_, first_phase_, first_target_);
                call_(job_, worker);
            }
            inside_.fetch_sub(1);
        }
    }

    Share share_[MOST_THREADS];
    alignas(64) std::atomic<uint64_t> done_{0};  // tasks of all phases so far
    alignas(64) std::atomic<uint32_t> number_{0};  // of the last job
    std::atomic<bool> open_{false};
    std::atomic<int> inside_{0};
    std::mutex mutex_;
    std::vector<std::thread> started_;
    void (*call_)(const void*, Worker&) = nullptr;
    const void* job_ = nullptr;
    int threads_ = 1;
    uint64_t last_phase_ = 0, first_phase_ = 0, first_target_ = 0;
};

// Runs task(i) for each i below `tasks`, once each in some thread, and returns when all are done.
template <class Task>
void Worker::phase(int tasks, const Task& task) {
    phase_++;
    target_ += tasks;
    int finished = 0;
    for (int turn = 0; turn < threads; turn++) {
        int owner = (index + turn) % threads;
        int first = (int)((int64_t)tasks * owner / threads);
        int count = (int)((int64_t)tasks * (owner + 1) / threads) - first;
        std::atomic<uint64_t>& taken = pool_->share_[owner].taken;
        uint64_t now = taken.load(std::memory_order_relaxed);
        for (;;) {
            // A share that nobody has touched in this phase still has an earlier one's number.
            uint64_t phase = now >> Pool::TASK_BITS;
            int next = phase == phase_ ? (int)(now & ((1 << Pool::TASK_BITS) - 1)) : 0;
            if (phase > phase_ || next >= count) break;
            uint64_t then = phase_ << Pool::TASK_BITS | (uint64_t)(next + 1);
            if (!taken.compare_exchange_weak(now, then, std::memory_order_relaxed)) continue;
            task(first + next);
            finished++;
            now = then;
        }
    }
    if (finished) pool_->done_.fetch_add(finished, std::memory_order_release);
    for (int i = 0; pool_->done_.load(std::memory_order_acquire) < target_; i++) Pool::rest(i);
}

// The process's pool. A fork has none of its parent's threads, so it gets a pool of its own.
static Pool& process_pool() {
    static std::mutex mutex;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (!pool || owner != getpid()) pool = new Pool, owner = getpid();
    return *pool;
}
