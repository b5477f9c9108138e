// Loops that the threads of a team share.
//
// Every thread runs all kernels of a list (calls.cpp). A loop ends when all of its portions are done, not when
// all threads have arrived. So if the operating system has taken a thread off its core, the others wait only for
// that thread's unfinished portion. When the thread runs again, it finds nothing left in the loops that it missed.
// At the end of an OpenMP loop, all threads would wait for that thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

struct Loop {
    std::atomic<int64_t> taken{0};  // number of portions taken; in a loop over rows, a bit for each block
    std::atomic<int64_t> done{0};   // number of finished portions
};

// An object that a kernel prepares in one thread for all threads. A later kernel may overwrite the object, but only
// after all portions of the kernel that prepared it are done. So a thread may read the object only while it runs such a
// portion. A thread that arrives after the last portion gets none, and reads nothing.
struct Prepared {
    void* object;
    int64_t counts[2];  // numbers of portions of the loops that follow
};

// Objects that kernels reuse in every call, at most one of each type.
// They grow, and stay until the calling thread ends.
using Memory = std::vector<std::pair<const void*, std::shared_ptr<void>>>;

constexpr int64_t MAX_LOOPS = 3;  // in one kernel

// The state that the threads share while they run one kernel.
struct Shared {
    Loop loops[MAX_LOOPS];
    Prepared prepared;
    Memory* memory;
};

constexpr int64_t PATIENCE = 256;        // checks before a waiting thread takes another thread's block
constexpr int64_t SPINS = 4096;          // checks before a waiting thread offers its core to others
constexpr int64_t MIN_PARALLEL = 16384;  // elements; with fewer, one thread ends before a second has begun
constexpr int64_t MAX_BLOCKS = 64;       // the bits of Loop::taken

// One thread's view of the team that runs a kernel: which of the kernel's loops the thread has reached.
class Team {
   public:
    const int64_t num_threads;

    Team(Shared& shared, int64_t thread, int64_t num_threads)
        : num_threads(num_threads), thread(thread), shared(shared), loop(shared.loops) {}

    // Calls body(i) for each i in [0, count). A thread takes the next i as soon as it is free. Returns when all of
    // them are done.
    template <class Body>
    void share(int64_t count, const Body& body) {
        Loop& here = next_loop();
        for (int64_t i; (i = here.taken.fetch_add(1, std::memory_order_relaxed)) < count;) {
            body(i);
            here.done.fetch_add(1, std::memory_order_release);
        }
        wait(here, count, [] {});
    }

    // Calls body(row) for each of num_rows rows. A thread has at most one block of rows, the same block in each loop, so
    // a row mostly stays in one core's cache. Another thread takes a block only if the block's thread does not arrive.
    template <class Body>
    void share_rows(int64_t num_rows, int64_t width, const Body& body) {
        const int64_t max_blocks = num_rows * width > MIN_PARALLEL ? std::min(num_threads, MAX_BLOCKS) : 1;
        const int64_t num_blocks = std::min(num_rows, max_blocks);
        Loop& here = next_loop();
        const auto take = [&](int64_t block) {
            const int64_t bit = int64_t(1) << block;
            if (here.taken.fetch_or(bit, std::memory_order_relaxed) & bit) return;
            const int64_t end = num_rows * (block + 1) / num_blocks;
            for (int64_t row = num_rows * block / num_blocks; row < end; row++) body(row);
            here.done.fetch_add(1, std::memory_order_release);
        };
        if (thread < num_blocks) take(thread);
        wait(here, num_blocks, [&] {
            for (int64_t block = 0; block < num_blocks; block++) take(block);
        });
    }

    // Calls make(Object&) in one thread. In all threads, returns the Prepared that `make` returned.
    template <class Object, class Make>
    Prepared once(const Make& make) {
        share_rows(1, 1, [&](int64_t) { shared.prepared = make(memory<Object>()); });
        return shared.prepared;
    }

   private:
    const int64_t thread;
    Shared& shared;
    Loop* loop;

    Loop& next_loop() {
        assert(loop < shared.loops + MAX_LOOPS);
        return *loop++;
    }

    template <class Object>
    Object& memory() {
        static char key;
        for (auto& [its_key, object] : *shared.memory)
            if (its_key == &key) return *(Object*)object.get();
        shared.memory->emplace_back(&key, std::make_shared<Object>());
        return *(Object*)shared.memory->back().second.get();
    }

    template <class Help>
    static void wait(const Loop& here, int64_t count, const Help& help) {
        for (int64_t spins = 0; here.done.load(std::memory_order_acquire) < count; spins++) {
            if (spins == PATIENCE) help();
            spins < SPINS ? pause() : std::this_thread::yield();
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
};
