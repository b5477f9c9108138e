// Runs kernels one after another in one call from Python, with one team of threads.

#include <vector>

#include "team.h"

extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();

// Mirrors `Call` in calls.py.
struct Call {
    void (*kernel)(const void*, Team&);
    const void* arguments;
};

// num_elements: the elements that the kernels read. If there are few, one thread runs all kernels.
extern "C" void run_calls(const Call* calls, int64_t count, int64_t num_elements) {
    static thread_local Memory memory;
    std::vector<Shared> shared(count);
    for (Shared& one : shared) one.memory = &memory;
#pragma omp parallel if (num_elements > MIN_PARALLEL)
    for (int64_t i = 0; i < count; i++) {
        Team team(shared[i], omp_get_thread_num(), omp_get_num_threads());
        calls[i].kernel(calls[i].arguments, team);
    }
}
