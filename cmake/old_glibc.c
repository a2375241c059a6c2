// Lets an extension that is linked on a new Linux load with glibc 2.28 (cmake/old_glibc.cmake; x86-64 and AArch64).
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

// "First" is the version of what glibc had from its beginning on that processor, which on AArch64 is all that is forwarded.
#if defined(__aarch64__)
#define JUMP_TO(name) "  b " name "\n"
#define FIRST "2.17"
#define NEWER(version) FIRST
#define VERSION_OF_STAT 0
#else
#define JUMP_TO(name) "  jmp " name "@PLT\n"
#define FIRST "2.2.5"
#define NEWER(version) version
#define VERSION_OF_STAT 1
#endif

// The twin of `name`: a jump to `target`. `version` binds the target to a version of glibc.
#define TWIN(name, target, version)                      \
  __asm__(version ".globl __wrap_" #name                 \
          "\n"                                           \
          ".hidden __wrap_" #name                        \
          "\n"                                           \
          ".type __wrap_" #name                          \
          ", %function\n"                                \
          "__wrap_" #name                                \
          ":\n"                                          \
          JUMP_TO(target)                                \
          ".size __wrap_" #name ", . - __wrap_" #name "\n");
#define FORWARD(name, version) TWIN(name, "old_" #name, ".symver old_" #name ", " #name "@GLIBC_" version "\n")
#define FORWARD_RENAMED(name, old) TWIN(name, #old, "")

FORWARD(dladdr, FIRST)
FORWARD(dlclose, FIRST)
FORWARD(dlerror, FIRST)
FORWARD(dlopen, FIRST)
FORWARD(dlsym, FIRST)
FORWARD(exp, FIRST)
FORWARD(exp2, FIRST)
FORWARD(fmod, FIRST)
FORWARD(log, FIRST)
FORWARD(log2, FIRST)
FORWARD(pow, FIRST)
FORWARD(__pthread_key_create, FIRST)
FORWARD(pthread_create, FIRST)
FORWARD(pthread_detach, FIRST)
FORWARD(pthread_getspecific, FIRST)
FORWARD(pthread_join, FIRST)
FORWARD(pthread_key_create, FIRST)
FORWARD(pthread_key_delete, FIRST)
FORWARD(pthread_mutex_trylock, FIRST)
FORWARD(pthread_once, FIRST)
FORWARD(pthread_rwlock_rdlock, FIRST)
FORWARD(pthread_rwlock_unlock, FIRST)
FORWARD(pthread_rwlock_wrlock, FIRST)
FORWARD(pthread_setaffinity_np, NEWER("2.3.4"))
FORWARD(pthread_setspecific, FIRST)

// From 2.38 on the headers of C23 give these names to sscanf and strtol's family, which then also read "0b101". Nothing here
// counts on that.
FORWARD_RENAMED(__isoc23_sscanf, sscanf)
FORWARD_RENAMED(__isoc23_strtol, strtol)
FORWARD_RENAMED(__isoc23_strtoll, strtoll)
FORWARD_RENAMED(__isoc23_strtoul, strtoul)
FORWARD_RENAMED(__isoc23_strtoull, strtoull)

#define HIDDEN __attribute__((visibility("hidden"), used))

// Before 2.33 the headers called these three with the version of the struct, VERSION_OF_STAT.
int __xstat(int version, const char* path, struct stat* status);
int __lxstat(int version, const char* path, struct stat* status);
int __fxstat(int version, int file, struct stat* status);
HIDDEN int __wrap_stat(const char* path, struct stat* status) { return __xstat(VERSION_OF_STAT, path, status); }
HIDDEN int __wrap_lstat(const char* path, struct stat* status) { return __lxstat(VERSION_OF_STAT, path, status); }
HIDDEN int __wrap_fstat(int file, struct stat* status) { return __fxstat(VERSION_OF_STAT, file, status); }
HIDDEN int __wrap_fstat64(int file, struct stat* status) { return __fxstat(VERSION_OF_STAT, file, status); }

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
