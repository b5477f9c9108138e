// Runs kernels one after another in one call from Python.

#include <cstdint>

// Mirrors `Call` in calls.py.
struct Call {
    void (*kernel)(const void*);
    const void* arguments;
};

extern "C" void run_calls(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].kernel(calls[i].arguments);
}
