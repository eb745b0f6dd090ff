/* A disk that refuses, cuts short or forgets: preloaded into a process, it stands before the C
 * library's calls for files whose path matches FAULT_FILE (a pattern as in fnmatch).
 *
 * The file named by FAULT_PLAN says what happens, and is read again at each call; without it
 * nothing does: "CALL SKIP COUNT ACTION", where CALL is write, sync, truncate or allocate, SKIP
 * calls go through, and COUNT calls (0: all) are met by ACTION: an errno, "short" (half of a
 * write is written) or "drop" (nothing is done, and success returned). A new plan counts anew.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { GO_ON, FAIL, SHORT, DROP };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char plan_before[128];
static long calls;

static int is_meant(int fd) {
    char link[64], path[4096];
    const char *pattern = getenv("FAULT_FILE");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (!pattern || size < 0) return 0;
    path[size] = 0;
    return fnmatch(pattern, path, 0) == 0;
}

static int action_for(int fd, const char *call) {
    char plan[128] = "", wanted[16], action[16];
    long skip, count;
    int verdict = GO_ON, before = errno;
    const char *name = getenv("FAULT_PLAN");
    FILE *file = name && is_meant(fd) ? fopen(name, "re") : NULL;
    errno = before;
    if (!file) return GO_ON;
    if (!fgets(plan, sizeof plan, file)) plan[0] = 0;
    fclose(file);
    pthread_mutex_lock(&mutex);
    if (strcmp(plan, plan_before)) {
        strcpy(plan_before, plan);
        calls = 0;
    }
    if (sscanf(plan, "%15s %ld %ld %15s", wanted, &skip, &count, action) == 4 &&
        !strcmp(wanted, call)) {
        long at = calls++ - skip;
        if (at >= 0 && (!count || at < count)) {
            verdict = !strcmp(action, "short") ? SHORT : !strcmp(action, "drop") ? DROP : FAIL;
            if (verdict == FAIL) errno = atoi(action);
        }
    }
    pthread_mutex_unlock(&mutex);
    return verdict;
}

static ssize_t write_at(int fd, const void *data, size_t size, off_t offset) {
    switch (action_for(fd, "write")) {
    case FAIL: return -1;
    case DROP: return (ssize_t)size;
    case SHORT: size = size > 1 ? size / 2 : size; /* fall through */
    default: return syscall(SYS_pwrite64, fd, data, size, offset);
    }
}

#define UNLESS_MET(call)                        \
    switch (action_for(fd, call)) {             \
    case FAIL: return -1;                       \
    case DROP: return 0;                        \
    }

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return write_at(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
    return write_at(fd, data, size, offset);
}
int fdatasync(int fd) {
    UNLESS_MET("sync")
    return (int)syscall(SYS_fdatasync, fd);
}
int fsync(int fd) {
    UNLESS_MET("sync")
    return (int)syscall(SYS_fsync, fd);
}
int ftruncate(int fd, off_t size) {
    UNLESS_MET("truncate")
    return (int)syscall(SYS_ftruncate, fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int fallocate(int fd, int mode, off_t offset, off_t size) {
    UNLESS_MET("allocate")
    return (int)syscall(SYS_fallocate, fd, mode, offset, size);
}
int fallocate64(int fd, int mode, off_t offset, off_t size) {
    return fallocate(fd, mode, offset, size);
}
/* These return the error's number, and get along with file systems that reserve nothing. */
int posix_fallocate(int fd, off_t offset, off_t size) {
    return fallocate(fd, 0, offset, size) && errno != EOPNOTSUPP ? errno : 0;
}
int posix_fallocate64(int fd, off_t offset, off_t size) {
    return posix_fallocate(fd, offset, size);
}
