// Lets an extension that is linked on a new Linux load with glibc 2.28 (cmake/old_glibc.cmake; x86-64 alone).
//
// glibc gives a symbol a new version when its home or its meaning changes, and the linker takes the newest. Here each such
// function has a twin `__wrap_NAME`, to which the linker's option --wrap sends every call, also those from the static C++
// library. Most twins jump to the version that glibc has always had; what 2.28 does not have at all is written out.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

#define FORWARD(name, version)                              \
  __asm__(".symver old_" #name ", " #name "@GLIBC_" version \
          "\n"                                              \
          ".globl __wrap_" #name                            \
          "\n"                                              \
          ".hidden __wrap_" #name                           \
          "\n"                                              \
          ".type __wrap_" #name                             \
          ", @function\n"                                   \
          "__wrap_" #name                                   \
          ":\n"                                             \
          "  jmp old_" #name                                \
          "@PLT\n"                                          \
          ".size __wrap_" #name ", . - __wrap_" #name "\n");

FORWARD(dladdr, "2.2.5")
FORWARD(dlclose, "2.2.5")
FORWARD(dlerror, "2.2.5")
FORWARD(dlopen, "2.2.5")
FORWARD(dlsym, "2.2.5")
FORWARD(exp, "2.2.5")
FORWARD(exp2, "2.2.5")
FORWARD(log, "2.2.5")
FORWARD(log2, "2.2.5")
FORWARD(pow, "2.2.5")
FORWARD(__pthread_key_create, "2.2.5")
FORWARD(pthread_create, "2.2.5")
FORWARD(pthread_detach, "2.2.5")
FORWARD(pthread_getspecific, "2.2.5")
FORWARD(pthread_join, "2.2.5")
FORWARD(pthread_key_create, "2.2.5")
FORWARD(pthread_key_delete, "2.2.5")
FORWARD(pthread_mutex_trylock, "2.2.5")
FORWARD(pthread_once, "2.2.5")
FORWARD(pthread_rwlock_rdlock, "2.2.5")
FORWARD(pthread_rwlock_unlock, "2.2.5")
FORWARD(pthread_rwlock_wrlock, "2.2.5")
FORWARD(pthread_setaffinity_np, "2.3.4")
FORWARD(pthread_setspecific, "2.2.5")

#define HIDDEN __attribute__((visibility("hidden"), used))

// Before 2.33 the headers called these three with the version of the struct, which is 1 on x86-64.
int __xstat(int version, const char* path, struct stat* status);
int __lxstat(int version, const char* path, struct stat* status);
int __fxstat(int version, int file, struct stat* status);
HIDDEN int __wrap_stat(const char* path, struct stat* status) { return __xstat(1, path, status); }
HIDDEN int __wrap_lstat(const char* path, struct stat* status) { return __lxstat(1, path, status); }
HIDDEN int __wrap_fstat(int file, struct stat* status) { return __fxstat(1, file, status); }
HIDDEN int __wrap_fstat64(int file, struct stat* status) { return __fxstat(1, file, status); }

// Whether the process has one thread, for which the C++ library leaves atomic operations out: never.
HIDDEN char __wrap___libc_single_threaded = 0;

HIDDEN uint32_t __wrap_arc4random(void) {
  uint32_t word = 0;
  while (getrandom(&word, sizeof word, 0) != (ssize_t)sizeof word) {
  }
  return word;
}

static int64_t nanoseconds(struct timespec time) { return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec; }

// The wait ends at the same moment by the clock that the old function knows. Callers look at their own clock when it ends.
HIDDEN int __wrap_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                         const struct timespec* until) {
  struct timespec here, there;
  if (clock_gettime(clock, &here) != 0 || clock_gettime(CLOCK_REALTIME, &there) != 0) return EINVAL;
  const int64_t left = nanoseconds(*until) - nanoseconds(here);
  const int64_t end = nanoseconds(there) + (left > 0 ? left : 0);
  const struct timespec moment = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
  return pthread_cond_timedwait(condition, mutex, &moment);
}
